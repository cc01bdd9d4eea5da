"""Compiled layers of a target: equal features, one graph for all layers, and the plain way after
any failure."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode.probe import difference
from outrider.decode.target import Target
from outrider.train import compiled as compiled_module
from outrider.train import setup
from outrider.train.compiled import CompiledTarget
from tests.helpers.training import chats, run, tiny_target


def given(rows: int, width: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    ids = torch.randint(3, 260, (rows, width), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones_like(ids, dtype=torch.bool), (1, 3, 4)


def compiled(target: Target, backend: Any) -> tuple[CompiledTarget, list[str]]:
    """(checked, what it said)."""
    torch._dynamo.reset()
    said: list[str] = []
    found = CompiledTarget(target, said.append, backend)
    found.check()
    return found, said


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_all_layers_and_lengths_share_a_graph(arch: str) -> None:
    target, graphs = tiny_target(arch=arch, layers=4), list[Any]()
    found, said = compiled(target, lambda graph, _: graphs.append(graph) or graph.forward)
    first = len(graphs)
    for rows, width in ((3, 17), (2, 33), (5, 64), (1, 9)):
        wanted = target.features(*given(rows, width))
        assert difference(found.features(*given(rows, width)), wanted) < 1e-5
    assert not said and len(graphs) == first == 2  # of several rows and of one
    assert all("forward" not in vars(layer) for layer in target.tapped_layers)
    listed = target.body(input_ids=given(1, 5)[0], output_hidden_states=True).hidden_states
    assert len(listed) == 5


def test_a_real_compiler_gives_the_same_features() -> None:
    target = tiny_target(layers=4)
    found, said = compiled(target, "aot_eager")
    assert (
        not said
        and difference(found.features(*given(3, 20)), target.features(*given(3, 20))) < 1e-5
    )


def test_a_layer_keeps_the_forward_it_was_given() -> None:
    """accelerate's hooks stand there."""
    target = tiny_target(layers=4)
    found, _ = compiled(target, "eager")
    first, *_ = target.tapped_layers
    first.forward = given_to = functools.partial(type(first).forward, first)
    found.features(*given(2, 9))
    assert first.forward is given_to


def broken(*_: Any) -> Any:
    raise RuntimeError("no C compiler")


def wrong(graph: Any, _: Any) -> Any:
    return lambda *args: [2 * out for out in graph(*args)]


@pytest.mark.parametrize("backend, why", [(broken, "no C compiler"), (wrong, "they differ by")])
def test_what_cannot_be_compiled_runs_as_loaded(backend: Any, why: str) -> None:
    target = tiny_target(layers=4)
    found, said = compiled(target, backend)
    assert len(said) == 1 and why in said[0] and "\n" not in said[0]
    assert torch.equal(found.features(*given(2, 20)), target.features(*given(2, 20)))
    assert found.num_layers == 4 and all("forward" not in vars(x) for x in target.tapped_layers)


def test_a_later_failure_is_the_plain_way_and_no_memory_is_not() -> None:
    target, errors = tiny_target(layers=4), list[Exception]()

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            if errors:
                raise errors.pop()
            return graph(*args)

        return run

    found, said = compiled(target, backend)
    errors.append(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        found.features(*given(2, 20))
    assert not said
    errors.append(RuntimeError("an illegal instruction"))
    wanted = target.features(*given(2, 20))
    assert torch.equal(found.features(*given(2, 20)), wanted) and len(said) == 1


def test_a_run_takes_compiled_passes_on_a_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses, and none of it with compile=none."""
    data, made = chats(tmp_path / "chats.jsonl"), list[CompiledTarget]()

    def losses(out: str, *keys: str) -> list[float]:
        folder = run(data, tmp_path / out, "log_every=1", *keys)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    def passes(target: Target, device: torch.device, say: Any) -> CompiledTarget:
        assert compiled_module.passes_of(target, device, say) is target
        return made.append(CompiledTarget(target, say, "eager")) or made[-1]

    plain = losses("plain", "compile=none")
    monkeypatch.setattr(setup, "passes_of", passes)
    assert losses("compiled") == pytest.approx(plain, rel=1e-5) and len(made) == 1 and plain
    assert losses("none", "compile=none") == plain and len(made) == 1


def test_layers_that_another_library_has_changed_stay_as_they_are() -> None:
    target, gpu = tiny_target(layers=4), torch.device("cuda")
    layer = target.tapped_layers[1]
    layer.forward = layer.forward  # as accelerate's hooks do
    assert compiled_module.passes_of(target, gpu, print) is target
    del layer.forward
    target.sharded = True
    assert compiled_module.passes_of(target, gpu, print) is target
