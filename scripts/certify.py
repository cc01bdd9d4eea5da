"""Certify that decoding with a drafter leaves the target's distribution unchanged: this target,
drafter, shape and settings.

    outrider certify target=smollm2 drafter=runs/eagle3@tree temperature=1 \\
        out=certificates/eagle3
    outrider certify target=tiny drafter=ngram temperature=1 tokens=50000 \\
        out=certificates/tiny

Writes OUT/certificate.json and shows it as a table. Exit code 0: lossless. 1: not lossless. 3:
undecided (too few tokens, or wrong code that must be rejected got through). docs/lossless.md says
how to read it. A certificate of something else in OUT is replaced with overwrite=true alone.

    outrider certify url=http://127.0.0.1:8080

asks a running server instead, of any model and whatever drafts there, in at most 1,200 tokens and
two minutes (tokens= and seconds= for more): is its temperature honoured, are its answers the
model's (by its own log-probabilities), do they depend on the batch? One line. Exit code 0: as
asked. 1: not as asked. 3: undecided.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.conf.schema import entry
from outrider.decode.models import facts
from outrider.decode.models.load import load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.drafters import refuse_other, resolve_drafter
from outrider.scripts.certificate import server_asked
from outrider.scripts.certificate.config import CertifyConfig
from outrider.scripts.certificate.controls import run_controls
from outrider.scripts.certificate.layers import bound, run_layers, verdict
from outrider.scripts.certificate.setup import open_setup
from outrider.scripts.common import files
from outrider.scripts.common.progress import Steps
from outrider.scripts.common.prompts import load_prompts, question_ids
from outrider.scripts.reports.table import Table
from outrider.scripts.scoring.interleaved import fitting
from outrider.scripts.scoring.systems import facts_of

# exit codes of the verdicts, the last two of a server
CODES = {"lossless": 0, "not lossless": 1, "undecided": 3, "passed": 0, "rejected": 1}
OFF = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "guidance_scale": 1}
EVIDENCE = {
    "exact": "{cases} small models, {branches} branches: distribution off by at most "
    "{max_error:.1e}",
    "greedy": "{prompts} prompts, {tokens} tokens ({drafted_tokens} drafted): {rounding_ties} "
    "rounding ties, {defects} defects, {not_the_verifiers_best} not the verifier's own best",
    "sampling": "{tokens} tokens ({drafted_share:.0%} drafted), {count} tests: p = {p:.3g} at "
    "alpha = {alpha:g}",
}


@entry("certify", CertifyConfig)
def main(cfg: CertifyConfig) -> int:
    """Certify this engine, or check a server. Exit codes: see the file's first lines."""
    if cfg.out:
        files.unclaimed(Path(cfg.out) / "certificate.json", files.asked(cfg), cfg.overwrite)
    if cfg.url:
        return server_checked(cfg)
    with files.sole_writer(Path(cfg.out)):
        return certified(cfg, Path(cfg.out))


def certified(cfg: CertifyConfig, out: Path) -> int:
    """Run every layer, write, say the verdict: the exit code."""
    known = load_prompts(Path(cfg.prompts))
    refuse_other([cfg.drafter], cfg.target)
    target = load_target(cfg.target, cfg.dtype, cfg.device)
    cfg.sampling().check_vocab(target.vocab_size)
    for line in facts.notes(target, cfg.sampling()):
        print(line, file=sys.stderr)
    drafter = resolve_drafter(cfg.drafter, target)
    head = {"name": cfg.drafter, **facts_of(cfg.drafter, target)}
    longest = max(cfg.max_new_tokens, cfg.greedy_tokens)
    texts = [prompt.turns[0] for prompt in fitting(known, target, longest, [])]
    prompts = [question_ids(target.tokenizer, text) for text in texts]
    about, plan, start = about_target(target, cfg.sampling()), cfg.plan(), datetime.now(UTC)
    with Steps(quiet=cfg.quiet) as bar:
        setup = open_setup(target, prompts, plan, bar.part)
        layers, controls = run_layers(setup, drafter), run_controls(setup)
    seen = bound(layers, plan.alpha, cfg.detect)
    decision, reasons = verdict(layers, controls, seen, drafter.max_depth > 0)
    certificate = {
        "format": 4,
        "verdict": decision,
        "reasons": reasons,
        "created": start.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - start).total_seconds(), 1),
        "command": files.command(),
        "asked": files.asked(cfg),
        "layers": layers,
        "negative_controls": controls,
        "bound": seen,
        "identities": {"target": about, "drafter": head},
        "prompts_sha256": files.sha256(Path(cfg.prompts)),
        "shape": {"kind": drafter.shape, "depth": drafter.max_depth, "nodes": drafter.max_nodes},
        "settings": settings(cfg),
        "versions": files.environment(str(target.device)),
    }
    files.write_json(out / "certificate.json", certificate)
    table(certificate).show()
    print(f"{out / 'certificate.json'} ({certificate['seconds']:.0f} s)")
    return CODES[decision]


def table(certificate: dict[str, Any]) -> Table:
    """Return the layers and the controls, the verdict above, its reasons and the bound below."""
    how, target = certificate["settings"], certificate["identities"]["target"]
    words = [target.get("name", "target"), f"T = {how['temperature']:g}"]
    words += [f"{key} = {how[key]:g}" for key, off in OFF.items() if how[key] != off]
    about = f"{certificate['identities']['drafter']['name']} on {', '.join(words)}"
    rows = [
        [
            layer["name"],
            {True: "passed", None: "NOT RUN"}.get(layer["passed"], f"FAILED: {layer['why']}"),
            EVIDENCE[layer["name"]].format(**layer, count=len(layer.get("tests", ()))),
        ]
        for layer in certificate["layers"]
    ]
    rows += [
        [f"control: {c['layer']}", "rejected" if c["rejected"] else "NOT REJECTED", c["evidence"]]
        for c in certificate["negative_controls"]
    ]
    notes = [*certificate["reasons"], certificate["bound"]["said"]]
    title = f"{certificate['verdict'].upper()}: {about}, {target['dtype']}"
    return Table(("layer", "result", "evidence"), rows, title, notes, range(3))


def settings(cfg: CertifyConfig) -> dict[str, Any]:
    """Return the keys as certificate.json holds them; it names the target by hash."""
    return {key: value for key, value in asdict(cfg).items() if key not in ("target", "overwrite")}


def about_target(target: Target, sampling: Sampling) -> dict[str, Any]:
    """Return what certificate.json says of it. probed_tokens: of the longest text that the
    target's probe compared with a plain pass."""
    return {
        **(asdict(target.identity) if target.identity else {}),
        "dtype": str(target.dtype).removeprefix("torch."),
        "generation_config": facts.ignored(target.model, sampling),
        "probed_tokens": target.probe().tested,
    }


def server_checked(cfg: CertifyConfig) -> int:
    """Ask a server, judge, say the line: its exit code."""
    prompts = [prompt.turns[0] for prompt in load_prompts(Path(cfg.prompts))]
    with Steps(quiet=cfg.quiet) as bar:
        found = server_asked.judged(cfg, prompts, bar.part)
    print(found["line"])
    for note in found["notes"]:
        print(note, file=sys.stderr)
    if cfg.out:
        about = {"format": 2, "command": files.command(), "asked": files.asked(cfg)}
        about["settings"] = settings(cfg)
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
        files.write_json(Path(cfg.out) / "certificate.json", about | found)
    return CODES[found["verdict"]]


if __name__ == "__main__":
    main()
