"""What the engine writes, for tests that compare answers."""

from __future__ import annotations

from typing import Any

from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target

GREEDY = Sampling()


def texts(
    target: Target,
    drafter: Drafter,
    requested: list[Request],
    sampling: Sampling = GREEDY,
    **how: Any,
) -> list[list[int]]:
    """The tokens of every answer. how: further arguments of decode.engine.generate."""
    return [g.token_ids for g in generate(target, drafter, requested, sampling, **how).generations]
