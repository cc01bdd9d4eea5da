"""Making the confidence head's chances honest: a temperature for every slot, chosen from left
to right so that the chance to get so far is right on average at every height (sequential
temperature scaling, as DSpark has it).

Shape letters: N blocks, K slots, n slots of one place in their blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

GRID = tuple(2 ** (i / 4) for i in range(-8, 13))  # temperatures that are tried, 1/4 to 8
BINS = 10


def error(said: Tensor, true: Tensor) -> float:
    """Expected calibration error of chances [n] that turned out as `true` [n], 0..1."""
    place = (said * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=said.dtype, device=said.device)
    gap.index_add_(0, place, said - true)
    return float(gap.abs().sum()) / max(1, said.numel())


def temperatures(logits: Tensor, rate: Tensor, on: Tensor) -> list[float]:
    """[K] of the slots. logits: [N, K] of the confidence head. rate: [N, K], with what chance
    the target accepts each slot. on: [N, K] bool, the slots that there are, a prefix of each
    block."""
    logits, rate = logits.double(), rate.double()
    said, true = (torch.ones(len(on), dtype=torch.float64, device=on.device) for _ in range(2))
    found = []
    for k in range(on.shape[1]):
        some = on[:, k]
        true = true * torch.where(some, rate[:, k], 1.0)
        tried = {t: said * (logits[:, k] / t).sigmoid() for t in GRID}
        best = min(tried, key=lambda t: (error(tried[t][some], true[some]), abs(math.log(t))))
        found.append(best if bool(some.any()) else 1.0)
        said = torch.where(some, tried[found[-1]], said)
    return found


def problems(calibration: dict[str, Any]) -> list[str]:
    """What is wrong with the temperatures that a file holds, "key: what"; []."""
    given = calibration.get("confidence", [])
    sound = isinstance(given, list) and all(
        isinstance(t, int | float) and not isinstance(t, bool) and 0.01 <= t <= 100 for t in given
    )
    return [] if sound else ["calibration.confidence: is no list of temperatures"]
