"""EAGLE-3's draft layer as one function: every bit of the modules, and where it does not run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from outrider.decode.engine import Request, generate
from outrider.decode.grow import Nodes
from outrider.decode.models import compiled, packed
from outrider.decode.models.identity import sha256_file
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.eagle import flat
from outrider.heads.eagle.drafter import EagleDrafter
from outrider.heads.eagle.flat import CompiledDraft, DraftPass, FlatSteps
from outrider.heads.names import DraftSpec
from tests.heads.test_eagle import head_of, target_of

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)
DTYPES = (torch.float32, torch.bfloat16)
TAKEN: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"norm_before_fc": True, "norm_output": True},
    "normed residual": {"norm_before_residual": True, "norm_joined": True},
    "whole vocabulary": {"draft_vocab": 0},
    "window": {"sliding_window": 5},
}


class StandIn:
    """A kernel where oneDNN has none."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def dense(self) -> Tensor:
        return self.weight


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Weights of draft layers can be packed: with oneDNN's kernels, or where this processor has
    none with a stand-in, which a library is then compiled of in this process. Whether they are
    oneDNN's."""
    if packed.available():
        return True
    monkeypatch.setattr(packed, "takes", lambda dtype, device: dtype == torch.bfloat16)
    monkeypatch.setattr(packed, "Ordered", StandIn)
    of_graph = compiled.GraphProduct
    monkeypatch.setattr(of_graph, "forward", lambda self, x: linear(x, self.weight))
    return False


def here(shape: compiled.LayerShape) -> Path:
    """`compiled.compile_layer` in this process."""
    assert isinstance(shape, flat.DraftShape)
    path = compiled.folder() / f"{compiled.key(shape)}.so"
    path.parent.mkdir(parents=True)
    flat.build(shape, path)
    named = path.with_stem(f"{path.stem}-{sha256_file(path)[:24]}")
    path.rename(named)
    return named


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_SAID", set())
    yield tmp_path


def wide(dtype: torch.dtype = torch.bfloat16, **shape: Any) -> Target:
    """A target whose layers may be compiled."""
    target = target_of(dtype=dtype, **({"hidden_size": 64} | shape))
    target.compiles, target.expected_passes = True, compiled.PAYS
    return target


def drafter_of(target: Target, shape: str = "tree", **keys: Any) -> EagleDrafter:
    drafter = head_of(target, **keys).drafter(target, DraftSpec(shape=shape, depth=4, nodes=9))
    assert isinstance(drafter, EagleDrafter)
    return drafter


def flat_of(drafter: EagleDrafter) -> DraftPass:
    assert isinstance(drafter.steps, FlatSteps)
    return drafter.steps.flat


def seen(drafter: EagleDrafter, seed: int) -> list[Tensor]:
    """What a drafter gives while ragged rows come, draft chains and trees, commit and leave, and
    the keys and values that stay."""
    rng, found = torch.Generator().manual_seed(seed), []
    width, taps = drafter.net.width, len(drafter.taps)

    def observed(counts: list[int], rows: slice) -> None:
        tokens = torch.randint(3, 61, (len(counts), max(counts)), generator=rng)
        feats = torch.randn(*tokens.shape, taps, width, generator=rng).to(drafter.dtype)
        drafter.observe(tokens, feats, torch.tensor(counts), rows)
        found.append(drafter.h.clone())

    def drafted(nodes: int, tree: bool) -> None:
        rows, above, below = len(drafter.lengths), torch.zeros(nodes, dtype=torch.int64), None
        found.append(drafter.open(4).clone())
        for level in range(1, 4):
            if tree:
                own = torch.eye(nodes, dtype=torch.bool).expand(rows, -1, -1)
                below = own if below is None else torch.cat([below[:, above], own], 2)
            tokens = torch.randint(3, 61, (rows, nodes), generator=rng)
            found.append(drafter.level(Nodes(level, tokens, above, below)).clone())
            above = torch.randint(0, nodes, (nodes,), generator=rng)

    drafter.reset(3, 64)
    with torch.inference_mode():
        for rows, counts in ((slice(0, 1), [9]), (slice(1, 3), [6, 6])):
            drafter.begin([torch.arange(3)] * len(counts), Sampling())
            observed(counts, rows)
            drafted(1, False)
            drafted(3, True)
        for counts in ([2, 1, 4], [1, 0, 1], [1, 1, 1]):
            observed(counts, slice(0, 3))
            drafted(1, False)
            drafted(3, True)
        drafter.select([2, 0])
        observed([2, 3], slice(0, 2))
        drafted(4, True)
        drafter.select([1])
        observed([1], slice(0, 1))
        drafted(4, True)
        observed([3], slice(0, 1))
        drafted(1, False)
    return [*found, drafter.cache.keys, drafter.cache.values]


