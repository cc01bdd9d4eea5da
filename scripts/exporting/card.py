"""The model card and the manifest of an export: what it is, what it was measured to do, how to
serve it, and the hashes."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.conf.jsonl import records
from outrider.heads.base import Head
from outrider.heads.interop import Facts, engines, served
from outrider.heads.tuned import Tuned
from outrider.scripts.common import files
from outrider.scripts.exporting.stage import visible
from outrider.scripts.reports.rendering import render

FORMAT = 1
NAMES = {
    "medusa": "Medusa heads",
    "eagle1": "an EAGLE-1 head",
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
    "small_lm": "a draft model",
}

SHOWN = ("batches", "draft vocabulary", "target", "commit")  # of the training, where it is known


@dataclass
class About:
    """All that card and manifest tell. card: of the head's folder. settings: what tune chose.
    run: what training said of itself. check: the self-check's figures. dtype: as written.
    """

    format: str
    head: Head
    card: dict[str, Any]
    facts: Facts
    settings: Tuned | None
    out: Path
    run: dict[str, Any]
    check: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""

    @property
    def depth(self) -> int:
        """K of the serve command: all heads for Medusa, of a block whose rows see each other
        what it was trained with, what tune chose for a chain, else K as trained.
        """
        if self.head.kind == "medusa":
            return int(self.head.cfg.heads)
        deepest = getattr(self.head, "deepest", None)
        if deepest and deepest <= self.head.levels:
            return int(self.head.levels)
        chain = self.settings.chain if self.settings is not None else None
        return (
            int(chain.depth)
            if chain is not None and chain.depth
            else trained_depth(asdict(self.head.cfg)) or int(self.head.levels)
        )


def trained_depth(saved: dict[str, Any]) -> int:
    """K as trained: the levels of a draft that a head has learned, by its keys in head.json; 0
    where they say nothing."""
    keys = {k: v for k, v in saved.items() if isinstance(v, int) and not isinstance(v, bool)}
    if "block" in keys:
        return keys["block"] - int(saved.get("kind") == "dflash")
    steps = keys.get("steps", 1)
    return keys.get("heads") or (steps if steps > 1 else keys.get("depth", 0))


def vllm(head: Head, folder: Path, draft_tokens: int) -> dict[str, Any]:
    """vLLM's speculative_config for an exported head."""
    method = engines.VLLM.drafters[head.kind].how
    spec = {"model": str(folder), "method": method, "num_speculative_tokens": draft_tokens}
    return spec | {"parallel_drafting": True} if getattr(head.cfg, "parallel", False) else spec


def serve(about: About) -> list[tuple[str, str]]:
    """(engine with the versions that load this head, command) pairs; the original repositories
    have none."""
    wanted = engines.required(about.head.kind, about.head.cfg)
    vllm_now, sglang_now = (e.versions(*wanted) for e in (engines.VLLM, engines.SGLANG))
    target, folder, kind = about.facts.name or "TARGET", str(about.out), about.head.kind
    steps = about.depth
    spec = vllm(about.head, about.out, steps)
    config = shlex.quote(json.dumps(spec))
    on_vllm = f"vllm serve {shlex.quote(target)} --speculative-config {config}"
    known = engines.SGLANG.drafters.get(kind, engines.Support())
    sglang = (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} "
        f"--speculative-algorithm {known.how} --speculative-draft-model-path {shlex.quote(folder)} "
        f"{' '.join(sglang_flags(steps, kind))}"
    )
    if about.format == "gguf":
        method = engines.LLAMACPP.drafters[kind].how
        draft = shlex.quote(f"{folder}/draft.gguf")
        command = (
            f"llama-server -m TARGET.gguf -md {draft} --spec-type {method} "
            f"--spec-draft-n-max {steps} --spec-draft-p-min 0"
        )
        return [(engines.LLAMACPP.versions(*wanted), command)]
    if about.format == "speculators":
        one = engines.SPECULATORS.versions(*wanted)
        return [(one, f"vllm serve {shlex.quote(folder)}"), (f"{one}, other settings", on_vllm)]
    if about.format == "transformers":
        return [(vllm_now, on_vllm), (sglang_now, sglang)]
    if about.format == "sglang":
        return [(sglang_now, sglang)]
    return [(vllm_now, on_vllm)] if about.format in ("vllm", "deepspec", "medusa") else []


def sglang_flags(draft_tokens: int, kind: str) -> list[str]:
    """How SGLang is told to draft so many tokens. A block head is one step, whose window holds
    the last token too."""
    window = f"--speculative-num-draft-tokens {draft_tokens + 1}"
    if kind in ("dflash", "dspark"):
        return [window]
    return [f"--speculative-num-steps {draft_tokens}", "--speculative-eagle-topk 1", window]


