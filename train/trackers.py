"""Where metrics go beside metrics.jsonl: wandb, tensorboard, mlflow and trackio, by
Accelerate's classes. They are not opened by Accelerator.init_trackers, where one that fails
takes the others and the run with it: here its first trouble costs that tracker and one
line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from outrider.conf.errors import UserError, first_line

OFFLINE = ("offline", "disabled", "dryrun")  # modes of wandb in which nobody is asked
# Of a line of metrics: what says how fast, or with what, a step was made.
SPEED = re.compile(
    r"(tokens|supervised)_per_second|tflops_|mfu$|share_|(gpu_)?(peak_)?memory_|(\w+_)?seconds$"
)
# Keys of an evaluation that say nothing above a chart of their own.
NAMED = {"low": "accepted_length_low", "high": "accepted_length_high", "tokens": "decoded_tokens"}


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


def settings_of(out: Path, project: str, mode: str, identity: str, step: int) -> dict[str, Any]:
    """Return what each tracker's class is made with. project, mode: the keys wandb_project
    and wandb. identity: what a resumed run has in common with its beginning, so that it
    goes on in the same place. step: at which it is resumed."""
    shared = {"run_name": project, "resume": "allow"}
    about = {"dir": str(out), "name": out.name, "id": identity}
    again = step + 1 if step else None  # these steps come again
    return {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": str(out), "purge_step": again},
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
        self, names: list[str], settings: Mapping[str, Any], keys: dict[str, Any], first: bool
    ) -> None:
        """Open those that can be. settings: as settings_of. keys: of the run, by dotted name.
        first: this run is not a resumed one."""
        for name in dict.fromkeys(names):
            if name == "wandb":
                no_reports(settings[name]["mode"])
            config = {"config": keys} if name in ("wandb", "trackio") else {}
            try:
                tracker = LOGGER_TYPE_TO_CLASS[name](**settings[name], **config)
                tracker.start()
                if first and not config:  # what these store once stays as it was
                    plain = (str, int, float)
                    tracker.store_init_configuration(
                        {k: v if isinstance(v, plain) else str(v) for k, v in keys.items()}
                    )
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
        """Hand on a line of metrics; the facts of a start to wandb's configuration alone."""
        if values.get("event") == "start":
            about = {"started": {k: v for k, v in values.items() if k != "event"}}
            self._each(lambda t: t.name != "wandb" or t.store_init_configuration(about))
        elif numbers := grouped(values):
            self._each(lambda t: t.log(numbers, step=step))

    def best(self, best: dict[str, float]) -> None:
        """Hand {step, accepted_length} of the run's best to wandb's summary."""
        found = {f"best_{key}": value for key, value in best.items()}
        self._each(lambda t: t.name != "wandb" or t.tracker.summary.update(found))

    def finish(self) -> None:
        """Close them; the run itself is done and saved."""
        self._each(lambda t: t.finish())
        self._live.clear()


def grouped(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics by names that a tracker sorts into groups:
    train/, eval/ and speed/."""
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
