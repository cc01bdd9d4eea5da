"""What lies between the matrix products of a flat pass, compiled, where the products themselves are
nothing that torch's compiler knows: FBGEMM's, in float32 over weights of 16 bits
(decode/models/packed.py).

A layer is four products and four pieces of three kinds: `join` adds what a product gave to the
hidden states and norms them, `attend` rotates, keeps keys and values and mixes them, `gate` is
the middle of the MLP. Each is compiled once for a model and takes any number of rows, tokens and
slots; libraries, their folder and what is done where something fails are those of compiled.py.
Every operation rounds where it rounds uncompiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from outrider.conf import bound
from outrider.conf.errors import first_line
from outrider.decode.models import compiled
from outrider.decode.models.compiled import PARTS, WIDEST, CodeShape, Run, whole_mask
from outrider.decode.models.flat import FlatPass
from outrider.decode.models.packed import Product

# Layers still to be run: three libraries take some 100 CPU seconds, and a layer 0.25 ms less then.
PAYS = 2 * compiled.PAYS


@dataclass(frozen=True)
class PieceShape(CodeShape):
    """Of a piece. kind: join, attend or gate. width: D, or the inner one of the MLP for gate.
    heads: H, Hkv, hd."""

    module: ClassVar[str] = __name__

    kind: str
    width: int
    heads: Sequence[int] = ()
    eps: float = 0.0
    scale: float = 0.0


def shapes_of(flat: FlatPass) -> tuple[PieceShape, PieceShape, PieceShape] | None:
    """Join, attend and gate of all layers of `flat`; None where layers differ or are not packed
    in float32."""
    inner = set()
    for layer in flat.layers:
        groups = [getattr(layer, part) for part in PARTS]
        if not all(isinstance(group, Product) for group in groups):
            return None
        up = cast(Product, layer.up)
        if layer.before.dtype != torch.float32 or len(set(up.sizes)) != 1:
            return None
        inner.add(up.sizes[0])
    width = flat.norm.shape[0]
    if len(inner) != 1 or width % 32 or width > WIDEST:
        return None
    return (
        PieceShape("join", width, eps=flat.eps),
        PieceShape("attend", width, tuple(flat.heads), scale=flat.scale),
        PieceShape("gate", inner.pop()),
    )


@dataclass(frozen=True)
class PiecedPass(FlatPass):
    """A FlatPass whose layers run piece by piece. runs: join, attend, gate. What comes without a
    mask and is longer than a token, a prompt, runs uncompiled: its time goes into products."""

    runs: tuple[Run, ...] = ()

    def stack(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cached: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        mask: Tensor | None,
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """See FlatPass."""
        if (mask is None and x.shape[1] > 1) or not x.numel():
            return super().stack(x, cos, sin, cached, slots, mask, taps)
        mask = whole_mask(self.heads, x, cached, mask)
        turn = self.turn(*(each.expand(len(x), -1, -1).contiguous() for each in (cos, sin)))
        behind = [*turn, slots, mask]
        join, attend, gate = self.runs
        following = [*(layer.before for layer in self.layers[1:]), self.norm]
        x, seen = x.contiguous(), {}
        read = self._norm(x, self.layers[0].before)
        for number, (layer, pair, norm) in enumerate(
            zip(self.layers, cached, following, strict=True)
        ):
            if number in taps:
                seen[number] = x
            (mixed,) = attend([layer.qkv(read), *pair, *behind])
            x, read = join([layer.out(mixed), x, layer.between])
            (fed,) = gate([layer.up(read)])
            x, read = join([layer.down(fed), x, norm])
        seen[len(self.layers)] = read
        return read, [seen[tap] for tap in taps]


def pieced_pass(flat: FlatPass | None, layers_to_come: int) -> PiecedPass | None:
    """`flat` in compiled pieces: from the cache folder, or compiled now where so many layers will
    be run that it pays. None where neither is, or something goes wrong, which is said."""
    shapes = None if flat is None else shapes_of(flat)
    if flat is None or shapes is None:
        return None
    pays = layers_to_come >= PAYS
    try:
        paths = [compiled.library(shape, pays) for shape in shapes]
        runs = tuple(compiled.loaded(path, {}) for path in paths if path is not None)
        if len(runs) < len(shapes):
            return None
        parts = {name: getattr(flat, name) for name in FlatPass.__dataclass_fields__}
        return PiecedPass(**parts, runs=runs)
    except compiled.FAILURES as e:
        compiled.refuse(first_line(e))
    return None


class _Join(nn.Module):
    def __init__(self, shape: PieceShape) -> None:
        super().__init__()
        self.eps = shape.eps

    def forward(self, more: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        found = more + x
        return found, compiled.unit(found, self.eps) * weight


class _Attend(nn.Module):
    def __init__(self, shape: PieceShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        mask: Tensor,
    ) -> Tensor:
        heads, kv_heads, size = self.shape.heads
        # Of a pass only what attention reads is called here.
        run = FlatPass((), mask, 0.0, self.shape.scale, (heads, kv_heads, size), self, self)
        return run.mixed(self, qkv, (cos, sin), (keys, values), slots, mask)


class _Gate(nn.Module):
    def __init__(self, shape: PieceShape) -> None:
        super().__init__()
        self.inner = shape.width

    def forward(self, both: Tensor) -> Tensor:
        gate, more = both.split(self.inner, -1)
        return gate / (1 + torch.exp(-gate)) * more  # as torch's silu divides


MODULES: dict[str, Any] = {"join": _Join, "attend": _Attend, "gate": _Gate}


@torch.no_grad()
def build(shape: PieceShape, out: Path) -> None:
    """Compile a piece of `shape` into the library `out`."""
    # Sizes that no other size equals: the compiler would take the two for one.
    rows, new, seen, slots = 5, 7, 211, 1021
    some = torch.zeros
    inputs: tuple[Tensor, ...]
    varying: list[tuple[int, ...]] = [(0, 1)]
    if shape.kind == "join":
        inputs = *(some(rows, new, shape.width) for _ in range(2)), some(shape.width)
        varying += [(0, 1), ()]
    elif shape.kind == "gate":
        inputs = (some(rows, new, 2 * shape.width),)
    else:
        heads, kv_heads, size = shape.heads
        keys, values = (some(rows, kv_heads, slots, size)[:, :, :seen] for _ in range(2))
        turn = [some(rows, 1, new, size) for _ in range(2)]
        mask = some(rows, 1, heads // kv_heads * new, seen)
        wide = (heads + 2 * kv_heads) * size
        inputs = (some(rows, new, wide), keys, values, *turn, torch.arange(new), mask)
        varying += [(0, 2), (0, 2), (0, 2), (0, 2), (0,), (0, 2, 3)]
    compiled.export(MODULES[shape.kind](shape), inputs, varying, out)


if __name__ == "__main__":
    bound.end_with_parent(Path(sys.argv[3]))
    build(PieceShape(**json.loads(sys.argv[1])), Path(sys.argv[2]))
