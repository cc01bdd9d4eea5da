"""Acceptance as a contract: what an exported head is expected to do, in a file beside it.

`expected.json` holds prompts as token ids, the greedy answer behind each, and what our chain
of the exported numbers accepted there: an accepted stop token counts, what a draft holds
behind it does not; a draft never reaches beyond the length limit.

It was written in float32, and servers run in 16 bits. So it holds what 16 bits do to the gap of
two logits, `rounding`, measured with the rule by which `evaluate` judges answers that differ
(scripts/scoring/same_tokens.py): the target's own logits in float32 and in bfloat16 behind the
same tokens, and SAFETY times the most that one moved against the best; and for every token of
an answer the others that are `near` it, by less than that.

Shape letters: n tokens of an answer, V vocabulary.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.scoring.plain import BEST, Plain, moved
from outrider.scripts.scoring.same_tokens import SAFETY

NAME = "expected.json"

Count = Annotated[int, Ge(0), Lt(1 << 31)]
Some = Annotated[int, Gt(0), Lt(1 << 31)]
Gap = Annotated[float, Ge(0), Lt(1 << 31)]


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
    """What is read of expected.json. rounding: the gap of two logits up to which 16 bits may
    turn them. stop: the target's stop tokens."""

    max_new_tokens: Some
    draft_tokens: Some
    stop: list[Count]
    rounding: Gap
    prompts: Annotated[list[Row], MinLen(1)]
    format: Literal[2] = 2

    def json(self) -> dict[str, Any]:
        """Return the file; the accepted length in it is for people."""
        cycles = [accepted for row in self.prompts for accepted in row.accepted]
        length = 1 + sum(cycles) / max(len(cycles), 1)
        return {"temperature": 0, "accepted_length": length, **asdict(self)}


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
    texts = [(found.prompt_ids, found.token_ids) for found in run.generations]
    rounding, near = measured(target, texts)
    rows = [
        Row(
            list(request.prompt),
            found.token_ids,
            target.tokenizer.decode([t for t in found.token_ids if t not in target.eos_ids]),
            [c.proposed for c in found.cycles],
            [c.accepted for c in found.cycles],
            others,
        )
        for request, found, others in zip(requests, run.generations, near, strict=True)
    ]
    return Contract(limit, depth, list(target.eos_ids), rounding, rows)


# -- what 16 bits do


@contextlib.contextmanager
def in_bfloat16(model: torch.nn.Module) -> Iterator[None]:
    """The model with bfloat16 weights while the block runs, then as it was, bit by bit."""
    kept = [(weight, weight.data) for weight in model.parameters()]
    try:
        for weight, whole in kept:
            weight.data = whole.to(torch.bfloat16)
        yield
    finally:
        for weight, whole in kept:
            weight.data = whole


def measured(
    target: Target, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[float, list[list[list[int]]]]:
    """Measure (prompt, answer) token ids: the gap of two logits that 16 bits may turn, and for
    every token of every answer the others that lie within it, at most BEST. target: in float32;
    it is back in it afterwards."""
    plain = Plain(target)
    rows = [([*prompt, *answer], len(prompt)) for prompt, answer in texts]
    whole = [plain.logits(*row).float() for row in rows]
    with in_bfloat16(target.model):
        some = [plain.logits(*row).float() for row in rows]
    most = SAFETY * max(moved(a, b) for a, b in zip(whole, some, strict=True))
    return most, [
        [_near(logits, token, most) for logits, token in zip(row, answer, strict=True)]
        for row, (_, answer) in zip(whole, texts, strict=True)
    ]


def _near(logits: Tensor, token: int, most: float) -> list[int]:
    """Return the tokens at one place [V] whose logits are at most so far below this one's."""
    best = logits.topk(min(BEST + 1, len(logits)))
    near = (logits[token] - best.values <= most).tolist()
    return [i for i, close in zip(best.indices.tolist(), near, strict=True) if close and i != token]
