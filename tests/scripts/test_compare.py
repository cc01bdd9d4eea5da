"""scripts/compare.py on made-up reports: it agrees where it should, and it can say no."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from decode import stats
from scripts import compare
from scripts.scoring import candidates, consistency
from tests.helpers.commands import code_of

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
    return code_of(compare.main, *args)


CLEAR = {"none": 1.0, "a": 1.5, "b": 1.2, "hf_generate": 1.0}


def test_two_runs_of_the_same_agree(tmp_path: Path) -> None:
    first = written(made(CLEAR, 0.05), tmp_path / "a")
    second = written(made(CLEAR, 0.05, seed=1), tmp_path / "b")
    assert run(f"first={first}", f"second={second}/report.json", f"out={tmp_path}/c.json") == 0
    found = json.loads((tmp_path / "c.json").read_text())["agreement"]
    assert found["agrees"] and [row["agrees"] for row in found["rows"]] == [True] * 4


def test_a_row_that_moved_is_named(tmp_path: Path, capsys: Any) -> None:
    first = written(made(CLEAR, 0.05), tmp_path / "a")
    second = written(made({**CLEAR, "b": 2.4}, 0.05, seed=1), tmp_path / "b")
    assert run(f"first={first}", f"second={second}", f"out={tmp_path}/c.json") == 1
    found = json.loads((tmp_path / "c.json").read_text())["agreement"]
    assert {r["name"] for r in found["rows"] if r["agrees"] is False} == {"b"}
    assert not found["agrees"] and "NOT ALL ROWS AGREE" in capsys.readouterr().out


def test_rows_of_one_report_alone_are_named_and_none_in_common_is_no_agreement() -> None:
    some, others = made({"none": 1.0, "a": 1.5}), made({"none": 1.0, "b": 1.2})
    assert consistency.agreement(some, others)["only_in_one"] == ["a", "b"]
    empty = {**some, "drafters": []}
    assert not consistency.agreement(some, empty)["agrees"]


def test_claims_are_those_of_the_ranking() -> None:
    report = made({**CLEAR, "b": 1.49, "c": 0.7}, 0.05)
    told = set(candidates.claims(report))
    ranked = candidates.ranking(report)
    assert told == {(better, row["name"]) for row in ranked for better in row["beaten_by"]}
    assert ("a", "b") not in told and ("b", "a") not in told
    assert {("a", "none"), ("a", "c"), ("none", "c")} <= told
    assert not {name for pair in told for name in pair if name.startswith("hf")}


def test_a_missing_interval_is_left_open() -> None:
    first, second = made({"none": 1.0}), made({"none": 1.0})
    for report in (first, second):
        report["drafters"][0]["speedup"] = {"mean": 1.0, "low": None, "high": None}
    same = consistency.agreement(first, second)["rows"][0]
    assert same["agrees"] is True
    second["drafters"][0]["speedup"]["mean"] = 1.1
    other = consistency.agreement(first, second)["rows"][0]
    assert other["agrees"] is None and other["metrics"]["speedup"]["overlap"] is None


def test_mistakes_are_one_line(tmp_path: Path, capsys: Any) -> None:
    good = made(CLEAR, 0.05)
    folder = written(good, tmp_path / "a")
    other = copy.deepcopy(good)
    other["settings"]["temperature"] = 1.0
    broken = copy.deepcopy(good)
    del broken["drafters"][0]["speedup"]
    mistakes = {
        f"{tmp_path}/nowhere": [f"first={tmp_path}/nowhere", f"second={folder}"],
        "second: ": [f"first={folder}", f"second={written(other, tmp_path / 'b')}"],
        f"{tmp_path}/c/report.json: ": [
            f"first={written(broken, tmp_path / 'c')}",
            f"second={folder}",
        ],
    }
    for start, args in mistakes.items():
        assert run(*args) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(f"error: {start}") and shown.count("\n") == 1
