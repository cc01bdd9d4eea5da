"""The kinds of drafters as the tuner sees them: what can be set, what must be recorded, what
may be chosen.

Chains and n-grams have K; parallel heads a static tree over the ranks of their heads; drafters
that go on from their own tokens (EAGLE, a separate model) a chain or a dynamic tree of some
depth, width and size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, generate
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.drafters import drafting_head
from outrider.heads.names import NGRAM, NONE, DraftSpec, parse
from outrider.heads.tuned import DraftSettings
from outrider.scripts.common.progress import OnProgress
from outrider.scripts.tuning import search
from outrider.scripts.tuning.replay import Shadow, Text
from outrider.scripts.tuning.search import Candidate

SUPERSET = 256  # nodes of the static tree that is recorded
DRAWN_CHAINS, DRAWN_TREES = (2, 4, 6), (8, 16, 32)  # levels and nodes that are measured
Texts = dict[str, list[Text]]  # of every drafter that was recorded


@dataclass(frozen=True)
class Bounds:
    """How far the search goes. depth: of chains and dynamic trees (heads have their own
    limit).
    """

    depth: int = 8
    nodes: int = 64
    width: int = 8


@dataclass
class DrafterFamily:
    """One drafter and what can be set about it. kinds: among "chain" and "tree". head: None
    for n-grams. notes: what the search leaves out, and why.
    """

    target: Target
    sampling: Sampling
    bounds: Bounds
    kinds: list[str]
    head: Head | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, spec: str, target: Target, sampling: Sampling, bounds: Bounds) -> DrafterFamily:
        """Raises UserError for `none`, an unknown drafter, or a shape that it does not have."""
        draft = parse(spec)
        path, shape = draft.source, draft.shape
        if path == NONE or draft != DraftSpec(path, shape) or (path == NGRAM and shape):
            raise UserError(
                f"drafter: {spec}; give ngram, a run folder, a head folder or a smaller model, "
                "with @chain or @tree at most"
            )
        if path == NGRAM:
            return cls(target, sampling, bounds, ["chain"])
        head = drafting_head(path, target)
        kinds = [k for k in ("chain", "tree") if shape in ("", k)]
        if target.support != "tree":
            kinds = [k for k in kinds if k == "chain"]
        if head.deepest is not None:
            bounds = replace(bounds, depth=min(bounds.depth, head.deepest))
        made = cls(target, sampling, bounds, kinds, head)
        if not kinds:
            raise UserError(f"drafter: {spec}: this target takes chains only; write {path}@chain")
        if made.drawn():
            made.notes.append(
                f"each {' and '.join(made.drawn_kinds)} drawn from the drafter's own distribution "
                "cannot be replayed: a few sizes are measured"
            )
        return made

    @property
    def parallel(self) -> bool:
        """K heads that guess at fixed distances."""
        return self.head is not None and hasattr(self.head.cfg, "heads")

    @property
    def deepest(self) -> int:
        if self.head is None:
            return max(self.bounds.depth, NGram().max_depth)
        return self.head.cfg.heads if self.parallel else self.bounds.depth

    @property
    def calibration(self) -> dict[str, Any]:
        """What the head itself has measured of its acceptance."""
        return getattr(self.head, "calibration", {})

    @property
    def drawn_kinds(self) -> list[str]:
        """Those whose candidates are drawn from the drafter's distribution, so that replay cannot
        say what would be accepted."""
        if self.head is None or self.sampling.greedy:
            return []
        trees = getattr(self.head.cfg, "tree_draw", "fixed") == "sampled"
        return [kind for kind in self.kinds if kind == "chain" or trees]

    @property
    def replayed_kinds(self) -> list[str]:
        return [kind for kind in self.kinds if kind not in self.drawn_kinds]

    def drawn(self) -> list[DraftSettings]:
        """Drawn chains and trees of a few sizes: they are measured without a replay."""
        out = list[DraftSettings]()
        if "chain" in self.drawn_kinds:
            depths = search.within(DRAWN_CHAINS, self.deepest)
            out += [DraftSettings("chain", depth=k) for k in depths]
        if "tree" in self.drawn_kinds:
            sizes = search.within(DRAWN_TREES, self.bounds.nodes)
            out += dict.fromkeys(self._static(n) for n in sizes)
        return out

    def default(self) -> DraftSettings:
        """What the drafter does untuned."""
        if self.head is None:
            return DraftSettings("chain", depth=NGram().max_depth)
        cfg = self.head.cfg
        kind = cfg.shape if cfg.shape in self.kinds else self.kinds[0]
        form = self.head.form(self.target, DraftSpec(shape=kind))
        if kind == "chain":
            return DraftSettings("chain", depth=form.depth)
        if self.parallel:
            tree = self.head.tree(cfg.nodes, self.deepest)
            return DraftSettings("tree", depth=tree.depth, nodes=len(tree), paths=tree.paths)
        return DraftSettings("tree", depth=form.depth, nodes=cfg.nodes, width=cfg.width)

    def drafter(self, settings: DraftSettings) -> Drafter:
        """A fresh drafter with these settings."""
        if self.head is None:
            return NGram(depth=settings.depth or NGram().max_depth)
        return self.head.drafter(self.target, settings.draft())

    def _static(self, nodes: int) -> DraftSettings:
        value = search.value_of([], self.calibration, self.deepest)
        return search.static_settings(value, nodes, self.deepest)

    def recorders(self) -> dict[str, Drafter]:
        """Drafters whose drafts hold those of every setting within the bounds."""
        b, kinds = self.bounds, self.replayed_kinds
        found = {
            "chain": DraftSettings("chain", depth=self.deepest),
            "tree": DraftSettings("tree", depth=b.depth, nodes=b.nodes, width=b.width),
        }
        if self.parallel and kinds:
            found, kinds = {"tree": self._static(SUPERSET)}, ["tree"]
        return {kind: self.drafter(found[kind]) for kind in kinds}

    def record(
        self, prompts: Sequence[list[int]], tokens: int, seed: int, on_progress: OnProgress
    ) -> Texts:
        """What `recorders` draft at every position of the target's plain answers."""
        recorders = self.recorders()
        out: Texts = {name: [] for name in recorders}
        for i, ids in enumerate(prompts):
            limit = min(tokens, self.target.context_length - len(ids))
            if recorders:
                shadow = Shadow(recorders)
                run = generate(
                    self.target, shadow, [Request(ids, tokens, id=i * 64)], self.sampling, seed=seed
                )
                for name in recorders:
                    out[name].append(
                        Text(run.generations[0].token_ids, limit, shadow.drafts[name][0])
                    )
            on_progress(i + 1, len(prompts))
        return out

    def candidates(self, texts: Texts) -> list[Candidate]:
        """Settings within the bounds, each with its accepted length."""
        b, kinds, out = self.bounds, self.replayed_kinds, list[Candidate]()
        if "chain" in kinds:
            out += search.chains(texts["tree" if self.parallel else "chain"], self.deepest)
        if "tree" in kinds and self.parallel:
            out += search.static_trees(texts["tree"], self.calibration, self.deepest, b.nodes)
        elif "tree" in kinds:
            out += search.dynamic_trees(texts["tree"], b.depth, b.nodes, b.width)
        return out
