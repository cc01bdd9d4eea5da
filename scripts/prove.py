"""The figures behind docs/lossless.md, every one by this command.

    # all that needs no trained head; merges into docs/results
    python scripts/prove.py
    python scripts/prove.py 'only=[greedy]' \\
        'drafters=[ngram,runs/medusa@chain,runs/medusa@tree]'
    python scripts/prove.py 'only=[certificates]' 'certificates=[certificates/medusa]'

enumeration    exact law of one verification on random worlds
engine         exact law of the whole loop
controls       known wrong code and the layer that catches it
greedy         the target against Hugging Face generate
biased         wrong decoders that a certificate must reject
sound          sound ones that it must pass, 200 seeds
certificates   what certify.py found

Every section goes on where it was stopped: parts wait in STATE, for as long as the code under
test stays the same. Entries keep command, commit and machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])


from conf.errors import UserError, resumable
from conf.rules import Filled, OneOrMore, Seed, one_of
from conf.schema import entry
from decode.engine import Request
from decode.models.load import TargetConfig, load_target
from decode.sampling import Sampling
from decode.target import Target
from heads import resolve_drafter
from scripts.certify import about_drafter
from scripts.common import files
from scripts.common.parts import Parts
from scripts.common.progress import Steps, by_name, columns
from scripts.common.prompts import load_prompts, question_ids
from scripts.proofs import detection
from scripts.proofs import sections as proofs
from scripts.proofs.certificate import ticker
from scripts.proofs.controls.certificates import code_sha256
from scripts.proofs.greedy import Greedy, Plain, Reading, greedy_layer, reference_tokens
from scripts.reports import lossless_page

GREEDY = Sampling(0.0)


@dataclass
class ProveConfig:
    """Keys of scripts/prove.py."""

    # the model of the section greedy
    target: TargetConfig = field(default_factory=TargetConfig)
    # names of sections to run; [] = all that have what they need
    only: list[Annotated[str, one_of(SECTIONS)]] = field(default_factory=list)
    # JSON file; entries of sections that do not run now are kept
    out: str = "docs/results/lossless.json"
    # folder for the parts of unfinished sections
    state: str = "runs/prove"
    # random worlds of the section enumeration
    cases: OneOrMore = 2000
    # prompt files of the section greedy, one after the other; first turns are used
    prompts: Filled[str] = field(default_factory=lambda: ["scripts/prompts/demo.jsonl"])
    # prompts of the section greedy
    num_prompts: OneOrMore = 300
    # tokens per answer in the section greedy
    max_new_tokens: OneOrMore = 64
    # drafters of the section greedy
    drafters: list[str] = field(default_factory=lambda: ["ngram"])
    # prompts that are decoded together in the section greedy
    batch_size: OneOrMore = 8
    # so many of the prompts of the section greedy are decoded one by one as well
    alone: int = 30
    # folders of the section certificates
    certificates: list[str] = field(default_factory=list)
    # cpu, cuda; null = the GPU when there is one
    device: str | None = None
    # seed of random worlds, draws and intervals
    seed: Seed = 0
    # no progress bar
    quiet: bool = False


Tick = Callable[[str, int, int], None]


def _prompts(cfg: ProveConfig, target: Target, count: int) -> list[list[int]]:
    texts = [p.turns[0] for path in cfg.prompts for p in load_prompts(path)]
    texts = list(dict.fromkeys(texts))
    ids = [question_ids(target.tokenizer, t) for t in texts]
    ids = [i for i in ids if len(i) + cfg.max_new_tokens <= target.context_length]
    if len(ids) < count:
        raise UserError(
            f"prompts: {len(ids)} different ones, {count} are wanted; add a file or set "
            "num_prompts lower"
        )
    return ids[:count]


def greedy(cfg: ProveConfig, tick: Tick) -> dict[str, Any]:
    """Token equality with Hugging Face generate at T = 0 in float32, every first difference
    classified.
    """
    target = load_target(cfg.target, "float32", cfg.device)
    prompts = _prompts(cfg, target, cfg.num_prompts)
    target.probe()
    plain, about = Plain(target), [files.sha256(Path(p)) for p in cfg.prompts]
    key = [
        code_sha256(),
        about,
        cfg.num_prompts,
        cfg.max_new_tokens,
        cfg.batch_size,
        _about(target),
    ]
    shared = Parts(Path(cfg.state) / "greedy", key)
    noise = shared.once("noise", lambda: plain.rounding(prompts[:4]))["gap"]
    asked = [Request(p, cfg.max_new_tokens, id=i) for i, p in enumerate(prompts)]
    theirs = reference_tokens(
        plain, asked, GREEDY, cfg.batch_size, None, ticker(tick, "generate", len(asked)), shared
    )
    rows = []
    for spec in ["none", *cfg.drafters]:
        drafter = resolve_drafter(spec, target)
        for size, some in ((cfg.batch_size, prompts), (1, prompts[: cfg.alone])):
            if not some:
                continue
            name = f"{spec}, batch {size}"
            folder = "greedy-" + name.replace("/", "-").replace(", batch ", "-")
            parts = Parts(Path(cfg.state) / folder, [key, about_drafter(spec), size, len(some)])
            found = greedy_layer(
                plain,
                target,
                drafter,
                some,
                Reading(cfg.max_new_tokens, size, tolerance=4 * noise),
                theirs[: len(some)],
                ticker(tick, name, len(some)),
                parts,
            )
            rows.append({"drafter": spec, "batch_size": size, **_compared(found)})
    return {
        "target": _about(target),
        "dtype": "float32",
        "max_new_tokens": cfg.max_new_tokens,
        "rounding": noise,
        "tie_margin": 4 * noise,
        "prompts_sha256": about,
        "rows": rows,
    }


def _compared(found: Greedy) -> dict[str, Any]:
    """The figures of one drafter at one batch size."""
    return {
        "prompts": found.prompts,
        "tokens": found.tokens,
        "drafted_tokens": found.accepted,
        "equal": found.prompts - len(found.divergences),
        "rounding_ties": len(found.divergences) - found.defects,
        "defects": found.defects,
        "divergences": found.divergences,
    }


def certificates(cfg: ProveConfig, tick: Tick) -> dict[str, Any]:
    """Certificates of scripts/certify.py, without folders of this machine and without the
    plots' data. Those of other drafters and settings that OUT holds already are kept.
    """
    known = json.loads(Path(cfg.out).read_text()) if Path(cfg.out).exists() else {}
    rows = {_certified(row): row for row in known.get("certificates", {}).get("rows", [])}
    for folder in cfg.certificates:
        path = Path(folder) / "certificate.json"
        try:
            paper = lossless_page.slim(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise UserError(
                f"certificates: {path}: {error}; give a folder that certify.py wrote"
            ) from None
        rows[_certified(paper)] = paper
    return {"rows": list(rows.values())}


def _certified(paper: dict[str, Any]) -> tuple[Any, ...]:
    """What a certificate is about: a later one of the same replaces it."""
    settings = paper["settings"]
    names = ("drafter", "temperature", "top_k", "top_p", "min_p", "verify", "dtype")
    return tuple(settings.get(name) for name in names)


def _about(target: Target) -> dict[str, str]:
    known = target.identity.to_json() if target.identity else {}
    return {k: v for k, v in known.items() if k != "path"}


def _toy(run: Callable[..., dict[str, Any]]) -> Callable[[ProveConfig, Tick], dict[str, Any]]:
    def section(cfg: ProveConfig, tick: Tick) -> dict[str, Any]:
        return run(Parts(Path(cfg.state) / run.__name__, [code_sha256()]), tick)

    section.__doc__ = run.__doc__
    return section


def enumeration(cfg: ProveConfig, tick: Tick) -> dict[str, Any]:
    """Exact law of one verification on random worlds, every branch walked, both rules."""
    parts = Parts(Path(cfg.state) / "enumeration", [code_sha256(), cfg.seed])
    return proofs.enumeration(cfg.cases, cfg.seed, parts, tick)


SECTIONS: dict[str, Callable[[ProveConfig, Tick], dict[str, Any]]] = {
    "enumeration": enumeration,
    "engine": _toy(proofs.engine),
    "controls": _toy(proofs.negative_controls),
    "biased": _toy(detection.biased),
    "sound": _toy(detection.sound),
    "greedy": greedy,
    "certificates": certificates,
}


def wanted(cfg: ProveConfig) -> Sequence[str]:
    """The sections to run: those named, else all but the certificates where none are given."""
    if "certificates" in cfg.only and not cfg.certificates:
        raise UserError("certificates: the list is empty; give folders that certify.py wrote")
    return cfg.only or [name for name in SECTIONS if name != "certificates" or cfg.certificates]


@entry("prove", ProveConfig)
@resumable()
def main(cfg: ProveConfig) -> None:
    """Run the sections one by one; each is written as soon as it is there."""
    with files.sole_writer(Path(cfg.state)):
        proved(cfg)


def proved(cfg: ProveConfig) -> None:
    """The run behind `main`."""
    out = Path(cfg.out)
    for name in wanted(cfg):
        with Steps(*columns(44), quiet=cfg.quiet) as bar:
            found = SECTIONS[name](cfg, by_name(bar))
        known = json.loads(out.read_text()) if out.exists() else {}
        known[name] = {
            "about": " ".join((SECTIONS[name].__doc__ or "").split()),
            **found,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": files.command(),
            "environment": files.environment(cfg.device or "cpu"),
        }
        files.write_json(out, known)
        print(f"{name}: written to {out}")
    if out.resolve() == (files.ROOT / "docs" / "results" / "lossless.json").resolve():
        lossless_page.refresh()


if __name__ == "__main__":
    main()
