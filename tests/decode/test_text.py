"""The language model of a vision-language checkpoint: found by its config, loaded without the vision
part, decoded as transformers decodes it, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from outrider.conf.errors import UserError
from outrider.decode.engine import Request
from outrider.decode.models import memory, text
from outrider.decode.models.identity import sha256_weights
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.tiny import byte_tokenizer
from outrider.decode.ngram import NGram
from outrider.decode.target import Target
from outrider.heads.interop import architecture
from outrider.heads.layers.shape import LayerKeys, layer_config
from tests.helpers.archs import SEEING, build
from tests.helpers.decoding import texts

VOCAB = 260
WEIGHTS = "model.safetensors"
OUTSIDE = ("vision", "visual", "multi_modal")  # names of what sees


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


def saved(folders: Path, arch: str) -> Path:
    folder = folders / arch
    if not folder.is_dir():
        build(arch, vocab_size=VOCAB).save_pretrained(folder)
        byte_tokenizer(VOCAB).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Target:
    return load_target(TargetConfig(kind="local", path=str(folder)))


@pytest.mark.parametrize("arch", SEEING)
def test_its_language_model_answers_as_the_whole_does(arch: str, folders: Path) -> None:
    folder = saved(folders, arch)
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    target = loaded(folder)
    names = dict(target.model.named_parameters())
    assert not [name for name in names if any(word in name for word in OUTSIDE)]
    held = sum(p.numel() for p in names.values())
    assert memory.parameters(text.empty(whole.config))[0] == held
    assert held == sum(
        weight.numel()
        for name, weight in whole.named_parameters()
        if not any(word in name for word in OUTSIDE)
    )
    assert (
        architecture(target) == json.loads((folder / "config.json").read_text())["architectures"][0]
    )
    assert target.identity.weights_sha256 == sha256_weights(folder)
    # 60 stands for a picture, which is not there
    ids, places = torch.tensor([[60, 5, 60, 60, 7, 8]]), torch.arange(6)[None]
    seen = target.features(ids, torch.ones_like(ids, dtype=torch.bool), [target.num_layers])
    wanted = target.model(input_ids=ids, position_ids=places).logits
    torch.testing.assert_close(target.unembed(seen[:, :, 0]), wanted)
    prompts = [[*range(5, 15)], [*range(40, 43)], [7, 8, 9] * 4]
    wanted = [
        whole.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
        for ids in prompts
    ]
    found = texts(target, NGram(), [Request(ids, 24) for ids in prompts], batch_size=3)
    assert found == [ids.tolist() for ids in wanted]


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl", "gemma4"])
def test_draft_layers_turn_as_those_of_a_text_do(arch: str, folders: Path) -> None:
    """Neither axes of pictures nor a part of each head, which no engine's draft layer knows."""
    made = layer_config(loaded(saved(folders, arch)), 1, LayerKeys())["rope_parameters"]
    assert made.keys() == {"rope_type", "rope_theta"} and made["rope_type"] == "default"


@pytest.mark.parametrize("arch", ["qwen3_vl", "gemma3"])
def test_a_weight_of_the_language_model_must_be_there_and_no_other(
    arch: str, folders: Path, tmp_path: Path
) -> None:
    folder = saved(folders, arch)
    weights = load_file(folder / WEIGHTS)
    seeing = [name for name in weights if any(word in name for word in OUTSIDE)]
    (mine,) = [name for name in weights if name.endswith("layers.1.mlp.up_proj.weight")]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert seeing
    for gone in seeing:
        del weights[gone]
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    loaded(tmp_path)
    del weights[mine]
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "clip"}, "no class that reads text alone for clip"),
        ({"model_type": "llava", "decoder": {"a": 1}}, "target: "),
        ({"model_type": "musicgen"}, "no loadable causal language model"),
    ],
)
def test_text_that_cannot_be_told_is_refused(config: dict, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(2)}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    byte_tokenizer(VOCAB).save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        loaded(tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value)
