"""What decode/probe.py finds out about a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.decode.cache import LayerShape
from outrider.decode.masks import FULL, Reach


@dataclass(frozen=True)
class LMHead:
    """logits = cap * tanh(scale * lm_head(h) / cap), cap None: no cap. exact: the model's
    logits agree.
    """

    scale: float = 1.0
    cap: float | None = None
    exact: bool = False
    reason: str = ""

    def finish(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass
class Probe:
    """support "tree" or "chain" (and why), K/V shapes per layer, reach per layer type, mask
    rows per node.

    tested: tokens of the longest text whose logits were compared with a plain pass's.
    """

    support: str
    shapes: list[LayerShape | None]
    reaches: dict[str, Reach] = field(default_factory=lambda: {"full_attention": FULL})
    tile: int = 1
    reason: str = ""
    tested: int = 0
