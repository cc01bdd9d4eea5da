"""Packed weights: the same numbers, the originals back bit by bit, and nothing packed that must
stay as it is. What needs the kernels is skipped where a processor has none."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models import load, memory, packed
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.memory import MemoryPlan
from outrider.decode.probe import TOLERANCE, difference
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from tests.helpers.archs import build

BF16 = torch.bfloat16
kernels = pytest.mark.skipif(not packed.available(), reason="no bfloat16 kernels of oneDNN here")


def logits(model: nn.Module, rows: int = 2, new: int = 9) -> torch.Tensor:
    ids = torch.arange(3, 3 + rows * new).remainder(50).view(rows, new)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


@kernels
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2", "mixtral"])
def test_a_packed_model_says_the_same_and_comes_back(arch: str) -> None:
    target = Target(build(arch, dtype=BF16))
    before, said = weights(target.model), logits(target.model)
    plain = sum(type(part) is nn.Linear for part in target.model.modules())
    target.pack_weights()
    assert len(target.packing.places) == plain
    for rows, new in ((1, 1), (1, 25), (3, 2)):
        again = copy.copy(target)  # shares the model
        now = logits(again._model, rows, new)
        assert len(again.packing.places) == plain
        assert difference(now, logits(target.model, rows, new)) <= TOLERANCE[BF16] / 5
        target.pack_weights()
    assert torch.equal(said, logits(target.model)) and len(target.packing.places) == 0
    assert same(weights(target.model), before)


@kernels
def test_a_layer_in_two_places_is_left_alone_and_an_empty_batch_has_no_rows() -> None:
    layer = nn.Linear(8, 8, dtype=BF16)
    model = nn.Sequential(layer, nn.Sequential(layer), nn.Linear(8, 8, dtype=BF16), layer)
    model.requires_grad_(False)
    x = torch.randn(3, 8, dtype=BF16)
    wanted = model(x)
    assert [name for _, name in packed.plain_linears(model)] == ["2"]
    found = packed.Packing()
    found.pack(model)
    assert torch.allclose(model(x), wanted, atol=0.05) and model(x[:0]).shape == (0, 8)
    found.undo()
    assert torch.equal(model(x), wanted)


@kernels
@pytest.mark.parametrize("tied", [False, True])
def test_who_holds_the_model_while_it_decodes_saves_all_of_it(tied: bool) -> None:
    target = Target(build("llama", dtype=BF16, tie_word_embeddings=tied, attention_bias=True))
    model, head = target.model, target.lm_head_weight
    before = weights(model)
    target.pack_weights()
    assert len(target.packing.places) and same(model.state_dict(), before)
    assert target.lm_head_weight is head, "drafters share it"
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if "proj.weight" in name], "no other is there twice"


@pytest.mark.parametrize("case", ["float32", "float16", "asked", "sharded", "training", "hooked"])
def test_what_must_stay_is_not_packed(case: str) -> None:
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(case, BF16)
    target = Target(build("llama", dtype=dtype))
    target.packs_weights = case != "asked"
    target.sharded = case == "sharded"
    if case == "training":
        target.model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    if case == "hooked":
        for part in target.model.modules():
            part.register_forward_hook(lambda *_: None)
    target.pack_weights()
    assert len(target.packing.places) == 0


@kernels
def test_a_packing_that_changes_the_model_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build("llama", dtype=BF16))
    said = logits(target.model)
    monkeypatch.setattr(
        packed.PackedLinear,
        "forward",
        lambda self, x: x.new_zeros(*x.shape[:-1], self.out_features),
    )
    target.pack_weights()
    assert len(target.packing.places) == 0 and target.packing.refused
    assert torch.equal(said, logits(target.model))


@kernels
def test_decoding_packs_and_features_do_not() -> None:
    target = load_target(TargetConfig(kind="tiny"), "bfloat16", "cpu")
    requests = [Request([5, 6, 7], 12), Request([9], 12, id=1)]
    runs = []
    for packs in (True, False):
        target.packs_weights = packs
        target.packing.undo()
        runs.append(generate(target, NoDraft(), requests, Sampling(0.0), batch_size=2))
        assert (len(target.packing.places) > 0) == packs
    assert [a.token_ids for a in runs[0].generations] == [a.token_ids for a in runs[1].generations]
    target.packs_weights = True
    target.pack_weights()
    ids = torch.arange(3, 9)[None]
    target.features(ids, torch.ones_like(ids, dtype=torch.bool), (0,))
    assert len(target.packing.places) == 0


@kernels
def test_the_memory_check_counts_the_lm_head_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = []
    monkeypatch.setattr(memory, "check", lambda need, *_: needs.append(need.weights))
    model, cpu = build("llama", dtype=BF16, tie_word_embeddings=True), torch.device("cpu")
    model.save_pretrained(tmp_path)
    for pack, plan in (
        ("auto", MemoryPlan(tokens=9)),
        ("none", MemoryPlan(tokens=9)),
        ("auto", MemoryPlan()),
    ):
        cfg = TargetConfig(kind="local", path="x", pack=pack)
        load._fits(cfg, tmp_path, model.config, BF16, cpu, plan, None)
    assert needs[0] - needs[1] == 61 * 32 * 2 and needs[1] == needs[2]
