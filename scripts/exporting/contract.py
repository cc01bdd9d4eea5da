"""Acceptance as a contract: what an exported head is expected to do, in a file beside it.

`expected.json` holds prompts as token ids, the greedy answer behind each, and what our chain
of the exported numbers accepted there: an accepted stop token counts, what a draft holds
behind it does not; a draft never reaches beyond the length limit.

It was written in float32, and servers run in 16 bits. So it holds per prompt `rivals`: for
every token of the answer the tokens next to it, [[token, by how much its logit is below],
..], of which the first is the gap of the two best logits; and what 16 bits do to such gaps,
`rounding`, measured with the rule by which `evaluate` judges answers that differ
(scripts/scoring/same_tokens.py): the target's own logits in float32 and in bfloat16 behind the
same tokens, and SAFETY times the most that one moved against the best.

Shape letters: n tokens of an answer, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import stats
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Cycle, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.scoring.plain import BEST, Plain, moved
from outrider.scripts.scoring.same_tokens import SAFETY

NAME = "expected.json"
WRONG, MANY = 3.0, 1000.0

Count = Annotated[int, Ge(0), Lt(1 << 31)]
Some = Annotated[int, Gt(0), Lt(1 << 31)]
Gap = Annotated[float, Ge(0), Lt(1 << 31)]
Rivals = list[tuple[Count, Gap]]  # tokens, by how much their logit is below the expected one's


@dataclass(frozen=True)
class Rounding:
    """What 16 bits do to the gap of the two best logits. most: the distance that counts as
    rounding. usual: root mean square of what the gap changes by. places: that were
    measured."""

    most: Gap
    usual: Gap
    places: Some

    def turned(self, gap: float, times: float = 1.0) -> float:
        """Return the probability that such a gap is turned round by normal noise of `times`
        the usual size; never less than what so few places can show."""
        noise = max(times * self.usual, 1e-9)
        return max(math.erfc(gap / noise / math.sqrt(2)), 1 / self.places) / 2

    def odds(self, seen: Iterable[tuple[float, bool]]) -> float:
        """By how much better noise of WRONG times the usual size explains where answers part:
        (gap, whether the answer parted there) of every place up to there. It is MANY with
        probability 1 / MANY at most where nothing but rounding parts them (Ville 1939)."""
        total = 0.0
        for gap, parted in seen:
            rounding, wrong = self.turned(gap), self.turned(gap, WRONG)
            total += math.log(wrong / rounding if parted else (1 - wrong) / (1 - rounding))
        return math.exp(min(total, 700))


@dataclass
class Row:
    """One prompt: its token ids, the greedy answer behind them, what each cycle proposed and
    accepted, and every token's rivals."""

    ids: Annotated[list[Count], MinLen(1)]
    tokens: list[Count]
    text: str
    proposed: list[Count]
    accepted: list[Count]
    rivals: list[Annotated[Rivals, MinLen(1)]]

    def __post_init__(self) -> None:
        alike = len(self.proposed) == len(self.accepted) and len(self.tokens) == len(self.rivals)
        if not alike or any(map(operator.gt, self.accepted, self.proposed)):
            raise ValueError("its lists do not go together")

    def cycles(self, limit: int) -> list[Cycle]:
        """Return the cycles of the answer with at most `limit` tokens: the last token of a
        cycle is not drafted."""
        cycles, start = [], 1  # the pass over the prompt gave a token
        for proposed, accepted in zip(self.proposed, self.accepted, strict=True):
            room = limit - start - 1 if limit < len(self.tokens) else proposed
            if room >= 0:
                cycles.append(Cycle(min(proposed, room), min(accepted, room), (), False, start))
            start += accepted + 1
        return cycles

    def gaps(self, count: int) -> list[float]:
        """Return the gaps between the two best logits at the first tokens of the answer."""
        return [rivals[0][1] for rivals in self.rivals[:count]]


@dataclass
class Contract:
    """What is read of expected.json. stop: the target's stop tokens."""

    max_new_tokens: Some
    draft_tokens: Some
    stop: list[Count]
    rounding: Rounding
    prompts: Annotated[list[Row], MinLen(1)]
    format: Literal[1] = 1

    def json(self) -> dict[str, Any]:
        """Return the file; the accepted length in it is for people."""
        length, _ = rates([row.cycles(self.max_new_tokens) for row in self.prompts])
        return {"temperature": 0, "accepted_length": length.json(), **asdict(self)}


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
    rounding, rivals = measured(target, texts)
    rows = [
        Row(
            list(request.prompt),
            found.token_ids,
            target.tokenizer.decode([t for t in found.token_ids if t not in target.eos_ids]),
            [c.proposed for c in found.cycles],
            [c.accepted for c in found.cycles],
            others,
        )
        for request, found, others in zip(requests, run.generations, rivals, strict=True)
    ]
    return Contract(limit, depth, list(target.eos_ids), rounding, rows)


def rates(cycles: Sequence[Sequence[Cycle]]) -> tuple[stats.Interval, list[stats.Interval]]:
    """Return accepted length and unconditional acceptance by position with 95 % intervals,
    over the cycles that drafted: engines count no others."""
    drafted = [[c for c in row if c.proposed] for row in cycles]
    by_position = [whole for _, whole in stats.position_intervals(drafted)]
    return stats.accepted_length(drafted), by_position


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
) -> tuple[Rounding, list[list[Rivals]]]:
    """Measure (prompt, answer) token ids: what 16 bits do to this target, and for
    every token of every answer its rivals, the nearest first: those within `most` of it,
    and the nearest in any case. target: in float32; it is back in it afterwards."""
    plain = Plain(target)
    rows = [([*prompt, *answer], len(prompt)) for prompt, answer in texts]
    whole = [plain.logits(*row).float() for row in rows]
    with in_bfloat16(target.model):
        some = [plain.logits(*row).float() for row in rows]
    pairs = list(zip(whole, some, strict=True))
    change = torch.cat([_gaps(a, a) - _gaps(b, a) for a, b in pairs])
    most = SAFETY * max(moved(a, b) for a, b in pairs)
    rounding = Rounding(most, float(change.square().mean().sqrt()), len(change))
    return rounding, [
        [_rivals(logits, token, most) for logits, token in zip(row, answer, strict=True)]
        for row, (_, answer) in zip(whole, texts, strict=True)
    ]


def _gaps(logits: Tensor, of: Tensor) -> Tensor:
    """[n] of logits [n, V] between the two tokens that are the best ones in `of`."""
    best = logits.gather(1, of.topk(2).indices)
    return best[:, 0] - best[:, 1]


def _rivals(logits: Tensor, token: int, most: float) -> Rivals:
    """Return the rivals at one place [V]; at most BEST."""
    best = logits.topk(min(BEST + 1, len(logits)))
    gaps = (logits[token] - best.values).clamp(min=0).tolist()
    pairs = zip(best.indices.tolist(), (round(gap, 4) for gap in gaps), strict=True)
    near = [(other, gap) for other, gap in pairs if other != token]
    return [pair for i, pair in enumerate(near) if not i or pair[1] <= most]
