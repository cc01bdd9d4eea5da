"""What a value of a configuration may be beyond its type, as types for the fields of a dataclass.

    batch_size: OneOrMore = 32
    decay: Annotated[float, Interval(gt=0, le=1)] = 0.8
    shape: Literal["chain", "tree"] = "chain"
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"

pydantic checks them; a rule about several keys at once
is in the dataclass's `validate`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt, Interval, MinLen
from pydantic import AfterValidator, Field, Strict

T = TypeVar("T")
SEEDS = 1 << 63  # seeds lie below: torch and numpy take no other ones

OneOrMore = Annotated[int, Ge(1)]
ZeroOrMore = Annotated[int, Ge(0)]
Seed = Annotated[int, Interval(ge=0, le=SEEDS - 1)]
AboveZero = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]  # a share that is never all
Inside = Annotated[float, Interval(gt=0, lt=1)]  # a probability that is neither 0 nor 1
NotEmpty = Annotated[str, MinLen(1)]
FileName = Annotated[str, Strict(), MinLen(1)]  # beside a number, which is none
Filled = Annotated[list[T], MinLen(1)]
AtATime = Filled[Annotated[int, Interval(ge=1, le=64)]]  # requests, or tokens of a draft


def one_of(words: Iterable[str]) -> AfterValidator:
    """Return the rule that a text is one of `words`, for choices that stand in a table
    elsewhere."""
    known = tuple(words)

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"is none of {', '.join(known)}; choose one")
        return value

    return AfterValidator(check)


Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)?$")]
Wandb = Literal["off", "online", "offline"]