def equal(drafter: EagleDrafter, seeds: int = 3) -> bool:
    """Whether it gives the bits of the modules."""
    fast = drafter.steps
    for seed in range(seeds):
        drafter.steps = fast
        found = seen(drafter, seed)
        drafter.steps = drafter.net
        if not all(map(torch.equal, found, seen(drafter, seed))):
            return False
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TAKEN)
def test_every_bit_is_that_of_the_modules(name: str, dtype: torch.dtype) -> None:
    drafter = drafter_of(target_of(dtype=dtype), **TAKEN[name])
    assert type(flat_of(drafter)) is DraftPass and equal(drafter)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_tokens_are_those_of_the_modules(dtype: torch.dtype) -> None:
    target = target_of(dtype=dtype)
    requests = [Request([5, 6, 7], 14), Request([9], 9, id=1), Request([4, 8], 12, id=2)]
    for shape, heat in (("chain", 0.0), ("chain", 1.0), ("tree", 0.0), ("tree", 1.0)):
        found = []
        for plainly in (False, True):
            drafter = drafter_of(target, shape)
            assert isinstance(drafter.steps, FlatSteps)
            if plainly:
                drafter.steps = drafter.net
            run = generate(target, drafter, requests, Sampling(heat), batch_size=2)
            found.append([(one.token_ids, one.cycles) for one in run.generations])
        assert found[0] == found[1]


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "eagle1"},
        {"layers": 2},
        {"parallel": True, "steps": 3},
        {"hidden_act": "gelu"},
    ],
    ids=["eagle1", "two layers", "parallel", "another activation"],
)
def test_other_heads_run_as_they_are(keys: dict[str, Any]) -> None:
    drafter = drafter_of(target_of(), "chain", **keys)
    assert drafter.steps is drafter.net


def test_layers_of_another_kind_run_as_they_are() -> None:
    target = target_of()
    target.packs_weights = False  # target.pack=none
    drafter = drafter_of(target)
    assert drafter.steps is drafter.net and flat.draft_pass(drafter.net) is not None
    net: Any = drafter.net
    layer = net.layers[0]
    hook = layer.mlp.register_forward_hook(lambda *_: None)
    assert flat.draft_pass(net) is None
    hook.remove()
    net.norm.variance_epsilon *= 2
    assert flat.draft_pass(net) is None
    net.norm.variance_epsilon /= 2
    assert flat.draft_pass(net) is not None
    layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj)  # as wrapped or quantised ones
    assert flat.draft_pass(net) is None


def wrong_slot(self: DraftPass, cached: Any, slots: Tensor, key: Tensor, value: Tensor) -> None:
    RIGHT["write"](self, cached, (slots - 1).clamp(min=0), key, value)


def wrong_mask(self: DraftPass, layer: Any, x: Tensor, turn: Any, *rest: Any) -> Tensor:
    cached, slots, mask = rest
    found = RIGHT["attended"](self, layer, x, turn, cached, slots, None if mask is None else ~mask)
    return found.nan_to_num()  # type: ignore[no-any-return]


def wrong_turn(self: DraftPass, layer: Any, x: Tensor, turn: Any, *rest: Any) -> Tensor:
    return RIGHT["attended"](self, layer, x, (turn[0], -turn[1]), *rest)  # type: ignore[no-any-return]


def wrong_norm(self: DraftPass, x: Tensor, weight: Tensor) -> Tensor:
    return x.div(x.float().square().mean(-1, keepdim=True).add(2 * self.eps).sqrt()).mul(weight)


RIGHT: dict[str, Any] = {"write": DraftPass.write, "attended": DraftPass.attended}


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("write", wrong_slot),
        ("attended", wrong_mask),
        ("attended", wrong_turn),
        ("_norm", wrong_norm),
    ],
)
def test_what_changes_a_bit_is_not_taken(
    name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftPass, name, broken)
    drafter = drafter_of(target_of())
    assert drafter.steps is drafter.net


def falls_back(capsys: pytest.CaptureFixture[str], target: Target, *parts: str) -> None:
    """One line with all `parts`, and the uncompiled layer, whose bits are the modules'."""
    drafter = drafter_of(target)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and all(part in said[0] for part in parts)
    assert said[0].startswith("target.compile: ")
    assert said[0].endswith("; the uncompiled pass runs")
    assert type(flat_of(drafter)) is DraftPass and equal(drafter, seeds=1)
    assert type(flat_of(drafter_of(target))) is DraftPass and not capsys.readouterr().err


