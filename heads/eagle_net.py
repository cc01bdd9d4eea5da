"""The networks of EAGLE-1 and EAGLE-3: what training and decoding both run, so that they cannot drift apart.

Row t takes the target's features at t and the embedding of token t + 1, and predicts token t + 2; its rotary position
is t. Its output `h` is the next row's feature when the drafter goes on by itself.

EAGLE-1 (Li et al. 2401.15077): x = fc(e, f); layers without an input norm at the first; h is the guess at f_{t+1}, read
by the target's own frozen LM head.
EAGLE-3 (Li et al. 2503.01840): g = fc(low, middle, high) for rows of the target only; the first layer's attention reads
(norm(e), norm(g)) and adds to g itself; h is the next g; a final norm and an LM head of its own over a draft
vocabulary.
EAGLE-3.1: norm_before_fc norms each feature before fc; norm_output hands on the normed h.

Shape letters: D width, Vd draft vocabulary, F tapped features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads.eagle_attention import NAME
from heads.eagle_layer import DraftLayer, Linear, RMSNorm, Rope


class EagleNet(nn.Module):
    """Base of both. shape: keys of a LlamaConfig (layer_config). Weights are float32 at first; see DraftLayer."""

    config: LlamaConfig
    layers: nn.ModuleList

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.config = LlamaConfig(**shape)
        self.config._attn_implementation = NAME
        self.width = int(shape["hidden_size"])

    def start(self, feats: Tensor) -> Tensor:
        """Target features [.., F, D] -> the first feature g [.., D]."""
        raise TypeError("a subclass defines it")

    def advance(self, e: Tensor, g: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Embeddings and features [.., D] -> h [.., D], or [n, D] with `keep` (see DraftLayer)."""
        raise TypeError("a subclass defines it")

    def feed(self, h: Tensor) -> Tensor:
        """h [.., D] -> the feature of the next step."""
        return h

    def read(self, h: Tensor) -> Tensor:
        """h [.., D] -> what the LM head reads."""
        return h

    def _rest(self, h: Tensor, rope: Rope, keep: Tensor | None, **kwargs: Any) -> Tensor:
        last = len(self.layers) - 1
        for i, layer in enumerate(list(self.layers)[1:], 1):
            before: Any = layer.input_layernorm
            h = layer(h, before(h), rope, keep if i == last else None, **kwargs)
        return h


class Eagle1Net(EagleNet):
    """fc [D, 2 D] over (embedding, feature), layers; the LM head is the target's. fc_bias: with a bias in fc."""

    def __init__(self, shape: dict[str, Any], fc_bias: bool = False) -> None:
        super().__init__(shape)
        width = self.config.hidden_size
        self.fc = Linear(2 * width, width, bias=fc_bias)
        self.layers = nn.ModuleList(
            DraftLayer(self.config, i, False, i > 0) for i in range(self.config.num_hidden_layers)
        )

    def start(self, feats: Tensor) -> Tensor:
        """The target's output feature itself."""
        return feats[..., 0, :]

    def advance(self, e: Tensor, g: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any) -> Tensor:
        """See EagleNet."""
        x = self.fc(torch.cat([e, g], -1))
        h = self.layers[0](x, x, rope, keep if len(self.layers) == 1 else None, **kwargs)
        return self._rest(h, rope, keep, **kwargs)


class Eagle3Net(EagleNet):
    """fc [D, F D] without bias, layers of which the first is wide, final norm, lm_head [Vd, D].

    norm_joined: one norm over the features side by side before fc. norm_before_residual: the first layer adds to
    norm(g), not to g. Neither is trained here; both occur in published heads.
    """

    def __init__(
        self, shape: dict[str, Any], features: int, vocab: int, norm_before_fc: bool, norm_output: bool,
        norm_joined: bool = False, norm_before_residual: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.fc = Linear(features * width, width, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(features)) if norm_before_fc else None
        self.input_norm = RMSNorm(features * width, eps) if norm_joined else None
        self.embed_norm, self.hidden_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.layers = nn.ModuleList(
            DraftLayer(self.config, i, i == 0, i > 0) for i in range(self.config.num_hidden_layers)
        )
        self.norm = RMSNorm(width, eps)
        self.lm_head = Linear(width, vocab, bias=False)
        self.norm_output, self.norm_before_residual = norm_output, norm_before_residual

    def start(self, feats: Tensor) -> Tensor:
        """The fused features."""
        if self.input_norm is not None:
            feats = self.input_norm(feats.flatten(-2)).unflatten(-1, feats.shape[-2:])
        if self.fc_norm is not None:
            return self.fc(torch.cat([norm(feats[..., i, :]) for i, norm in enumerate(self.fc_norm)], -1))
        return self.fc(feats.flatten(-2))

    def advance(self, e: Tensor, g: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any) -> Tensor:
        """See EagleNet."""
        normed = self.hidden_norm(g)
        x = torch.cat([self.embed_norm(e), normed], -1)
        base = normed if self.norm_before_residual else g
        h = self.layers[0](base, x, rope, keep if len(self.layers) == 1 else None, **kwargs)
        return self._rest(h, rope, keep, **kwargs)

    def feed(self, h: Tensor) -> Tensor:
        """See EagleNet."""
        return self.norm(h) if self.norm_output else h

    def read(self, h: Tensor) -> Tensor:
        """The normed h."""
        return self.norm(h)
