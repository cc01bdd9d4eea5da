"""What a report takes from a drafter's folder, and the figures drawn of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.heads.names import DraftSpec
from outrider.scripts.reports import plots, tuning_plots
from outrider.scripts.scoring import extras
from outrider.scripts.scoring.contest import System


def test_learning_curves_come_from_the_run(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    assert extras.evaluations(tmp_path / "head") == []
    lines = [
        {"step": 0, "event": "start"},
        {"step": 10, "loss": 2.0},
        {"step": 20, "event": "eval", "accepted_length": 1.2, "low": 1.1, "high": 1.3},
        {"step": 20, "event": "eval", "accepted_length": 1.4, "low": 1.3, "high": 1.5},
        {"step": 40, "event": "eval", "accepted_length": 1.6},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 60, "ev'
    (tmp_path / "metrics.jsonl").write_text(text)
    found = extras.evaluations(tmp_path / "head")
    assert [(p["step"], p["accepted_length"]) for p in found] == [(20, 1.4), (40, 1.6)], (
        "last of a step, no half line"
    )


def test_nothing_beside_a_drafter_is_no_error(tmp_path: Path) -> None:
    drafts = [
        None,
        DraftSpec("none"),
        DraftSpec("ngram"),
        DraftSpec(str(tmp_path)),
        DraftSpec(str(tmp_path / "gone"), "tree"),
    ]
    systems = [
        System("x", "x", "x", "tree", 1, 1, lambda requests, settings: None, draft=d)
        for d in drafts
    ]  # type: ignore[arg-type, return-value]
    assert extras.extras(systems) == {"learning": {}}


def report(batch: int, speed: float, temperature: float = 0.0) -> dict[str, Any]:
    prompts = [{"category": c, "accepted_length": tau} for c, tau in (("x", 1.5), ("y", 2.0))]
    row = {
        "name": "a@tree",
        "label": "a@tree",
        "shape": "tree",
        "per_prompt": prompts,
        "acceptance_by_position": [],
        "speedup": {"mean": speed, "low": speed - 0.1, "high": speed + 0.1},
        "tokens_per_second": 9.0,
    }
    none = {**row, "name": "none", "label": "none", "shape": "none", "per_prompt": []}
    return {"settings": {"batch_size": batch, "temperature": temperature}, "drafters": [none, row]}


def test_speed_by_batch_size_is_of_one_temperature() -> None:
    assert extras.batches([report(1, 1.4)]) == {}
    found = extras.batches([report(1, 1.4), report(4, 0.9), report(1, 1.2, 1.0)])
    assert [(p["batch_size"], p["speedup"]) for p in found.pop("a@tree")] == [
        (1, 1.4),
        (4, 0.9),
    ]
    assert not found


def test_only_panels_with_something_to_show_are_drawn() -> None:
    one = report(1, 1.4)
    assert not tuning_plots.present(tuning_plots.EVALUATE, one)
    learned = [
        {"step": s, "accepted_length": 1.0 + s / 100, "low": 1.0, "high": 2.0} for s in (10, 20)
    ]
    one |= {
        "learning": {"a": learned},
        "batches": {"a@tree": [{"batch_size": 1, "speedup": 1.3}]},
    }
    panels = tuning_plots.present(tuning_plots.EVALUATE, one)
    assert set(panels) == set(tuning_plots.EVALUATE)
    for name, (draw, words) in panels.items():
        svg = plots.svg(plots.figure(draw, one), name)
        assert svg.startswith("<svg") and "<metadata" not in svg and words
        assert "var(--ink)" in svg and "#1d2433" not in svg, "figures follow the page's theme"
