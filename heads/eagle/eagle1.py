"""EAGLE-1 (Li et al. 2401.15077): what it does otherwise than EAGLE-3.

Shape letters: D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.decode.target import Target
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import EagleHead
from outrider.heads.eagle.net import EagleNet
from outrider.heads.layers.modules import Linear
from outrider.heads.layers.rope import Rope


class Eagle1Net(EagleNet):
    """fc [D, 2 D] over (embedding, feature), layers; the LM head is the target's."""

    def __init__(self, cfg: EagleConfig, shape: dict[str, Any], features: int, size: int) -> None:
        super().__init__(shape)
        self.fc = Linear(2 * self.width, self.width, bias=cfg.fc_bias)
        self.layers = self.stack(False, False)

    def start(self, feats: Tensor) -> Tensor:
        """The target's output feature itself."""
        return feats[..., 0, :]

    def advance(
        self, e: Tensor, g: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """See EagleNet."""
        x = self.fc(torch.cat([e, g], -1))
        h = self.layers[0](x, x, rope, keep if len(self.layers) == 1 else None, **kwargs)
        return self._rest(h, rope, keep, **kwargs)


class Eagle1Head(EagleHead):
    """EAGLE-1: embedding and LM head are the target's and frozen; learns features and tokens."""

    kind, Net = "eagle1", Eagle1Net
    net: Eagle1Net

    @classmethod
    def choose_taps(cls, target: Target, cfg: EagleConfig) -> tuple[int, ...]:
        """The output after the final norm, which the LM head reads."""
        return (target.num_layers,)
