"""Worlds at the edges of floating point, for the exact distribution of one verification
(enumerator.py).

A lossless verifier is right for any proposal distribution it is handed. The worlds of
`Case.random` are moderate; here a distribution may hold zeros and denormals, be one-hot or
off one by rounding, drafts are certain and wrong over several levels, and the target's
logits lie up to 300 temperatures apart, stored in any floating dtype.

Shape letters: B rows (branches), N nodes, K siblings, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.decode.grow import siblings
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree, Proposal, TreeShape
from outrider.scripts.certificate.enumerator import Branches, Case

TEMPERATURES = (0.01, 0.05, 0.1, 0.2, 0.3, 1.0, 5.0)
GAPS = (0.0, 1.0, 9.0, 40.0, 52.0, 88.0, 95.0, 104.0, 150.0, 300.0)  # in temperatures
SHAPES = (
    ((0,), (1,)),
    ((0,), (1,), (2,)),
    ((0,), (0, 0), (0, 0, 0)),
    ((0,), (0, 0), (0, 0, 0), (0, 0, 1)),
    ((0,), (0, 0), (0, 1), (0, 0, 0)),
    ((0,), (1,), (0, 0), (0, 0, 0)),
    ((0,), (1,), (1, 0), (1, 1)),
    ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)),
)
# A draft distribution: what the tokens behind its favourite share, in the order of its preference.
# None: drawn at random.
REMAINDERS: tuple[tuple[float, ...] | None, ...] = (
    None,
    (0.0, 0.0, 0.0),  # one-hot
    (0.5, 0.0, 0.0),  # zeros
    (1e-6, 1e-6, 1e-6),
    (1e-40, 1e-41, 0.0),  # denormal in float32
    (1e-39, 1e-45, 1e-44),
    (1e-310, 1e-320, 1e-320),  # denormal in float64, nothing in float32
)


@dataclass
class Extreme(Case):
    """A `Case` whose `draft` [contexts, Vd] holds distributions in float32 or float64, not logits.

    target: logits of any floating dtype; the largest of a context is 0, so that dividing by a
    small temperature rounds only what has next to no probability.
    scheme: "without" draws as decode.grow does, with stand-ins where a distribution has run out of
    tokens; "iid" draws with replacement; "hybrid" takes one deterministic candidate, outside
    the draft vocabulary where there is such a token, and draws the others from what is left.
    """

    def propose(self, rng: Branches, rows: int) -> tuple[DraftTree, Tensor]:
        """The tree of every row and the context [B, N + 1] of every slot."""
        n, width = len(self.shape), self.draft.shape[1]
        parents = self.shape.parents(torch.device("cpu"))[0].tolist()
        tokens = torch.zeros(rows, n, dtype=torch.int64)
        context = torch.zeros(rows, n + 1, dtype=torch.int64)
        sampled = torch.zeros(rows, n, dtype=torch.bool)
        distribution = self.draft.new_zeros(rows, n + 1, width)
        distribution[:, :, 0] = 1
        for slot in range(n + 1):
            kids = [i for i, parent in enumerate(parents) if parent == slot - 1]
            if not kids:
                continue
            distribution[:, slot] = self.draft[context[:, slot]]
            tokens[:, kids], sampled[:, kids] = self._children(distribution[:, slot], kids, rng)
            below = [i + 1 for i in kids]
            context[:, below] = self.child(context[:, slot, None], tokens[:, kids])
        row = (torch.tensor(parents, dtype=torch.int64) + 1).expand(rows, n)
        proposal = Proposal(distribution, row, self.draft_vocab, self.scheme == "iid")
        return DraftTree.static(self.shape, tokens, None, sampled, proposal), context

    def _children(
        self, distribution: Tensor, kids: Sequence[int], rng: Branches
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, K], and which were drawn [B, K], from their parent's distribution [B, Vd]."""
        rows, width = distribution.shape
        ids = torch.arange(width) if self.draft_vocab is None else self.draft_vocab
        coins: Any = _Drafts(rng)
        if self.scheme == "iid":
            drawn = [
                coins.draft(distribution, torch.arange(rows), torch.full((rows,), i)) for i in kids
            ]
            return ids[torch.stack(drawn, 1)], torch.ones(rows, len(kids), dtype=torch.bool)
        order = -torch.arange(width, dtype=torch.float64).expand(rows, 1, width)  # of the stand-ins
        if self.scheme == "without":
            _, place, fresh = siblings(distribution[:, None], order, [kids], coins)
            return ids[place], fresh
        missing = sorted(set(range(self.vocab)) - set(ids.tolist()))
        best = distribution.argmax(1, keepdim=True)
        first = torch.full_like(best, missing[0]) if missing else ids[best]
        fixed = torch.zeros(rows, 1, dtype=torch.bool)
        if len(kids) == 1:
            return first, fixed
        left = distribution if missing else distribution.scatter(1, best, 0.0)
        order = order if missing else order.scatter(2, best[:, None], -torch.inf)
        _, place, fresh = siblings(left[:, None], order, [kids[1:]], coins)
        return torch.cat([first, ids[place]], 1), torch.cat([fixed, fresh], 1)

    @staticmethod
    def random(  # type: ignore[override]
        generator: torch.Generator,
        temperature: float,
        stored: torch.dtype = torch.float64,
        distributions: torch.dtype = torch.float64,
    ) -> Extreme:
        """stored: dtype of the target's logits; distributions: of the draft distributions,
        float32 or float64."""

        def pick(n: int) -> int:
            return int(torch.randint(n, (), generator=generator))

        vocab = 3 + pick(2)
        shape = TreeShape.of(SHAPES[pick(len(SHAPES))])
        widest = 1 + max(path[-1] for path in shape.paths)
        scheme = ("without", "without", "iid", "hybrid")[pick(4)]
        known = vocab - pick(2) if vocab > widest else vocab
        lacking = pick(vocab)
        ids = None
        if known < vocab:
            ids = torch.tensor([i for i in range(vocab) if i != lacking])
        contexts = (vocab + 1) ** (shape.depth + 1)
        # Few tables, used again and again, so that distributions meet on every level.
        kinds = torch.randint(3, (contexts,), generator=generator)
        target = torch.stack([_logits(vocab, pick) for _ in range(3)])[kinds] * temperature
        target = target.to(stored)
        draft = torch.stack([_distribution(known, pick, distributions) for _ in range(3)])[
            kinds.flip(0)
        ]
        return Extreme(vocab, shape, scheme, Sampling(temperature), target, draft, ids)


