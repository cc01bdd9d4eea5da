"""The losses of an older commit beside today's: what the committed figures say, and that a run
which differs is told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.reports import same_losses


def test_the_committed_figures_meet_the_bar() -> None:
    found = json.loads(same_losses.RESULT.read_text())
    pairs = {(run["head"], run["layout"]) for run in found["runs"]}
    assert pairs == {(h, name) for h in same_losses.HEADS for name in same_losses.LAYOUTS}
    assert found["steps"] == 100 and found["dtype"] == "float64" and found["bar"] == 1e-9
    for run in found["runs"]:
        assert run["same"] and run["largest_apart"] <= found["bar"], run
        first, last = (run[name][1] for name in ("first_loss", "last_loss"))
        assert last < 0.9 * first, run  # something was learned, so there was something to differ


def test_a_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(tree: Path, *rest: Any) -> list[float]:
        return [3.0, 2.0 if tree.name == "before" else 2.1]

    monkeypatch.setattr(same_losses, "losses", losses)
    runs = same_losses.compare(tmp_path / "before", tmp_path / "after", tmp_path)
    assert len(runs) == 10 and not any(run["same"] for run in runs)
    assert runs[0]["largest_apart"] == pytest.approx(0.1)
    assert len((tmp_path / "chats.jsonl").read_text().splitlines()) == 48
