"""Logits processors of other people, as transformers has them: whether one may be used under
tree verification.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from conf.errors import UserError

Processor = Callable[[Tensor, Tensor], Tensor]


def refuse_state(processor: Processor) -> None:
    """Call it on two histories and the first again: a processor that answers differently, or
    changes, keeps state.
    """
    name = type(processor).__name__
    before = _picture(processor)
    histories: Sequence[list[int]] = ([1, 2, 3], [3, 1, 2, 0], [1, 2, 3])
    try:
        answers = [
            copy.deepcopy(processor)(torch.tensor([h]), torch.linspace(0, 1, 1024)[None])
            for h in histories[:1]
        ]
        probe = copy.deepcopy(processor)
        answers += [probe(torch.tensor([h]), torch.linspace(0, 1, 1024)[None]) for h in histories]
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"processors: {name} cannot be called on one row by itself ({error}); use a "
            "stateless one"
        ) from None
    if _picture(probe) != before or not (
        torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[3])
    ):
        raise UserError(
            f"processors: {name} keeps state between calls; tree verification visits "
            "nodes in any order, "
            f"so only stateless processors are exact: leave it out"
        )


def _picture(thing: object) -> str:
    fields = getattr(thing, "__dict__", {})
    return repr({k: v.tolist() if isinstance(v, Tensor) else v for k, v in sorted(fields.items())})
