"""What further passes are worth: the fit, the frozen prediction, and the runs behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.scripts import evaluate
from outrider.scripts.common.pipeline import Command, Pipeline
from outrider.scripts.extra.forecasting import curves
from outrider.scripts.lab import data_scaling
from outrider.scripts.lab.pages import reused
from outrider.train import cache_features, eagle
from tests.helpers.chats import chats

MAINS = {"cache_features": cache_features.main, "eagle": eagle.main, "evaluate": evaluate.main}


def length(unique: float, passes: int, reuse: float = 4.0) -> float:
    """Of a head whose rejection falls by 0.1 with every doubling of its effective tokens."""
    worth = curves.effective(passes * unique, unique, reuse)
    return curves.length_of(-0.5 - 0.1 * curves.math.log2(worth / 1e6), 5)


def point(unique: float, passes: int) -> dict[str, Any]:
    found = {"unique_tokens": unique, "tokens_seen": passes * unique, "depth": 5}
    return {**found, "share": unique / 1e6, "mean": length(unique, passes)}


def test_a_token_that_is_read_again_is_worth_less() -> None:
    assert curves.effective(5e5, 1e6, 4.0) == 5e5
    assert curves.effective(2e6, 1e6, 4.0) == pytest.approx(1e6 * (1 + 4 * (1 - 0.7788)), rel=1e-3)
    assert curves.effective(1e9, 1e6, 4.0) == pytest.approx(5e6, rel=1e-3), "and there is an end"


def test_the_worth_of_passes_is_found_and_foretells_more_data() -> None:
    points = [point(unique, n) for unique in (1.25e5, 5e5) for n in (1, 2, 4)]
    fitted = curves.fit_reuse(points)
    assert fitted["reuse"] == pytest.approx(4.0, rel=0.1)
    assert fitted["slope"] == pytest.approx(0.1 / 0.6931, rel=0.02)
    said = curves.foretell(points, 1e6, 4)
    assert said.low < length(1e6, 4) < said.high and said.mean == pytest.approx(
        length(1e6, 4), rel=0.01
    )
    noisy = [{**one, "mean": one["mean"] + 0.05 * (-1) ** i} for i, one in enumerate(points)]
    wide = curves.foretell(noisy, 1e6, 4)
    assert wide.high - wide.low > 2 * (said.high - said.low), "noise makes it say less"


def test_a_forecast_takes_passes_for_what_they_are_worth(tmp_path: Path) -> None:
    assert curves.worth(0.0, tmp_path / "none.json")(3e6) == 3e6
    with pytest.raises(UserError, match="unique: .*none.json does not say what a further pass"):
        curves.worth(1e6, tmp_path / "none.json")
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"reuse": 4.0}))
    assert curves.worth(1e6, report)(2e6) == curves.effective(2e6, 1e6, 4.0)


def test_the_prediction_is_frozen_before_the_last_head_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, report, order = tmp_path / "out", tmp_path / "report.json", []
    data = chats(tmp_path / "data.jsonl", rows=40)
    keys = [
        f"path={data}",
        f"prompts={data}",
        f"out={out}",
        f"report={report}",
        "shares=[0.25,0.5]",
    ]

    def call(pipeline: Pipeline, command: Command) -> int:
        main: Any = MAINS[Path(command.argv[0]).stem]
        cfg = compose(main.config_name, main.schema, command.argv[1:])
        command.leaves.parent.mkdir(parents=True, exist_ok=True)
        text = "{}"
        if isinstance(cfg, evaluate.EvaluateConfig):
            run = Path(cfg.out).name.removeprefix("score-")
            share, _, passes = run.partition("x")
            seen = point(1e6 * float(share), int(passes))
            row = {"training": {"tokens_seen": seen["tokens_seen"]}, "max_depth": 5}
            row |= {"accepted_length": {"mean": seen["mean"]}, "weights_sha256": [run]}
            text = json.dumps({"drafters": [{}, row]})
            order.append((run, (out / "predicted.json").exists()))
        command.leaves.write_text(text)
        return 0

    monkeypatch.setattr(Pipeline, "_call", call)
    for again in (False, True):
        with pytest.raises(SystemExit) as end:
            data_scaling.main(keys)
        assert end.value.code == 0
        assert len(order) == 7, "the same command again trains nothing" if again else ""
    assert order[-1] == ("1x4", True) and not any(frozen for _, frozen in order[:-1])
    found = json.loads(report.read_text())
    assert found["inside"] and found["measured"]["mean"] == pytest.approx(length(1e6, 4))
    assert found["prediction"]["unique_tokens"] == pytest.approx(1e6)
    assert len((out / "data-0.25.jsonl").read_text().splitlines()) == 10
    frozen = json.loads((out / "predicted.json").read_text())
    frozen["prediction"]["high"] += 1
    (out / "predicted.json").write_text(json.dumps(frozen))
    with pytest.raises(UserError, match="was changed since it was frozen"):
        data_scaling.kept(out / "predicted.json", frozen["points"], dict)


def test_the_page_shows_what_was_read_and_the_miss() -> None:
    def head(unique: float, passes: int, mean: float) -> dict[str, Any]:
        found = {**point(unique, passes), "mean": mean, "low": mean - 0.05, "high": mean + 0.05}
        return {**found, "passes": passes, "share": unique / 160e3}

    report = {
        "points": [head(80e3, 2, 1.25), head(40e3, 4, 1.2)],
        "prediction": {"mean": 1.5, "low": 1.4, "high": 1.6},
        "measured": head(160e3, 8, 1.3),
        "inside": False,
        "reuse": 5.17,
    }
    lines = reused.text(report, "a machine").splitlines()
    assert lines[2:5] == [
        "| 40,000 | 4 | 160,000 | 1.20 [1.15, 1.25] |  |",
        "| 80,000 | 2 | 160,000 | 1.25 [1.20, 1.30] |  |",
        "| 160,000 | 8 | 1,280,000 | 1.30 [1.25, 1.35] | 1.50 [1.40, 1.60] |",
    ]
    assert "worth 5.2 first ones" in lines[-1] and "outside the interval (a machine" in lines[-1]