def page(about: About) -> str:
    """README.md."""
    head, name, identity = about.head, about.facts.name, about.card.get("target") or {}
    what = NAMES[head.kind]
    extra = about.card.get("extra") or {}
    return render(
        "export.md",
        about=about,
        what=what[0].upper() + what[1:],
        base_model=name if name and "/" in name and not Path(name).is_absolute() else "",
        target=identity.get("name", name),
        hashes={k.replace("_", " "): identity[k] for k in identity if k.endswith("sha256")},
        serve=serve(about),
        checked=engines.CHECKED,
        gone=served.gone(about.format, head),
        described=described(head),
        training={k: about.run[k] for k in SHOWN if about.run.get(k)},
        steps=extra.get("step"),
        recipe=json.dumps(about.card["head"].get("config", {}), sort_keys=True),
        acceptance=acceptance(extra, getattr(head, "calibration", {}) or {}),
        decoding=decoding(about),
    )


def described(head: Head) -> list[tuple[str, Any]]:
    """Rows about the head's shape."""
    cfg = head.cfg
    rows: list[tuple[str, Any]] = [("parameters", f"{sum(p.numel() for p in head.parameters()):,}")]
    if hasattr(cfg, "heads"):
        rows += [("heads", cfg.heads), ("blocks of each", cfg.blocks)]
    taps = tuple(getattr(head, "taps", ()))
    if taps:
        rows.append(
            (
                "target features",
                f"hidden_states {list(taps)}; 0 = embeddings, the last = after the final norm",
            )
        )
    size = getattr(cfg, "draft_vocab", 0)
    if size:
        cover = getattr(head, "coverage", 1.0)
        note = {
            "medusa": "widened to the whole one: other tokens get the mean row, which is "
            "never the best",
            "eagle1": "the engine scores the whole one",
        }.get(head.kind, f"{cover:.1%} of the supervised tokens")
        rows.append(("draft vocabulary", f"{size:,} tokens ({note})"))
    return rows


def acceptance(extra: dict[str, Any], calibration: dict[str, Any]) -> list[str]:
    """What was measured in training; "not measured" where it was not."""
    lines = []
    best = extra.get("best")
    if isinstance(best, dict) and isinstance(best.get("accepted_length"), int | float):
        lines.append(
            f"decoded on held-out prompts: accepted length {best['accepted_length']:.2f} "
            f"(bonus token counted, step {best.get('step')})"
        )
    table = calibration.get("acceptance") or []
    if table:
        rates = " ".join(f"{row[0]:.0%}" for row in table[:8])
        lines.append(
            f"teacher-forced, right token is the head's first choice, by depth: {rates} "
            f"({calibration.get('positions', '?')} positions)"
        )
    return lines or ["not measured"]


def decoding(about: About) -> list[str]:
    """What tune found for this head, if it ran."""
    found = about.settings
    if found is None:
        return ["not tuned; `outrider tune drafter=...` finds K for a machine and prompts"]
    lines = [
        f"tuned here: {found.best}"
        + ("" if found.pays else " (not measured to be faster than plain decoding)")
    ]
    if found.chain is not None:
        lines.append(f"for engines, which draft chains: {found.chain}")
    where = {k: v for k, v in found.evidence.items() if isinstance(v, str | int | float)}
    return lines + ([f"measured: `{json.dumps(where)}`"] if where else [])


def run_record(source: Path) -> dict[str, Any]:
    """What metrics.jsonl of the head's run folder says of its start (data, batches, commit);
    {} without one.
    """
    for folder in source.parents[:3]:
        try:
            first = records(folder / "metrics.jsonl")[:1]
        except OSError:
            continue
        if first and first[0].get("event") == "start":
            return {k: v for k, v in first[0].items() if isinstance(v, str)}
    return {}


def manifest(
    about: About, stage: Path, command: str, environment: dict[str, Any]
) -> dict[str, Any]:
    """outrider.json: who it is for, from what it was made, and the sha256 of every file beside
    it.
    """
    ids = about.head.ids()
    names = [p.name for p in visible(stage)]
    vocabulary = (
        None if ids is None else hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest()
    )
    return {
        "format": FORMAT,
        "engine_format": about.format,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": environment["commit"],
        "versions": environment["versions"],
        "kind": about.head.kind,
        "source": {
            "card_sha256": about.card["sha256"],
            "weights_sha256": about.card["weights"]["sha256"],
        },
        "target": about.card.get("target"),
        "vocabulary_map": {"tokens": 0 if ids is None else int(ids.numel()), "sha256": vocabulary},
        "dtype": about.dtype,
        "draft_tokens": about.depth,
        "folder": str(about.out),  # as the lines of `serve` name it
        "serve": [{"engine": engine, "command": line} for engine, line in serve(about)],
        "training": {
            k: v
            for k, v in about.run.items()
            if k in ("data", "batches", "commit", "draft vocabulary")
        },
        "check": about.check,
        "files": {
            n: {"bytes": (stage / n).stat().st_size, "sha256": files.sha256(stage / n)}
            for n in names
        },
    }
