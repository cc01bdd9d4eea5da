"""gpt-oss as it is published, small: MXFP4 weights are read as plain numbers, counted as such before
anything is loaded, and never quantised on top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from outrider.conf.errors import UserError
from outrider.decode.models import memory, text, tiny
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.tiny import byte_tokenizer

VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of four bits, sign apart
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 300}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with such weights, and what its experts hold."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    model = tiny.tiny_model("gpt_oss", **SHAPE, num_local_experts=4, head_dim=16)
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer(300).save_pretrained(folder)
    weights, want = load_file(folder / "model.safetensors"), {}
    draw = torch.Generator().manual_seed(0)
    for name in [n for n in weights if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        blocks = torch.randint(256, (experts, outer, inner // 32, 16), generator=draw)
        scales = torch.randint(120, 126, (experts, outer, inner // 32), generator=draw)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = (
            blocks.to(torch.uint8),
            scales.to(torch.uint8),
        )
        both = torch.stack([blocks & 15, blocks >> 4], -1)
        signed = VALUES[both & 7] * torch.where(both & 8 > 0, -1.0, 1.0)
        whole = signed.flatten(-2) * (scales - 127.0).exp2()[..., None]
        want[name] = whole.flatten(-2).transpose(1, 2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, want


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_read_as_plain_numbers(
    published: tuple[Path, dict[str, torch.Tensor]], dtype: str
) -> None:
    folder, want = published
    target = load_target(TargetConfig(kind="local", path=str(folder)), dtype, "cpu")
    found = dict(target.model.named_parameters())
    assert len(want) == 4
    for name, value in want.items():
        assert found[name].dtype == getattr(torch, dtype)
        assert torch.equal(found[name].float(), value), name
    counted, _ = memory.parameters(text.empty(AutoConfig.from_pretrained(folder)))
    assert counted == sum(p.numel() for p in found.values())
    ids = torch.arange(4, 20)[None]
    state = target.features(ids, torch.ones_like(ids, dtype=torch.bool), (target.num_layers,))
    assert state.shape[:2] == (1, 16) and bool(state.isfinite().all())


def test_they_are_not_quantised_on_top(
    published: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    cfg = TargetConfig(kind="local", path=str(published[0]), quantize="bnb-int8")
    with pytest.raises(
        UserError, match="^target.quantize: the checkpoint keeps its weights in MXFP4"
    ):
        load_target(cfg, "bfloat16", "cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_is_read_as_plain_numbers(tmp_path: Path, dtype: str) -> None:
    """With a scale for each block of 32 x 32, and a layer that is left as it is."""
    model = tiny.tiny_model("qwen3", **SHAPE).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    byte_tokenizer(300).save_pretrained(tmp_path)
    weights, want = load_file(tmp_path / "model.safetensors"), {}
    for name in [n for n in weights if "_proj" in n and "layers.1.mlp" not in n]:
        blocks = weights.pop(name).float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
        scales = blocks.abs().amax((1, 3)) / 448
        packed = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        whole = (packed.float() * scales[:, None, :, None]).flatten(2).flatten(0, 1)
        want[name], weights[f"{name}_scale_inv"] = whole, scales
        weights[name] = packed.flatten(2).flatten(0, 1)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    kept = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    config["quantization_config"] = {**kept, "modules_to_not_convert": ["model.layers.1.mlp"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(TargetConfig(kind="local", path=str(tmp_path)), dtype, "cpu")
    found = dict(target.model.named_parameters())
    assert {n: p.dtype for n, p in found.items()} == dict.fromkeys(found, getattr(torch, dtype))
    for name, value in want.items():
        assert torch.allclose(found[name].float(), value, rtol=0.01), name
    same = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[same].float(), weights[same].float())