class _Drafts:
    """Draws a token also where a distribution has no mass left, as decode.rng does."""

    def __init__(self, rng: Branches) -> None:
        self.rng = rng

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        place = torch.zeros_like(weights)
        place[:, 0] = 1
        some = (weights > 0).any(1, keepdim=True)
        return self.rng.draft(torch.where(some, weights, place), rows, node)


def _logits(vocab: int, pick: Any) -> Tensor:
    """[V] float64 at T = 1: one or two tokens at 0, the others below or out of reach."""
    logits = torch.tensor([-GAPS[pick(len(GAPS))] for _ in range(vocab)], dtype=torch.float64)
    if pick(4) == 0:
        logits[pick(vocab)] = -torch.inf
    logits[pick(vocab)] = 0.0
    return logits


def _distribution(width: int, pick: Any, dtype: torch.dtype) -> Tensor:
    """[Vd] float32 or float64, of sum one up to rounding."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(pick(1 << 30)))
    rest = REMAINDERS[pick(len(REMAINDERS))]
    if rest is None:
        gaps = torch.tensor([GAPS[pick(4)] for _ in range(width)], dtype=dtype)
        return (-gaps).softmax(0)
    distribution = torch.tensor([1.0, *rest[: width - 1]], dtype=torch.float64)
    distribution[0] = 1 - distribution[1:].sum()
    return torch.zeros(width, dtype=torch.float64).scatter(0, order, distribution).to(dtype)