def test_no_compiler(
    kernels: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    falls_back(capsys, wide(), "no C++ compiler (no-such-compiler)")


def test_a_library_that_is_none(
    kernels: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], env: Any, work: Path, longest: float) -> tuple[int, str]:
        assert command[2] == "outrider.heads.eagle.flat"
        (work / "layer.so").write_bytes(b"no library at all")
        return 0, ""

    monkeypatch.setattr(compiled.bound, "run", run)
    monkeypatch.setenv("CXX", "sh")
    falls_back(capsys, wide(), ".so")


@pytest.mark.parametrize("fails", [False, True])
def test_a_library_that_gives_other_bits_is_refused(
    fails: bool, kernels: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(run: DraftPass, layers: int) -> CompiledDraft:
        def twice(inputs: list[Tensor]) -> list[Tensor]:
            if fails:
                raise RuntimeError("no such instruction")
            kept = inputs[0].flatten(0, 1)[inputs[-1]]
            return [kept * 1.5, kept]

        return compiled_as(run, twice)

    monkeypatch.setattr(flat, "compiled_draft", wrong)
    falls_back(capsys, wide(), "no such instruction" if fails else "rounds otherwise")


def compiled_as(run: DraftPass, library: compiled.Run) -> CompiledDraft:
    return CompiledDraft(**{one.name: getattr(run, one.name) for one in fields(run)}, run=library)


def graph_of(run: DraftPass) -> compiled.Run:
    """What is compiled of `run`, over its weights."""
    known = compiled.shape_of(run)
    assert known is not None
    graph = flat._Level(flat.DraftShape(**vars(known), normed=run.normed))
    given = compiled.weights(run.layers[0]) | {"first": run.first, "last": run.norm}
    for name, weight in given.items():
        owner, _, last = name.rpartition(".")
        setattr(graph.get_submodule(owner), last, weight)

    def library(inputs: list[Tensor]) -> list[Tensor]:
        e, g, cos, sin, keys, values, slots, mask, keep = inputs
        rows, new = e.shape[:2]
        assert all(one.is_contiguous() for one in (e, g, cos, sin, slots, mask, keep))
        assert all(one.shape[0] == rows for one in (g, cos, sin, keys, values, slots, mask))
        assert mask.shape[1:] == (1, new, keys.shape[2]) and mask.dtype == torch.bool
        return list(graph((e, g), (cos, sin), (keys, values), slots, mask, keep))

    return library


@pytest.mark.parametrize("name", TAKEN)
def test_the_graph_gives_every_bit_before_it_is_compiled(
    name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def as_graph(run: DraftPass, layers: int) -> CompiledDraft:
        library = graph_of(run)
        return compiled_as(run, lambda inputs: calls.append(1) or library(inputs))

    monkeypatch.setattr(flat, "compiled_draft", as_graph)
    drafter = drafter_of(wide(), **TAKEN[name])
    assert type(flat_of(drafter)) is CompiledDraft and equal(drafter) and len(calls) > 50


def test_what_is_compiled(
    kernels: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing for a short run, nothing in float32, nothing where it is not wanted."""
    monkeypatch.setattr(compiled, "compile_layer", lambda shape: pytest.fail("compiled"))
    short, not_wanted = wide(), wide()
    short.expected_passes = compiled.PAYS // (flat.LAYERS * 4) - 1  # four levels
    not_wanted.compiles = False
    for target in (short, not_wanted, wide(torch.float32)):
        assert type(flat_of(drafter_of(target))) is DraftPass
    asked: list[compiled.LayerShape] = []
    monkeypatch.setattr(compiled, "compile_layer", lambda shape: asked.append(shape) or Path())
    short.expected_passes += 1
    drafter_of(short)
    (shape,) = asked
    names = [one.name for one in fields(compiled.LayerShape)]
    plain = compiled.LayerShape(**{name: getattr(shape, name) for name in names})
    other = flat.DraftShape(**{**vars(shape), "normed": True})
    assert len({compiled.key(one) for one in (shape, plain, other)}) == 3
    assert "target.compile: " in capsys.readouterr().err


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["eagle3", "normed residual", "window"])
def test_every_compiled_bit_is_that_of_the_modules(
    name: str,
    kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = wide()
    if not kernels:
        monkeypatch.setattr(compiled, "compile_layer", here)
    drafter = drafter_of(target, **TAKEN[name])
    assert not [line for line in capsys.readouterr().err.splitlines() if "target.compile" in line]
    assert type(flat_of(drafter)) is CompiledDraft and equal(drafter)
    # A later process finds the library.
    monkeypatch.setattr(compiled, "compile_layer", lambda shape: pytest.fail("compiled again"))
    target.expected_passes = 0
    assert type(flat_of(drafter_of(target, **TAKEN[name]))) is CompiledDraft
