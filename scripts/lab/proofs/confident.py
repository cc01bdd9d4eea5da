"""Drafts that grow by the drafter's own confidence (decode.price), as worlds for the exact
layers: one verification (enumerator.py) and the whole loop (engine_distribution.py). The
draft is grown by decode/grow.py itself; only the distributions come from a table.

Shape letters: B rows, P nodes, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from outrider.decode import grow
from outrider.decode.cost import Price
from outrider.decode.grow import Form, Nodes
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree, TreeShape
from outrider.scripts.proofs.engine_distribution import ProbabilityTable
from outrider.scripts.proofs.enumerator import Branches, Case

CPU = torch.device("cpu")


@dataclass
class Confident(Case):
    """A toy world whose drafts are grown at a price. form: of the draft, within the shape."""

    form: Form = field(default_factory=lambda: Form.chain(1))

    @staticmethod
    def random(generator: torch.Generator, max_nodes: int = 4, max_vocab: int = 4) -> Confident:
        """A world as `Case.random` makes it: a chain, a tree that is drawn or takes the most
        probable tokens, or a dynamic one, at a price that cuts some of it."""

        def pick(values: tuple[float, ...]) -> float:
            return values[int(torch.randint(len(values), (), generator=generator))]

        case = Case.random(generator, max_nodes, max_vocab)
        price = Price(pick((0.0, 0.1, 0.2, 0.35, 0.5)), pick((0.0, 0.3, 0.5, 0.7, 0.9)))
        known, depth = case.draft.shape[1], max(case.shape.depth, 1)
        # A distribution without replacement has no more children than tokens.
        paths = [path for path in case.shape.paths if max(path) < known]
        case.shape = TreeShape.of(paths or [(0,)])
        if len(case.shape) == case.shape.depth:
            form = Form.chain(depth, price)
        elif pick((0.0, 1.0)):
            form = Form("tree", depth, len(case.shape), case.shape, price=price)
        else:
            form = Form.tree(depth, len(case.shape), 2, case.shape, price)
        if pick((0.0, 0.0, 1.0)) and form.width:
            form = Form.tree(depth, len(case.shape), 2, None, price)
        own = {f.name: getattr(case, f.name) for f in fields(Case)}
        return Confident(**own, form=form)

    def propose(self, rng: Branches, rows: int) -> tuple[DraftTree, Tensor]:
        """See Case."""
        rng.padding = len(self.shape)
        budget = torch.full((rows,), self.shape.depth)
        tree = grow.draft(_Table(self, rows), self.form, budget, self.sampling, rng)  # type: ignore[arg-type]
        return tree, self.contexts(tree)


class _Table:
    """The distributions of a world as decode.grow.LevelSource. context: [B, P] of the nodes
    read last."""

    device = CPU

    def __init__(self, case: Case, rows: int) -> None:
        self.case, self.rows = case, rows
        self.context = torch.zeros(rows, 1, dtype=torch.int64)

    def draft_ids(self) -> Tensor | None:
        return self.case.draft_vocab

    def open(self, levels: int) -> Tensor:
        return self.case.draft[self.context]

    def level(self, nodes: Nodes) -> Tensor:
        self.context = self.case.child(nodes.of_parents(self.context), nodes.tokens)
        return self.case.draft[self.context]


class ConfidentTable(ProbabilityTable):
    """A drafter for the whole loop, grown at a price from a table. See also
    decode.grow.LevelSource."""

    name, device = "confident table", CPU

    def __init__(self, form: Form, vocab: int, seed: int = 0) -> None:
        super().__init__(vocab, seed)
        self.form, self.shape = form, form.shape
        self.max_nodes, self.max_depth = form.nodes, form.depth

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return grow.draft(self, self.form, budget, sampling, rng)

    def draft_ids(self) -> Tensor | None:
        return None

    def open(self, levels: int) -> Tensor:
        return self.table[self.last][:, None]

    def level(self, nodes: Nodes) -> Tensor:
        return self.table[nodes.tokens]
