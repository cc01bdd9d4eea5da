"""What can be set about a drafter, and which settings are worth timing.

Chains and n-grams have K; parallel heads a static tree over the ranks of their heads;
drafters that go on from their own tokens (EAGLE, a separate model) a chain or a dynamic
tree of some depth and size. Static trees are grown best-first by the value of a node, the
chance that its whole path is right (heads/shapes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, generate
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import shapes
from outrider.heads.base import Head
from outrider.heads.drafters import drafting_head
from outrider.heads.names import NGRAM, NONE, DraftSpec, parse
from outrider.heads.shapes import Path
from outrider.heads.tuned import DraftSettings
from outrider.scripts.common.progress import OnProgress
from outrider.scripts.tuning import replay
from outrider.scripts.tuning.replay import Shadow, Text

PRIOR = 60.0  # recorded positions that the head's own calibration is worth
SUPERSET = 256  # nodes of the static tree that is recorded
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # of chains and dynamic trees
SIZES = (4, 8, 16, 32, 64, 128)  # nodes of trees
Texts = dict[str, list[Text]]  # by the shape that was recorded


@dataclass(frozen=True)
class Candidate:
    """A setting with the accepted length that replay says it has."""

    settings: DraftSettings
    accepted_length: float

    @property
    def cost(self) -> tuple[int, int]:
        """What its cycles take longer with: levels drafted, nodes verified."""
        depth = self.settings.depth or 0
        return depth, self.settings.nodes or depth


@dataclass
class DrafterFamily:
    """One drafter and what can be set about it. depth, nodes: the most of a draft. kinds:
    among "chain" and "tree". head: None for n-grams.
    """

    target: Target
    sampling: Sampling
    depth: int
    nodes: int
    kinds: list[str]
    head: Head | None = None

    @classmethod
    def of(
        cls, spec: str, target: Target, sampling: Sampling, depth: int, nodes: int
    ) -> DrafterFamily:
        """Raise UserError for `none`, an unknown drafter, or a shape that it does not have."""
        draft = parse(spec)
        path, shape = draft.source, draft.shape
        if path == NONE or draft != DraftSpec(path, shape) or (path == NGRAM and shape):
            raise UserError(
                f"drafter: {spec}; give ngram, a run folder, a head folder or a smaller model, "
                "with @chain or @tree at most"
            )
        if path == NGRAM:
            return cls(target, sampling, depth, nodes, ["chain"])
        head = drafting_head(path, target)
        kinds = [kind for kind in ("chain", "tree") if shape in ("", kind)]
        return cls(target, sampling, min(depth, head.deepest or depth), nodes, kinds, head)

    @property
    def parallel(self) -> bool:
        """K heads that guess at fixed distances."""
        return self.head is not None and hasattr(self.head.cfg, "heads")

    @property
    def calibration(self) -> dict[str, Any]:
        """What the head itself has measured of its acceptance, or what is assumed of it."""
        known = getattr(self.head, "calibration", {})
        return known if known.get("paths") else shapes.assumed(self.depth)

    def default(self) -> DraftSettings:
        """Return what the drafter does untuned."""
        shape: Any = self.head.cfg.shape if self.head else "chain"
        return DraftSettings(shape if shape in self.kinds else "chain")

    def drafter(self, settings: DraftSettings) -> Drafter:
        """Return a fresh drafter with these settings."""
        if self.head is None:
            return NGram(depth=settings.depth or NGram().max_depth)
        return self.head.drafter(self.target, settings.draft())

    def dynamic(self, depth: int, nodes: int) -> DraftSettings:
        """Return a dynamic tree, as wide as the head has it."""
        assert self.head is not None, "n-grams have no trees"
        return DraftSettings("tree", depth, nodes, self.head.cfg.width)

    def recorders(self) -> dict[str, Drafter]:
        """Return drafters whose drafts hold those of every setting, by shape."""
        kinds, made = self.kinds, {"chain": DraftSettings("chain", depth=self.depth)}
        if self.parallel:
            kinds = ["tree"]
            assumed = shapes.assumed(self.depth, SUPERSET)["paths"]
            known = {tuple(p) for p in (*assumed, *self.calibration["paths"])}
            paths = sorted((p for p in known if len(p) <= self.depth), key=lambda p: (len(p), p))
            made["tree"] = DraftSettings("tree", self.depth, len(paths), paths=tuple(paths))
        elif "tree" in kinds:
            made["tree"] = self.dynamic(self.depth, self.nodes)
        return {kind: self.drafter(made[kind]) for kind in kinds}

    def record(
        self, prompts: Sequence[list[int]], tokens: int, seed: int, on_progress: OnProgress
    ) -> Texts:
        """Return what `recorders` draft at every position of the target's plain answers."""
        recorders = self.recorders()
        out: Texts = {name: [] for name in recorders}
        for i, ids in enumerate(prompts):
            limit = min(tokens, self.target.context_length - len(ids))
            shadow, request = Shadow(recorders), Request(ids, tokens, id=i * 64)
            run = generate(self.target, shadow, [request], self.sampling, seed=seed)
            answer = run.generations[0].token_ids
            for name in recorders:
                out[name].append(Text(answer, limit, shadow.drafts[name]))
            on_progress(i + 1, len(prompts))
        return out

    def candidates(self, texts: Texts) -> list[Candidate]:
        """Return settings within the bounds, each with its accepted length."""
        out = list[Candidate]()

        def add(settings: DraftSettings, kept: list[replay.Kept], found: list[Text]) -> None:
            length = replay.accepted_length(found, kept, settings.depth or 0)
            out.append(Candidate(settings, length))

        chains, trees = texts["tree" if self.parallel else "chain"], texts.get("tree", [])
        for k in within(DEPTHS, self.depth) if "chain" in self.kinds else ():
            add(DraftSettings("chain", depth=k), replay.chain_of(chains, k), chains)
        for n in within(SIZES, self.nodes) if "tree" in self.kinds else ():
            if self.parallel:
                static = static_settings(value_of(trees, self.calibration), n, self.depth)
                add(static, replay.static_of(trees, static.paths or ()), trees)
                continue
            for depth in within(DEPTHS, self.depth):
                one = self.dynamic(depth, n)
                width = one.width or 1
                if depth <= n <= width + (depth - 1) * width**2:
                    add(one, replay.dynamic_of(trees, depth, n), trees)
        return out


