"""Which slots of blocks are supervised, and how they count in the loss (heads/losses.py).

Shape letters: N blocks, K slots of a block, n supervised slots (block by block), m of a chunk.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

SMOOTH = 0.5  # D-PACE: share of a slot's weight that does not go by its probability


@dataclass(frozen=True)
class Slots:
    """at: [n] int64, the supervised slots among all N * K. number: [n] int64, their places in
    their blocks. ends: [N + 1] where the slots of each block begin and end, known to the host.
    size: K."""

    at: Tensor
    number: Tensor
    ends: list[int]
    size: int

    @classmethod
    def of(cls, on: Tensor) -> Slots:
        """on: [N, K] bool, on the CPU."""
        at = on.flatten().nonzero()[:, 0]
        ends = [0, *on.sum(1).cumsum(0).tolist()]
        return cls(at, at % on.shape[1], ends, on.shape[1])

    def spread(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[N, K] with `values` [n] at the supervised slots and `fill` at the others."""
        whole = values.new_full(((len(self.ends) - 1) * self.size,), fill)
        return whole.index_copy(0, self.at, values).view(-1, self.size)

    def sums(self, values: Tensor) -> Tensor:
        """[K] float64, `values` [n] summed by their place in the block."""
        whole = torch.zeros(self.size, dtype=torch.float64, device=values.device)
        return whole.index_add(0, self.number, values.double())

    def parts(self, chunk: int) -> list[slice]:
        """Return the slots of whole blocks, about `chunk` of them at a time."""
        step = max(1, chunk // self.size)
        ends = [*self.ends[:-1:step], self.ends[-1]]
        return [slice(a, b) for a, b in pairwise(ends) if b > a]

    def part(self, some: slice) -> Slots:
        """Return the slots of some whole blocks."""
        first, last = bisect_right(self.ends, some.start) - 1, bisect_left(self.ends, some.stop)
        ends = [end - some.start for end in self.ends[first : last + 1]]
        return Slots(self.at[some] - first * self.size, self.number[some], ends, self.size)

    def decaying(self, decay: float, dtype: torch.dtype) -> Tensor:
        """[n] weights that fall to 1 / e in `decay` slots; 1 on average over a whole block."""
        fall = torch.exp(-torch.arange(self.size, device=self.at.device).to(dtype) / decay)
        return (fall / fall.mean())[self.number]

    def pace(self, own: Tensor) -> Tensor:
        """[n] weights by how far a block is likely to be right (D-PACE, arXiv 2605.18810).
        own: [n] log-probability of the tokens, minus infinity outside the draft vocabulary."""
        right = self.spread((1 - SMOOTH) * own.exp() + SMOOTH, fill=1.0)
        reached = right.cumprod(1) * self.spread(torch.ones_like(own))
        return reached.flip(1).cumsum(1).flip(1).flatten()[self.at]

    def weigh(self, decay: float | None, part: slice, own: Tensor) -> Tensor:
        """Return weights [m] of the slots of some whole blocks. decay: slots in which a
        weight falls to 1 / e, None: D-PACE, by `own` (see pace)."""
        slots = self.part(part)
        if decay is None:
            return slots.pace(own)
        return slots.decaying(decay, torch.float64).to(own.dtype)


# -- the confidence head's chances, made honest

GRID = tuple(2 ** (i / 4) for i in range(-8, 13))  # temperatures that are tried, 1/4 to 8
BINS = 10


def chance_error(said: Tensor, true: Tensor) -> float:
    """Expected calibration error of chances [n] that turned out as `true` [n], 0..1."""
    place = (said * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=said.dtype, device=said.device)
    gap.index_add_(0, place, said - true)
    return float(gap.abs().sum()) / max(1, said.numel())


def temperatures(logits: Tensor, rate: Tensor, on: Tensor) -> list[float]:
    """Choose a temperature for every slot [K], from left to right so that the chance to get so
    far is right on average at every height (sequential temperature scaling, as DSpark has it).
    logits: [N, K] of the confidence head. rate: [N, K], with what chance the target accepts
    each slot. on: [N, K] bool, the slots that there are, a prefix of each block."""
    logits, rate = logits.double(), rate.double()
    said, true = (torch.ones(len(on), dtype=torch.float64, device=on.device) for _ in range(2))
    found = []
    for k in range(on.shape[1]):
        some = on[:, k]
        true = true * torch.where(some, rate[:, k], 1.0)
        tried = {t: said * (logits[:, k] / t).sigmoid() for t in GRID}
        off = {t: chance_error(chance[some], true[some]) for t, chance in tried.items()}
        best = min(tried, key=lambda t: (off[t], abs(math.log(t))))
        found.append(best if bool(some.any()) else 1.0)
        said = torch.where(some, tried[found[-1]], said)
    return found


def problems(calibration: dict[str, Any]) -> list[str]:
    """Return what is wrong with the temperatures that a file holds, "key: what"; []."""
    given = calibration.get("confidence", [])
    sound = isinstance(given, list) and all(
        isinstance(t, int | float) and not isinstance(t, bool) and 0.01 <= t <= 100 for t in given
    )
    return [] if sound else ["calibration.confidence: is no list of temperatures"]
