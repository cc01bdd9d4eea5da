"""A fresh EAGLE head whose draft layers start as layers of the target (head.init=layer)."""

from __future__ import annotations

from typing import Any, cast

import torch

from conf.errors import UserError
from decode.target import Target
from heads.eagle.init import backbone, norm_weight
from heads.eagle.modules import Linear
from heads.eagle.net import EagleNet


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
                f"{key}: the target's layers ({type(given).__name__}) have no separate q, k, v, o "
                "and gate, up, down projections to copy; use head.init=random"
            ) from None
        for name, weight in found.items():
            mine = layer.get_submodule(name).weight
            if weight.shape[0] != mine.shape[0] or mine.shape[1] not in (
                weight.shape[1],
                2 * weight.shape[1],
            ):
                raise UserError(
                    f"{key}: the target's {name} is {tuple(weight.shape)}, the draft's "
                    f"{tuple(mine.shape)}; use head.init=random"
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
