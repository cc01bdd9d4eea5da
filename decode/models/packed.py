"""Weights of linear layers in the order that a CPU's kernels read, for decoding.

bfloat16, on a CPU with instructions for it: torch hands a weight to oneDNN as it lies, and the
kernel puts it in order again at every call. Put in order once, the same kernel gives the same
numbers: SmolLM2's linear layers take half the time for one token and three quarters for 25
(docs/tuning.md).

float32, on a CPU without such instructions: weights that came from a 16-bit checkpoint are kept
in 16 bits, and FBGEMM multiplies them in float32. A product over few tokens reads half the
bytes.

Layers that read the same tensor (q, k and v; gate and up) become one product. Only plain layers
are packed: frozen, neither quantised nor sharded nor hooked. The original goes while its packed
form is there (`undo` brings it back bit by bit); a weight that somebody else holds too, such as
tied embeddings, stays and is there twice.

Shape letters: I inputs, O outputs of a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.decode.models.arithmetic import bfloat16_on_cpu

LEAST = 2.0**-25  # half of float16's smallest number
PIECE = 1 << 18  # values of a weight looked at together: they stay in the processor's cache
Place = tuple[nn.Module, str]  # a module and the name of a child


def available() -> bool:
    """Whether this build of torch and this processor have oneDNN's kernels for bfloat16."""
    names = "_linear_pointwise", "_reorder_linear_weight"
    return bfloat16_on_cpu() and all(hasattr(torch.ops.mkldnn, name) for name in names)


@functools.cache
def halves_available() -> bool:
    """Whether this build of torch and this processor have FBGEMM's kernels for 16-bit weights."""
    try:
        found = Halves(torch.ones(2, 2), None)(torch.ones(1, 2))
    except (RuntimeError, AttributeError):  # no FBGEMM, or a processor without AVX2
        return False
    return bool((found == 2).all())


def takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of `dtype` on `device` can be packed here."""
    if device.type != "cpu":
        return False
    if dtype == torch.float32:
        return not bfloat16_on_cpu() and halves_available()
    return dtype == torch.bfloat16 and available()


class Ordered:
    """A bfloat16 weight [O, I] in oneDNN's order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b: [.., I] -> [.., O]."""
        found = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return cast(Tensor, found)

    def dense(self) -> Tensor:
        """The weight as it was, a copy."""
        return self.weight.to_dense()


class Halves:
    """A float32 weight [O, I] that `packs`, in FBGEMM's order and in float16; the arithmetic is
    float32's. weight: FBGEMM's handle, no tensor. odd: where float16 does not hold a value, and
    the value."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.shape, flat = weight.shape, weight.flatten()
        found = [(held != piece).nonzero()[:, 0] + at for at, piece, held in in_halves(flat)]
        places = torch.cat(found)
        self.odd = places, flat[places]
        self.weight = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b: [.., I] -> [.., O]."""
        return cast(Tensor, torch.ops.quantized.linear_dynamic_fp16(x, self.weight))

    def dense(self) -> Tensor:
        """The weight as it was, a copy."""
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self.weight)[0]
        flat = weight.float().flatten()
        places, values = self.odd
        flat[places] = values
        return flat.view(self.shape)


def packs(weight: Tensor) -> bool:
    """Whether a kernel takes `weight`: bfloat16, or float32 that came from 16 bits. Of the latter
    float16 holds every value but those below 2^-17, which it may round by 2^-25: less than what
    float32 rounds in a sum of such products."""
    if weight.dtype == torch.float32:
        pieces = in_halves(weight.flatten())
        return all(bool(((held - piece).abs() <= LEAST).all()) for _, piece, held in pieces)
    return weight.dtype == torch.bfloat16


