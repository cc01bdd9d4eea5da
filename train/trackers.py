"""Trackers: where metrics go beside metrics.jsonl. Accelerate's classes speak to each of them.

They are started here one by one, not by Accelerator.init_trackers: there one that fails takes
the others and the run with it. What a tracker does wrong costs that tracker and one line.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from outrider.conf.errors import UserError, first_line
from outrider.train.config import TrainConfig, flat

PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}  # any of them; else the name itself
OFFLINE = ("offline", "disabled", "dryrun")  # modes of wandb in which nobody is asked
# Of a line of metrics: what says how fast, or with what, a step was made.
SPEED = re.compile(
    r"(tokens|supervised)_per_second|tflops_|mfu$|share_|(gpu_)?(peak_)?memory_|(\w+_)?seconds$"
)
# Keys of an evaluation that say nothing above a chart of their own.
NAMED = {"low": "accepted_length_low", "high": "accepted_length_high", "tokens": "decoded_tokens"}
TAG = "outrider"  # of a run in MLflow: the identity by which a resumed run finds it


def check_installed(cfg: TrainConfig) -> None:
    """Raises UserError for a tracker whose package is not there. `wandb=` is no such tracker: a
    run that asks for it so goes on without."""
    missing = [name for name in cfg.trackers if not installed(name)]
    if missing:
        names = ", ".join(missing)
        raise UserError(
            f"trackers: {names} not installed; pip install {' '.join(missing)}, or leave it out"
        )


def no_reports(mode: str | None) -> None:
    """Before wandb is imported: where its mode is one of OFFLINE, switch off what it reports of
    itself. Left on, its own measurements look for its server all the same, from a thread of this
    process at any time up to its end. mode: None, as WANDB_MODE says."""
    if (mode or os.environ.get("WANDB_MODE", "")).lower() in OFFLINE:
        os.environ["WANDB_ERROR_REPORTING"] = "false"


def installed(name: str) -> bool:
    """Whether the package of a tracker is there; it is not imported."""
    return any(map(_there, PACKAGES.get(name, (name,))))


def _there(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


class Tracker:
    """A tracker that is given up at its first trouble. wanted: whether it takes all values of a
    line, or numbers alone."""

    def __init__(self, tracker: Any, say: Callable[[str], None]) -> None:
        self.name: str = tracker.name
        self._tracker, self._say = tracker, say
        self._live = False

    def start(self, settings: dict[str, Any] | None) -> bool:
        """Open it. settings: to be stored with it. Returns whether it is there."""
        self._live = True
        self._try("not used", self._tracker.start)
        if settings is not None:
            self._try("not used", lambda: self._tracker.store_init_configuration(settings))
        return self._live

    @property
    def summarises(self) -> bool:
        """Whether it takes a best value for all of the run."""
        return self._live and self.name == "wandb"

    def log(self, step: int, values: dict[str, Any]) -> None:
        """A line of metrics."""
        if values.get("event") == "start":
            if self.summarises:
                about = {"started": {k: v for k, v in values.items() if k != "event"}}
                self._try("given up", lambda: self._tracker.store_init_configuration(about))
            return
        if numbers := grouped(values):
            self._try("given up", lambda: self._tracker.log(numbers, step=step))

    def evaluated(self, best: dict[str, float]) -> None:
        """After the line of an evaluation. best: {step, accepted_length} of the run."""
        if self.summarises:
            summary = {f"best_{key}": value for key, value in best.items()}
            self._try("given up", lambda: self._tracker.tracker.summary.update(summary))

    def finish(self) -> None:
        """Close it; the run itself is done and saved."""
        self._try("not finished", self._tracker.finish)
        self._live = False

    def _try(self, what: str, action: Callable[[], Any]) -> None:
        if not self._live:
            return
        try:
            action()
        except Exception as error:  # network, account, folder: none of them may stop a run
            self._live = False
            self._say(f"{self.name}: {what} ({first_line(error)}); metrics.jsonl has everything")


def grouped(values: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics by names that a tracker sorts into groups: train/, eval/
    and speed/."""
    event = values.get("event")
    if event == "parity":
        lengths = {name: length["mean"] for name, length in values["accepted_length"].items()}
        numbers = {"passed": int(values["passed"]), **lengths}
        return {f"eval/parity_{name}": number for name, number in numbers.items()}
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if SPEED.match(key):
            found[f"speed/{f'{event}_' if key == 'seconds' else ''}{key}"] = value
        elif event == "eval" and not key.endswith("_seen"):
            found[f"eval/{NAMED.get(key, key)}"] = value
        else:
            found[f"train/{key}"] = value
    for place, share in enumerate(values.get("unconditional", ()), 1):
        found[f"eval/acceptance_at_{place}"] = share
    return found


def started(
    cfg: TrainConfig, identity: str, step: int, say: Callable[[str], None]
) -> list[Tracker]:
    """The trackers of a run that could be opened. identity: what a resumed run has in common
    with its beginning, so that it goes on in the same place. step: at which it is resumed."""
    names = dict.fromkeys([*cfg.trackers, *(["wandb"] if cfg.wandb != "off" else [])])
    settings = {k: v if isinstance(v, str | int | float) else str(v) for k, v in flat(cfg).items()}
    found = []
    for name in names:
        if name == "wandb":
            no_reports(_wandb_mode(cfg))
        try:
            made = LOGGER_TYPE_TO_CLASS[name](**_keys(name, cfg, identity, step))
        except Exception as error:  # as in Tracker
            say(f"{name}: not used ({first_line(error)}); metrics.jsonl has everything")
            continue
        tracker = Tracker(made, say)
        # What is stored once stays as it was; the others take it with their start.
        once = settings if name in ("tensorboard", "mlflow") and not step else None
        if tracker.start(once):
            found.append(tracker)
    return found


def _keys(name: str, cfg: TrainConfig, identity: str, step: int) -> dict[str, Any]:
    """What a tracker's class is made with."""
    out = Path(cfg.out_dir)
    if name == "tensorboard":
        return {
            "run_name": "tensorboard",
            "logging_dir": str(out),
            "purge_step": step + 1 if step else None,  # these steps come again
        }
    if name == "mlflow":
        return {
            "experiment_name": cfg.wandb_project,
            "run_id": _known_run(cfg.wandb_project, identity),
            "run_name": out.name,
            "tags": {TAG: identity},
        }
    shared = {"run_name": cfg.wandb_project, "resume": "allow", "config": flat(cfg)}
    if name == "trackio":
        return {**shared, "name": f"{out.name}-{identity[:8]}"}
    about = {"dir": str(out), "name": out.name, "id": identity}
    return {**shared, **about, "mode": _wandb_mode(cfg)}


def _wandb_mode(cfg: TrainConfig) -> str | None:
    """None: as WANDB_MODE says."""
    return None if cfg.wandb == "off" else cfg.wandb


def _known_run(experiment: str, identity: str) -> str | None:
    """MLflow's id of the run with this identity, None before there is one."""
    import mlflow

    found = mlflow.search_runs(
        experiment_names=[experiment],
        filter_string=f"tags.{TAG} = '{identity}'",
        output_format="list",
        max_results=1,
    )
    return str(found[0].info.run_id) if found else None
