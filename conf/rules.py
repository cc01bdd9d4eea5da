"""What a value of a configuration may be beyond its type, as types for the fields of a dataclass.

    batch_size: OneOrMore = 32
    decay: Annotated[float, Interval(gt=0, le=1)] = 0.8
    shape: Literal["chain", "tree"] = "chain"
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"

pydantic checks them and conf/typed.py words what it finds; a rule about several keys at once
stands in the dataclass's `validate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Interval, MinLen
from pydantic import AfterValidator, BeforeValidator, Strict
from pydantic_core import PydanticCustomError

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

    def check(value: Any) -> Any:
        if value in known:
            return value
        raise PydanticCustomError("literal_error", "", {"expected": ", ".join(known)})

    return AfterValidator(check)


def _device(value: str) -> str:
    if re.fullmatch(r"(cpu|cuda(:\d+)?)?", value):
        return value
    raise PydanticCustomError("literal_error", "", {"expected": "cpu, cuda, cuda:N, nothing"})


Device = Annotated[str, AfterValidator(_device)]


def _wandb(value: Any) -> Any:
    """Some commands took true and false here, and YAML reads a bare `off` as false."""
    if not isinstance(value, bool):
        return value
    now = "online" if value else "off"
    why = f"{str(value).lower()} is none of off, online, offline; set wandb={now}"
    raise PydanticCustomError("value_error", "", {"error": why})


Wandb = Annotated[Literal["off", "online", "offline"], BeforeValidator(_wandb)]
