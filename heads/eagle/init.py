"""Where a fresh EAGLE head starts: random weights, a layer of the target, the target's own
output side.

Shape letters: D width, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from conf.errors import UserError
from decode.target import Target
from heads.eagle.layer import Linear, RMSNorm
from heads.eagle.net import Eagle3Net, EagleNet

SPREAD = 1.5  # of a fresh EAGLE-3 head's logits


def backbone(target: Target) -> Any:
    """The target's layers with their final norm; of a model that also sees, the language part."""
    body = target.model.base_model
    return getattr(body, "language_model", body)


def reset_weights(net: Any, std: float) -> None:
    """Normal weights of spread `std`, norms at one, in place."""
    for name, weight in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(weight)
        elif name.endswith("norm.weight") or weight.dim() == 1:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, 0.0, std)


@torch.no_grad()
def copy_layer(net: EagleNet, target: Target, source: int, key: str = "head.init_layer") -> None:
    """Start the first draft layer as layer `source` of the target (and further layers as those
    after it).

    A wide projection gets the target's weights on the feature half and zeros on the embedding
    half. EAGLE-3's fc starts as the identity on the highest feature. Raises UserError when the
    target's layers are not built like a Llama's.
    """
    stack: Any = getattr(backbone(target), "layers", None)
    for i in range(len(net.layers)):
        layer: Any = net.layers[i]
        number = min(source + i, target.num_layers - 1)
        given: Any = stack[number] if stack is not None else None
        before = (
            layer.input_layernorm
            if layer.input_layernorm is not None
            else getattr(net, "hidden_norm", None)
        )
        try:
            names = [n for n, _ in layer.named_modules() if n.endswith("_proj")]
            found = {n: given.get_submodule(n).weight for n in names}
        except AttributeError:
            raise UserError(
                f"{key}: the target's layers ({type(given).__name__}) have no separate "
                "q, k, v, o and "
                "gate, up, down projections to copy; use head.init=random"
            ) from None
        for name, weight in found.items():
            mine = layer.get_submodule(name).weight
            if weight.shape[0] != mine.shape[0] or mine.shape[1] not in (
                weight.shape[1],
                2 * weight.shape[1],
            ):
                raise UserError(
                    f"{key}: the target's {name} is {tuple(weight.shape)}, the draft's "
                    f"{tuple(mine.shape)}"
                    "; use head.init=random"
                )
            mine.zero_()
            mine[:, -weight.shape[1] :] = weight.float()
        layer.post_attention_layernorm.weight.copy_(
            norm_weight(given.post_attention_layernorm, target)
        )
        if before is not None:
            before.weight.copy_(norm_weight(given.input_layernorm, target))
    width, fc = net.width, cast(Linear, net.fc)
    fc.weight.zero_()
    fc.weight[:, -width:] = torch.eye(width, device=fc.weight.device)


@torch.no_grad()
def norm_weight(norm: Any, target: Target) -> Tensor:
    """The factor [D] by which a norm scales, whatever its convention (Gemma stores it minus
    one): asked of it.
    """
    width = target.hidden_size
    x = torch.ones(width, dtype=target.dtype, device=target.device)
    x[1::2] = -1  # mean 0 and mean square 1: LayerNorm and RMSNorm leave it as it is
    return ((norm(x[None]) - norm(-x[None])) / 2 * x)[0].float()


@torch.no_grad()
def start_output(net: Eagle3Net, rows: Tensor, target: Target) -> None:
    """The LM head starts as the target's `rows` [Vd, D], the final norm as start_norm says."""
    net.lm_head.weight.copy_(rows)
    start_norm(net.norm, net.lm_head.weight, target)


@torch.no_grad()
def start_norm(final: RMSNorm, rows: Tensor, target: Target) -> None:
    """The final norm starts as the target's, shrunk until random outputs give logits of spread
    SPREAD under an LM head of `rows` [Vd, D]: at full size a fresh head is sure of random
    tokens (SmolLM2: a cross-entropy of 17 where guessing gives 9) and unlearns that first."""
    names = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")
    norm = next(
        (n for name in names if (n := getattr(backbone(target), name, None)) is not None), None
    )
    if isinstance(norm, nn.Module):
        final.weight.copy_(norm_weight(norm, target))
    spread = (rows * final.weight).square().sum(1).mean().sqrt()
    final.weight.mul_((SPREAD / spread).clamp(max=1.0))
