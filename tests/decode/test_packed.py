"""Packed weights: the same numbers, the originals back bit by bit, and nothing packed that must
stay as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

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
from outrider.heads import HEADS
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.names import DraftSpec
from outrider.heads.small_lm.head import SmallLMConfig
from outrider.heads.small_lm.plain import plain_model
from outrider.scripts.scoring.memory import own_elements
from tests.helpers.archs import TREE, build

BF16 = torch.bfloat16
kernels = pytest.mark.skipif(not packed.available(), reason="no bfloat16 kernels of oneDNN here")


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without instructions for bfloat16; weights in several pieces."""
    monkeypatch.setattr(packed, "PIECE", 20)
    if not packed.halves_available():
        pytest.skip("no FBGEMM here")
    monkeypatch.setattr(packed, "bfloat16_on_cpu", lambda: False)


def from_16_bits(arch: str) -> Target:
    """A float32 target of a bfloat16 checkpoint."""
    return Target(build(arch, dtype=BF16).float())


def logits(model: nn.Module, rows: int = 2, new: int = 9) -> torch.Tensor:
    ids = torch.arange(3, 3 + rows * new).remainder(50).view(rows, new)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@kernels
@pytest.mark.parametrize("arch", TREE)
def test_a_packed_model_says_the_same_and_comes_back(arch: str) -> None:
    target = Target(build(arch, dtype=BF16))
    before, said = weights(target.model), logits(target.model)
    plain = sum(type(part) is nn.Linear for part in target.model.modules())
    target.pack_weights()
    assert target.packed_layers == plain
    for rows, new in ((1, 1), (1, 25), (3, 2)):
        again = copy.copy(target)  # shares the model
        now = logits(again._model, rows, new)
        assert again.packed_layers == plain
        target.packs_weights = False
        assert difference(now, logits(target.model, rows, new)) <= TOLERANCE[BF16] / 5
        target.packs_weights = True
        target.pack_weights()
    assert torch.equal(said, logits(target.model)) and target.packed_layers == 0
    after = weights(target.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@kernels
def test_layers_that_read_one_tensor_become_one_product() -> None:
    target = Target(build("llama", dtype=BF16))
    target.pack_weights()
    sizes = [
        len(part.product.sizes)
        for part in target._model.model.layers[0].modules()
        if isinstance(part, packed.PackedLinear)
    ]
    assert sorted(sizes) == [1, 1, 2, 2, 3, 3, 3]


@kernels
def test_what_changes_its_input_between_two_layers_is_not_joined() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8, dtype=BF16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.a(x) + self.b(x)
            x.mul_(2)
            return first + self.c(input=x)

    model = Odd().requires_grad_(False)
    x = torch.randn(3, 8, dtype=BF16)
    wanted = model(x.clone())
    places = packed.plain_linears(model)
    groups = packed.seen_together(places, lambda: model(x.clone()))
    assert sorted(len(group) for group in groups) == [1, 2]
    found = packed.pack(groups, model)
    assert torch.allclose(model(x.clone()), wanted, atol=0.05)
    assert model.a(x[:0]).shape == (0, 8)
    found.undo()
    assert torch.equal(model(x.clone()), wanted)


@kernels
def test_a_layer_in_two_places_is_left_alone() -> None:
    layer = nn.Linear(8, 8, dtype=BF16)
    model = nn.Sequential(layer, nn.Sequential(layer), nn.Linear(8, 8, dtype=BF16), layer)
    model.requires_grad_(False)
    x = torch.randn(3, 8, dtype=BF16)
    wanted = model(x)
    places = packed.plain_linears(model)
    assert [name for _, name in places] == ["2"]
    packed.pack([[place] for place in places], model)
    assert torch.allclose(model(x), wanted, atol=0.05)


@kernels
def test_stopped_midway_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build("llama", dtype=BF16))
    before, said = weights(target.model), logits(target.model)
    real, made = packed.PackedLinear.__init__, []

    def stopped(self: packed.PackedLinear, *args: Any) -> None:
        made.append(self)
        if len(made) == 5:
            raise MemoryError
        real(self, *args)

    monkeypatch.setattr(packed.PackedLinear, "__init__", stopped)
    with pytest.raises(MemoryError):
        target.pack_weights()
    assert target.packed_layers == 0
    assert torch.equal(logits(target._model), said)
    assert all(torch.equal(target._model.state_dict()[name], before[name]) for name in before)


@kernels
@pytest.mark.parametrize("tied", [False, True])
def test_who_holds_the_model_while_it_decodes_saves_all_of_it(tied: bool) -> None:
    target = Target(build("llama", dtype=BF16, tie_word_embeddings=tied, attention_bias=True))
    model = target.model
    before = weights(model)
    target.pack_weights()
    assert target.packed_layers
    now = model.state_dict()
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in before)


