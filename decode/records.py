"""What goes into the decode loop and what comes out: requests, generations, their cycles, the time
they took.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

PARTS = ("target", "drafter", "distribution", "verify", "cache", "python")


@dataclass(frozen=True)
class Request:
    """prompt: token ids, at least one. uncond: the unconditional prompt of guidance (default:
    the last prompt token, as in transformers).

    id addresses the random numbers: the same id and seed give the same tokens in any batch. A
    whole number of 64 bits, below 2**63.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    uncond: Sequence[int] | None = None
    id: int = 0

    @property
    def companion(self) -> Sequence[int]:
        """The unconditional prompt of guidance."""
        return self.uncond or self.prompt[-1:]


@dataclass(frozen=True)
class Cycle:
    """One verification of one row. proposed: levels drafted. accepted: draft tokens kept (the
    bonus token not counted).

    ranks: sibling rank of each accepted candidate. cut: shortened by a stop token, or drafted
    short because of the length limit; such cycles say nothing about the drafter. start:
    generated tokens before this cycle. drafters: of a union, who proposed each accepted
    candidate, bit k for its k-th drafter (decode.union).
    """

    proposed: int
    accepted: int
    ranks: tuple[int, ...]
    cut: bool
    start: int
    drafters: tuple[int, ...] = ()


@dataclass
class Generation:
    """token_ids: generated tokens, the stop token included. from_draft: per token, was it an
    accepted draft token.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    finish: str = "length"


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


@dataclass
class DecodedRun:
    """generations stand in the order of the requests."""

    generations: list[Generation]
    timing: Timing
