"""A rule that an engine sells by name and that a trainer must not meet: FLy's deferred acceptance
(2511.22972), here for chains.

Nothing outside the laboratory and the tests may import it.
"""

from __future__ import annotations

import math

from outrider.scripts.proofs.controls.row_rules import Path, Rule, TreeRow, by_row, norm

FLAT = 0.3  # share of log V from which on a distribution is flat


def deferred_acceptance(window: int) -> Rule:
    """A rejected token of a flat distribution is kept where the `window` drafted tokens behind it
    are accepted."""

    @by_row
    def deferred(row: TreeRow) -> Path:
        nodes: list[int] = []
        while kids := row.kids(nodes[-1] + 1 if nodes else 0):
            nodes.append(kids[0])
        slots = [0, *(node + 1 for node in nodes)]
        accepted = []
        for slot, node in zip(slots, nodes, strict=False):
            x, q = row.tokens[node], row.q(node, [])
            accepted.append(row.accept(float(row.p(slot)[x] / q[x]) if q[x] > 0 else 0.0, node))
        for k, node in enumerate(nodes):
            p = row.p(slots[k])
            entropy = -float((p * p.clamp(min=1e-300).log()).sum())
            flat = entropy > FLAT * math.log(len(p))
            forgiven = flat and k + window < len(nodes) and all(accepted[k + 1 : k + 1 + window])
            if not accepted[k] and not forgiven:
                owed = norm((p - row.q(node, [])).clamp(min=0))
                return nodes[:k], row.draw(owed if owed.sum() > 0 else p, slots[k])
        return nodes, row.draw(row.p(slots[len(nodes)]), slots[len(nodes)])

    return deferred
