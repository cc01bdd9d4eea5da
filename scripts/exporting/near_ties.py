"""Where may a server in 16 bits answer otherwise than the target in float32? Where the two
best logits lie so near that its arithmetic turns them round.

How far that arithmetic moves logits is measured, with the rule by which `evaluate` judges
answers that differ (scripts/scoring/same_tokens.py): the target's own logits in float32 and
in bfloat16 behind the same tokens, and SAFETY times the most that one moved against the best.

Shape letters: n tokens of an answer, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.decode.target import Target
from outrider.scripts.scoring.plain import BEST, Plain, moved
from outrider.scripts.scoring.same_tokens import SAFETY

WRONG, MANY = 3.0, 1000.0
Rivals = list[tuple[int, float]]  # tokens, by how much their logit is below the expected one's


@contextlib.contextmanager
def in_bfloat16(model: torch.nn.Module) -> Iterator[None]:
    """The model with bfloat16 weights while the block runs, then as it was, bit by bit. A
    weight that bfloat16 holds exactly, as most published ones, needs no second copy
    meanwhile."""
    kept: list[tuple[torch.nn.Parameter, Tensor | None, torch.dtype]] = []
    try:
        for weight in model.parameters():
            whole = weight.data
            if whole.dtype in (torch.float32, torch.float64):
                weight.data = whole.to(torch.bfloat16)
                exact = torch.equal(weight.data.to(whole.dtype), whole)
                kept.append((weight, None if exact else whole, whole.dtype))
        yield
    finally:
        for weight, other, dtype in kept:
            weight.data = weight.data.to(dtype) if other is None else other


@dataclass(frozen=True)
class Rounding:
    """What 16 bits do to the gap of the two best logits. most: the distance that counts as
    rounding. usual: root mean square of what the gap changes by. places: that were measured."""

    most: float
    usual: float
    places: int

    def turned(self, gap: float, times: float = 1.0) -> float:
        """The probability that such a gap is turned round by normal noise of `times` the usual
        size; never less than what so few places can show."""
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


def measured(
    target: Target, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[Rounding, list[list[Rivals]]]:
    """Of (prompt, answer) token ids: what 16 bits do to this target, and for every token of
    every answer its rivals, the nearest first: those within `most` of it, and the nearest in
    any case.

    target: in float32; it is back in it afterwards."""
    plain = Plain(target)
    rows = [([*prompt, *answer], len(prompt)) for prompt, answer in texts]
    whole = [plain.logits([row])[0].float() for row in rows]
    with in_bfloat16(target.model):
        some = [plain.logits([row])[0].float() for row in rows]
    pairs = list(zip(whole, some, strict=True))
    change = torch.cat([_gaps(a, a) - _gaps(b, a) for a, b in pairs])
    most = SAFETY * max(moved(a, b) for a, b in pairs)
    rounding = Rounding(most, float(change.square().mean().sqrt()), len(change))
    return rounding, [
        [_rivals(logits, token, rounding.most) for logits, token in zip(row, answer, strict=True)]
        for row, (_, answer) in zip(whole, texts, strict=True)
    ]


def _gaps(logits: Tensor, of: Tensor) -> Tensor:
    """[n] of logits [n, V] between the two tokens that are the best ones in `of`."""
    best = logits.gather(1, of.topk(2).indices)
    return best[:, 0] - best[:, 1]


def _rivals(logits: Tensor, token: int, most: float) -> Rivals:
    """Of one place [V]; at most BEST."""
    best = logits.topk(min(BEST + 1, len(logits)))
    gaps = (logits[token] - best.values).clamp(min=0).tolist()
    pairs = zip(best.indices.tolist(), (round(gap, 4) for gap in gaps), strict=True)
    near = [(other, gap) for other, gap in pairs if other != token]
    return [pair for i, pair in enumerate(near) if not i or pair[1] <= most]
