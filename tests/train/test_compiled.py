"""Compiled passes: the gradients of the plain ones, one graph for all layers, and the plain way
after any failure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.schema import compose
from outrider.decode.probe import difference
from outrider.decode.target import Target
from outrider.heads.layers import pieces
from outrider.heads.registry import head_class
from outrider.train import setup
from outrider.train.compiled import Compiled, layers_of
from outrider.train.config import keys_of
from outrider.train.loop import fit
from tests.helpers.training import chats, overrides, random_batch, tiny_target

GPU = torch.device("cuda")
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"steps": 2, "activation_checkpointing": True},
    "dspark": {"layers": 2, "block": 4, "anchors": 6},
    "small_lm": {"from_target_layers": 2},
    "medusa": {},
}


def made(kind: str, backend: Any, arch: str = "llama") -> tuple[Any, Target, Compiled, list[str]]:
    """(head, target, what is compiled of both, what it said)."""
    torch._dynamo.reset()
    target, of, said = tiny_target(arch=arch, layers=4), head_class(kind), list[str]()
    keys = of.Config(kind=kind, draft_vocab=0, **HEADS[kind])
    head = of.for_target(target, keys, torch.ones(260, dtype=torch.int64)).train()
    return head, target, Compiled(head, target, GPU, said.append, backend), said


def gradients(head: Any, target: Target, width: int, way: Any) -> list[Tensor]:
    batch = random_batch(2, width)
    head.zero_grad()
    with way:
        head(batch, target).sum.backward()
    return [p.grad.clone() for p in head.parameters() if p.grad is not None]


def forwards(*modules: Any) -> list[bool]:
    return ["forward" in vars(m) for module in modules for m in module.modules()]


@pytest.mark.parametrize(
    "kind, arch",
    [("eagle3", "llama"), ("dspark", "qwen3"), ("small_lm", "llama"), ("medusa", "gemma2")],
)
def test_passes_share_graphs_and_have_the_plain_gradients(kind: str, arch: str) -> None:
    graphs = list[Any]()
    head, target, found, said = made(kind, lambda g, _: graphs.append(g) or g.forward, arch)
    names, before = [*head.state_dict()], forwards(head, target.model)
    found.check(random_batch(2, 20), target)
    first = len(graphs)
    for width in (33, 9):
        ways = contextlib.nullcontext(), found.used()
        plain, compiled = (gradients(head, target, width, way) for way in ways)
        assert all(difference(a, b) < 1e-4 for a, b in zip(compiled, plain, strict=True))
    assert not said and 0 < len(graphs) == first < 12 and names == [*head.state_dict()]
    assert forwards(head, target.model) == before and not any(before)
    listed = target.body(input_ids=random_batch(1, 5).ids, output_hidden_states=True)
    assert len(listed.hidden_states) == 5


def test_a_real_compiler_gives_the_pieces_their_gradients() -> None:
    x, y, w = (torch.randn(*size, requires_grad=True) for size in ((2, 3, 5, 8), (5, 8), (8,)))
    both = x, x.detach().flip(0).requires_grad_()
    given = {"normed": (x, w, 1e-5), "gated": (torch.sin, *both), "turned": (x, y[None], y[None])}
    for name in pieces.NAMES:
        plain, weights = getattr(pieces, name), [t for t in (*both, y, w) if t.requires_grad]
        ways = plain, torch.compile(plain, backend="aot_eager", dynamic=True)
        outs = [way(*given[name]).square().sum() for way in ways]
        grads = [torch.autograd.grad(out, weights, allow_unused=True) for out in outs]
        for a, b in zip(*grads, strict=True):
            assert (a is b is None) or difference(a, b) < 1e-5


def broken(*_: Any) -> Any:
    raise RuntimeError("no C compiler")


def wrong(graph: Any, _: Any) -> Any:
    return lambda *args: [2 * out for out in graph(*args)]


@pytest.mark.parametrize("kind", ["dspark", "medusa"])
@pytest.mark.parametrize("backend, why", [(broken, "no C compiler"), (wrong, "differ by")])
def test_what_cannot_be_compiled_runs_as_it_is_written(kind: str, backend: Any, why: str) -> None:
    """Of the head, and of the target alone."""
    head, target, found, said = made(kind, backend)
    found.check(random_batch(2, 20), target)
    assert len(said) == 1 and why in said[0] and "\n" not in said[0]
    ways = contextlib.nullcontext(), found.used()
    plain, after = (gradients(head, target, 20, way) for way in ways)
    assert all(map(torch.equal, plain, after)) and len(said) == 1
    assert pieces.normed.__module__ == pieces.__name__


def test_a_first_batch_without_supervised_tokens_changes_nothing() -> None:
    head, target, found, said = made("medusa", "eager")
    batch = random_batch(2, 20)
    found.check(dataclasses.replace(batch, loss_mask=batch.loss_mask & False), target)
    assert not said and found._on


def test_a_later_failure_is_the_plain_way_and_no_memory_is_not() -> None:
    errors = list[Exception]()

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            if errors:
                raise errors.pop()
            return graph(*args)

        return run

    head, target, found, said = made("medusa", backend)
    found.check(random_batch(2, 20), target)
    errors.append(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        gradients(head, target, 20, found.used())
    assert not said
    errors.append(RuntimeError("an illegal instruction"))
    plain = gradients(head, target, 20, contextlib.nullcontext())
    assert all(map(torch.equal, plain, gradients(head, target, 20, found.used())))
    assert len(said) == 1 and not errors


def test_a_run_takes_compiled_passes_on_a_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses of 20 steps, and none of it with compile=none."""
    data, begun = chats(tmp_path / "chats.jsonl"), list[Compiled]()

    def losses(out: str, *keys: str) -> list[float]:
        own = [key for key in overrides(data, tmp_path / out) if key != "head.heads=2"]
        own += ["head=eagle3", "head.steps=1", "steps=20", "log_every=1", "save_every=0", *keys]
        fit(compose("eagle", keys_of("eagle"), own), head_class("eagle3"))
        lines = map(json.loads, (tmp_path / out / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    def passes(head: Any, target: Any, device: torch.device | None, say: Any) -> Compiled:
        assert not Compiled(head, target, device, say)._ways
        return begun.append(Compiled(head, target, device and GPU, say, "eager")) or begun[-1]

    plain = losses("plain")
    monkeypatch.setattr(setup, "Compiled", passes)
    assert losses("compiled") == pytest.approx(plain, rel=1e-3) and len(plain) == 20
    assert begun[0]._ways and begun[0]._on and begun[0]._checked
    assert losses("none", "compile=none", "steps=1") == plain[:1] and not begun[1]._ways


def test_layers_that_another_library_has_changed_stay_as_they_are() -> None:
    target = tiny_target(layers=4)
    layer = target.tapped_layers[1]
    assert len(layers_of(target)) == 4
    layer.forward = functools.partial(type(layer).forward, layer)  # as accelerate's hooks do
    assert layers_of(target) == []
    del layer.forward
    target.sharded = True
    assert layers_of(target) == []
