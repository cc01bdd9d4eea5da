"""What one GPU confirmed and measured, for docs/scaling.md: `first_gpu`, passes, and the heads
that were trained there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outrider.scripts.reports.table import Table

# attention of `first_gpu` that is shown: its name there -> in words
KERNELS = {
    "training-time test, 0 steps, packed": "attention of a target's packed rows, with gradients",
    "training-time test, 3 steps, packed": "attention of training-time test, with gradients",
}
# reports whose heads were trained there -> the target, and what else the GPU did
TRAINED = {
    "gpu-t0": ("SmolLM2-135M", ", beside other work"),
    "qwen25-gpu-t0": ("Qwen2.5-Coder-1.5B", ""),
}
SHAPE = "the shape of a 1B model"
SIZES = (1, 25)  # tokens of a pass that are shown


def text(results: Path) -> str:
    """The table and where it comes from."""
    first = _read(results, "first_gpu")
    if first is None:
        return "Not measured yet."
    rows = [*_kernels(first), *_training(first), *_trained(results), *_passes(results)]
    env = first["environment"]
    table = Table(("one " + env["gpu"], "measured"), rows)
    confirmed = ", ".join(first["confirmed"])
    return (
        f"{table.markdown()}\n\nConfirmed by `{first['command']}`: {confirmed} (torch "
        f"{env['versions']['torch']}, commit `{env['commit']}`, "
        "[JSON](results/first_gpu.json))."
    )


def _read(results: Path, name: str) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _kernels(first: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Kernels in bfloat16 beside plain operations."""
    for row in first["kernels"]["compared"]:
        if row["dtype"] == "bfloat16" and row["name"] in KERNELS:
            ratio = row["dense_ms"] / row["ms"]
            yield KERNELS[row["name"]], f"{row['ms']:.1f} ms, {ratio:.1f} times plain operations"


def _training(first: dict[str, Any]) -> Iterator[Sequence[str]]:
    """The run of `first_gpu` and its memory."""
    run, memory = first["training"], first["memory"]
    rate = f", {run['tflops_per_device']:.0f} TFLOP/s" if run.get("tflops_per_device") else ""
    yield (
        f"training EAGLE-3, seven steps, on {SHAPE} with random weights",
        f"{run['tokens_per_second']:,.0f} tokens/s{rate} ({run['share_target']:.0%} of the time "
        f"the target, {run['share_head']:.0%} the head)",
    )
    yield (
        "its peak of memory, predicted and measured",
        f"{memory['predicted_bytes'] / 1e9:.2f} and {memory['measured_bytes'] / 1e9:.2f} GB",
    )


def _trained(results: Path) -> Iterator[Sequence[str]]:
    """Real heads that learned there."""
    for name, (target, beside) in TRAINED.items():
        report = _read(results, name)
        found = [row["training"] for row in (report or {}).get("drafters", ()) if row["training"]]
        if found:
            read, seconds = found[0]["tokens_seen"], found[0]["train_seconds"]
            yield (
                f"training an EAGLE-3 head of {target}{beside}",
                f"{read / 1e6:.1f} million tokens in {seconds:.0f} s, {read / seconds:,.0f} a "
                "second",
            )


def _passes(results: Path) -> Iterator[Sequence[str]]:
    """What calls the kernels of a pass, on the clock."""
    by_model = {
        "SmolLM2-135M": _of_smollm2(_read(results, "gpu-passes") or {}),
        SHAPE: _of_first(_read(results, "first_gpu") or {}),
    }
    for model, by_tokens in by_model.items():
        for tokens, (modules, flat, graph) in by_tokens.items():
            yield (
                f"a pass of {model} over {tokens} token{'s' * (tokens != 1)}",
                f"{modules:.1f} ms by modules, {flat:.1f} as one function, {graph:.1f} replayed "
                "as a CUDA graph",
            )


def _of_smollm2(found: dict[str, Any]) -> dict[int, tuple[float, float, float]]:
    """Tokens of one row -> milliseconds by modules, as one function, as a graph."""
    known = found.get("milliseconds", {})
    rows = {tokens: known[f"1x{tokens}"] for tokens in SIZES if f"1x{tokens}" in known}
    return {
        tokens: (row["modules_no_cache"], row["flat"], row["graph"]) for tokens, row in rows.items()
    }


def _of_first(found: dict[str, Any]) -> dict[int, tuple[float, float, float]]:
    """The same of the step `passes` of `first_gpu`."""
    known = found.get("passes", {})
    rows = {tokens: known[f"{tokens} tokens"] for tokens in SIZES if f"{tokens} tokens" in known}
    return {tokens: (row["modules"], row["flat"], row["graph"]) for tokens, row in rows.items()}
