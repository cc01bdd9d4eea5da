"""Trackers beside metrics.jsonl, through Accelerate's classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from outrider.conf.errors import UserError
from outrider.train import log as trackers
from tests.helpers.training import run

NAMES = ("tensorboard", "mlflow", "trackio", "wandb")


class Fake(GeneralTracker):
    """One of Accelerate's trackers with a list in place of a service."""

    requires_logging_directory = False
    made: list[Fake]
    fails = False

    def __init__(self, **keys: Any) -> None:
        super().__init__()
        self.keys, self.lines, self.settings, self.ended = keys, list[Any](), None, False
        self.made.append(self)

    def start(self) -> None:
        """Nothing."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if self.fails:
            raise ConnectionError("no route\nand more")
        self.lines.append((step, values))

    def finish(self) -> None:
        self.ended = True

    @property
    def tracker(self) -> Any:
        return self


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Fake]]:
    """All four, installed; what was made of each by name."""
    made: dict[str, list[Fake]] = {name: [] for name in NAMES}
    for name in NAMES:
        kind = type(name, (Fake,), {"name": name, "made": made[name]})
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, kind)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: [*NAMES])
    return made


def test_all_of_them_get_the_numbers_of_a_run_and_of_its_resumption(
    data: Path, tmp_path: Path, fakes: dict[str, list[Fake]]
) -> None:
    all_four = f"trackers=[{','.join(NAMES)}]"
    out = run(data, tmp_path / "run", all_four, "wandb=offline", "steps=4")
    run(data, out, all_four, "wandb=offline", "steps=6", "save_every=3")
    for name in NAMES:
        first, second = fakes[name]
        assert first.ended and second.ended
        assert [s for s, v in first.lines if "train/loss" in v] == [2, 4]
        assert [s for s, v in second.lines if "train/loss" in v] == [6]
        numbers = [v for _, values in first.lines for v in values.values()]
        assert all(type(v) in (int, float) for v in numbers)
        groups = {key.partition("/")[0] for _, line in first.lines for key in line}
        assert groups == {"start", "train", "end"} and second.settings is None
        assert all(isinstance(v, str | int | float) for v in first.settings.values())
        assert first.settings["steps"] == 4
    board, flow, trackio, wandb = (fakes[name] for name in NAMES)
    assert board[0].keys["logging_dir"] == str(out)
    assert flow[0].keys["run_name"] == out.name
    assert trackio[0].keys["name"] == trackio[1].keys["name"]
    assert wandb[0].keys["id"] == wandb[1].keys["id"] and wandb[0].keys["resume"] == "allow"
    assert wandb[0].keys["mode"] == "offline"


def test_trouble_costs_that_tracker_alone(
    data: Path,
    tmp_path: Path,
    fakes: dict[str, list[Fake]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS["mlflow"], "fails", True)
    out = run(data, tmp_path / "run", "trackers=[mlflow,trackio]", "steps=2")
    said = capfd.readouterr().err
    assert said.count("mlflow: ") == 1 and "metrics.jsonl has everything" in said
    assert "and more" not in said and "Traceback" not in said
    assert fakes["trackio"][0].ended
    assert [s for s, v in fakes["trackio"][0].lines if "train/loss" in v]
    assert (out / "head" / "head.json").exists()


def test_a_tracker_that_is_not_installed_is_refused_first(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(UserError, match="trackers: mlflow, trackio not installed"):
        run(data, tmp_path / "run", "trackers=[mlflow,tensorboard,trackio]")
    assert not (tmp_path / "run").exists()


def test_numbers_of_every_event_have_a_group() -> None:
    skipped = {"event": "skipped", "rows": [3, 4], "skipped_steps": 2, "passed": True}
    assert trackers.grouped(skipped) == {"skipped/skipped_steps": 2}
    evaluated = {"event": "eval", "low": None, "shape": "chain", "unconditional": [0.5]}
    assert trackers.grouped(evaluated) == {"eval/acceptance_at_1": 0.5}
    assert trackers.grouped({"loss": 1.0}) == {"train/loss": 1.0}
