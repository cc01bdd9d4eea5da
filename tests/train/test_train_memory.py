"""Memory of a training step: at most one [chunk, V] block in float32, and validate's
prediction of the peak.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.conf.jsonl import records
from outrider.heads import head_class
from outrider.heads.losses import LossWeights
from outrider.train.data.batches import BatchPlan
from outrider.train.data.load import load_rows
from outrider.train.memory import Peak, predict, widest
from tests.helpers.training import chats, random_batch, run_config, tiny_target

ROOT = Path(__file__).resolve().parents[2]
CHUNK, VOCAB = 64, 1000


class Blocks(TorchDispatchMode):
    """Counts storages of at least `size` elements of a dtype that are alive at the same time."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.dtype = size, dtype
        self.alive: dict[int, Any] = {}
        self.most, self.largest, self.by = 0, 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dtype == self.dtype and t.numel() >= self.size:
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = weakref.finalize(storage, self.alive.pop, key, None)
                if len(self.alive) > self.most:
                    self.most, self.by = len(self.alive), str(func)
                self.largest = max(self.largest, t.numel())
        return out


LOSSES = [{"soft": 1.0}, {"hard": 1.0}, {"lk": 1.0}, {"soft": 0.5, "tv": 0.5, "hard": 0.1}]


def blocks(loss: dict[str, float], dtype: torch.dtype, again: bool = False) -> Blocks:
    """The vocabulary blocks of a dtype in one EAGLE-3 pass in bfloat16, forward and backward.
    again: with activation checkpointing."""
    target = tiny_target("bfloat16", layers=4, vocab=VOCAB)
    kind: Any = head_class("eagle3")
    cfg = kind.Config(
        kind="eagle3",
        draft_vocab=0,
        chunk=CHUNK,
        loss=LossWeights(**{"hard": 0.0, **loss}),
        activation_checkpointing=again,
    )
    head = kind.for_target(target, cfg)
    batch = random_batch(rows=8, width=80, vocab=VOCAB)
    block = CHUNK * VOCAB  # larger than any weight here, and than [B, T, D]
    assert (
        block > max(p.numel() for p in head.parameters()) and int(batch.loss_mask.sum()) > 3 * CHUNK
    )
    with Blocks(block, dtype) as seen:
        head(batch, target).sum.backward()
    return seen


@pytest.mark.parametrize("loss", LOSSES)
def test_eagle3_holds_at_most_one_vocabulary_block_in_float32(loss: dict[str, float]) -> None:
    seen = blocks(loss, torch.float32)
    assert seen.most <= 1 and seen.largest <= CHUNK * VOCAB, (seen.most, seen.by, seen.largest)


def test_the_widest_pass_is_found_and_the_parts_add_up(tmp_path: Path) -> None:
    cfg = run_config(chats(tmp_path / "data.jsonl"), tmp_path / "run", "batch_size=8", "steps=100")
    target = tiny_target()
    rows = load_rows(
        cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
    )
    plan = BatchPlan(rows, 8, 16, 0)
    part = widest(cfg, rows, plan)
    sizes = [int(rows.lengths[b].max()) * 8 for b in (plan.batch(k) for k in range(plan.per_epoch))]
    assert int(rows.lengths[part].max()) * len(part) == max(sizes)
    cfg = replace(cfg, micro_batch=2)
    assert len(widest(cfg, rows, plan)) == 2
    head = head_class("medusa").for_target(target, cfg.head).train()
    peak = predict(cfg, target, head, rows, plan)
    trained = sum(p.numel() for p in head.parameters())
    assert (
        peak.moments == peak.saving == 8 * trained and peak.step >= 4 * trained
    )  # micro-batches add up gradients
    assert all(p.grad is None for p in head.parameters())
    assert Peak(100, 20, 7, 9, 50).bytes == 129 and Peak(100, 20, 7, 9, 500).bytes == 500


PREDICT = """
import sys, torch
from outrider.conf.schema import compose
from outrider.decode.models.load import load_target
from outrider.heads import head_class
from outrider.train import memory
from outrider.train.data.batches import BatchPlan
from outrider.train.data.load import load_rows
from outrider.train.validate import ValidateConfig, head_config
cfg = compose("validate", ValidateConfig, sys.argv[1:])
target = load_target(cfg.target, cfg.dtype, cfg.device)
rows = load_rows(cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length)
head = head_class(cfg.head["kind"]).for_target(target, head_config(cfg.head), rows.counts(target.vocab_size)).train()
print(memory.predict(cfg, target, head, rows, BatchPlan(rows, cfg.batch_size, cfg.data.window, cfg.seed)).bytes)
"""


RUNS = {
    "medusa": ["head=medusa"],
    "eagle3": ["head=eagle3"],
    "eagle3-saving": ["head=eagle3", "save_every=1"],
    "eagle3-7": ["head=eagle3", "head.steps=7"],
    "eagle3-7-checkpointing": ["head=eagle3", "head.steps=7", "head.activation_checkpointing=true"],
}


def peak(name: str, folder: Path) -> int:
    """The measured peak of a run on SmolLM2 in bytes, in processes of its own; recorded and held
    against what `validate` predicts."""
    args = [
        "target=smollm2",
        f"data.path={chats(folder / 'data.jsonl', 64, times=20)}",
        "batch_size=8",
        "steps=3",
        "device=cpu",
        "data.cache=false",
        "head.draft_vocab=0",
        f"out_dir={folder / name}",
        *RUNS[name],
    ]
    script = ROOT / "train" / ("medusa.py" if name == "medusa" else "eagle.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    message, _ = (
        subprocess.run(
            [sys.executable, *command], env=env, capture_output=True, text=True, check=True
        )
        for command in (
            ["-c", PREDICT, *args],
            [str(script), *args, "eval.every=0", "eval.parity=0"],
        )
    )
    lines = records(folder / name / "metrics.jsonl")
    measured = int(next(x["peak_memory_bytes"] for x in lines if x.get("event") == "end"))
    predicted = int(message.stdout.split()[-1])
    off = predicted / measured - 1
    shutil.rmtree(folder / name)
    assert abs(off) <= 0.15, (predicted, measured)
    return measured


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "eagle3", "eagle3-saving"])
def test_the_predicted_peak_is_within_15_percent_of_the_measured_one(
    tmp_path: Path, name: str
) -> None:
    assert peak(name, tmp_path) > 0


@pytest.mark.slow
def test_what_activation_checkpointing_saves_is_predicted(tmp_path: Path) -> None:
    saved = peak("eagle3-7", tmp_path) - peak("eagle3-7-checkpointing", tmp_path)
    assert saved > 0
