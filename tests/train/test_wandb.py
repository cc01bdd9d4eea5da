"""What a run and a report leave in wandb: real offline runs, read back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.jsonl import records
from outrider.scripts import evaluate
from outrider.train.trackers import grouped
from tests.helpers.commands import code_of
from tests.helpers.training import TINY, chats, run
from tests.helpers.wandb_files import Logged, logged

GROUPS = {"train", "eval", "speed"}
KEYS = [*(f"target.{k}={v}" for k, v in TINY.items()), "dtype=float32", "device=cpu"]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("staged")))
        yield patch


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, patched: Any) -> Path:
    """A run that overfits six chats, evaluated twice, and logs offline."""
    folder = tmp_path_factory.mktemp("wandb")
    data = chats(folder / "data.jsonl")
    keys = ["steps=60", "optim.lr=0.02", "log_every=20", "save_every=0", "data.held_out=0.4"]
    keys += ["eval.every=30", "eval.prompts=6", "eval.max_new_tokens=24", "eval.parity=2"]
    return run(data, folder / "run", "wandb=offline", "wandb_project=drafters", *keys)


@pytest.fixture(scope="module")
def seen(trained: Path) -> Logged:
    return logged(trained)


def test_charts_of_a_run_stand_in_three_groups(trained: Path, seen: Logged) -> None:
    """Every number of metrics.jsonl under a group, and nothing else beside wandb's own keys."""
    assert seen.project == "drafters" and seen.config["steps"] == 60
    assert seen.config["started"]["config"], "facts of the start are no charts"
    names = {key for line in seen.steps.values() for key in line if not key.startswith("_")}
    assert {name.partition("/")[0] for name in names} == GROUPS
    assert {"train/loss", "train/lr", "eval/accepted_length", "eval/acceptance_at_1"} <= names
    assert {"speed/tokens_per_second", "speed/share_target", "speed/peak_memory_bytes"} <= names
    assert {"eval/parity_passed", "speed/eval_seconds", "train/tokens_seen"} <= names
    for line in records(trained / "metrics.jsonl"):
        if line.get("event") == "eval":
            step = seen.steps[line["step"]]
            assert step["eval/accepted_length"] == pytest.approx(line["accepted_length"])
            assert step["eval/acceptance_at_1"] == pytest.approx(line["unconditional"][0])


def test_the_best_accepted_length_is_in_the_summary(trained: Path, seen: Logged) -> None:
    evaluated = [one for one in records(trained / "metrics.jsonl") if one.get("event") == "eval"]
    best = max(evaluated, key=lambda line: line["accepted_length"])
    assert len(evaluated) == 2 and best["accepted_length"] > 1
    assert seen.summary["best_accepted_length"] == best["accepted_length"]
    assert seen.summary["best_step"] == best["step"]


def test_an_evaluation_shows_scores_and_the_best(trained: Path) -> None:
    out, prompts = trained.parent / "report", trained.parent / "prompts.jsonl"
    prompts.write_text(
        '{"id": 1, "category": "a", "turns": ["one <b>two</b>", "and then?"]}\n'
        '{"id": 2, "category": "b", "turns": ["abc abc abc"]}\n'
    )
    union = f"{trained}@chain+ngram"
    keys = [f"prompts={prompts}", f"out={out}", f"drafters=[none,{union},{trained}@chain]"]
    keys += ["target=tiny", "max_new_tokens=20", "quiet=true", "parity=0", *KEYS]
    assert code_of(evaluate.main, *keys, "wandb=offline", "wandb_project=scores") == 0
    seen = logged(out)
    (line,) = seen.steps.values()
    charts = {key.partition("/")[0] for key in line if not key.startswith("_")}
    assert charts == {"eval", "figures"} and seen.project == "scores"
    assert {key.partition("/")[0] for key in seen.summary if "/" in key} == GROUPS | {"figures"}
    (step,) = seen.steps
    scores = seen.table(step, "eval/drafters")
    assert [row["drafter"] for row in scores][0] == "none"
    best = max(row["accepted length"] for row in scores)
    assert seen.summary["best_accepted_length"] == best
    assert seen.summary["best_drafter"] in (union, f"{trained}@chain")
    # of two prompts a speed is in doubt, and is no number of the summary; that of `none` is its own
    assert seen.summary["speed/none/tokens_per_second"] == pytest.approx(scores[0]["tokens/s"])
    assert "speed/run@chain/tokens_per_second" not in seen.summary


def test_trouble_with_wandb_costs_a_report_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not its exit code, and not what was measured for hours."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": 1, "category": "a", "turns": ["abc abc"]}\n')
    keys = [f"prompts={prompts}", f"out={tmp_path / 'out'}", "drafters=[none]", "wandb=online"]
    keys += ["target=tiny", "max_new_tokens=8", "quiet=true", *KEYS]
    assert code_of(evaluate.main, *keys) == 0
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("wandb")]
    assert line.endswith(f"the report is in {tmp_path / 'out'}")
    assert (tmp_path / "out/report.json").exists()


def test_numbers_of_every_event_have_a_group() -> None:
    parity = {"event": "parity", "passed": True, "accepted_length": {"reloaded": {"mean": 1.5}}}
    assert grouped(parity) == {"eval/parity_passed": 1, "eval/parity_reloaded": 1.5}
    assert grouped({"event": "skipped", "rows": [3, 4], "skipped_rows": 2}) == {
        "train/skipped_rows": 2
    }
    assert grouped({"event": "end", "peak_memory_bytes": 7}) == {"speed/peak_memory_bytes": 7}
    assert grouped({"event": "eval", "low": None, "shape": "chain", "seconds": 2.0}) == {
        "speed/eval_seconds": 2.0
    }
    speeds = ("mfu", "tflops_per_device", "gpu_peak_memory_bytes", "share_save", "cpu_seconds")
    assert {*grouped(dict.fromkeys(speeds, 1.0))} == {f"speed/{key}" for key in speeds}
    assert {*grouped({"loss_0": 1.0, "mfus": 1.0})} == {"train/loss_0", "train/mfus"}
