"""Logits processors by name: any stateless class of transformers with its arguments, as a
configuration writes them.

    processors={NoRepeatNGramLogitsProcessor:{ngram_size:3},SuppressTokensLogitsProcessor:{suppress_tokens:[17]}}

They run in the order given, before the repetition penalty and the warpers
(decode/sampling.py), each on one row with that row's own history.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import UserError

Processor = Callable[[Tensor, Tensor], Tensor]


def named_processors(spec: Mapping[str, Any]) -> tuple[Processor, ...]:
    """Class name -> keyword arguments ({} for none) becomes processors for Sampling, which
    refuses stateful ones.

    Raises UserError for a name that is no logits processor of transformers and for arguments
    that it does not take.
    """
    from transformers import LogitsProcessor
    from transformers.generation import logits_process

    found = []
    for name, given in spec.items():
        kind = getattr(logits_process, name, None)
        if not (
            inspect.isclass(kind)
            and issubclass(kind, LogitsProcessor)
            and kind is not LogitsProcessor
        ):
            raise UserError(
                f"processors: {name} is no logits processor of transformers; "
                "set processors={NoRepeatNGramLogitsProcessor:{ngram_size:3}}, say"
            )
        if not isinstance(given, Mapping):
            raise UserError(
                f"processors.{name}: {given!r} is not a mapping of its arguments; set {{}} for none"
            )
        try:
            found.append(kind(**given))
        except (TypeError, ValueError) as error:
            takes = ", ".join(list(inspect.signature(kind).parameters))
            raise UserError(f"processors.{name}: {error}; it takes {takes}") from None
    return tuple(found)


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