def within(values: Sequence[int], most: int) -> list[int]:
    """Return the sizes below `most`, and `most`."""
    return [value for value in values if value < most] + [most]


def value_of(texts: Sequence[Text], calibration: dict[str, Any]) -> Callable[[Path], float]:
    """Return the chance that a path is right: recorded hits, smoothed by the head's
    calibration."""
    found = [path for text in texts for path in text.paths.values()]
    hits = Counter(path[:d] for path in found for d in range(1, len(path) + 1))
    known = dict(zip(map(tuple, calibration["paths"]), calibration["values"], strict=True))
    return lambda path: (hits[path] + PRIOR * known.get(path, 0.0)) / (len(found) + PRIOR)


def static_settings(value: Callable[[Path], float], nodes: int, depth: int) -> DraftSettings:
    """Return what asks for the best static tree of so many nodes and levels."""
    tree = [path for path, _ in shapes.grow(value, nodes, depth)]
    paths = tuple(sorted(tree, key=lambda p: (len(p), p)))
    return DraftSettings("tree", depth=max(map(len, paths)), nodes=len(paths), paths=paths)


def worth_timing(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the settings of which no other of the same shape accepts as much with no more
    levels and no more nodes."""
    return [
        one
        for one in candidates
        if not any(
            other.settings.shape == one.settings.shape
            and other.cost != one.cost
            and all(a <= b for a, b in zip(other.cost, one.cost, strict=True))
            and other.accepted_length >= one.accepted_length
            for other in candidates
        )
    ]
