"""What a run says: a header, lines of progress, metrics.jsonl always, trackers when asked.
Rank 0 alone speaks.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.conf import disk
from outrider.conf.commit import commit
from outrider.conf.jsonl import records
from outrider.train.checkpoint import State
from outrider.train.trackers import Trackers

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors")


class Log:
    """The record of a run. `main`: whether this process speaks; the others get silent
    methods."""

    def __init__(self, out: Path, main: bool, state: State) -> None:
        """out: the run folder, whose metrics lose what the resumed run will do again."""
        self.main, self.path = main, out / "metrics.jsonl"
        self.trackers = Trackers(self.say)
        if main:
            _forget_after(self.path, state)

    def say(self, text: str) -> None:
        """A line for people. A full disk behind stderr costs the line, not the run."""
        if self.main:
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl. Raises OSError where the disk is full."""
        if not self.main:
            return
        line = {"step": step, "time": round(time.time(), 3), **values}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.trackers.log(step, values)

    def header(self, head: nn.Module, config: str, facts: dict[str, Any]) -> None:
        """Versions, commit and facts of the run. config: hash of the keys that decide what is
        learned."""
        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
        about = {
            "config": config,
            "commit": commit() or "none",
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, "
            f"{torch.get_num_threads()} threads, {gpu}",
            "python": platform.python_version(),
            **{p: version(p) for p in PACKAGES},
        }
        self.say("  ".join(f"{k} {v}" for k, v in about.items()))
        for key, value in facts.items():
            self.say(f"{key}: {value}")
        trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
        self.say(f"trainable: {trained:,} parameters")
        said = {k: str(v) for k, v in facts.items()}
        self.metrics(0, {"event": "start", **about, **said, "trainable": trained})

    def progress(self, step: int, steps: int, found: dict[str, float], seconds: float) -> None:
        """The line of progress. steps: of the run. found: as metrics.summary. seconds: of a
        step."""
        accuracy = " ".join(f"{found[k]:.2f}" for k in sorted(found) if k.startswith("top1_"))
        left = int((steps - step) * seconds)
        self.say(
            f"step {step}/{steps}  loss {found['loss']:.3f}  top-1 {accuracy or '-'}  "
            f"{found['tokens_per_second']:,.0f} tokens/s  {left // 60}:{left % 60:02d} left"
        )


def _forget_after(path: Path, state: State) -> None:
    """Drop the metrics of steps and evaluations that the resumed run will do again, and a line
    that a kill cut short.
    """
    if not path.exists():
        return
    kept = []
    for known in records(path):
        done = state.evaluated if known.get("event") == "eval" else state.step
        step = known.get("step")
        if isinstance(step, int) and step <= done:
            kept.append(json.dumps(known) + "\n")
    disk.write_text(path, "".join(kept))
