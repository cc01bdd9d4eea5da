"""What head.json says of heads with decoder layers of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.decode.target import Target
from outrider.heads import shapes, vocab
from outrider.heads.layers.shape import LayerShape
from outrider.heads.limits import MOST_DEPTH
from outrider.heads.saved import Saved


@dataclass(kw_only=True)
class LayeredSaved(Saved):
    """See Saved. layer: shape of the draft layers. final: number of the target's hidden state
    behind its final norm. reads_table: false in heads of version 0.1, which read what the target's
    own layers read of a token."""

    config: Any
    layer: LayerShape
    vocab_size: int
    taps: list[int]
    final: int
    tap_convention: str = ""
    reads_table: bool = False

    def fits(self, target: Target) -> list[str]:
        """See Saved."""
        deep, size = target.num_layers, self.config.draft_vocab or self.vocab_size
        found = vocab.problems(self.vocab_size, self.config.draft_vocab, target.vocab_size)
        found = found or shapes.problems(self.calibration, MOST_DEPTH, size)
        found += self.layer.fits(target, self.config.layers, "layer")
        if not self.reads_table and vocab.scales(target):
            found.append(
                "reads_table: false; version 0.1 trained it on what the target makes of embeddings"
            )
        if self.final != deep:
            found.append(f"final: {self.final}, the target has {deep} layers")
        return found
