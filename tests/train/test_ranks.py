"""What ranks must have in common before anything is written, and what a step reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.train import checkpoint as disk
from outrider.train import loop, metrics
from tests.helpers.faults import finish, train
from tests.helpers.training import run

SMALL = ("steps=8", "log_every=3", "save_every=1", "keep=9", "micro_batch=1")


def test_ranks_that_drift_apart_write_no_checkpoint(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "drift"

    def drifting() -> None:
        step = loop.train_step

        def bent(run: Any) -> int:
            requested = step(run)
            if os.environ["RANK"] == "1" and run.state.step == 5:
                with torch.no_grad():
                    run.head.block_bias.view(-1)[3] += 1e-6
            return requested

        loop.train_step = bent
        train(data, out, *SMALL, "save_every=2")

    assert finish(2, drifting, out.with_suffix(".txt")) == [2, 2]
    said = out.with_name("drift.txt.0").read_text()
    assert "rank 1 has other weights than rank 0 at step 6, no checkpoint was written" in " ".join(
        said.split()
    )
    assert [p.name for p in disk.checkpoints(out)] == ["step-4", "step-2"]


def test_ranks_clip_by_one_norm(data: Path, tmp_path: Path) -> None:
    """Two kinds of GPU may sum the same gradients to norms a bit apart: each rank clipping by
    its own, their weights would drift apart."""
    out = tmp_path / "clip"

    def apart() -> None:
        norm = torch.nn.utils.get_total_norm

        def other(*args: Any, **more: Any) -> torch.Tensor:
            return norm(*args, **more) * (1.0 + int(os.environ["RANK"]) / 8)

        torch.nn.utils.get_total_norm = other
        train(data, out, *SMALL, "optim.clip=0.01")

    assert finish(2, apart, out.with_suffix(".txt")) == [0, 0]


def test_a_step_waits_for_the_device_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many micro-batches it has: every read of a number on a GPU waits for all that
    was asked of it.
    """
    reads = []
    for name in ("__bool__", "__float__", "__int__", "item", "tolist"):
        real = getattr(torch.Tensor, name)

        def read(self: Any, name: str = name, real: Any = real) -> Any:
            caller = sys._getframe(1).f_code
            if caller.co_filename in (loop.__file__, metrics.__file__):
                reads.append(name)
            return real(self)

        monkeypatch.setattr(torch.Tensor, name, read)
    run(data, tmp_path / "run", "steps=3", "micro_batch=1")
    assert reads == ["tolist"] * 3, "nothing else of the loop or of its passes"
