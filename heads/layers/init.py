"""Where fresh draft layers start: random weights, the target's own output side.

Shape letters: D width, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.decode.target import Target
from outrider.heads.layers.layer import RMSNorm

SPREAD = 1.5  # of a fresh head's logits


def backbone(target: Target) -> Any:
    """The target's layers with their final norm; of a model that also sees, the language
    part."""
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
def norm_weight(norm: Any, target: Target) -> Tensor:
    """The factor [D] by which a norm scales, whatever its convention (Gemma stores it minus
    one): asked of it.
    """
    width = target.hidden_size
    x = torch.ones(width, dtype=target.dtype, device=target.device)
    x[1::2] = -1  # mean 0 and mean square 1: LayerNorm and RMSNorm leave it as it is
    return ((norm(x[None]) - norm(-x[None])) / 2 * x)[0].float()


def final_norm(target: Target) -> Tensor | None:
    """The factor [D] of the target's last norm; None where no known name leads to it."""
    names = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")
    norm = next(
        (n for name in names if (n := getattr(backbone(target), name, None)) is not None), None
    )
    return norm_weight(norm, target) if isinstance(norm, nn.Module) else None


@torch.no_grad()
def start_norm(final: RMSNorm, rows: Tensor, target: Target) -> None:
    """The final norm starts as the target's, shrunk until random outputs give logits of spread
    SPREAD under an LM head of `rows` [Vd, D]: at full size a fresh head is sure of random
    tokens (SmolLM2: a cross-entropy of 17 where guessing gives 9) and unlearns that first."""
    weight = final_norm(target)
    if weight is not None:
        final.weight.copy_(weight)
    spread = (rows * final.weight).square().sum(1).mean().sqrt()
    final.weight.mul_((SPREAD / spread).clamp(max=1.0))
