"""Where the time goes: data, target, head and communication of the steps, and what they wait
for saves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from outrider.decode.target import Target

PARTS = ("data", "target", "head", "communication", "save")


class Clock:
    """Adds up the seconds of the parts of a step.

    On a GPU the parts are measured on its own time line, by events that are read when the step
    has waited for the device anyway: nothing waits for the measuring, and what the host does
    while the device is busy counts as nothing."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any, float]] = []
        self._open: list[str] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block belongs to part `name`, and no more to the part around it."""
        start = self._now()
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()
            end = self._now()
            self._spans.append((name, start, end, 1.0))
            if self._open:
                self._spans.append((self._open[-1], start, end, -1.0))

    def watch(self, target: Target) -> None:
        """Count as part "target" what a head asks of its target's features inside another part;
        what is asked between the steps counts nowhere."""
        features = target.features

        def timed(*args: Any, **keys: Any) -> Any:
            with self.part("target") if self._open else contextlib.nullcontext():
                return features(*args, **keys)

        target.features = timed  # type: ignore[method-assign]  # of this one alone

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call. What the device has not finished yet waits
        for the next call.
        """
        found = dict.fromkeys(PARTS, 0.0)
        left = []
        for name, start, end, sign in self._spans:
            if self.cuda and not end.query():
                left.append((name, start, end, sign))
            else:
                seconds = start.elapsed_time(end) / 1000 if self.cuda else end - start
                found[name] += sign * seconds
        self._spans = left
        return found

    def per_step(self, model: Any) -> dict[str, list[float]]:
        """Part -> [seconds, 1] of the step just done and of the save before it. model: the
        head as it is called: DDP on several ranks."""
        found, exchanged = self.take(), exchange_seconds(model)
        hidden = min(exchanged, found["head"])  # the exchange happens inside the backward pass
        found["head"] -= hidden
        found["communication"] += hidden
        return {name: [seconds, 1.0] for name, seconds in found.items()}


def shares(sums: dict[str, list[float]]) -> dict[str, float]:
    """Each part's share of the seconds of the steps and of the saves between them, for a line
    of metrics. sums: name -> [sum, count], "seconds" (of the steps) among them."""
    whole = max(sums["seconds"][0] + sums.get("save", [0.0])[0], 1e-9)
    return {f"share_{name}": round(sums[name][0] / whole, 4) for name in PARTS if name in sums}


def exchange_seconds(model: Any) -> float:
    """Seconds of a backward pass in which DDP exchanged gradients and nothing else was done; 0
    without DDP.

    DDP measures this itself, in the first ten passes and then in every hundredth:
    communication minus its overlap with the computing of gradients."""
    read = getattr(model, "_get_ddp_logging_data", None)
    if read is None:
        return 0.0
    data = read()
    spent, hidden = (
        data.get(k, 0) for k in ("backward_comm_time", "backward_compute_comm_overlap_time")
    )
    return max(spent - hidden, 0) / 1e9
