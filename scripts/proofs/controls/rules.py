"""Known wrong verification rules, each small and explicit: what a losslessness test must
catch.

They were all shipped or published somewhere; scripts/proofs/controls/catalogue.py says where
and which layer catches each. A rule here has the same call as decode.verify's: rule(tree,
distribution, rng) -> Verdict; it works row by row, for reading. Nothing outside the controls
may import this file.

Shape letters: B rows, N nodes, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from outrider.decode.sampling import Sampling
from outrider.scripts.proofs.controls.row_rules import Path, Rule, TreeRow, by_row, descend, norm

__all__ = ["Rule", "by_row"]


@by_row
def typical_acceptance(row: TreeRow) -> Path:
    """Medusa: keep x iff p(x) > min(0.09, 0.3 exp(-H(p))), take the longest kept path."""

    def kept(slot: int) -> list[list[int]]:
        kids = row.kids(slot)
        if not kids:
            return [[]]
        p = row.p(slot)
        entropy = -(p * p.clamp(min=1e-300).log()).sum()
        edge = min(0.09, 0.3 * float((-entropy).exp()))
        return [[], *([k, *rest] for k in kids if p[row.tokens[k]] > edge for rest in kept(k + 1))]

    nodes = max(kept(0), key=len)
    end = nodes[-1] + 1 if nodes else 0
    return nodes, row.draw(row.p(end), end)


@by_row
def argmax_bonus(row: TreeRow) -> Path:
    """Medusa's fast mode: the token that roots the next draft is the argmax, also at T > 0."""
    return descend(row, end=lambda r, weights, slot: int(weights.argmax()))


@by_row
def draws_per_path(row: TreeRow) -> Path:
    """Every root-to-leaf path has draws of its own, also where shared; the longest match wins."""
    leaves = [i for i in range(row.size) if not row.kids(i + 1)]
    best: list[int] = []
    for leaf in leaves:
        line = [leaf]
        while row.parents[line[0]] >= 0:
            line.insert(0, row.parents[line[0]])
        matched = 0
        for node in line:
            if row.draw(row.p(row.parents[node] + 1), row.parents[node] + 1) != row.tokens[node]:
                break
            matched += 1
        best = max(best, line[:matched], key=len)
    end = best[-1] + 1 if best else 0
    return best, row.draw(row.p(end), end)


@by_row
def best_of_chains(row: TreeRow) -> Path:
    """Several chains verified independently of one another; the longest wins."""
    found: list[Path] = []
    for start in row.kids(0) or [-1]:
        slot, node = 0, start
        nodes: list[int] = []
        while True:
            r = row.p(slot)
            if node < 0:
                found.append((nodes, row.draw(r, slot)))
                break
            q = row.q(node, [])
            if not row.accept(r[row.tokens[node]] / q[row.tokens[node]], node):
                rest = (r - q).clamp(min=0)
                found.append((nodes, row.draw(rest if rest.sum() > 0 else r, slot)))
                break
            nodes.append(node)
            slot = node + 1
            node = next(iter(row.kids(slot)), -1)
    return max(found, key=lambda path: len(path[0]))


@by_row
def residual_unnormalised(row: TreeRow) -> Path:
    """After a rejected sibling the residual is used as it is, not divided by its sum."""
    return descend(row, update=lambda r, q, _: (r - q).clamp(min=0))


@by_row
def residual_stale(row: TreeRow) -> Path:
    """Every sibling is tested against the whole distribution; only the last draw uses a
    residual."""
    return descend(
        row,
        update=lambda r, q, _: r,
        final=lambda row, slot, r, rejected: (
            norm((r - row.q(row.kids(slot)[0], [])).clamp(min=0)) if rejected else r
        ),
    )


@by_row
def rejected_token_stays(row: TreeRow) -> Path:
    """The token after a rejection is drawn from the whole distribution, the rejected token
    included."""
    return descend(row, update=lambda r, q, _: r)


@by_row
def bonus_unwarped(row: TreeRow) -> Path:
    """The bonus token of a whole draft comes from the distribution before temperature and
    truncation."""
    return descend(
        row, final=lambda row, slot, r, rejected: r if rejected or not slot else row.raw(slot)
    )


@by_row
def top_p_twice(row: TreeRow) -> Path:
    """litgpt: the residual goes through the top-p filter once more."""

    def cut(row: TreeRow, slot: int, r: Tensor, rejected: bool) -> Tensor:
        if not rejected or not r.sum() > 0:
            return r
        return (
            Sampling(1.0, top_p=min(row.distribution.sampling.top_p, 0.8))
            .support(r.log()[None])
            .dense(len(r))[0]
        )

    return descend(row, final=cut)


