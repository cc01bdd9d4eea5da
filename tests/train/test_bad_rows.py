"""Rows whose loss or gradient is not finite: left out, named, counted; and what a run may
change when it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import Interrupted, UserError
from outrider.heads.base import Batch, LossOut
from outrider.heads.registry import head_class
from outrider.train import checkpoint as disk
from outrider.train.loop import fit
from tests.helpers.faults import digest, finish
from tests.helpers.training import chats, run_config, sigterm_at_update

BAD = 5  # a row of the data
SMALL = (
    "steps=12",
    "optim.clip=0",
    "micro_batch=2",
    "dtype=float64",
    "data.held_out=0",
    "log_every=1",
)


class Ill(head_class("medusa")):  # type: ignore[misc]
    """Medusa heads for which some rows have no finite loss. how: loss, gradient, always (every
    row), or never (those rows count nothing)."""

    how = "loss"
    bad: tuple[int, ...] = (BAD,)

    def forward(self, batch: Batch, target: Any) -> LossOut:
        here = torch.isin(batch.sample_ids, torch.tensor(self.bad, dtype=torch.int64))
        if self.how == "never":
            on = batch.loss_mask & ~here[:, None]
            return super().forward(Batch(batch.ids, batch.mask, on, batch.sample_ids), target)
        out = super().forward(batch, target)
        if self.how == "always" or (bool(here.any()) and self.how == "loss"):
            return LossOut(out.sum * float("nan"), out.count, out.stats)
        if bool(here.any()):
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
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(out / "head" / "head.safetensors")


def near(a: Path, b: Path) -> bool:
    one, other = weights(a), weights(b)
    return all(torch.allclose(one[k], other[k], rtol=0, atol=1e-9) for k in one)


@pytest.mark.parametrize("how", ["gradient"])
def test_a_bad_row_is_left_out_and_the_others_of_its_pass_count(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, how: str
) -> None:
    """As if the row had no supervised token: three passes over 16 rows meet it three times."""
    want = train(data, tmp_path / "want", how="never")
    got = train(data, tmp_path / "got", how=how)
    said = capsys.readouterr().err
    assert near(got, want) and f"data.jsonl:{BAD + 1}: loss or gradient is not finite" in said
    skips = [line for line in lines(got) if line.get("event") == "skipped"]
    assert [line["skipped_rows"] for line in skips] == [1, 2, 3]
    assert all(line["rows"] == [f"{data}:{BAD + 1}"] for line in skips)
    losses = [[e["loss"] for e in lines(out) if "loss" in e] for out in (got, want)]
    assert losses[0] == losses[1] and disk.read(got / "checkpoints/step-12").skipped == 3


def test_a_run_stopped_among_bad_rows_ends_with_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(data, tmp_path / "whole")
    bad = next(line["step"] for line in lines(whole) if line.get("event") == "skipped")
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        sigterm_at_update(patch, bad + 1)
        train(data, tmp_path / "parts", "save_every=0")
    parts = train(data, tmp_path / "parts", "save_every=0")
    for name in ("head", "checkpoints/step-12"):
        assert digest(parts / name) == digest(whole / name)


def test_two_ranks_leave_out_what_one_process_does(data: Path, tmp_path: Path) -> None:
    for how, world in (("loss", 1), ("loss", 2), ("gradient", 2)):
        out = tmp_path / f"{how}{world}"

        def action(out: Path = out, how: str = how) -> None:
            train(data, out, how=how)

        assert finish(world, action, tmp_path / f"said{how}{world}") == [0] * world
        assert disk.read(out / "checkpoints/step-12").skipped == 3
    assert near(tmp_path / "loss2", tmp_path / "loss1")
    assert near(tmp_path / "gradient2", tmp_path / "loss1")


def test_many_bad_steps_in_a_row_and_a_step_without_a_sound_row_stop(
    data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"data.jsonl:6.*not finite at step \d+.*data.skip="):
        train(data, tmp_path / "row", "batch_size=16", "bad_steps=3")
    (stopped,) = [e for e in lines(tmp_path / "row") if e.get("event") == "not finite"]
    assert stopped["step"] == 2, "the third step in a row"
    with pytest.raises(UserError, match="not finite at step 0, no weight was changed"):
        train(data, tmp_path / "all", how="always")


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
