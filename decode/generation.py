"""What goes into the decode loop and what comes out: requests, generations, their cycles, the time
they took.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """prompt: token ids, at least one. uncond: the unconditional prompt of guidance (default:
    the last prompt token, as in transformers).

    id addresses the random numbers, a whole number below 2**63. The same id and seed give the same
    tokens in any batch, unless a pass over more rows rounds otherwise and a random number falls
    between the two borders of a token: seldom in float32, not seen in float64.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    uncond: Sequence[int] | None = None
    id: int = 0


@dataclass(frozen=True)
class Cycle:
    """One verification of one row. proposed: levels drafted. accepted: draft tokens kept (the
    bonus token not counted).

    cut: shortened by a stop token, or drafted short because of the length limit; such cycles say
    nothing about the drafter. start: generated tokens before this cycle.
    """

    proposed: int
    accepted: int
    cut: bool
    start: int


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
    begin. On a GPU, whose passes run on their own time line, verify_s has the wait for them.

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
    cycle_s: list[float] = field(default_factory=list)
    cycle_nodes: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside as `name`_s."""
        begin = time.perf_counter()
        yield
        spent = time.perf_counter() - begin
        setattr(self, f"{name}_s", getattr(self, f"{name}_s") + spent)

    @property
    def decode_s(self) -> float:
        return self.total_s - self.prefill_s


@dataclass
class DecodedRun:
    """generations stand in the order of the requests."""

    generations: list[Generation]
    timing: Timing
