"""scripts/compare.py on made-up reports: it agrees where it should, and it can say no."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode import stats
from scripts import compare
from scripts.scoring import candidates, consistency

PROMPTS = 24


def made(
    speeds: dict[str, float], spread: float = 0.0, seed: int = 0, batch: int = 1
) -> dict[str, Any]:
    """A report of rows that take 1 / speed seconds a token, times a factor by row and prompt
    with `spread`.
    """
    generator = np.random.default_rng(seed)
    common = generator.uniform(0.5, 2.0, PROMPTS)  # long prompts are long for all
    times = {
        n: common / s * np.exp(spread * generator.standard_normal(PROMPTS))
        for n, s in speeds.items()
    }
    chunks = [list(range(i, min(i + batch, PROMPTS))) for i in range(0, PROMPTS, batch)]
    work = {
        n: ([10.0 * len(c) for c in chunks], [10.0 * float(t[c].sum()) for c in chunks])
        for n, t in times.items()
    }
    rows = []
    for n in speeds:
        rate = stats.ratio_interval(*work[n]).json()
        rows.append(
            {
                "name": n,
                "label": n,
                "kind": "reference" if n.startswith("hf") else n,
                "accepted_length": rate,
                "tokens_per_second": rate["mean"],
                "tokens_per_second_interval": rate,
                "speedup": stats.ratio_of_rates(*work[n], *work["none"]).json(),
                "units": [
                    {"prompts": [str(i) for i in c], "tokens": t, "seconds": s}
                    for c, t, s in zip(chunks, *work[n], strict=True)
                ],
            }
        )
    names = list(speeds)
    pairs = [
        {"a": a, "b": b, "speed_ratio": stats.ratio_of_rates(*work[a], *work[b]).json()}
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    settings = {
        "temperature": 0.0,
        "batch_size": batch,
        "dtype": "float32",
        "prompts": {"path": "p", "sha256": "0"},
    }
    return {
        "drafters": rows,
        "pairs": pairs,
        "settings": settings,
        "target": {"name": "toy", "weights_sha256": "1"},
        "plain_pass_ms": {"steady": True},
    }


def written(report: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        compare.main(list(args))
    return int(stop.value.code or 0)


CLEAR = {"none": 1.0, "a": 1.5, "b": 1.2, "hf_generate": 1.0}


def test_two_runs_of_the_same_agree_and_a_clear_ranking_stands(tmp_path: Path, capsys: Any) -> None:
    first = written(made(CLEAR, 0.05), tmp_path / "a")
    second = written(made(CLEAR, 0.05, seed=1), tmp_path / "b")
    assert (
        run(f"first={first}", f"second={second}/report.json", f"out={tmp_path}/c.json", "draws=50")
        == 0
    )
    found, shown = json.loads((tmp_path / "c.json").read_text()), capsys.readouterr().out
    assert found["holds"] and [row["agrees"] for row in found["agreement"]["rows"]] == [True] * 4
    told = {(c["faster"], c["slower"]) for c in found["ranking"][0]["claims"]}
    assert told == {("a", "none"), ("b", "none"), ("a", "b")}, "references take part in no ranking"
    assert all(c["stable"] and c["fewer"]["claimed"] == 1.0 for c in found["ranking"][0]["claims"])
    assert "no draw turns a claim round" in shown and "the intervals of every row overlap" in shown


def test_a_row_that_moved_is_named(tmp_path: Path, capsys: Any) -> None:
    first = written(made(CLEAR, 0.05), tmp_path / "a")
    second = written(made({**CLEAR, "b": 2.4}, 0.05, seed=1), tmp_path / "b")
    assert run(f"first={first}", f"second={second}", f"out={tmp_path}/c.json", "draws=5") == 1
    found = json.loads((tmp_path / "c.json").read_text())
    assert {r["name"] for r in found["agreement"]["rows"] if r["agrees"] is False} == {"b"}
    assert not found["holds"] and "NOT ALL ROWS AGREE" in capsys.readouterr().out


def test_a_claim_that_hangs_on_one_prompt_is_not_made_and_would_be_found(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`a` is slower everywhere and far faster on one long prompt: the report must not claim
    it, and if it did, leaving prompts out turns the claim round."""
    report = made({"none": 1.0, "a": 0.97})
    one = report["drafters"][1]["units"][0]
    one["seconds"] /= 20
    report["pairs"][0]["speed_ratio"] = {
        "mean": 0.9,
        "low": 0.8,
        "high": 0.99,
    }  # none over a: claimed all the same
    folder = written(report, tmp_path / "a")
    assert run(f"first={folder}", f"out={tmp_path}/c.json") == 0 and not consistency.claims(report)
    monkeypatch.setattr(consistency, "FEWER", 0)  # as if the interval alone decided
    assert run(f"first={folder}", f"out={tmp_path}/c.json") == 1
    claim = json.loads((tmp_path / "c.json").read_text())["ranking"][0]["claims"][0]
    assert (claim["faster"], claim["slower"]) == ("a", "none") and not claim["stable"]
    assert 0.4 < claim["fewer"]["kept"] < 0.8, "a share of 14 / 24 of the draws keeps that prompt"
    assert claim["fewer"]["claimed"] < 0.05 and "A CLAIM IS TURNED ROUND" in capsys.readouterr().out


def test_claims_are_those_of_the_ranking() -> None:
    report = made({"none": 1.0, "a": 1.5, "b": 1.49, "c": 0.7}, 0.05)
    told = set(consistency.claims(report))
    ranked = candidates.ranking(report)
    assert told == {(better, row["name"]) for row in ranked for better in row["beaten_by"]}
    assert ("a", "b") not in told and ("b", "a") not in told


def test_prompts_that_ran_together_leave_together() -> None:
    found = consistency.stability(made(CLEAR, 0.05, batch=4), 10, 20, 0)
    assert found["change"] == 12 and found["prompts"] == 24 and found["stable"]


def test_a_missing_interval_is_left_open() -> None:
    one = {"mean": 1.0, "low": None, "high": None}
    assert consistency._compared(one, one)["overlap"] is True
    assert consistency._compared(one, {**one, "mean": 1.1})["overlap"] is None


def test_mistakes_are_one_line(tmp_path: Path, capsys: Any) -> None:
    good = made(CLEAR, 0.05)
    folder = written(good, tmp_path / "a")
    other = copy.deepcopy(good)
    other["settings"]["temperature"] = 1.0
    old = copy.deepcopy(good)
    del old["drafters"][0]["units"]
    for args, words in (
        ([f"first={tmp_path}/nowhere"], "cannot be read"),
        (
            [f"first={folder}", f"second={written(other, tmp_path / 'b')}"],
            "temperature: 0.0 against 1.0",
        ),
        ([f"first={written(old, tmp_path / 'c')}"], "no outcomes by prompt"),
        ([f"first={folder}", "change=23"], "leave too few"),
        ([f"first={folder}", "draws=0"], "draws: 0 is below 1"),
    ):
        assert run(*args) == 2
        shown = capsys.readouterr().err
        assert words in shown and "Traceback" not in shown and shown.count("\n") == 1
