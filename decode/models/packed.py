"""bfloat16 weights of linear layers in the order that a CPU's kernels read, while a target decodes.

torch hands a weight to oneDNN as it is, and the kernel puts it in order again at every call. Put
in order once, the same kernel gives the same numbers in less time: on one thread plain decoding of
SmolLM2-135M is 1.6 times as fast. In other dtypes, on other devices and on CPUs without
instructions for bfloat16 nothing is packed.

Only plain layers are packed: frozen, neither quantised nor sharded nor hooked. The original goes
while its packed form is there, and `undo` brings it back bit by bit. A weight that somebody else
reads too stays and is there twice: tied embeddings, and the LM head's, which drafters share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.decode.models.arithmetic import bfloat16_on_cpu

Place = tuple[nn.Module, str]  # a module and the name of a child


def available() -> bool:
    """Return whether this build of torch and this processor have oneDNN's kernels for bfloat16."""
    names = "_linear_pointwise", "_reorder_linear_weight"
    return bfloat16_on_cpu() and all(hasattr(torch.ops.mkldnn, name) for name in names)


def takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether weights of `dtype` on `device` can be packed here."""
    return device.type == "cpu" and dtype == torch.bfloat16 and available()


class PackedLinear(nn.Module):
    """Stands in the place of a linear layer. weight: [O, I], a copy of the original, or the
    original where it stays; bias: [O] or None."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self._plain = (plain,)  # in a tuple: no child of this module
        self._ordered = torch.ops.mkldnn._reorder_linear_weight(plain.weight.contiguous(), 1)

    @property
    def weight(self) -> Tensor:
        """[O, I]."""
        held = cast(Tensor | None, self._plain[0].weight)
        return cast(Tensor, self._ordered.to_dense()) if held is None else held

    @property
    def bias(self) -> Tensor | None:
        """[O] or None."""
        return self._plain[0].bias

    def forward(self, input: Tensor) -> Tensor:
        """[.., I] -> [.., O]."""
        if not input.numel():
            return input.new_empty(*input.shape[:-1], self.out_features)
        kernel = torch.ops.mkldnn._linear_pointwise
        return cast(Tensor, kernel(input, self._ordered, self.bias, "none", [], ""))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As a linear layer: who holds the model while it decodes saves all of it."""
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:
                destination[prefix + name] = value if keep_vars else value.detach()


@dataclass
class Packing:
    """What was packed: (parent, name, original) of every layer. refused: there is nothing to pack,
    or packed, the model computed something else."""

    places: list[tuple[nn.Module, str, nn.Linear]] = field(default_factory=list)
    refused: bool = False

    @torch.no_grad()
    def pack(self, model: nn.Module, shared: nn.Module | None = None) -> None:
        """Replace the plain layers of `model`. The weight of `shared`, one of them, stays. Stopped
        midway, nothing is replaced."""
        holders = _holders(model)
        try:
            with torch.inference_mode(False):
                for parent, name in plain_linears(model):
                    layer = cast(nn.Linear, getattr(parent, name))
                    here = PackedLinear(layer)
                    self.places.append((parent, name, layer))
                    setattr(parent, name, here)
                    if holders[id(layer.weight)] == 1 and layer is not shared:
                        layer._parameters["weight"] = None
        except BaseException:
            self.undo()
            raise

    @torch.no_grad()
    def undo(self) -> None:
        """Put every original back, its weight bit by bit what it was."""
        with torch.inference_mode(False):
            for parent, name, plain in self.places:
                here = cast(PackedLinear, getattr(parent, name))
                if cast(Tensor | None, plain.weight) is None:
                    plain.weight = nn.Parameter(here.weight, requires_grad=False)
                setattr(parent, name, plain)
        self.places = []


def plain_linears(model: nn.Module) -> list[Place]:
    """Return where layers stand that can be packed; those that stand in two places are left
    alone."""
    found: dict[int, list[Place]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children tells one place of two
            if type(child) is nn.Linear and _packs(child):
                found.setdefault(id(child), []).append((parent, name))
    return [places[0] for places in found.values() if len(places) == 1]


def _packs(layer: nn.Linear) -> bool:
    weight, bias = layer.weight, layer.bias
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
    return (
        type(weight) is nn.Parameter
        and type(weight.data) is Tensor
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.numel() > 0
        and not weight.requires_grad
        and (bias is None or bias.dtype == weight.dtype)
        and not any(hooks)
    )


def _holders(model: nn.Module) -> dict[int, int]:
    """Return how many modules hold each parameter."""
    count: dict[int, int] = {}
    for part in model.modules():
        for weight in part._parameters.values():
            if weight is not None:
                count[id(weight)] = count.get(id(weight), 0) + 1
    return count
