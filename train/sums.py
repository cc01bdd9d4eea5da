"""What the passes of a step add up to, and what the ranks tell each other of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.heads.batch import Batch, LossOut
from outrider.train.run import Run

Totals = dict[str, Tensor]  # statistic -> [2] float64, sum and count, on the device


class Sums:
    """Sums over the passes of a rank, on the device: to ask one for a number would wait for it.

    totals: sum and count of every statistic, "loss" and "tokens" among them. finite: of each
    pass whether its loss is, bool [].
    """

    def __init__(self) -> None:
        self.totals: Totals = {}
        self.finite: list[Tensor] = []

    def add(self, batch: Batch, out: LossOut) -> None:
        """Count a pass. batch: on the device."""
        loss, tokens = out.sum.detach(), batch.mask.sum().to(torch.float64)
        totals = {
            "loss": torch.stack([loss.double(), out.count.double()]),
            "tokens": torch.stack([tokens, torch.ones_like(tokens)]),
            **out.stats,
        }
        for name, value in totals.items():
            self.totals[name] = self.totals[name] + value if name in self.totals else value
        self.finite.append(loss.isfinite())


class Shared(NamedTuple):
    """What every rank knows of a step. stats: statistic -> [sum, count] over all ranks. norm: of
    the gradients, rank 0's. finite: whether every loss and every norm is. stop: whether some
    rank was asked to."""

    stats: dict[str, list[float]]
    norm: float
    finite: bool
    stop: bool


def exchange(run: Run, sums: Sums) -> Shared:
    """Add up what the ranks have found: one exchange and one wait for the device."""
    norm = torch.nn.utils.get_total_norm(run.gradients).to(run.device, torch.float64)
    bad = ~(torch.stack(sums.finite).all() & norm.isfinite())
    names = sorted(sums.totals)
    # All ranks clip by one number: unlike devices sum the same gradients to unlike norms.
    first = norm if run.main else torch.zeros_like(norm)
    flags = torch.stack([bad.double(), first, norm.new_tensor(run.stop.requested)])
    packed = torch.cat([flags, *(sums.totals[n] for n in names)])
    with run.clock.part("communication"):
        shared = run.accelerator.reduce(packed, "sum") if run.world > 1 else packed
        not_finite, shared_norm, stop, *both = shared.tolist()  # type: ignore[union-attr]
    stats = {name: both[2 * i : 2 * i + 2] for i, name in enumerate(names)}
    return Shared(stats, shared_norm, not not_finite, bool(stop))
