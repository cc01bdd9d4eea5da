"""Evaluation while training: decoded accepted length on held-out prompts decides which weights
are best/.
"""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from heads.base import Head
from heads.checkpoint import save_head
from train import curve
from train.accept import decoded_acceptance
from train.config import TrainConfig
from train.log import Log
from train.saving import asked_anywhere
from train.signals import Stop
from train.state import State
from train.texts.batches import Rows


def seen(state: State) -> dict[str, float]:
    """What the run took so far, for a line of metrics."""
    return {name: round(amount, 2) for name, amount in state.seen.items()}


def evaluate(
    cfg: TrainConfig,
    out: Path,
    state: State,
    head: Head,
    target: Any,
    rows: Rows,
    accelerator: Accelerator,
    log: Log,
    stop: Stop,
) -> int:
    """Decode held-out prompts with the current weights, write the figures, keep the best
    weights as OUT/best. Returns the signal that some rank was asked to stop by, 0 if none; an
    evaluation that a signal cut short leaves no trace."""
    start = time.perf_counter()
    head.eval()
    found = decoded_acceptance(head, target, rows, cfg.eval, cfg.seed, accelerator, stop)
    head.train()
    asked = asked_anywhere(stop, accelerator)
    if found is None:
        return asked or signal.SIGTERM
    state.evaluated = state.step
    if not found:
        log.say(
            "no held-out prompts: accepted length is not measured (see data.held_out, eval.prompts)"
        )
        return asked
    seconds = time.perf_counter() - start
    log.metrics(state.step, {"event": "eval", "seconds": round(seconds, 2), **found, **seen(state)})
    spread = f" [{found['low']:.2f}, {found['high']:.2f}]" if found["low"] is not None else ""
    log.say(
        f"step {state.step}: accepted length {found['accepted_length']:.2f}{spread}, "
        f"{found['shape']}, "
        f"{found['cycles']} cycles, {seconds:.1f} s"
    )
    curve.draw(out, accelerator.is_main_process)
    if found["accepted_length"] > state.best.get("accepted_length", -math.inf):
        better = {"step": state.step, "accepted_length": found["accepted_length"]}
        if accelerator.is_main_process:
            try:
                save_head(
                    head,
                    out / "best",
                    target.identity,
                    {"step": state.step, **found, "training": seen(state)},
                )
            except (OSError, RuntimeError, SafetensorError) as error:
                log.say(f"step {state.step}: best/ not written ({error})")
                better = state.best  # what best/ still holds
        state.best = better
    return asked
