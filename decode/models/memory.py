"""Predicts how much memory decoding takes, before anything is loaded: weights, cache, tree.

The weights' bytes and the cache's come from the model's configuration, the tree's from its
logits and the distribution made of them. Attention's own scratch
is small beside these and covered by `SLACK`.

Shape letters: B rows, L slots, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from outrider.conf.disk import size
from outrider.conf.errors import UserError
from outrider.decode.models.facts import context_length

SLACK = 1.05
BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True)
class MemoryPlan:
    """What will be decoded. tokens: longest prompt and answer together, per row. nodes: of the
    largest draft tree. drafters: bytes of their weights."""

    rows: int = 1
    tokens: int = 0
    nodes: int = 0
    guidance: bool = False
    drafters: int = 0


@dataclass(frozen=True)
class Need:
    """Bytes by part."""

    weights: int
    cache: int
    tree: int
    drafters: int = 0

    @property
    def total(self) -> int:
        return int((self.weights + self.cache + self.tree + self.drafters) * SLACK)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size(count)}" for name, count in asdict(self).items())
        return f"{size(self.total)} ({parts}, and {SLACK - 1:.0%} to spare)"


def parameters(model: nn.Module) -> tuple[int, int]:
    """(parameters, of them in matrices) of a model, such as `text.empty` makes of a config."""
    total = matrices = 0
    for name, weight in model.named_parameters():
        total += weight.numel()
        outside = "embed" in name or "lm_head" in name
        matrices += 0 if outside or weight.dim() != 2 else weight.numel()
    return total, matrices


def estimate(
    config: Any,
    weights: tuple[int, int],
    dtype: str,
    plan: MemoryPlan,
    quantized_bits: float | None = None,
) -> Need:
    """Return what a model takes. config: transformers' (of the text part). weights:
    (parameters, of them in matrices).

    quantized_bits: bits per weight of the matrices, scales included; the rest stays in dtype.
    """
    bits, (total, matrices) = BITS[dtype], weights
    small = matrices * (quantized_bits or bits)
    heads = int(getattr(config, "num_attention_heads", 1) or 1)
    pairs = int(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    tokens = min(plan.tokens, context_length(config))  # longer ones are refused anyhow
    slots = tokens + plan.nodes + 1 if tokens else 0
    rows = plan.rows * (2 if plan.guidance else 1)
    cache = 2 * int(config.num_hidden_layers) * rows * slots * pairs * head * bits // 8
    vocab = int(config.vocab_size)
    # Logits in the model's dtype, a float32 copy and the distribution of the rows that verification
    # asks for.
    tree = rows * (plan.nodes + 1) * vocab * (bits // 8 + 8) if plan.tokens else 0
    return Need(int((total - matrices) * bits + small) // 8, cache, tree, plan.drafters)


def available(device: str) -> int | None:
    """Return bytes free on a device: CUDA's own count; for the CPU the system's, or the
    control group's where that is less. None where it cannot be known."""
    if device.startswith("cuda"):
        import torch

        try:
            return int(torch.cuda.mem_get_info(torch.device(device))[0])
        except (RuntimeError, AssertionError):
            return None
    system, group = int(psutil.virtual_memory().available), _group()
    return system if group is None else min(system, group)


def check(need: Need, device: str, name: str, plan: MemoryPlan) -> None:
    """Raise UserError when `need` exceeds what is free on `device`."""
    free = available(device)
    if free is None or need.total <= free:
        return
    if need.weights * SLACK > free:
        fix = "take a smaller dtype, target.quantize, another device, or a smaller model"
    else:
        fix = f"decode fewer than {plan.rows} rows at a time, fewer tokens, or a smaller tree"
    raise UserError(f"memory: {name} needs {need}, and {device} has {size(free)} free; {fix}")


def _group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what the process's memory control group (version 2) still allows. Page cache
    counts as used, but would give way."""
    try:
        most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        rows = map(str.split, (folder / "memory.stat").read_text().splitlines())
        return max(most - used + int(dict(rows).get("inactive_file", 0)), 0)
    except (OSError, ValueError):  # no group, or one without a limit
        return None
