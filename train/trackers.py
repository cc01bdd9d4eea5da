"""Where metrics go beside metrics.jsonl: wandb, tensorboard, mlflow and trackio, by
Accelerate's classes. They are not opened by Accelerator.init_trackers, where one that fails
takes the others and the run with it: here its first trouble costs that tracker and one
line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from outrider.conf.errors import UserError, first_line

OFFLINE = ("offline", "disabled", "dryrun")  # modes of wandb in which nobody is asked


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
