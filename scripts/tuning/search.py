"""What can be set about a drafter: chains of K levels, trees of so many nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.ngram import NGram
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.drafters import drafting_head
from outrider.heads.names import NGRAM, NONE, DraftSpec, parse
from outrider.heads.tuned import DraftSettings

LEVELS = (1, 2, 3, 4, 6)  # of chains; the most that is allowed comes beside them
SIZES = (4, 8, 16, 32)  # nodes of trees
FLAT = (4,)  # levels of a dynamic tree


@dataclass(frozen=True)
class Tunable:
    """One drafter and the shapes that its drafts may have. head: None for n-grams."""

    target: Target
    head: Head | None
    shapes: tuple[str, ...]

    @classmethod
    def of(cls, spec: str, target: Target) -> Tunable:
        """Raise UserError for `none`, an unknown drafter, and for a size in its name."""
        draft = parse(spec)
        path, shape = draft.source, draft.shape
        if path == NONE or draft != DraftSpec(path, shape) or (path == NGRAM and shape):
            raise UserError(
                f"drafter: {spec}; give ngram, a run folder, a head folder or a smaller model, "
                "with @chain or @tree at most"
            )
        if path == NGRAM:
            return cls(target, None, ("chain",))
        return cls(target, drafting_head(path, target), (shape,) if shape else ("chain", "tree"))

    def default(self) -> DraftSettings:
        """Return what the drafter does untuned, in its own numbers."""
        shape: Any = self.head.cfg.shape if self.head else "chain"
        shape = shape if shape in self.shapes else self.shapes[0]
        drafter = self.drafter(DraftSettings(shape))
        nodes = drafter.max_nodes if shape == "tree" else None
        return DraftSettings(shape, drafter.max_depth, nodes)

    def drafter(self, settings: DraftSettings) -> Drafter:
        """Return a fresh drafter with these settings."""
        if self.head is None:
            return NGram(depth=settings.depth or NGram().max_depth)
        return self.head.drafter(self.target, settings.draft())

    def settings(self, depth: int, nodes: int) -> list[DraftSettings]:
        """Return the table of settings that are tried: at most so many levels and nodes. A head
        without the key `width` has static trees, the best of so many nodes at any depth."""
        depth = min(depth, (self.head.deepest if self.head else None) or depth)
        dynamic = self.head is not None and hasattr(self.head.cfg, "width")
        found = [DraftSettings("chain", depth=k) for k in within(LEVELS, depth)]
        for levels in within(FLAT, depth) if dynamic else (depth,):
            sizes = [n for n in within(SIZES, nodes) if n >= levels]
            found += [DraftSettings("tree", levels, n) for n in sizes]
        return [one for one in found if one.shape in self.shapes]


def within(values: Sequence[int], most: int) -> list[int]:
    """Return the sizes below `most`, and `most`."""
    return [value for value in values if value < most] + [most]
