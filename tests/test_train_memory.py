"""Memory of a training step: at most one [chunk, V] block in float32, and validate's prediction of the peak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads import HEADS
from heads.losses import LossWeights
from tests.training import chats, random_batch, run_config, tiny_target
from train.data import Plan, load_rows
from train.memory import Peak, predict, widest

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.parametrize("loss", [{"soft": 1.0}, {"hard": 1.0}, {"lk": 1.0}, {"soft": 0.5, "tv": 0.5, "hard": 0.1}])
def test_eagle3_holds_at_most_one_vocabulary_block_in_float32(loss: dict[str, float]) -> None:
    target = tiny_target("bfloat16", layers=4, vocab=VOCAB)
    kind: Any = HEADS["eagle3"]
    cfg = kind.Config(kind="eagle3", draft_vocab=0, chunk=CHUNK, loss=LossWeights(**{"hard": 0.0, **loss}))
    head = kind.for_target(target, cfg)
    batch = random_batch(rows=8, width=80, vocab=VOCAB)
    supervised = int(batch.loss_mask.sum())
    block = CHUNK * VOCAB  # larger than any weight here, and than [B, T, D]
    assert block > max(p.numel() for p in head.parameters()) and supervised > 3 * CHUNK
    with Blocks(block, torch.float32) as seen:
        head(batch, target).sum.backward()
    assert seen.most <= 1 and seen.largest <= block, (seen.most, seen.by, seen.largest)
    with Blocks(block, torch.bfloat16) as narrow:
        head(batch, target).sum.backward()
    assert narrow.most >= 2 and narrow.largest >= block  # logits, softmax, law, gradient: the count does see them


def test_the_widest_pass_is_found_and_the_parts_add_up(tmp_path: Path) -> None:
    cfg = run_config(chats(tmp_path / "data.jsonl"), tmp_path / "run", "batch_size=8", "steps=100")
    target = tiny_target()
    rows = load_rows(cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length)
    plan = Plan(rows, 8, 16, 0)
    part = widest(cfg, rows, plan)
    sizes = [int(rows.lengths[b].max()) * 8 for b in (plan.batch(k) for k in range(plan.per_epoch))]
    assert int(rows.lengths[part].max()) * len(part) == max(sizes)
    cfg.micro_batch = 2
    assert len(widest(cfg, rows, plan)) == 2
    head = HEADS["medusa"].for_target(target, cfg.head).train()
    peak = predict(cfg, target, head, rows, plan)
    trained = sum(p.numel() for p in head.parameters())
    assert peak.moments == 8 * trained and peak.saving == 12 * trained and peak.step >= 0
    assert all(p.grad is None for p in head.parameters())
    assert Peak(100, 20, 7, 9, 50, 1, 1).bytes == 129 and Peak(100, 20, 7, 9, 500, 1, 1).bytes == 500


PREDICT = """
import sys, torch
from conf.schema import compose
from decode.load import load_target
from heads import HEADS
from train import memory
from train.data import Plan, load_rows
from train.validate import ValidateConfig, head_config
cfg = compose("validate", ValidateConfig, sys.argv[1:])
target = load_target(cfg.target, cfg.dtype, cfg.device)
rows = load_rows(cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length)
head = HEADS[cfg.head["kind"]].for_target(target, head_config(cfg.head), rows.counts(target.vocab_size)).train()
print(memory.predict(cfg, target, head, rows, Plan(rows, cfg.batch_size, cfg.data.window, cfg.seed)).bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("head", ["medusa", "eagle3"])
def test_the_predicted_peak_is_within_15_percent_of_the_measured_one(head: str, tmp_path: Path) -> None:
    """On SmolLM2, in processes of their own."""
    data = tmp_path / "data.jsonl"
    chats(tmp_path / "short.jsonl", 64)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "short.jsonl").read_text().splitlines()]
    data.write_text("".join(json.dumps({"messages": [{**m, "content": m["content"] * 20} for m in row]}) + "\n"
                            for row in rows))
    args = ["target=smollm2", f"head={head}", f"data.path={data}", "batch_size=8", "steps=3", "device=cpu",
            "data.cache=false", "head.draft_vocab=0", f"out_dir={tmp_path / 'run'}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", PREDICT, *args], env=env, capture_output=True, text=True, check=True)
    script = ROOT / "train" / ("medusa.py" if head == "medusa" else "eagle.py")
    subprocess.run([sys.executable, str(script), *args, "eval.every=0", "eval.parity=0"], env=env, check=True,
                   capture_output=True)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    measured = next(line["peak_memory_bytes"] for line in lines if line.get("event") == "end")
    assert abs(int(told.stdout.split()[-1]) / measured - 1) <= 0.15, (told.stdout, measured)
