"""What a run has seen and spent, and its best weights, survive a resume."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.conf.errors import Interrupted
from outrider.conf.jsonl import records
from outrider.heads.registry import head_class
from outrider.train.loop import fit
from tests.helpers.training import chats, run_config, sigterm_at_update

MORE = ("eval.every=3", "eval.prompts=2", "eval.max_new_tokens=6", "log_every=1")


def test_counts_survive_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = chats(tmp_path / "d.jsonl")
    clocks = {
        "perf_counter": count().__next__,
        "process_time": count(0, 2).__next__,
    }  # a second a look, two of the CPU
    monkeypatch.setattr("outrider.train.loop.time", SimpleNamespace(**clocks))
    fit(run_config(data, tmp_path / "whole", *MORE), head_class("medusa"))
    sigterm_at_update(monkeypatch, 4)
    with pytest.raises(Interrupted):
        fit(run_config(data, tmp_path / "cut", *MORE), head_class("medusa"))
    fit(run_config(data, tmp_path / "cut", *MORE), head_class("medusa"))
    whole, cut = (
        [e for e in records(tmp_path / name / "metrics.jsonl") if "loss" in e]
        for name in ("whole", "cut")
    )
    assert [e["step"] for e in cut] == [1, 2, 3, 4, 5, 6]
    for key in ("tokens_seen", "supervised_seen", "train_seconds", "cpu_seconds"):
        assert [e[key] for e in cut] == [e[key] for e in whole] and whole[0][key] > 0
    assert [e["cpu_seconds"] for e in cut] == [2, 4, 6, 8, 10, 12]


def test_best_is_kept_over_a_resume_and_follows_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """best/ is the checkpoint of the longest accepted length, not the last and not the one of
    the lowest loss.
    """
    from outrider.heads.checkpoint import read_card

    data, message = chats(tmp_path / "d.jsonl"), iter([1.5, 1.2, 1.1])
    wanted = {"shape": "chain", "low": None, "high": None, "cycles": 3}
    monkeypatch.setattr(
        "outrider.train.evaluation.decoded_acceptance",
        lambda *a: {**wanted, "accepted_length": next(message)},
    )
    out, small = tmp_path / "run", ("eval.every=2", "save_every=2")
    sigterm_at_update(monkeypatch, 3)
    with pytest.raises(Interrupted):
        fit(run_config(data, out, *small), head_class("medusa"))
    assert read_card(out / "best")["extra"]["step"] == 2
    fit(run_config(data, out, *small), head_class("medusa"))
    assert (
        read_card(out / "best")["extra"]["step"] == 2
        and read_card(out / "head")["extra"]["step"] == 6
    )
    assert read_card(out / "head")["extra"]["best"] == {"step": 2, "accepted_length": 1.5}
