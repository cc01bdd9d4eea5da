"""Drafters' weights in the order of the CPU's kernels (decode/models/packed.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from outrider.decode.models import packed
from outrider.decode.target import Target
from outrider.heads.eagle.modules import Linear

# Projections of transformers' Llama layers that read the same tensor.
JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Unembedding:
    """Draft logits of hidden states: x W^T. weight: [Vd, D], own: nobody else's tensor."""

    def __init__(self, weight: Tensor, packs: bool, own: bool) -> None:
        self.size, self.width = weight.shape
        packs = packs and own and packed.packs(weight)
        self.weight = packed.Product([weight], [None]) if packs else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., Vd]."""
        if isinstance(self.weight, packed.Product):
            return self.weight(x)
        return functional.linear(x, self.weight)


def pack_net(net: Any, target: Target) -> bool:
    """Pack the frozen draft layers `net`, in the target's dtype, where decoding may; whether it
    may."""
    if not (target.packs_weights and packed.takes(target.dtype, target.device)):
        return False
    places = packed.plain_linears(net, (nn.Linear, Linear))
    packed.pack(packed.named_together(places, JOINT), net)
    return True
