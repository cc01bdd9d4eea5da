"""Rules that engines ship, by name or by mistake, and that leave the target's distribution:
the field of 2026. Each is written for chains; scripts/proofs/controls/catalogue.py says where
each was seen.

Nothing outside the controls, the laboratory and the tests may import this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree
from outrider.decode.verify import Coins, Verdict, verify
from outrider.decode.wrapped import Wrapped
from outrider.scripts.proofs.controls.row_rules import Path, Rule, TreeRow, by_row, descend

FLY_ENTROPY, FLY_TOP = 0.3, 3  # vLLM's defaults: nats, of so many likeliest tokens
FLAT = 0.3  # the paper's, of the largest entropy there is
RATE = 0.7  # of acceptance, where it is drawn whatever the tokens are


def _chain(row: TreeRow) -> list[int]:
    """The nodes of a chain, from the root on."""
    nodes: list[int] = []
    while kids := row.kids(nodes[-1] + 1 if nodes else 0):
        nodes.append(kids[0])
    return nodes


def _rejected(row: TreeRow, nodes: list[int], slot: int, node: int) -> Path:
    """The sound end of a chain whose `node` behind `slot` is not kept."""
    rest = (row.p(slot) - row.q(node, [])).clamp(min=0)
    return nodes, row.draw(rest if rest.sum() > 0 else row.p(slot), slot)


def uncertain(p: Tensor) -> bool:
    """Whether the likeliest tokens of a distribution [V] are open enough, in vLLM 0.33."""
    best = p.topk(min(FLY_TOP, len(p))).values
    return float(-(best * best.clamp(min=1e-300).log()).sum()) >= FLY_ENTROPY


def flat(p: Tensor) -> bool:
    """Whether a distribution [V] is, in the paper (2511.22972): 0.3 of the largest entropy."""
    return float(-(p * p.clamp(min=1e-300).log()).sum()) > FLAT * math.log(len(p))


def deferred_acceptance(
    window: int,
    open_to: Callable[[Tensor], bool] = uncertain,
    on_deferred: Callable[[], None] = lambda: None,
) -> Rule:
    """FLy: a rejected draft token is kept all the same where the target's distribution is
    `open_to` others and the next `window` draft tokens would each be accepted. on_deferred:
    told of each."""

    @by_row
    def deferred(row: TreeRow) -> Path:
        nodes, kept, spared = _chain(row), [], []
        slots = [0, *(node + 1 for node in nodes)]
        for slot, node in zip(slots, nodes, strict=False):
            p, q, x = row.p(slot), row.q(node, []), row.tokens[node]
            kept.append(row.accept(p[x] / q[x] if q[x] > 0 else 0.0, node))
            spared.append(bool(p[x] > 0) and bool(q[x] > 0) and open_to(p))
        for i, node in enumerate(nodes):
            whole = i + window < len(nodes) and all(kept[i + 1 : i + window + 1])
            if not kept[i]:
                if not (spared[i] and whole):
                    return _rejected(row, nodes[:i], slots[i], node)
                on_deferred()
        return nodes, row.draw(row.p(slots[-1]), slots[-1])

    return deferred


@by_row
def synthetic_acceptance(row: TreeRow) -> Path:
    """Draft tokens are kept at a set rate, whatever target and draft say of them."""
    nodes: list[int] = []
    slot = 0
    for node in _chain(row):
        if not row.accept(RATE, node):
            return _rejected(row, nodes, slot, node)
        nodes.append(node)
        slot = node + 1
    return nodes, row.draw(row.p(slot), slot)


@by_row
def greedy_fallback(row: TreeRow) -> Path:
    """Temperature above 0 is taken for 0: the best token alone is kept, and emitted."""
    nodes: list[int] = []
    slot = 0
    for node in _chain(row):
        if row.tokens[node] != int(row.p(slot).argmax()):
            break
        nodes.append(node)
        slot = node + 1
    return nodes, int(row.p(slot).argmax())


@by_row
def late_rejection(row: TreeRow) -> Path:
    """The token in a rejected one's place comes from the distribution behind that one."""

    def behind(row: TreeRow, slot: int, r: Tensor, rejected: bool) -> Tensor:
        return row.p(row.kids(slot)[-1] + 1) if rejected else r

    return descend(row, final=behind)


def rows_mixed_up(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
    """With more than two rows every row reads its neighbour's logits."""
    if len(tree.tokens) > 2:
        distribution.logits = distribution.logits.roll(1, 0)
    return verify(tree, distribution, rng, rule="rejection")


class _Argmax:
    """Random numbers whose draft draws are the likeliest tokens."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rng, name)

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """See decode.rng.Rng."""
        return weights.argmax(-1)


class ArgmaxDrafts(Wrapped):
    """Drafts the likeliest tokens and says that they were drawn: they are judged by soft
    probabilities."""

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return self.inner.propose(budget, sampling, _Argmax(rng))  # type: ignore[arg-type]
