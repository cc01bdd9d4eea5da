"""What a step adds up to, what the ranks tell each other of it, where its time goes, and
what a run reports of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from outrider.heads.batch import Batch, LossOut

# Sums over the ranks
# -------------------------------------------------------------------------------------------

Totals = dict[str, Tensor]  # statistic -> [2] float64, sum and count, on the device


class Sums:
    """Sums over the passes of a rank, on the device: to ask one for a number would wait for
    it.

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
    """What every rank knows of a step. stats: statistic -> [sum, count] over all ranks.
    norm: of the gradients, rank 0's. seconds: that training took before this step, rank
    0's. finite: whether every loss and every norm is. stop: whether some rank was asked
    to."""

    stats: dict[str, list[float]]
    norm: float
    seconds: float
    finite: bool
    stop: bool


def exchange(
    sums: Sums,
    gradients: Sequence[Tensor],
    requested: int,
    seconds: float,
    accelerator: Accelerator,
    clock: Clock,
) -> Shared:
    """Add up what the ranks have found: one exchange and one wait for the device.
    requested: the signal that this rank was asked to stop by. seconds: of training before
    this step."""
    norm = torch.nn.utils.get_total_norm(gradients).to(accelerator.device, torch.float64)
    bad = ~(torch.stack(sums.finite).all() & norm.isfinite())
    names = sorted(sums.totals)
    # All ranks clip by one number, for unlike devices sum the same gradients to unlike norms,
    # and plan by one clock.
    main = accelerator.is_main_process
    flags = torch.stack([bad.double(), norm if main else torch.zeros_like(norm)])
    told = norm.new_tensor([requested, seconds if main else 0.0])
    packed = torch.cat([flags, told, *(sums.totals[n] for n in names)])
    with clock.part("communication"):
        shared = accelerator.reduce(packed, "sum") if accelerator.num_processes > 1 else packed
        not_finite, first, stop, spent, *both = shared.tolist()  # type: ignore[union-attr]
    stats = {name: both[2 * i : 2 * i + 2] for i, name in enumerate(names)}
    return Shared(stats, first, spent, not not_finite, bool(stop))


# Time
# -------------------------------------------------------------------------------------------

PARTS = ("data", "head", "communication", "save")


class Clock:
    """Adds up the seconds of the parts of a step; "head" is the target's pass as well.

    On a GPU the parts are measured on its own time line, by events that are read when the step
    has waited for the device anyway: nothing waits for the measuring, and what the host does
    while the device is busy counts as nothing."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block belongs to part `name`."""
        start = self._now()
        try:
            yield
        finally:
            self._spans.append((name, start, self._now()))

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def per_step(self) -> dict[str, list[float]]:
        """Return part -> [seconds, 1] of what the device has finished since the last call, a
        step and the save before it. DDP exchanges gradients inside the backward pass, which
        is the head's."""
        found, left = dict.fromkeys(PARTS, 0.0), []
        for name, start, end in self._spans:
            if self.cuda and not end.query():
                left.append((name, start, end))
            else:
                found[name] += start.elapsed_time(end) / 1000 if self.cuda else end - start
        self._spans = left
        return {name: [seconds, 1.0] for name, seconds in found.items()}


def shares(sums: dict[str, list[float]]) -> dict[str, float]:
    """Return each part's share of the seconds of the steps and of the saves between them,
    for a line of metrics. sums: name -> [sum, count], "seconds" (of the steps) among
    them."""
    whole = max(sums["seconds"][0] + sums.get("save", [0.0])[0], 1e-9)
    return {f"share_{name}": round(sums[name][0] / whole, 4) for name in PARTS if name in sums}


def summary(sums: dict[str, list[float]]) -> dict[str, float]:
    """Return the numbers of a line of metrics. sums: name -> [sum, count] over its steps."""
    mean = {k: total / count if count else 0.0 for k, (total, count) in sums.items()}
    seconds = sums["seconds"][0]
    return {
        **{k: round(v, 6) for k, v in mean.items() if k not in ("tokens", "seconds", *PARTS)},
        "tokens_per_second": round(sums["tokens"][0] / seconds, 1),
        "supervised_per_second": round(sums["loss"][1] / seconds, 1),
        **shares(sums),
    }
