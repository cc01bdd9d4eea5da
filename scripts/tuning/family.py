"""The kinds of drafters as the tuner sees them: what can be set, what must be recorded, what
may be chosen.

Chains and n-grams have K; parallel heads a static tree over the ranks of their heads; drafters
that go on from their own tokens (EAGLE, a separate model) a chain or a dynamic tree of some
depth, width and size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode import stats
from outrider.decode.cost import Price
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, generate
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.drafters import drafting_head, settings_folder
from outrider.heads.names import NGRAM, NONE, DraftSpec, parse
from outrider.heads.tuned import DraftSettings
from outrider.scripts.common.progress import OnProgress
from outrider.scripts.tuning import replay, search
from outrider.scripts.tuning.cost import CycleShape
from outrider.scripts.tuning.latency import TimedSetting
from outrider.scripts.tuning.replay import Shadow, Text
from outrider.scripts.tuning.search import Candidate, Pricing

SUPERSET = 256  # nodes of the static tree that is recorded
CONFIDENT = "confident"  # name of the dynamic tree that is recorded of heads with static ones
DRAWN = (8, 16, 32, 64)  # nodes of the drawn trees that are measured
# Of a node and of a level, for the largest of them.
DRAWN_PRICES = (Price(0.03, 0.15), Price(0.05, 0.35), Price(0.1, 0.35))


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
    for n-grams.
    folder: where its settings go, None for n-grams and for repositories, which have no place
        for them.

    notes: what the search leaves out, and why.
    """

    spec: str
    target: Target
    sampling: Sampling
    bounds: Bounds
    kinds: list[str]
    head: Head | None = None
    folder: File | None = None
    notes: list[str] = field(default_factory=list)
    unconditional: list[float] = field(default_factory=list)  # of sampled chains, measured

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
            return cls(spec, target, sampling, bounds, ["chain"])
        folder, head = settings_folder(draft), drafting_head(path, target)
        kinds = [k for k in ("chain", "tree") if shape in ("", k)]
        if target.support != "tree":
            kinds = [k for k in kinds if k == "chain"]
        if head.deepest is not None:
            bounds = replace(bounds, depth=min(bounds.depth, head.deepest))
        made = cls(spec, target, sampling, bounds, kinds, head, folder)
        if not kinds:
            raise UserError(f"drafter: {spec}: this target takes chains only; write {path}@chain")
        if made.drawn():
            made.notes.append(
                "trees drawn from the drafter's own distribution cannot be replayed: a few sizes "
                "are measured"
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
    def drawn_chain(self) -> bool:
        """Whether chains are drawn from a distribution, so that replay cannot say what would be
        accepted.
        """
        return self.head is not None and not self.sampling.greedy

    @property
    def drawn_tree(self) -> bool:
        return (
            getattr(getattr(self.head, "cfg", None), "tree_draw", "fixed") == "sampled"
            and not self.sampling.greedy
        )

    def drawn(self) -> list[DraftSettings]:
        """Trees whose candidates are drawn, where there are such trees: they are measured
        without a prediction.
        """
        if "tree" not in self.kinds or not self.drawn_tree:
            return []
        sizes = sorted({min(n, self.bounds.nodes) for n in DRAWN})
        return list(dict.fromkeys(self._static(self.deepest, n) for n in sizes))

    def drawn_at_a_price(self) -> list[DraftSettings]:
        """Drawn trees that the drafter's own confidence cuts, to be measured beside the others."""
        most = search.PRICED_NODES[-1]
        large = [one for one in self.drawn() if (one.nodes or 0) <= most][-1:]
        return [replace(one, price=price) for one in large for price in DRAWN_PRICES]

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

    # -- measuring

    def probes(self) -> list[TimedSetting]:
        """Settings spread over the bounds, to fit the drafter's time to."""
        found: list[DraftSettings] = []
        if "chain" in self.kinds:
            found += [
                DraftSettings("chain", depth=k)
                for k in sorted({1, (self.deepest + 1) // 2, self.deepest})
            ]
        if "tree" in self.kinds and self.drawn_tree:
            found += self.drawn()
        elif "tree" in self.kinds and self.parallel:
            sizes = sorted({min(n, self.bounds.nodes) for n in (4, 16, 64)})
            found += [
                self._static(d, n)
                for n in sizes
                for d in sorted({2, self.deepest})
                if d <= self.deepest
            ]
            found.append(self._dynamic())
        elif "tree" in self.kinds:
            b = self.bounds
            half = (max(b.depth // 2, 1), max(b.width // 2, 1))
            spread = (
                (1, b.width, b.width),
                (2, 2, 4),
                (b.depth, b.width, 64),
                (b.depth, half[1], 16),
                (half[0], b.width, 32),
            )
            found += [
                DraftSettings("tree", depth=d, nodes=min(n, b.nodes), width=w) for d, w, n in spread
            ]
        return [
            TimedSetting(s.shape, CycleShape.of(s), self.drafter(s)) for s in dict.fromkeys(found)
        ]

    def _static(self, depth: int, nodes: int) -> DraftSettings:
        value = search.value_of([], self.calibration, self.deepest)
        return search.static_settings(search.static_tree(value, nodes, depth))

    def recorders(self) -> dict[str, Drafter]:
        """Drafters whose drafts hold those of every setting within the bounds."""
        if self.head is None:
            return {"chain": self.drafter(DraftSettings("chain", depth=self.deepest))}
        if self.parallel:
            if self.drawn_chain and (self.kinds == ["chain"] or self.drawn_tree):
                return {}
            found = {"tree": self.drafter(self._static(self.deepest, SUPERSET))}
            if "tree" in self.kinds:
                found[CONFIDENT] = self.drafter(self._dynamic())
            return found
        b, out = self.bounds, {}
        if "chain" in self.kinds and not self.drawn_chain:
            out["chain"] = self.drafter(DraftSettings("chain", depth=b.depth))
        if "tree" in self.kinds and not self.drawn_tree:
            out["tree"] = self.drafter(self._dynamic())
        return out

    def _dynamic(self) -> DraftSettings:
        """The largest dynamic tree."""
        b = self.bounds
        return DraftSettings("tree", depth=min(b.depth, self.deepest), nodes=b.nodes, width=b.width)

    def record(
        self, prompts: Sequence[list[int]], tokens: int, seed: int, on_progress: OnProgress
    ) -> dict[str, list[Text]]:
        """What `recorders` draft at every position of the target's plain answers."""
        recorders = self.recorders()
        out: dict[str, list[Text]] = {name: [] for name in recorders}
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
        if self.drawn_chain and "chain" in self.kinds:
            deep = self.drafter(DraftSettings("chain", depth=self.deepest))
            requested = [Request(ids, tokens, id=i * 64) for i, ids in enumerate(prompts)]
            run = generate(self.target, deep, requested, self.sampling, seed=seed)
            clean = [c for g in run.generations for c in stats.split(g).clean]
            self.unconditional = [p.unconditional for p in stats.acceptance_by_position(clean)]
        return out

    # -- choosing

    def candidates(self, pricing: Pricing, texts: dict[str, list[Text]]) -> list[Candidate]:
        """Every setting within the bounds with what is expected of it."""
        b, out = self.bounds, list[Candidate]()
        if "chain" in self.kinds and self.drawn_chain:
            out += search.sampled_chains(pricing, self.unconditional)
        elif "chain" in self.kinds and self.parallel:
            # The best rank of every level, read off the recorded tree.
            found = replay.paths(texts["tree"])
            straight = lambda k: replay.static_of(found, [(0,) * (d + 1) for d in range(k)])
            out += search.chains(pricing, texts["tree"], self.deepest, straight)
        elif "chain" in self.kinds:
            first = lambda k: replay.chain_of(texts["chain"], k)
            out += search.chains(pricing, texts["chain"], self.deepest, first)
        if self.drawn_tree:
            return out
        if "tree" in self.kinds and self.parallel:
            out += search.static_trees(
                pricing, texts["tree"], self.calibration, self.deepest, b.nodes
            )
        elif "tree" in self.kinds:
            widths = [w for w in (1, 2, 3, 4, 6, 8, 10, 12, 16) if 1 < w <= b.width]
            nodes = [n for n in range(2, b.nodes + 1) if n <= 16 or n % 4 == 0]
            depths = range(1, b.depth + 1)
            out += search.dynamic_trees(pricing, texts["tree"], depths, nodes, widths)
        return out

    def confident(self, pricing: Pricing, texts: dict[str, list[Text]]) -> list[Candidate]:
        """Dynamic trees with every price, with what is expected of them."""
        if "tree" not in self.kinds or self.drawn_tree:
            return []
        b, most = self.bounds, self._dynamic()
        widths = sorted({min(width, b.width) for width in (1, 4, b.width)})
        found = texts[CONFIDENT if self.parallel else "tree"]
        return search.priced_trees(pricing, found, most.depth or 1, b.nodes, widths)

    def acceptance(self, texts: dict[str, list[Text]]) -> dict[str, Any]:
        """Acceptance by position and rank at every position of the texts: what the search went
        by.
        """
        if not texts or self.unconditional and "tree" not in texts:
            return {"unconditional": self.unconditional}
        name = "tree" if "tree" in texts else "chain"
        found = [path for one in replay.paths(texts[name]) for path in one.values()]
        total = max(len(found), 1)
        by_rank: list[list[float]] = []
        for d in range(self.deepest):
            counts = Counter(p[d] for p in found if len(p) > d)
            by_rank.append([counts[rank] / total for rank in range(max(counts, default=-1) + 1)])
        return {
            "positions": len(found),
            "recorded": name,
            "by_level_and_rank": by_rank,
            "reached": [sum(level) for level in by_rank],
        }
