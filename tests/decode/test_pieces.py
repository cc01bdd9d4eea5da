"""Compiled pieces between float32's products over weights of 16 bits give every bit of the flat
pass; where that fails, the uncompiled pass runs and one line says why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode.models import compiled, packed, pieces
from outrider.decode.models.flat import FlatPass
from outrider.decode.models.pieces import PiecedPass, PieceShape
from outrider.decode.target import Target
from tests.decode.test_compiled import answers, falls_back, flat_of
from tests.decode.test_flat import SHAPES, passes
from tests.helpers.archs import build


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor without bfloat16, and a cache folder of one's own."""
    if not packed.halves_available():
        pytest.skip("this processor has no FBGEMM")
    monkeypatch.setattr(packed, "bfloat16_on_cpu", lambda: False)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_SAID", set())
    yield


def target_of(name: str = "llama", **keys: Any) -> Target:
    """A float32 target of a bfloat16 checkpoint."""
    arch, shape = SHAPES[name]
    model = build(arch, dtype=torch.bfloat16, **(shape | {"hidden_size": 64} | keys)).float()
    target = Target(model)
    target.compiles, target.expected_passes = True, pieces.PAYS
    return target


class Silu(torch.nn.Module):
    """`gate` with torch's own function: uncompiled, its exponential alone has other bits."""

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        gate, more = both.chunk(2, -1)
        return torch.nn.functional.silu(gate) * more


def uncompiled(flat: FlatPass | None, layers: int, wrong: float = 1.0) -> PiecedPass:
    """A PiecedPass that runs pieces as they are written, on what libraries are given. wrong: what
    `gate` gives is multiplied by it."""
    assert flat is not None
    shapes = pieces.shapes_of(flat)
    assert shapes is not None

    def library(shape: PieceShape) -> compiled.Run:
        module = Silu() if shape.kind == "gate" else pieces.MODULES[shape.kind](shape)

        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            found = module(*inputs)
            assert all(one.is_contiguous() for one in inputs if one.dim() == 3)
            if shape.kind == "attend":
                cos, sin, _, mask = inputs[3:]
                assert len(cos) == len(sin) == len(mask) == len(inputs[0])
                assert all(one.is_contiguous() for one in (cos, sin, mask)), "read as they lie"
            outputs: Sequence[torch.Tensor] = found if isinstance(found, tuple) else (found,)
            return [one * wrong if shape.kind == "gate" else one for one in outputs]

        return run

    parts = {name: getattr(flat, name) for name in FlatPass.__dataclass_fields__}
    return PiecedPass(**parts, runs=tuple(map(library, shapes)))


@pytest.mark.parametrize("name", SHAPES)
def test_pieces_give_the_bits_of_the_flat_pass(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pieces, "pieced_pass", uncompiled)
    target = target_of(name)
    target.pack_weights()
    fast = target.packing.flat
    assert target.compiled and isinstance(fast, PiecedPass) and not capsys.readouterr().err
    for seed, guidance in ((0, None), (2, 1.5)):
        target.packing.flat = fast
        found = passes(target, seed, guidance)
        target.packing.flat = flat_of(target)
        assert all(map(torch.equal, found, passes(target, seed, guidance)))


def test_rows_at_the_same_place_have_rotations_of_their_own() -> None:
    target = target_of()
    flat = flat_of(target)
    fast = uncompiled(flat, 0)
    ids, slots = torch.tensor([[5, 6], [7, 8]]), torch.arange(2)
    mask = torch.zeros(1, 1, 2, 9)

    def states(run: FlatPass) -> torch.Tensor:
        _, kv_heads, size = run.heads
        cached = [
            (torch.zeros(2, kv_heads, 9, size), torch.zeros(2, kv_heads, 9, size))
            for _ in run.layers
        ]
        return run(ids, torch.arange(2)[None], cached, slots, mask)[0]

    with torch.no_grad():
        assert torch.equal(states(fast), states(flat))


@pytest.mark.parametrize("where", ["everywhere", "two rows at the same place"])
def test_pieces_that_give_other_bits_are_refused(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pieced(flat: FlatPass | None, layers: int) -> PiecedPass:
        fast = uncompiled(flat, layers, 1.0001 if where == "everywhere" else 1.0)
        join, attend, gate = fast.runs

        def attend_wrong(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            cos = inputs[3]
            together = len(cos) == 2 and torch.equal(cos[0], cos[1])
            return [one * 1.0001 if together else one for one in attend(inputs)]

        return fast if where == "everywhere" else replace(fast, runs=(join, attend_wrong, gate))

    monkeypatch.setattr(pieces, "pieced_pass", pieced)
    falls_back(capsys, "round otherwise", target=target_of())


def test_what_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    falls_back(capsys, "no C++ compiler (no-such-compiler)", target=target_of())


def test_nothing_is_compiled_for_a_short_run_or_unpacked_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "compile_layer", lambda shape: pytest.fail(f"compiled {shape}"))
    short = target_of()
    short.expected_passes = pieces.PAYS // short.num_layers - 1
    rough = target_of()
    for weight in rough.model.parameters():
        weight.data += torch.rand_like(weight) * 1e-3  # no values of 16 bits
    for target in (short, rough):
        answers(target)
        assert not target.compiled and not capsys.readouterr().err


def test_every_piece_depends_on_its_own_sizes() -> None:
    shapes = pieces.shapes_of(flat_of(target_of()))
    assert shapes is not None and [one.kind for one in shapes] == ["join", "attend", "gate"]
    other = pieces.shapes_of(flat_of(target_of(rms_norm_eps=1e-3)))
    assert other is not None
    same = [compiled.key(a) == compiled.key(b) for a, b in zip(shapes, other, strict=True)]
    assert same == [False, True, True], "only what norms is another program"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["biases", "qwen2"])
def test_compiled_pieces_give_every_bit(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_of(name)
    target.pack_weights()
    assert target.compiled and not capsys.readouterr().err
    fast = target.packing.flat
    assert isinstance(fast, PiecedPass)
    for seed, guidance in ((0, None), (1, None), (2, 1.5)):
        target.packing.flat = fast
        found = passes(target, seed, guidance)
        target.packing.flat = flat_of(target)
        assert all(map(torch.equal, found, passes(target, seed, guidance)))
    # A later process finds the libraries.
    monkeypatch.setattr(compiled, "compile_layer", lambda shape: pytest.fail("compiled again"))
    later = target_of(name)
    later.expected_passes = 0
    said = answers(later)
    assert isinstance(later.packing.flat, PiecedPass)
    later.unpack_weights()
    later.compiles = False
    assert answers(later) == said
