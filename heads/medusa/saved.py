"""What head.json says of Medusa and Hydra heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.decode.target import Target
from outrider.heads import shapes, vocab
from outrider.heads.saved import Saved


@dataclass(kw_only=True)
class ParallelSaved(Saved):
    """See Saved. width: of the target's features. taps: the hidden state that the heads read,
    one.
    """

    config: Any
    width: int
    vocab_size: int
    taps: list[int]
    tap_convention: str = ""

    def fits(self, target: Target) -> list[str]:
        """See Saved."""
        size = self.config.draft_vocab or self.vocab_size
        found = vocab.problems(self.vocab_size, self.config.draft_vocab, target.vocab_size)
        found = found or shapes.problems(self.calibration, self.config.heads, size)
        if self.width != target.hidden_size:
            found.append(f"width: {self.width}, the target's is {target.hidden_size}")
        if len(self.taps) != 1 or not 0 <= self.taps[0] <= target.num_layers:
            found.append(
                f"taps: {self.taps[:9]}; one hidden state of 0..{target.num_layers} is read"
            )
        return found
