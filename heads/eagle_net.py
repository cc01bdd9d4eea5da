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

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from conf.errors import UserError
from decode.target import Target
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


def reset_weights(net: EagleNet, std: float) -> None:
    """Normal weights of spread `std`, norms at one, in place."""
    for name, weight in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(weight)
        elif name.endswith("norm.weight") or weight.dim() == 1:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, 0.0, std)


def backbone(target: Target) -> Any:
    """The target's stack of layers with its final norm; of a model that also sees, the language part."""
    body = target.model.base_model
    return getattr(body, "language_model", body)


@torch.no_grad()
def copy_layer(net: EagleNet, target: Target, source: int, key: str = "head.init_layer") -> None:
    """Start the first draft layer as layer `source` of the target (and further layers as those after it).

    A wide projection gets the target's weights on the feature half and zeros on the embedding half. EAGLE-3's fc starts
    as the identity on the highest feature. Raises UserError when the target's layers are not built like a Llama's.
    """
    stack: Any = getattr(backbone(target), "layers", None)
    for i in range(len(net.layers)):
        layer: Any = net.layers[i]
        number = min(source + i, target.num_layers - 1)
        given: Any = stack[number] if stack is not None else None
        try:
            names = [n for n, _ in layer.named_modules() if n.endswith("_proj")]
            found = {n: given.get_submodule(n).weight for n in names}
        except AttributeError:
            raise UserError(f"{key}: the target's layers ({type(given).__name__}) have no separate q, k, v, o and "
                            "gate, up, down projections to copy; use head.init=random") from None  # fmt: skip
        for name, weight in found.items():
            mine = layer.get_submodule(name).weight
            if weight.shape[0] != mine.shape[0] or mine.shape[1] not in (weight.shape[1], 2 * weight.shape[1]):
                raise UserError(f"{key}: the target's {name} is {tuple(weight.shape)}, the draft's {tuple(mine.shape)}"
                                "; use head.init=random")  # fmt: skip
            mine.zero_()
            mine[:, -weight.shape[1] :] = weight.float()
        layer.post_attention_layernorm.weight.copy_(norm_weight(given.post_attention_layernorm, target))
        before = layer.input_layernorm if layer.input_layernorm is not None else getattr(net, "hidden_norm", None)
        if before is not None:
            before.weight.copy_(norm_weight(given.input_layernorm, target))
    width, fc = net.width, cast(Linear, net.fc)
    fc.weight.zero_()
    fc.weight[:, -width:] = torch.eye(width, device=fc.weight.device)


@torch.no_grad()
def norm_weight(norm: Any, target: Target) -> Tensor:
    """The factor [D] by which a norm scales, whatever its convention (Gemma stores it minus one): asked of it."""
    width = target.hidden_size
    x = torch.ones(width, dtype=target.dtype, device=target.device)
    x[1::2] = -1  # mean 0 and mean square 1: LayerNorm and RMSNorm leave it as it is
    return ((norm(x[None]) - norm(-x[None])) / 2 * x)[0].float()
