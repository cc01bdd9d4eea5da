"""A model with a weight that no file gave is refused by the weight's name: transformers would draw
it at random, another one in each process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from transformers import LlamaForCausalLM

from outrider.conf.errors import UserError
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.shards import READ
from outrider.decode.models.tiny import byte_tokenizer, tiny_model
from outrider.heads.small_lm.plain import plain_model
from tests.helpers.archs import ARCHS, build

Weights = dict[str, Tensor]
FILE = "model.safetensors"


def removed(weights: Weights, name: str) -> None:
    del weights[name]


def renamed(weights: Weights, name: str) -> None:
    weights[f"{name.removesuffix('.weight')}_old.weight"] = weights.pop(name)


def cut(weights: Weights, name: str) -> None:
    weights[name] = weights[name][:-1].clone()


DAMAGES = (removed, renamed, cut)


def damaged(folder: Path, out: Path, damage: Callable[[Weights, str], None], name: str) -> Path:
    shutil.copytree(folder, out, dirs_exist_ok=True)
    weights = load_file(folder / FILE)
    damage(weights, name)
    save_file(weights, out / FILE, metadata={"format": "pt"})
    return out


def refuses(folder: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        load_target(TargetConfig(kind="local", path=str(folder)))
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(layers=2, hidden=16, heads=2, kv_heads=1, vocab=260).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_target_that_is_not_whole(
    whole: Path, tmp_path: Path, damage: Callable[[Weights, str], None], name: str
) -> None:
    refuses(damaged(whole, tmp_path / "model", damage, name), name)


def test_a_separate_draft_that_is_not_whole(whole: Path, tmp_path: Path) -> None:
    target = load_target(TargetConfig(kind="local", path=str(whole)))
    name = "model.norm.weight"
    with pytest.raises(UserError, match=name):
        plain_model(str(damaged(whole, tmp_path / "draft", removed, name)), target)


def test_a_tied_head_needs_no_weight_of_its_own(tmp_path: Path) -> None:
    model = build("llama", vocab_size=260, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / FILE)
    load_target(TargetConfig(kind="local", path=str(tmp_path)))


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_expert_that_a_checkpoint_keeps_apart(
    tmp_path: Path, damage: Callable[[Weights, str], None]
) -> None:
    """transformers stacks them, and says of one that it could not be converted."""
    build("mixtral", vocab_size=260).save_pretrained(tmp_path / "whole")
    byte_tokenizer().save_pretrained(tmp_path / "whole")
    for part in ("w1", "w2"):
        name = f"model.layers.1.block_sparse_moe.experts.2.{part}.weight"
        refuses(damaged(tmp_path / "whole", tmp_path / "damaged", damage, name), name)


def test_an_adapter_is_no_target(whole: Path, tmp_path: Path) -> None:
    """transformers would put it on top of the weights, and the target's identity would not say."""
    folder = shutil.copytree(whole, tmp_path / "adapter")
    model = LlamaForCausalLM.from_pretrained(whole)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    refuses(folder, "adapter_config.json")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_weight_of_every_architecture(arch: str, tmp_path: Path) -> None:
    """By its name where the checkpoint spells it as the model does, and of experts."""
    model = build(arch, vocab_size=260)
    model.save_pretrained(tmp_path / "whole")
    byte_tokenizer().save_pretrained(tmp_path / "whole")
    own = model.state_dict()
    for name in load_file(tmp_path / "whole" / FILE):
        for damage in DAMAGES:
            folder = damaged(tmp_path / "whole", tmp_path / "damaged", damage, name)
            refuses(folder, name if name in own or ".experts." in name else "target: ")


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_weight_goes_to_its_device_as_it_is_read(whole: Path, device: str) -> None:
    """The host never holds a model for another device: ranks that start together would hold it as
    many times."""
    read = []

    def seen(module: nn.Module, name: str, weight: Any) -> None:
        if getattr(weight, READ, False):
            read.append(weight.device.type)

    handle = hooks.register_module_parameter_registration_hook(seen)
    try:
        load_target(TargetConfig(kind="local", path=str(whole)), device=device)
    finally:
        handle.remove()
    assert read and {*read} == {device}
