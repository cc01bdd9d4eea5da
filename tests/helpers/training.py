"""What the training tests share: a tiny target, a small chat file, a typed run configuration,
a run.
"""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.schema import compose
from outrider.decode.models.load import TargetConfig, load_target
from outrider.heads.batch import Batch
from outrider.heads.registry import head_class
from outrider.train.config import keys_of
from outrider.train.loop import fit
from tests.helpers.chats import chats as chats

TINY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "vocab": 260}


def tiny_target(dtype: str = "float32", **shape: Any):
    return load_target(TargetConfig(kind="tiny", **{**TINY, **shape}), dtype, "cpu")


def overrides(data: Path, out: Path, *more: str) -> list[str]:
    """Command line of a small run."""
    return [
        "target=tiny",
        *(f"target.{k}={v}" for k, v in TINY.items()),
        f"data.path={data}",
        f"out_dir={out}",
        "data.held_out=0.1",
        "data.cache=false",
        "steps=6",
        "batch_size=4",
        "dtype=float32",
        "device=cpu",
        "head.heads=2",
        "head.draft_vocab=0",
        "eval.every=0",
        "eval.parity=0",
        "save_every=2",
        "log_every=2",
        *more,
    ]


def run_config(data: Path, out: Path, *more: str) -> Any:
    """The configuration of a small run of Medusa heads."""
    cfg = _composed(more)
    return replace(cfg, data=replace(cfg.data, path=str(data)), out_dir=str(out))


@functools.cache
def _composed(more: tuple[str, ...]) -> Any:
    """Once for each set of keys: to compose takes as long as ten steps of such a run."""
    assert not any(key.startswith(("data.path=", "out_dir=")) for key in more), more
    return compose("medusa", keys_of("medusa"), overrides(Path("data.jsonl"), Path("run"), *more))


def run(data: Path, out: Path, *more: str) -> Path:
    """A small run of the head that the configuration names; its folder."""
    cfg = run_config(data, out, *more)
    fit(cfg, head_class(cfg.head.kind))
    return out


def sigterm_at_update(patch: pytest.MonkeyPatch, number: int) -> None:
    """Optimizer update `number` of this process, counted from 1, meets a SIGTERM."""
    update, calls = torch.optim.AdamW.step, count(1)

    def interrupted(self: Any, closure: Any = None) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, closure)

    patch.setattr(torch.optim.AdamW, "step", interrupted)


def random_batch(rows: int = 3, width: int = 12, vocab: int = 260, seed: int = 0) -> Batch:
    """Random tokens; row b has width - 2 b real tokens, the second half of them supervised."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, width), generator=generator)
    place, length = torch.arange(width), width - 2 * torch.arange(rows)[:, None]
    mask = place < length
    return Batch(ids * mask, mask, mask & (place >= length // 2), torch.arange(rows))
