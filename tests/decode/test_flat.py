"""The flat pass gives every bit of transformers' own modules, and runs where nobody would miss them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.flat import FlatPass, flat_pass
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from tests.helpers.archs import build

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "no groups": ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 1}),
    "one group": ("llama", {"num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 3}),
    "scaled": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
}


def ready(name: str, dtype: str = "float32", **keys: Any) -> Target:
    arch, shape = SHAPES[name]
    target = Target(build(arch, dtype=getattr(torch, dtype), **shape, **keys))
    target.pack_weights()
    return target


def trees(rows: int, most: int, seed: int) -> DraftTree:
    """Random trees of 0 to `most` nodes; one row has them all."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.randint(0, most + 1, (rows,), generator=rng)
    size[int(torch.randint(0, rows, (1,), generator=rng))] = most
    tokens = torch.randint(3, 61, (rows, most), generator=rng)
    parents = torch.full((rows, most), -1)
    for row in range(rows):
        for node in range(1, int(size[row])):
            parents[row, node] = int(torch.randint(-1, node, (1,), generator=rng))
    return DraftTree(tokens, parents, size)


def path_to(tree: DraftTree, row: int, node: int) -> list[int]:
    """Nodes from below the root to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[row, node])
    return path


def passes(target: Target, seed: int, guidance: float | None = None) -> list[Tensor]:
    """Logits and hidden states of ragged rows that come, score random trees, keep paths of them
    and leave, and the keys and values that stay."""
    rng = torch.Generator().manual_seed(seed)
    taps = range(target.num_layers + 1)
    cache = target.new_cache(3, 60, 9, guidance)
    found = []
    for lengths in ((11, 4), (7,)):
        prompts = [torch.randint(3, 61, (n,), generator=rng) for n in lengths]
        found.append(target.prefill(cache, prompts, taps))
    for turn, most in enumerate((9, 0, 3, 1, 6)):
        tree = trees(cache.rows, most, seed + turn)
        last = torch.randint(3, 61, (cache.rows,), generator=rng)
        found.append(target.score(cache, last, tree, taps if turn % 2 else ()))
        paths = [path_to(tree, row, int(tree.size[row]) - 1) for row in range(cache.rows)]
        length = torch.tensor([len(path) for path in paths])
        kept = torch.full((cache.rows, int(length.max())), -1)
        for row, path in enumerate(paths):
            kept[row, : len(path)] = torch.tensor(path, dtype=torch.int64)
        cache.commit(kept, length)
        if turn == 2:
            cache.select([2, 0])
        if turn == 3:
            cache.select([1])
    parts = [part for step in found for part in (step.logits, step.feats) if part is not None]
    return parts + cache.buffers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_bit_is_that_of_the_modules(name: str, dtype: str) -> None:
    target = ready(name, dtype)
    flat = target.packing.flat
    assert isinstance(flat, FlatPass)
    for seed, guidance in ((0, None), (1, None), (2, 1.5)):
        target.packing.flat = flat
        found = passes(target, seed, guidance)
        target.packing.flat = None
        assert all(map(torch.equal, found, passes(target, seed, guidance)))


def test_it_goes_and_comes_with_the_model() -> None:
    target = ready("llama")
    assert target.packing.flat is not None
    watched = []
    model = target.model  # which somebody holds now
    assert target.packing.flat is None
    hook = model.model.layers[1].self_attn.register_forward_hook(lambda *_: watched.append(1))
    generate(target, NoDraft(), [Request([5, 6, 7], 3)], Sampling(0.0))
    assert watched and target.packing.flat is None
    hook.remove()
    target.unpack_weights()
    del watched[:]
    generate(target, NoDraft(), [Request([5, 6, 7], 3)], Sampling(0.0))
    assert target.packing.flat is not None and not watched


def test_other_models_run_as_they_are() -> None:
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    for arch, keys in (("qwen3", {}), ("gemma2", {}), ("mistral", {}), ("qwen2", window)):
        target = Target(build(arch, **keys))
        target.pack_weights()
        assert target.packing.ready and target.packing.flat is None, arch
    learning = Target(build("llama"))
    learning.model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    learning.pack_weights()
    assert learning.packing.flat is None
    other = build("llama")
    other.model.layers[1].input_layernorm.variance_epsilon = 0.5
    assert flat_pass(other) is None


def test_as_loaded_where_that_is_asked() -> None:
    target = load_target(TargetConfig(kind="tiny", pack="none"), "float32", "cpu")
    generate(target, NoDraft(), [Request([5, 6, 7], 3)], Sampling(0.0))
    assert target.packing.flat is None


def test_what_changes_a_bit_is_not_taken() -> None:
    """The modules' norms are of single precision, also in a model of double precision."""
    target = ready("llama", "float64")
    assert flat_pass(target._model) is not None
    assert target.packing.ready and target.packing.flat is None


def test_a_short_context_is_enough() -> None:
    for context in (8, 9, 12):
        assert ready("llama", max_position_embeddings=context).packing.ready
