"""Acceptance as a contract: what an exported head is expected to do, in a file beside it.

`expected.json` holds prompts as token ids, the greedy answer behind each, and what our chain
of the exported numbers accepted there: an accepted stop token counts, what a draft holds
behind it does not; a draft never reaches beyond the length limit.

It was written in float32, and servers run in 16 bits. So it holds for every token of an answer
the others that are `near` it: whose logits lie within GAP of its own.

Shape letters: n tokens of an answer, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.scoring.plain import BEST, Plain

NAME = "expected.json"
GAP = 0.5  # bfloat16 rounds logits between 16 and 32 to eighths, and what leads to them

Count = Annotated[int, Ge(0), Lt(1 << 31)]
Some = Annotated[int, Gt(0), Lt(1 << 31)]


@dataclass
class Row:
    """One prompt: its token ids, the greedy answer behind them, what each cycle proposed and
    accepted, and every token's rivals within rounding."""

    ids: Annotated[list[Count], MinLen(1)]
    tokens: list[Count]
    text: str
    proposed: list[Count]
    accepted: list[Count]
    near: list[list[Count]]

    def __post_init__(self) -> None:
        alike = len(self.proposed) == len(self.accepted) and len(self.tokens) == len(self.near)
        if not alike or any(map(operator.gt, self.accepted, self.proposed)):
            raise ValueError("its lists do not go together")

    def counts(self, limit: int) -> tuple[int, int]:
        """Return how many tokens are drafted and accepted in the answer with at most `limit`
        tokens: the last token of a cycle is not drafted."""
        drafted, taken, start = 0, 0, 1  # the pass over the prompt gave a token
        for proposed, accepted in zip(self.proposed, self.accepted, strict=True):
            room = max(limit - start - 1, 0) if limit < len(self.tokens) else proposed
            drafted, taken = drafted + min(proposed, room), taken + min(accepted, room)
            start += accepted + 1
        return drafted, taken


@dataclass
class Contract:
    """What is read of expected.json. stop: the target's stop tokens."""

    max_new_tokens: Some
    draft_tokens: Some
    stop: list[Count]
    prompts: Annotated[list[Row], MinLen(1)]
    format: Literal[2] = 2


def load(path: Path) -> Contract:
    """Return a contract. Raises UserError for a file that is none."""
    place = path / NAME if path.is_dir() else path
    try:
        return TypeAdapter(Contract).validate_json(place.read_bytes(), strict=True)
    except OSError as error:
        raise UserError(
            f"expected: {place} cannot be read ({error.strerror}); give the folder of an export"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"expected: {place}: {where or 'it'}: {first['msg']:.80}; export the head again"
        ) from None


# -- writing


def expected(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], depth: int, limit: int
) -> Contract:
    """Return the contract of a chain of `depth` over greedy answers of at most `limit`
    tokens.

    drafter: a chain drafter with the exported numbers. prompts: token ids, one or more each.
    target: in float32.
    """
    drafter.max_depth = drafter.max_nodes = depth
    requests = [Request(list(p), limit, id=i) for i, p in enumerate(prompts)]
    run = generate(target, drafter, requests, Sampling(), batch_size=len(requests))
    plain, rows = Plain(target), []
    for request, found in zip(requests, run.generations, strict=True):
        logits = plain.logits([*found.prompt_ids, *found.token_ids], len(found.prompt_ids))
        rows.append(
            Row(
                list(request.prompt),
                found.token_ids,
                target.tokenizer.decode([t for t in found.token_ids if t not in target.eos_ids]),
                [c.proposed for c in found.cycles],
                [c.accepted for c in found.cycles],
                [_near(*pair) for pair in zip(logits, found.token_ids, strict=True)],
            )
        )
    return Contract(limit, depth, list(target.eos_ids), rows)


def _near(logits: Tensor, token: int) -> list[int]:
    """Return the tokens at one place [V] that 16 bits may put before this one, at most BEST."""
    best = logits.topk(min(BEST + 1, len(logits)))
    near = (logits[token] - best.values <= GAP).tolist()
    return [i for i, close in zip(best.indices.tolist(), near, strict=True) if close and i != token]
