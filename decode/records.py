"""What goes into the decode loop and what comes out: requests, generations, their cycles, the
time they took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.decode.timing import Timing


@dataclass(frozen=True)
class Request:
    """prompt: token ids, at least one. uncond: the unconditional prompt of guidance (default:
    the last prompt token).

    id addresses the random numbers: the same id and seed give the same tokens in any batch. A
    whole number of 64 bits, below 2**63.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    uncond: Sequence[int] | None = None
    id: int = 0


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
class DecodedRun:
    """generations stand in the order of the requests. probs_rows: rows of V logits turned into a
    distribution.
    """

    generations: list[Generation]
    timing: Timing
    probs_rows: int
