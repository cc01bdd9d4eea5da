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
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from torch import nn

from outrider.conf import disk
from outrider.conf.commit import commit
from outrider.conf.errors import UserError, first_line
from outrider.conf.jsonl import records
from outrider.train.checkpoint import State

OFFLINE = ("offline", "disabled", "dryrun")  # modes of wandb in which nobody is asked
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


# Trackers, by Accelerate's classes. Accelerator.init_trackers does not open them: one that fails
# would take the others and the run with it. Here its first trouble costs that tracker and one line.
# -------------------------------------------------------------------------------------------


def check_installed(names: list[str]) -> None:
    """Raise UserError for a tracker whose package is not there. `wandb=` is no such
    tracker: a run that asks for it so goes on without."""
    there = [str(name) for name in get_available_trackers()]
    if missing := [name for name in names if name not in there]:
        raise UserError(
            f"trackers: {', '.join(missing)} not installed; pip install {' '.join(missing)}, or "
            "leave it out"
        )


def no_reports(mode: str | None) -> None:
    """Before wandb is imported: where its mode is one of OFFLINE, switch off what it
    reports of itself. Left on, its own measurements look for its server all the same, from
    a thread of this process at any time up to its end. mode: None, as WANDB_MODE says."""
    if (mode or os.environ.get("WANDB_MODE", "")).lower() in OFFLINE:
        os.environ["WANDB_ERROR_REPORTING"] = "false"


def settings_of(out: Path, project: str, mode: str, identity: str) -> dict[str, Any]:
    """Return what each tracker's class is made with. project, mode: the keys wandb_project
    and wandb. identity: what a resumed run has in common with its beginning, so that it
    goes on in the same place."""
    shared = {"run_name": project, "resume": "allow"}
    about = {"dir": str(out), "name": out.name, "id": identity}
    return {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": str(out)},
        "mlflow": {"experiment_name": project, "run_name": out.name},
        "trackio": {**shared, "name": f"{out.name}-{identity[:8]}"},
        # None: as WANDB_MODE says
        "wandb": {**shared, **about, "mode": None if mode == "off" else mode},
    }


class Trackers:
    """The trackers of a run; none on ranks that do not speak."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._live = say, list[Any]()

    def open(
        self, names: list[str], settings: Mapping[str, Any], keys: dict[str, Any] | None
    ) -> None:
        """Open those that can be. settings: as settings_of. keys: of the run, by dotted name;
        None for a resumed one, whose keys are there."""
        plain = {
            k: v if isinstance(v, str | int | float) else str(v) for k, v in (keys or {}).items()
        }
        for name in dict.fromkeys(names):
            if name == "wandb":
                no_reports(settings[name]["mode"])
            try:
                tracker = LOGGER_TYPE_TO_CLASS[name](**settings[name])
                tracker.start()
                if plain:
                    tracker.store_init_configuration(plain)
                self._live.append(tracker)
            except Exception as error:
                self._given_up(name, error)

    def _given_up(self, name: str, error: Exception) -> None:
        self._say(f"{name}: given up ({first_line(error)}); metrics.jsonl has everything")

    def _each(self, action: Callable[[Any], Any]) -> None:
        for tracker in [*self._live]:
            try:
                action(tracker)
            except Exception as error:  # network, account, folder: none of them may stop a run
                self._live.remove(tracker)
                self._given_up(tracker.name, error)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hand on the numbers of a line of metrics."""
        if numbers := grouped(values):
            self._each(lambda t: t.log(numbers, step=step))

    def finish(self) -> None:
        """Close them; the run itself is done and saved."""
        self._each(lambda t: t.finish())
        self._live.clear()


def grouped(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics, in a group for each event: train/, eval/."""
    group = values.get("event", "train")
    found = {k: v for k, v in values.items() if type(v) in (int, float)}
    found |= {f"acceptance_at_{n}": v for n, v in enumerate(values.get("unconditional", ()), 1)}
    return {f"{group}/{name}": number for name, number in found.items()}
