"""The networks of EAGLE-1 and EAGLE-3: what training and decoding both run, so that they
cannot drift apart.

Row t takes the target's features at t and the embedding of token t + 1, and predicts token t +
2; its rotary position is t. Its output `h` is the next row's feature when the drafter goes on
by itself.

EAGLE-1 (Li et al. 2401.15077): x = fc(e, f); h is the guess at f_{t+1}, read by the
target's own frozen LM head. EAGLE-3 (Li et al. 2503.01840): g = fc(low, middle, high) for
rows of the target only; the first layer's attention reads (norm(e), norm(g)) and adds to g
itself; h is the next g; a final norm and an LM head of its own over a draft vocabulary.

Shape letters: D width, Vd draft vocabulary, F tapped features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.eagle.config import EagleConfig
from outrider.heads.layers.attention import NAME
from outrider.heads.layers.layer import DraftLayer, DraftNet, Linear, RMSNorm, Rope, run_layers


class EagleNet(DraftNet):
    """Base of both. Weights are float32 at first; see DraftLayer."""

    layers: nn.ModuleList

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__(shape)
        self.width = int(shape["hidden_size"])
        self.config._attn_implementation = NAME  # as transformers' registry has it

    def stack(self, wide: bool, norm: bool) -> nn.ModuleList:
        """Return the layers; wide, norm: of the first one, see DraftLayer."""
        count = self.config.num_hidden_layers
        layers = (DraftLayer(self.config, i, wide and not i, norm or i > 0) for i in range(count))
        return nn.ModuleList(layers)

    def start(self, feats: Tensor) -> Tensor:
        """Target features [.., F, D] -> the first feature g [.., D]."""
        raise TypeError("a subclass defines it")

    def advance(
        self, e: Tensor, g: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Embeddings and features [.., D] -> h [.., D], or [n, D] with `keep` (see
        DraftLayer)."""
        raise TypeError("a subclass defines it")

    def feed(self, h: Tensor) -> Tensor:
        """h [.., D] -> the feature of the next step."""
        return h

    def read(self, h: Tensor) -> Tensor:
        """h [.., D] -> what the LM head reads."""
        return h


class Eagle1Net(EagleNet):
    """fc [D, 2 D] over (embedding, feature), layers; the LM head is the target's."""

    def __init__(self, cfg: EagleConfig, shape: dict[str, Any], features: int, size: int) -> None:
        super().__init__(shape)
        self.fc = Linear(2 * self.width, self.width, bias=cfg.fc_bias)
        self.layers = self.stack(False, False)

    def start(self, feats: Tensor) -> Tensor:
        return feats[..., 0, :]

    def advance(
        self, e: Tensor, g: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        x = self.fc(torch.cat([e, g], -1))
        return run_layers(self.layers, x, x, rope, keep, **kwargs)


class Eagle3Net(EagleNet):
    """fc [D, F D] without bias, layers of which the first is wide, final norm, lm_head [Vd,
    D].

    masked: what P-EAGLE (2602.01469) reads from depth 1 on; its mask, an embedding [1, D] and
    tapped features [F, D], may attend where a row of training-time test may.

    norm_joined: one norm over the features side by side before fc. norm_before_residual: the
    first layer adds to norm(g), not to g. Neither is trained here; both occur in published
    heads."""

    def __init__(self, cfg: EagleConfig, shape: dict[str, Any], features: int, size: int) -> None:
        """size: of the target's vocabulary."""
        super().__init__(shape)
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.fc = Linear(features * width, width, bias=False)
        each = (RMSNorm(width, eps) for _ in range(features))
        self.fc_norm = nn.ModuleList(each) if cfg.norm_before_fc else None
        self.input_norm = RMSNorm(features * width, eps) if cfg.norm_joined else None
        self.embed_norm, self.hidden_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.layers = self.stack(True, False)
        self.norm = RMSNorm(width, eps)
        self.lm_head = Linear(width, cfg.draft_vocab or size, bias=False)
        self.norm_output = cfg.norm_output
        self.norm_before_residual = cfg.norm_before_residual
        some = cfg.parallel
        self.mask_embed = nn.Parameter(torch.zeros(1, width)) if some else None
        self.mask_feats = nn.Parameter(torch.zeros(features, width)) if some else None

    def masked(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(embeddings, features) of masks, [*shape, D] each."""
        assert self.mask_embed is not None and self.mask_feats is not None
        g = self.start(self.mask_feats.to(dtype))
        return tuple(t.to(dtype).expand(*shape, -1) for t in (self.mask_embed[0], g))  # type: ignore[return-value]

    def start(self, feats: Tensor) -> Tensor:
        if self.input_norm is not None:
            feats = self.input_norm(feats.flatten(-2)).unflatten(-1, feats.shape[-2:])
        if self.fc_norm is not None:
            normed = [norm(feats[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(normed, -1))
        return self.fc(feats.flatten(-2))

    def advance(
        self, e: Tensor, g: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        normed = self.hidden_norm(g)
        x = torch.cat([self.embed_norm(e), normed], -1)
        residual = normed if self.norm_before_residual else g
        return run_layers(self.layers, residual, x, rope, keep, **kwargs)

    def feed(self, h: Tensor) -> Tensor:
        return self.norm(h) if self.norm_output else h

    def read(self, h: Tensor) -> Tensor:
        return self.norm(h)