@kernels
def test_tied_embeddings_stay_and_are_counted() -> None:
    target = Target(build("llama", dtype=BF16, tie_word_embeddings=True))
    table = target.model.get_input_embeddings().weight
    target.pack_weights()
    assert target.lm_head_weight is table
    assert target.packing.extra == table.numel() * 2
    assert target.model.get_output_embeddings().weight is table


@kernels
def test_untied_weights_are_not_there_twice() -> None:
    target = Target(build("llama", dtype=BF16, tie_word_embeddings=False))
    target.pack_weights()
    assert target.packing.extra == 0
    names = [name for name, _ in target._model.named_parameters()]
    assert not [name for name in names if "proj" in name or "lm_head" in name]
    assert target.lm_head_weight.shape == (target.vocab_size, target.hidden_size)


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
    assert target.packed_layers == 0


@kernels
def test_a_packing_that_changes_the_model_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build("llama", dtype=BF16))
    said = logits(target.model)
    monkeypatch.setattr(
        packed.Product, "__call__", lambda self, x: x.new_zeros(*x.shape[:-1], self.shape[0])
    )
    target.pack_weights()
    assert target.packed_layers == 0 and target.packing.refused
    assert torch.equal(said, logits(target.model))


@kernels
def test_decoding_packs_and_features_do_not() -> None:
    target = load_target(TargetConfig(kind="tiny"), "bfloat16", "cpu")
    requests = [Request([5, 6, 7], 12), Request([9], 12, id=1)]
    runs = []
    for packs in (True, False):
        target.packs_weights = packs
        target.model  # noqa: B018
        runs.append(generate(target, NoDraft(), requests, Sampling(0.0), batch_size=2))
        assert (target.packed_layers > 0) == packs
    assert [a.token_ids for a in runs[0].generations] == [a.token_ids for a in runs[1].generations]
    target.packs_weights = True
    target.pack_weights()
    ids = torch.arange(3, 9)[None]
    target.features(ids, torch.ones_like(ids, dtype=torch.bool), (0,))
    assert target.packed_layers == 0


def test_the_key_is_checked() -> None:
    assert TargetConfig(kind="tiny", pack="none").validate() == []
    assert not load_target(TargetConfig(kind="tiny", pack="none"), "bfloat16").packs_weights


@kernels
def test_drafters_pack_their_layers_and_draft_the_same() -> None:
    target = load_target(TargetConfig(kind="tiny"), "bfloat16", "cpu")
    counts = torch.arange(target.vocab_size) + 1
    head = HEADS["eagle3"].for_target(target, EagleConfig(draft_vocab=64), counts)
    requests = [Request([5, 6, 7], 24), Request([9, 3], 24, id=1)]
    runs = []
    for packs in (True, False):
        target.packs_weights = packs
        target.model  # noqa: B018
        drafter = head.drafter(target, DraftSpec(shape="tree", depth=3, nodes=6))
        assert isinstance(drafter.proj.weight, packed.Product) == packs
        runs.append(generate(target, drafter, requests, Sampling(0.0), batch_size=2))
        elements, size = own_elements(drafter, target)
        assert size == 2 * elements
        runs.append((elements, size))
    assert runs[1] == runs[3]
    assert [a.token_ids for a in runs[0].generations] == [b.token_ids for b in runs[2].generations]
    assert [a.cycles for a in runs[0].generations] == [b.cycles for b in runs[2].generations]


@kernels
@pytest.mark.parametrize("packs", [True, False])
def test_separate_drafts_pack_where_their_target_may(packs: bool, tmp_path: Path) -> None:
    target = load_target(TargetConfig(kind="tiny"), "bfloat16", "cpu")
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    target.packs_weights = packs
    cut = HEADS["small_lm"].for_target(target, SmallLMConfig(from_target_layers=1))
    for drafter in (cut.drafter(target), plain_model(str(tmp_path), target).drafter(target)):
        generate(target, drafter, [Request([5, 6, 7], 6)], Sampling(0.0))
        assert (drafter.draft.packed_layers > 0) == packs


@kernels
def test_the_memory_check_counts_a_tied_lm_head_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = []
    monkeypatch.setattr(memory, "check", lambda need, *_: needs.append(need.weights))
    build("llama", dtype=BF16, tie_word_embeddings=True).save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    for pack, plan in (
        ("auto", MemoryPlan(tokens=9)),
        ("none", MemoryPlan(tokens=9)),
        ("auto", MemoryPlan()),
    ):
        load._fits(TargetConfig(kind="local", path="x", pack=pack), tmp_path, BF16, cpu, plan, 1)
    assert needs[0] - needs[1] == 61 * 32 * 2 and needs[1] == needs[2]


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("arch", TREE)
def test_without_bfloat16_weights_of_16_bits_are_multiplied_in_float32(arch: str) -> None:
    target = from_16_bits(arch)
    before, said = weights(target.model), logits(target.model)
    plain = packed.plain_linears(target.model)
    assert plain and packed.takes(torch.float32, target.device)
    assert not packed.takes(BF16, target.device)
    target.pack_weights()
    assert target.packed_layers == len(plain)
    for rows, new in ((1, 1), (1, 25), (3, 2)):
        now = logits(copy.copy(target)._model, rows, new)
        target.packs_weights = False
        assert difference(now, logits(target.model, rows, new)) <= 1e-5, "float32's own rounding"
        target.packs_weights = True
        target.pack_weights()
    # MKL's bits depend on where a weight lies
    assert difference(said, logits(target.model)) <= 1e-5 and target.packed_layers == 0
    after = weights(target.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("halves")
def test_what_16_bits_would_round_stays_float32() -> None:
    odd = {"0": 0.5, "1": 1 + 2**-11, "2": 70_000.0, "3": 1.1 * 2**-16, "4": float("nan")}
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in odd))
    for name, value in odd.items():
        weight = getattr(model, name).weight.data
        weight.fill_(0.25)
        weight[3, 5] = value
    model.requires_grad_(False)
    assert [name for _, name in packed.plain_linears(model)] == ["0", "3"]
    assert packed.plain_linears(nn.Linear(8, 8).requires_grad_(False)) == []


