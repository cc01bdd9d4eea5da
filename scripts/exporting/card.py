"""The model card and the manifest of an export: what it is, what it was measured to do, how to
serve it, and the hashes."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.conf.jsonl import records
from outrider.heads.base import Head
from outrider.heads.interop import ENGINE, engines
from outrider.heads.registry import title
from outrider.heads.tuned import Tuned
from outrider.scripts.common import files
from outrider.scripts.common.rendering import render

SHOWN = ("batches", "draft vocabulary", "target", "commit")  # of the training, where it is known


@dataclass
class About:
    """All that card and manifest tell. card: of the head's folder. name, architecture: of the
    target. depth: K of the serve command. run: what training said of itself. dtype: as written.
    check: the self-check's figures.
    """

    format: str
    head: Head
    card: dict[str, Any]
    name: str
    architecture: str
    out: Path
    depth: int
    run: dict[str, Any]
    dtype: str
    check: dict[str, Any] = field(default_factory=dict)


def usual_depth(head: Head, settings: Tuned | None) -> int:
    """Return K of the serve command: all levels that a head has, where it has no more; what tune
    chose for a chain; else K as trained."""
    deepest = getattr(head, "deepest", None)
    if deepest and deepest <= head.levels:
        return int(head.levels)
    chain = settings.chain if settings is not None else None
    tuned = int(chain.depth or 0) if chain is not None else 0
    return tuned or trained_depth(asdict(head.cfg)) or int(head.levels)


def trained_depth(saved: dict[str, Any]) -> int:
    """K as trained: the levels of a draft that a head has learned, by its keys in head.json; 0
    where they say nothing."""
    keys = {k: v for k, v in saved.items() if isinstance(v, int) and not isinstance(v, bool)}
    if "block" in keys:
        return keys["block"] - int(saved.get("kind") == "dflash")
    steps = keys.get("steps", 1)
    return keys.get("heads") or (steps if steps > 1 else keys.get("depth", 0))


def serve(about: About) -> list[tuple[str, str]]:
    """(engine with the versions that load this head, command) pairs."""
    head, steps, folder = about.head, about.depth, shlex.quote(str(about.out))
    wanted, target = engines.required(head.kind, head.cfg), shlex.quote(about.name or "TARGET")
    reader = ENGINE[about.format]
    spec = {
        "model": str(about.out),
        "method": engines.VLLM.drafters[head.kind].how,
        "num_speculative_tokens": steps,
        **({"parallel_drafting": True} if getattr(head.cfg, "parallel", False) else {}),
    }
    vllm = f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(spec))}"
    known = engines.SGLANG.drafters.get(head.kind, engines.Support())
    # a block is one step, whose window holds the last token too
    chain = f"--speculative-num-steps {steps} --speculative-eagle-topk 1 "
    sglang = (
        f"python -m sglang.launch_server --model-path {target} "
        f"--speculative-algorithm {known.how} --speculative-draft-model-path {folder} "
        f"{'' if head.kind in ('dflash', 'dspark') else chain}"
        f"--speculative-num-draft-tokens {steps + 1}"
    )
    llamacpp = (
        f"llama-server -m TARGET.gguf -md {shlex.quote(f'{about.out}/draft.gguf')} --spec-type "
        f"{engines.LLAMACPP.drafters.get(head.kind, engines.Support()).how} --spec-draft-n-max "
        f"{steps} --spec-draft-p-min 0"
    )
    one = reader.versions(*wanted)
    return {
        "gguf": [(one, llamacpp)],
        "speculators": [(one, f"vllm serve {folder}"), (f"{one}, other settings", vllm)],
        "transformers": [(one, vllm), (engines.SGLANG.versions(*wanted), sglang)],
        "sglang": [(one, sglang)],
    }.get(about.format, [(one, vllm)])


def page(about: About) -> str:
    """README.md."""
    head, name, identity = about.head, about.name, about.card.get("target") or {}
    what, extra = title(head.kind), about.card.get("extra") or {}
    return render(
        "export.md",
        about=about,
        what=what[0].upper() + what[1:],
        base_model=name if "/" in name and not Path(name).is_absolute() else "",
        target=identity.get("name", name),
        hashes={k.replace("_", " "): identity[k] for k in identity if k.endswith("sha256")},
        serve=serve(about),
        checked=engines.CHECKED,
        gone=ENGINE[about.format].gone(head.kind),
        parameters=sum(p.numel() for p in head.parameters()),
        training={k: about.run[k] for k in SHOWN if about.run.get(k)},
        steps=extra.get("step"),
        recipe=json.dumps(about.card["head"].get("config", {}), sort_keys=True),
        acceptance=acceptance(extra.get("best")),
    )


def acceptance(best: Any) -> str:
    """Return what training measured; "not measured" where it did not."""
    if not isinstance(best, dict) or not isinstance(best.get("accepted_length"), int | float):
        return "not measured"
    return (
        f"decoded on held-out prompts: accepted length {best['accepted_length']:.2f} "
        f"(bonus token counted, step {best.get('step')})"
    )


def run_record(source: Path) -> dict[str, Any]:
    """Return what metrics.jsonl of the head's run folder says of its start (data, batches,
    commit); {} without one."""
    for folder in source.parents[:3]:
        try:
            first = records(folder / "metrics.jsonl")[:1]
        except OSError:
            continue
        if first and first[0].get("event") == "start":
            return {k: v for k, v in first[0].items() if isinstance(v, str)}
    return {}


def manifest(stage: Path, about: About) -> dict[str, Any]:
    """outrider.json: what it is, from what it was made, and the sha256 of every file beside it."""
    environment, names = files.environment(), sorted(p.name for p in stage.iterdir())
    return {
        "format": 1,
        "engine_format": about.format,
        "kind": about.head.kind,
        "dtype": about.dtype,
        "target": about.card.get("target"),
        "source": {
            "card_sha256": about.card["sha256"],
            "weights_sha256": about.card["weights"]["sha256"],
        },
        "draft_tokens": about.depth,
        "folder": str(about.out),  # as the lines of `serve` name it
        "serve": [{"engine": engine, "command": line} for engine, line in serve(about)],
        "check": about.check,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": files.command(),
        "commit": environment["commit"],
        "versions": environment["versions"],
        "files": {
            name: {"bytes": (stage / name).stat().st_size, "sha256": files.sha256(stage / name)}
            for name in names
        },
    }
