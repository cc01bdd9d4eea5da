"""What the training tests share: a tiny target, a small chat file, a typed run configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from conf.schema import compose
from decode.load import TargetConfig, load_target
from heads.base import Batch
from train.config import MedusaRun

TINY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "vocab": 260}
WORDS = ["the", "rider", "goes", "ahead", "of", "a", "slow", "horse", "and", "looks", "back", "along", "the", "road"]


def tiny_target(dtype: str = "float32", **shape: Any):
    return load_target(TargetConfig(kind="tiny", **{**TINY, **shape}), dtype, "cpu")


def chats(path: Path, count: int = 48) -> Path:
    """A chat file of `count` conversations of different lengths."""
    with path.open("w") as file:
        for i in range(count):
            answer = " ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(3 + i % 9))
            turns = [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def overrides(data: Path, out: Path, *more: str) -> list[str]:
    """Command line of a small run."""
    return ["target=tiny", *(f"target.{k}={v}" for k, v in TINY.items()), f"data.path={data}", f"out_dir={out}",
            "data.held_out=0.1", "data.cache=false", "steps=6", "batch_size=4", "dtype=float32", "device=cpu",
            "head.heads=2", "head.draft_vocab=0", "eval.every=0", "eval.parity=0", "save_every=2", "log_every=2", *more]


def run_config(data: Path, out: Path, *more: str) -> MedusaRun:
    return compose("medusa", MedusaRun, overrides(data, out, *more))


def random_batch(rows: int = 3, width: int = 12, vocab: int = 260, seed: int = 0) -> Batch:
    """Random tokens; row b has width - 2 b real tokens, the second half of them supervised."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, width), generator=generator)
    place, length = torch.arange(width), width - 2 * torch.arange(rows)[:, None]
    mask = place < length
    return Batch(ids * mask, mask, mask & (place >= length // 2), torch.arange(rows))
