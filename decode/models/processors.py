"""Logits processors by name: any stateless class of transformers with its arguments, as a
configuration writes them.

    processors={NoRepeatNGramLogitsProcessor:{ngram_size:3},SuppressTokensLogitsProcessor:{suppress_tokens:[17]}}

They run in the order given, before the repetition penalty and the warpers
(decode/sampling.py), each on one row with that row's own history.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from conf.errors import UserError
from decode.stateless import Processor


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