def in_halves(flat: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Piece by piece of a float32 weight [N]: where it begins, its values, and what float16 holds
    of them."""
    for at in range(0, len(flat), PIECE):
        piece = flat[at : at + PIECE]
        yield at, piece, piece.half().float()


class Product:
    """x W^T + b for one or more stacked layers of the same input: weights [sum of O, I], I
    inputs. The parts of a product are handed out one by one; it is computed when another input
    comes, or a part is asked for again."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self.sizes = [weight.shape[0] for weight in weights]
        self.shape = (sum(self.sizes), weights[0].shape[1])
        joined = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        some = [bias for bias in biases if bias is not None]
        form = Halves if joined.dtype == torch.float32 else Ordered
        self.kernel = form(joined, torch.cat(some) if some else None)
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    @property
    def weight(self) -> Any:
        """As the kernel holds it."""
        return self.kernel.weight

    @property
    def bias(self) -> Tensor | None:
        """[sum of O] or None."""
        return self.kernel.bias

    def __call__(self, x: Tensor) -> Tensor:
        """[.., I] -> [.., sum of O]."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.shape[0])
        return self.kernel(x)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """[.., I] -> [.., O] of each layer."""
        return self(x).split(self.sizes, -1)

    def part(self, x: Tensor, number: int) -> Tensor:
        """[.., I] -> [.., O] of one of the layers."""
        if len(self.sizes) == 1:
            return self(x)
        if x is not self._input or number not in self._parts:
            self._input, self._parts = x, dict(enumerate(self.split(x)))
        found = self._parts.pop(number)
        if not self._parts:
            self._input = None
        return found

    def dense(self, number: int) -> Tensor:
        """The weight [O, I] of one of the layers as it was, a copy."""
        rows: Tensor = self.kernel.dense().split(self.sizes)[number]
        return rows.clone() if len(self.sizes) > 1 else rows


class PackedLinear(nn.Module):
    """Stands in the place of a linear layer. weight: a copy of the original, or the original
    where it stays."""

    def __init__(self, plain: nn.Linear, product: Product, number: int) -> None:
        super().__init__()
        self.product, self.number = product, number
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self._plain = (plain,)  # in a tuple: no child of this module

    @property
    def weight(self) -> Tensor:
        """[O, I]."""
        held = cast(Tensor | None, self._plain[0].weight)
        return self.product.dense(self.number) if held is None else held

    @property
    def bias(self) -> Tensor | None:
        """[O] or None."""
        return self._plain[0].bias

    def forward(self, input: Tensor) -> Tensor:
        """[.., I] -> [.., O]."""
        return self.product.part(input, self.number)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As a linear layer: who holds the model while it decodes saves all of it."""
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:
                destination[prefix + name] = value if keep_vars else value.detach()


@dataclass
class Packing:
    """What was packed: (parent, name, original) of every layer, and the originals that stay.
    extra: bytes that are there twice. refused: packed, the model computed something else."""

    places: list[tuple[nn.Module, str, nn.Linear]] = field(default_factory=list)
    extra: int = 0
    refused: bool = False

    def take(self, other: Packing) -> None:
        """Hold what `other` holds."""
        self.places, self.extra = other.places, other.extra

    @torch.no_grad()
    def undo(self) -> None:
        """Put every original back, its weight bit by bit what it was."""
        with torch.inference_mode(False):
            for parent, name, plain in self.places:
                here = cast(PackedLinear, getattr(parent, name))
                if cast(Tensor | None, plain.weight) is None:
                    plain.weight = nn.Parameter(here.weight, requires_grad=False)
                setattr(parent, name, plain)
        self.places, self.extra = [], 0


def plain_linears(model: nn.Module, kinds: tuple[type, ...] = (nn.Linear,)) -> list[Place]:
    """Where layers stand that can be packed; those that stand in two places are left alone.
    kinds: their very classes."""
    found: dict[int, list[Place]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children tells one place of two
            if type(child) in kinds and _packs(cast(nn.Linear, child)):
                found.setdefault(id(child), []).append((parent, name))
    return [places[0] for places in found.values() if len(places) == 1]


def _packs(layer: nn.Linear) -> bool:
    weight, bias = layer.weight, layer.bias
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
    return (
        type(weight) is nn.Parameter
        and type(weight.data) is Tensor
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.numel() > 0
        and not weight.requires_grad
        and (bias is None or bias.dtype == weight.dtype)
        and not any(hooks)
        and packs(weight)
    )


@torch.no_grad()
def seen_together(places: Iterable[Place], run: Callable[[], Any]) -> list[list[Place]]:
    """`places`, those side by side that read one and the same tensor while `run` goes through
    the model, unchanged in between. Outside of inference mode, which counts no changes."""
    calls: dict[int, int] = {}
    groups: dict[Any, list[Place]] = {}
    inputs: list[Tensor] = []  # kept alive, so that an id stays that of one tensor

    def reader(place: Place) -> Callable[..., None]:
        def read(layer: nn.Module, args: tuple[Any, ...]) -> None:
            calls[id(layer)] = calls.get(id(layer), 0) + 1
            if not args:  # given by name
                return
            inputs.append(args[0])
            key = (id(place[0]), id(args[0]), args[0]._version, layer.bias is None)
            groups.setdefault(key, []).append(place)

        return read

    every = list(places)
    hooks = [getattr(*place).register_forward_pre_hook(reader(place)) for place in every]
    try:
        with torch.inference_mode(False):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    joined = [
        group
        for group in groups.values()
        if len(group) > 1 and all(calls[id(getattr(*place))] == 1 for place in group)
    ]
    members = {(id(parent), name) for group in joined for parent, name in group}
    alone = [[(parent, name)] for parent, name in every if (id(parent), name) not in members]
    return joined + alone


def named_together(places: Iterable[Place], names: Iterable[Sequence[str]]) -> list[list[Place]]:
    """`places`, those of one parent together that a list of `names` names side by side."""
    every = {(id(parent), name): (parent, name) for parent, name in places}
    groups: list[list[Place]] = []
    for parent, _ in list(every.values()):
        for joint in names:
            if all((id(parent), name) in every for name in joint):
                groups.append([every.pop((id(parent), name)) for name in joint])
    return groups + [[place] for place in every.values()]


@torch.no_grad()
def pack(groups: Iterable[Sequence[Place]], model: nn.Module) -> Packing:
    """Replace the layers of `model` at these places; those of a group become one product. Stopped
    midway, nothing is replaced."""
    found = Packing()
    holders = _holders(model)
    try:
        with torch.inference_mode(False):
            for group in groups:
                _pack(group, holders, found)
    except BaseException:
        found.undo()
        raise
    return found


def _pack(group: Sequence[Place], holders: dict[int, int], found: Packing) -> None:
    layers = [cast(nn.Linear, getattr(parent, name)) for parent, name in group]
    product = Product([one.weight for one in layers], [one.bias for one in layers])
    for number, ((parent, name), layer) in enumerate(zip(group, layers, strict=True)):
        found.places.append((parent, name, layer))
        setattr(parent, name, PackedLinear(layer, product, number))
        if holders[id(layer.weight)] > 1:
            found.extra += layer.weight.numel() * layer.weight.element_size()
        else:
            layer._parameters["weight"] = None


def _holders(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter."""
    count: dict[int, int] = {}
    for part in model.modules():
        for weight in part._parameters.values():
            if weight is not None:
                count[id(weight)] = count.get(id(weight), 0) + 1
    return count
