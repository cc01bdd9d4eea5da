"""Drafters' weights in the order of the CPU's kernels (decode/models/packed.py).

Where the target's float32 weights came from 16 bits and are kept so, a drafter's are rounded to 16
bits as well: a level of a draft reads half the bytes. A drafter may round: what it draws from is
what is verified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.decode.models import packed
from outrider.decode.target import Target
from outrider.heads.eagle.modules import Linear

# Projections of transformers' Llama layers that read the same tensor.
JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Unembedding:
    """Draft logits of hidden states: x W^T. weight: [Vd, D], own: nobody else's tensor."""

    def __init__(self, weight: Tensor, target: Target, own: bool) -> None:
        self.size, self.width = weight.shape
        self.weight: Tensor | packed.Product = weight
        if own and packs(target):
            weight = rounded(weight) if rounds(target) else weight
            self.weight = packed.Product([weight], [None]) if packed.packs(weight) else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., Vd]."""
        if isinstance(self.weight, packed.Product):
            return self.weight(x)
        return functional.linear(x, self.weight)


def packs(target: Target) -> bool:
    """Whether drafters of `target` are packed where they can be."""
    return target.packs_weights and packed.takes(target.dtype, target.device)


def rounds(target: Target) -> bool:
    """Whether drafters' weights are rounded to 16 bits first: the target's float32 weights came
    from so many, by a look at some rows of its embeddings."""
    known = target.embedding_weight
    return target.dtype == torch.float32 and packed.packs(known[:: 1 + len(known) // 256])


def rounded(weight: Tensor) -> Tensor:
    """What float16 holds of a float32 weight; the weight itself where it is too large for that."""
    found = weight.half().float()
    return found if found.isfinite().all() else weight


@torch.no_grad()
def pack_net(net: Any, target: Target) -> None:
    """Pack the frozen draft layers `net`, a copy in the target's dtype, where decoding may."""
    if not packs(target):
        return
    kinds = nn.Linear, Linear
    for layer in net.modules() if rounds(target) else ():
        if type(layer) in kinds:
            layer.weight.data = rounded(layer.weight.data)
    packed.pack(packed.named_together(packed.plain_linears(net, kinds), JOINT), net)