@pytest.mark.usefixtures("halves")
def test_weights_of_a_bfloat16_model_are_packed_and_come_back_with_their_smallest_values() -> None:
    """As trained weights are: a few in ten thousand lie where float16 has fewer digits."""
    torch.manual_seed(0)
    weight = torch.randn(600, 400).mul(0.02).bfloat16().float()
    weight[0, :3] = torch.tensor([1e-9, -3e-8, 5e-6]).bfloat16().float()
    layer = nn.Linear(400, 600, bias=False).requires_grad_(False)
    layer.weight.data = weight.clone()
    model = nn.Sequential(layer)
    assert (weight.half().float() != weight).sum() > 30
    x = torch.randn(7, 400)
    wanted = model(x)
    found = packed.pack([[place] for place in packed.plain_linears(model)], model)
    assert type(model[0]) is packed.PackedLinear and torch.equal(model[0].weight, weight)
    assert (model(x) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    found.undo()
    assert torch.equal(model[0].weight, weight)


@pytest.mark.usefixtures("halves")
def test_a_product_of_16_bit_weights_takes_every_shape() -> None:
    weight, bias = torch.randn(96, 64).half().float(), torch.randn(96)
    product = packed.Product([weight[:60], weight[60:]], [bias[:60], bias[60:]])
    for shape in ((1, 64), (25, 64), (5, 5, 64), (300, 64), (0, 64)):
        x = torch.randn(shape)
        assert torch.allclose(product(x), nn.functional.linear(x, weight, bias), atol=1e-4)
    turned = torch.randn(64, 7).t()
    assert torch.allclose(product(turned), nn.functional.linear(turned, weight, bias), atol=1e-4)
    assert torch.equal(product.dense(0), weight[:60]) and torch.equal(product.dense(1), weight[60:])


@pytest.mark.usefixtures("halves")
def test_decoding_in_16_bits_of_float32_gives_the_same_tokens() -> None:
    target = from_16_bits("llama")
    requests = [Request(list(range(5, 15)), 24, id=0)]
    now = generate(target, NoDraft(), requests, Sampling(0.0)).generations[0].token_ids
    assert target.packed_layers
    target.packs_weights = False
    target.unpack_weights()
    assert generate(target, NoDraft(), requests, Sampling(0.0)).generations[0].token_ids == now


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("from_16", [True, False])
def test_drafters_round_their_weights_where_those_of_the_target_came_from_16_bits(
    from_16: bool,
) -> None:
    target = load_target(TargetConfig(kind="tiny"), "float32", "cpu")
    if from_16:
        target.model.bfloat16().float()
    assert not target.embedding_weight[0].any(), "the first values say nothing"
    counts = torch.arange(target.vocab_size) + 1
    head = HEADS["eagle3"].for_target(target, EagleConfig(draft_vocab=64), counts)
    head.net.layers[0].mlp.down_proj.weight.data[0, 0] = 70_000.0  # more than float16 holds
    trained = weights(head.net)
    runs = []
    for packs in (True, False):
        target.packs_weights = packs
        drafter = head.drafter(target, DraftSpec(shape="chain", depth=3))
        layer = drafter.net.layers[0]
        for part, packable in (
            (layer.self_attn.q_proj, True),
            (layer.mlp.gate_proj, True),
            (drafter.net.fc, True),
            (layer.mlp.down_proj, False),
        ):
            assert (type(part) is packed.PackedLinear) == (packs and packable and from_16)
        assert isinstance(drafter.proj.weight, packed.Product) == (packs and from_16)
        assert torch.equal(layer.mlp.down_proj.weight, trained["layers.0.mlp.down_proj.weight"])
        run = generate(target, drafter, [Request([5, 6, 7], 24)], Sampling(0.0))
        runs.append(run.generations[0].token_ids)
    assert runs[0] == runs[1]
    after = weights(head.net)
    assert all(torch.equal(trained[name], after[name]) for name in trained), "the head's own"
