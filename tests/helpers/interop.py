"""What the tests of export and import share: a tiny target deep enough for three inner layers,
heads with random weights, folders in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

from outrider.decode.models.load import TargetConfig, load_target
from outrider.heads.block.config import BlockConfig
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.interop import LAYOUTS, gguf_write
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.medusa.hydra_heads import HydraHeadsConfig
from outrider.heads.registry import head_class

DEEP = {"layers": 8, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 260}
MASK = 259  # no text has it
PAIRS = sorted(LAYOUTS)


def deep_target(**shape: Any):
    """A tiny Llama of 8 layers: the default taps are 2, 4 and 5.."""
    return load_target(TargetConfig(kind="tiny", **{**DEEP, **shape}), "float32", "cpu")


def words(size: int) -> dict[str, Any]:
    """The tokenizer's keys of a GGUF file, its words spelled in letters."""
    found = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [f"w{i}" for i in range(size)],
        "token_type": [int(gguf.TokenType.NORMAL)] * size,
        "merges": ["Ā Ā"],
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def target_gguf(path: Path, target: Any) -> Path:
    """The target as llama.cpp's converter writes a Llama."""
    config, size = target.model.config, target.vocab_size
    layer = {**config.to_dict(), "head_dim": config.head_dim}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, value in target.model.state_dict().items():
        stem = name.removesuffix(".weight")
        count = heads.get(stem.rpartition(".")[2])
        value = gguf_write.paired(value, count) if count else value
        tensors[f"{gguf_write.USUAL.get_name(stem)}.weight"] = value.detach().contiguous()
    keys = {f"llama.{k}": v for k, v in gguf_write._layer_keys(layer, size).items()}
    gguf_write.write(path, gguf_write.GgufModel("llama", keys | words(size), tensors), "float32")
    return path


def config(kind: str, **keys: Any) -> Any:
    """The configuration of a head that all formats of its kind can carry."""
    if kind == "medusa":
        return MedusaConfig(**{"heads": 3, "draft_vocab": 0, **keys})
    if kind == "hydra_heads":
        return HydraHeadsConfig(**{"heads": 2, "draft_vocab": 0, **keys})
    if kind in ("dflash", "dspark"):
        start = {"block": 4} if kind == "dflash" else {"block": 3, "markov_rank": 4}
        sure = {} if kind == "dflash" else {"confidence": 1.0}
        return BlockConfig(
            **{"kind": kind, "draft_vocab": 64, "mask_token": MASK, **start, **sure, **keys}
        )
    start = {"steps": 1, "feature_loss": 1.0} if kind == "eagle1" else {}
    return EagleConfig(
        **{"kind": kind, "draft_vocab": 0 if kind == "eagle1" else 64, "depth": 3, **start, **keys}
    )


def random_head(target: Any, kind: str, seed: int = 0, **keys: Any) -> Any:
    """A head whose every weight matters: random, norms around one, a draft vocabulary with
    gaps.
    """
    counts = torch.randint(
        1, 99, (target.vocab_size,), generator=torch.Generator().manual_seed(seed)
    )
    counts[MASK] = 0
    head = head_class(kind).for_target(target, config(kind, **keys), counts)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, weight in head.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        spread = 0.3 if weight.dim() == 1 else weight.shape[-1] ** -0.5
        if weight.requires_grad:
            weight.data = ("norm" in name) + spread * noise
    if kind in ("dflash", "dspark"):
        head.net.scale.fill_(1.0)  # what an export folds away
    return head.eval()


def folder(
    path: Path, target: Any, head: Any, format: str, dtype: torch.dtype = torch.float32
) -> Path:
    """The head in a format, without the script around it."""
    path.mkdir(parents=True)
    settings, tensors = LAYOUTS[format, head.kind].write(head, target, "/a/target", dtype)
    (path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "model.safetensors")
    return path


def change(path: Path, edit: Any = None, settings: Any = None) -> Path:
    """Edit the tensors and the config.json of a folder: both get the mapping and change it in
    place.
    """
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    if edit:
        edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, file)
    value = json.loads((path / "config.json").read_text())
    if settings:
        settings(value)
    (path / "config.json").write_text(json.dumps(value))
    return path
