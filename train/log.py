"""What a run says: a header, a live line, metrics.jsonl always, trackers when asked.
Rank 0 alone speaks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from torch import nn

from outrider.conf import disk
from outrider.conf.commit import commit
from outrider.conf.jsonl import records
from outrider.train.checkpoint import State
from outrider.train.config import REPLANNED, TrainConfig, is_logistics, meaning_hash
from outrider.train.trackers import Tracker, started

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors")


class Log:
    """The record of a run. `main`: whether this process speaks; the others get silent methods."""

    def __init__(self, cfg: TrainConfig, main: bool, state: State) -> None:
        self.cfg, self.main = cfg, main
        self.console = Console(stderr=True, quiet=not main)
        self.path = Path(cfg.out_dir) / "metrics.jsonl"
        self.progress: Progress | None = None
        self.trackers: list[Tracker] = []
        self._waiting: list[str] = []  # lines of metrics that the disk has not taken yet
        self._reported = False
        if main:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _forget_after(self.path, state)
            identity = identity_of(cfg, state.meaning)[:16]
            self.trackers = started(cfg, identity, state.step, self.say)

    def say(self, text: str) -> None:
        """A line for people. A full disk behind stderr costs the line, not the run."""
        with contextlib.suppress(OSError):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if not self.main:
            return
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._waiting.append(json.dumps(line) + "\n")
        self._flush()
        for tracker in self.trackers:
            tracker.log(step, values)

    def evaluated(self, best: dict[str, float]) -> None:
        """What a tracker takes of an evaluation beside its line of metrics."""
        for tracker in self.trackers:
            tracker.evaluated(best)

    def _flush(self) -> None:
        """Append the lines that wait. A disk that refuses loses none: they wait for the next
        call, and no half of one stays in the file."""
        data = "".join(self._waiting).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                try:
                    written = file.write(data)
                    if written != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    file.truncate(before)
                    raise
            self._waiting, self._reported = [], False
        except OSError as error:
            if not self._reported:
                self.say(
                    f"{self.path}: {error.strerror}; its lines are kept until they can be written"
                )
            self._reported = True

    def header(self, head: nn.Module, facts: dict[str, Any]) -> None:
        """Versions, config hash, commit, facts of the run, and every trainable parameter."""
        if not self.main:
            return
        about = {
            "config": meaning_hash(self.cfg)[:12],
            "commit": commit() or "none",
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, "
            f"{torch.get_num_threads()} threads, {_accelerator()}",
            "python": platform.python_version(),
            **{p: version(p) for p in PACKAGES},
            "trust_remote_code": "ON: code of the target's repository runs here"
            if self.cfg.target.trust_remote_code
            else "off",
        }
        self.say("  ".join(f"{k} {v}" for k, v in about.items()))
        for key, value in facts.items():
            self.say(f"{key}: {value}")
        table = Table("trainable", "shape", "parameters", "dtype", box=None, pad_edge=False)
        trainable = {n: p for n, p in head.named_parameters() if p.requires_grad}
        rows = [
            (n, "x".join(map(str, p.shape)), p.numel(), str(p.dtype).removeprefix("torch."))
            for n, p in trainable.items()
        ]
        for name, shape, count, dtype in rows:
            table.add_row(name, shape, f"{count:,}", dtype)
        table.add_row("all", "", f"{sum(count for _, _, count, _ in rows):,}", "")
        with contextlib.suppress(OSError):
            self.console.print(table)
        self.metrics(
            0,
            {
                "event": "start",
                **about,
                **{k: str(v) for k, v in facts.items()},
                "trainable": {n: [shape, dtype] for n, shape, _, dtype in rows},
            },
        )

    def live(self, step: int, text: str, seconds_left: float) -> None:
        """The progress line: a live one on a terminal, a plain line otherwise."""
        if not self.main:
            return
        left = f"{int(seconds_left) // 60}:{int(seconds_left) % 60:02d} left"
        if not sys.stderr.isatty():
            if step % self.cfg.log_every == 0 or step == self.cfg.steps:
                self.say(f"step {step}/{self.cfg.steps}  {text}  {left}")
            return
        if self.progress is None:
            self.progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(20),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self.progress.start()
            self.progress.add_task("", total=self.cfg.steps, text="")
        self.progress.update(self.progress.task_ids[0], completed=step, text=f"{text}  {left}")

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self.progress is not None:
            self.progress.stop()
        if self._waiting:
            self._flush()
        for tracker in self.trackers:
            tracker.finish()


def identity_of(cfg: TrainConfig, meaning: dict[str, Any]) -> str:
    """What tells runs apart for a tracker: the folder, and what is learned from which target
    and data. Keys that may follow when a run is resumed do not count."""
    kept = {k: v for k, v in meaning.items() if not is_logistics(k) and k not in REPLANNED}
    place = str(Path(cfg.out_dir).expanduser().resolve())
    return hashlib.sha256(json.dumps([place, kept], sort_keys=True).encode()).hexdigest()


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


def _accelerator() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
