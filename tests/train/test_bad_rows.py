"""Steps whose loss or gradient is not finite: no update, their rows named, counted; and what a
run may change when it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.jsonl import records
from outrider.heads.base import Batch, LossOut
from outrider.heads.registry import head_class
from outrider.train import checkpoint as disk
from outrider.train.loop import fit
from tests.helpers.faults import digest, finish
from tests.helpers.training import chats, run_config, sigterm_at_update

BAD = 5  # a row of the data
SMALL = (
    "steps=12",
    "micro_batch=1",
    "dtype=float64",
    "data.held_out=0",
    "log_every=1",
)


class Ill(head_class("medusa")):  # type: ignore[misc]
    """Medusa heads for which a row has no finite loss, or no finite gradient."""

    how = "loss"

    def forward(self, batch: Batch, target: Any) -> LossOut:
        out = super().forward(batch, target)
        if BAD not in batch.sample_ids.tolist():
            return out
        if self.how == "loss":
            return LossOut(out.sum * float("nan"), out.count, out.stats)
        out.sum.register_hook(lambda g: g * float("inf"))
        return out


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return chats(tmp_path / "data.jsonl", 16)


def train(data: Path, out: Path, *more: str, how: str = "loss") -> Path:
    Ill.how = how
    fit(run_config(data, out, *SMALL, *more), Ill)
    return out


def lines(out: Path) -> list[dict[str, Any]]:
    return records(out / "metrics.jsonl")


def skips(out: Path) -> list[dict[str, Any]]:
    return [line for line in lines(out) if line.get("event") == "skipped"]


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_step_with_a_bad_row_makes_no_update(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Three passes over 16 rows meet it three times; two ranks pass over the same steps."""
    update, seen = torch.optim.AdamW.step, list[bool]()

    def sound(self: Any, *args: Any) -> Any:
        weights = self.param_groups[0]["params"]
        seen.append(all(bool(p.grad.isfinite().all()) for p in weights))
        return update(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", sound)
    alone = train(data, tmp_path / "alone", how=how)
    assert seen == [True] * 9 and [e["skipped_steps"] for e in skips(alone)] == [1, 2, 3]
    place = f"{data}:{BAD + 1}"
    assert all(e["rows"] == [place] if how == "loss" else place in e["rows"] for e in skips(alone))
    action, said = lambda: bool(train(data, tmp_path / "two", how=how)) - 1, tmp_path / "said"
    assert finish(2, action, said) == [0, 0]
    steps = [[e["step"] for e in skips(tmp_path / name)] for name in ("alone", "two")]
    assert steps[0] == steps[1] and disk.read(alone / "checkpoints/step-12").skipped == 3
    one, two = ([e["loss"] for e in lines(tmp_path / n) if "loss" in e] for n in ("alone", "two"))
    assert one == pytest.approx(two, abs=1e-9) and len(one) == 9


def test_a_run_stopped_among_bad_steps_ends_with_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(data, tmp_path / "whole")
    bad = skips(whole)[0]["step"]
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        sigterm_at_update(patch, bad)
        train(data, tmp_path / "parts", "save_every=0")
    parts = train(data, tmp_path / "parts", "save_every=0")
    for name in ("head", "checkpoints/step-12"):
        assert digest(parts / name) == digest(whole / name)


def test_many_bad_steps_in_a_row_stop(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.jsonl:6.*at step 3.*data.skip="):
        train(data, tmp_path / "row", "batch_size=16", "bad_steps=3")
    (stopped,) = [e for e in lines(tmp_path / "row") if e.get("event") == "not finite"]
    assert stopped["step"] == 3


def test_rows_can_be_skipped_on_resume(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "run"
    with pytest.raises(UserError, match="not finite"):
        train(data, out, "bad_steps=1", "save_every=1", "seed=1")
    capsys.readouterr()
    train(data, out, "bad_steps=1", "save_every=1", "seed=1", f"data.skip=[{BAD + 1}]")
    said = " ".join(capsys.readouterr().err.split())
    assert f"data.skip: [] -> [{BAD + 1}]" in said
    assert "1 skipped as data.skip says" in said and (out / "head").exists()
    with pytest.raises(UserError, match="data.skip|optim"):
        run_config(data, out, *SMALL, "data.skip=[-1]")