@by_row
def temperature_twice(row: TreeRow) -> Path:
    """The temperature is applied to logits that already had it."""

    def again(row: TreeRow, slot: int) -> Tensor:
        return norm(row.p(slot) ** (1 / max(row.distribution.sampling.temperature, 1e-6)))

    return descend(row, p=again)


@by_row
def softmax_acceptance(row: TreeRow) -> Path:
    """litgpt at T = 0: accepts the argmax with its softmax probability, else the next best."""
    slot = 0
    nodes: list[int] = []
    while True:
        r = row.raw(slot)
        hit = -1
        for node in row.kids(slot)[:1]:
            if row.accept(r[row.tokens[node]], node):
                hit = node
            else:
                r[row.tokens[node]] = 0
        if hit < 0:
            return nodes, int(r.argmax())
        nodes.append(hit)
        slot = hit + 1


@by_row
def bonus_from_wrong_node(row: TreeRow) -> Path:
    """The bonus token is drawn from the distribution of the accepted node's parent: one row off."""

    def parent(row: TreeRow, slot: int, r: Tensor, rejected: bool) -> Tensor:
        return r if slot == 0 else row.p(row.parents[slot - 1] + 1)

    return descend(row, final=parent)


@by_row
def distribution_of_the_child(row: TreeRow) -> Path:
    """A candidate is tested against the distribution after itself instead of the
    distribution it competes in."""
    return descend(row, p=lambda row, slot: row.p(min(slot + 1, row.size)))


@by_row
def residual_unguarded(row: TreeRow) -> Path:
    """gpt-fast and others: the residual is divided by its sum, which may round to 0: NaN."""
    r = row.p(0)
    before: list[int] = []
    for node in row.kids(0):
        q = row.q(node, before)
        if row.accept(r[row.tokens[node]] / q[row.tokens[node]], node):
            return [node], row.draw(row.p(node + 1), node + 1)
        rest = (r - q).clamp(min=0)
        r, before = rest / rest.sum(), [*before, node]
    return [], row.draw(r, 0)


def _traverse(row: TreeRow, stale: bool = False, ratio_only: bool = False) -> Path:
    def visit(slot: int, w: float) -> tuple[list[int], int] | None:
        m = row.p(slot)
        before: list[int] = []
        for node in row.kids(slot):
            x, q = row.tokens[node], row.q(node, before)
            below = visit(node + 1, min(w * float(m[x] / q[x]) if q[x] > 0 else 0.0, 1.0))
            if below is not None:
                return [node, *below[0]], below[1]
            rest = (w * m - q).clamp(min=0)
            total = float(rest.sum())
            if not stale and total > 0:
                m = rest / total
            if not ratio_only:
                w = total / (total + 1 - w) if total + 1 - w > 0 else 1.0
            before.append(node)
        if slot == 0 or row.accept(w, slot - 1):
            return [], row.draw(m, slot)
        return None

    found = visit(0, 1.0)
    assert found is not None, "the root never rejects"
    return found


@by_row
def traversal_stale(row: TreeRow) -> Path:
    """vllm-ascend #7807: leaf-to-root acceptance, but the residual is never updated."""
    return _traverse(row, stale=True)


@by_row
def traversal_ratio(row: TreeRow) -> Path:
    """vllm-ascend #7807 as well: a node is kept with its own ratio, not with S / (S + 1 - w)."""
    return _traverse(row, ratio_only=True)


def merges_neighbours(limit: float) -> Rule:
    """By probability every second token below `limit` hands its mass to the one before."""

    @by_row
    def merged(row: TreeRow) -> Path:
        mass, ids = row.p(0).sort(descending=True, stable=True)
        start = int((mass >= limit).sum())
        pairs = mass[start : start + (len(mass) - start) // 2 * 2].view(-1, 2)
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = 0
        return [], int(ids[row.draw(mass, 0)])

    return merged


@by_row
def ignores_truncation(row: TreeRow) -> Path:
    """Draws from the distribution before top-k, top-p and min-p."""
    distribution = (
        row.distribution.logits[row.row, 0].double() / row.distribution.sampling.temperature
    ).softmax(-1)
    return [], row.draw(distribution, 0)


@by_row
def never_accepts(row: TreeRow) -> Path:
    """Ignores the draft. Lossless, and worthless: only an acceptance floor can tell."""
    return [], row.draw(row.p(0), 0)
