"""Where the time of decoding goes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

PARTS = ("target", "drafter", "distribution", "verify", "cache", "python")


@dataclass
class Timing:
    """Wall seconds. decode_s is everything after prefill; total_s includes prefill.

    The phases of a cycle, one after the other: draft_s until the proposal is there, target_s
    until it is scored, verify_s until the path is chosen, commit_s until the next cycle may
    begin. Within them: drafter_s proposing and observing, distribution_s from logits to
    distributions (inside verify_s), cache_s keeping accepted rows of the K/V cache.

    cycle_s, cycle_nodes: of every cycle, how long it took and how many nodes of a row it drafted;
    empty where that is not known.
    """

    prefill_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0
    cycles: int = 0
    drafter_s: float = 0.0
    distribution_s: float = 0.0
    cache_s: float = 0.0
    cycle_s: list[float] = field(default_factory=list)
    cycle_nodes: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def part(self, name: str, clock: Callable[[], float]) -> Iterator[None]:
        """What happens inside is counted as `name`_s, by `clock` (seconds)."""
        begin = clock()
        yield
        setattr(self, f"{name}_s", getattr(self, f"{name}_s") + clock() - begin)

    @property
    def decode_s(self) -> float:
        return self.total_s - self.prefill_s

    def parts(self) -> dict[str, float]:
        """decode_s by who spent it (PARTS); "python" is what remains of it, the loop itself.
        Sums to decode_s.
        """
        known = {
            "target": self.target_s,
            "drafter": self.drafter_s,
            "distribution": self.distribution_s,
            "verify": self.verify_s - self.distribution_s,
            "cache": self.cache_s,
        }
        return {**known, "python": self.decode_s - sum(known.values())}


class Timed(Protocol):
    """Who has methods that are `timed`. part(name): a context whose seconds count as
    `name`."""

    def part(self, name: str) -> AbstractContextManager[None]: ...


Method = TypeVar("Method", bound=Callable[..., Any])


def timed(part: str) -> Callable[[Method], Method]:
    """A method of somebody `Timed` whose seconds count as those of `part`."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Timed, *args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return method(self, *args, **kwargs)

        return cast(Method, run)

    return wrap
