"""GGUF files of heads for llama.cpp (build 11549): EAGLE-3 (its architecture `eagle3`) and block
heads (`dflash`; with a Markov term it is DSpark). The target's own file comes from llama.cpp's
converter, as does that of a separate draft; a head's takes the tokenizer from there.

    write(path, head_model(head, target, tokenizer_keys(file, target.vocab_size)), "q8_0")

Tensors are those of the other layouts, renamed by the gguf package's own table; of `eagle3`, q
and k rows are stored so that the two numbers a frequency turns stand side by side. `d2t` holds
absolute target ids, `target_layers` numbers hidden_states as our taps do.

Shape letters: H heads, hd head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.block.head import BlockHead
from outrider.heads.config import MOST_LAYERS
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.interop import engines
from outrider.heads.interop.block import block_refusals, block_tensors
from outrider.heads.interop.eagle import eagle3_refusals, eagle3_tensors
from outrider.heads.interop.layout import LM_HEAD, architecture
from outrider.heads.interop.reading import read_gguf

TYPES = {
    "float32": GGMLQuantizationType.F32,
    "bfloat16": GGMLQuantizationType.BF16,
    "float16": GGMLQuantizationType.F16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
FACTORS = ("llama3", "linear")  # kinds of rotary positions that divide the plain frequencies
USUAL = gguf.TensorNameMap(gguf.MODEL_ARCH.QWEN3, MOST_LAYERS)  # transformers' names -> theirs
# Engines' names of a head's tensors that the table lacks -> theirs
NAMES = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "layers.0.hidden_norm": "blk.0.attn_norm_2",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


@dataclass
class GgufModel:
    """arch: general.architecture. keys: of the file, whose types are those of their values.
    tensors: of floats in any format, or int64."""

    arch: str
    keys: dict[str, Any]
    tensors: dict[str, Tensor]


def refusals(head: Head, target: Target) -> list[str]:
    """Return why llama.cpp cannot run a head, each with its key; [] when it can."""
    engine, found = engines.LLAMACPP, list[str]()
    if architecture(target) not in engine.targets["eagle3"]:
        found.append(
            f"target: {engine.title} hands no layer of a {architecture(target)} to a draft head; "
            "choose another format (a separate draft, train/draft.py, needs no layer)"
        )
    kinds: tuple[str, ...] = ("default",)
    if isinstance(head, Eagle3Head):
        found, kinds = eagle3_refusals(head, engine, target) + found, (*kinds, *FACTORS)
        if len(head.taps) != 3:
            found.append(
                f"head.taps: {list(head.taps)}; {engine.name} reads three different features: "
                "train with three taps"
            )
    elif isinstance(head, BlockHead):
        found = block_refusals(head, target) + found
    rope = head.config_json()["layer"]["rope_parameters"]
    if rope.get("rope_type") not in (None, *kinds):
        found.append(
            f"rope_parameters.rope_type: {rope['rope_type']}; {engine.name} turns {head.kind} "
            f"heads by {', '.join(kinds)} positions alone"
        )
    return found


def head_model(head: Head, target: Target, words: dict[str, Any]) -> GgufModel:
    """Return an EAGLE-3 or block head. words: see tokenizer_keys. Raises UserError with
    every reason why llama.cpp cannot run it."""
    if refused := refusals(head, target):
        raise UserError("format=gguf: " + "; ".join(refused))
    made: Any = head
    cfg, layer = made.cfg, made.config_json()["layer"]
    if isinstance(head, BlockHead):
        arch, given = "dflash", block_tensors(head, target)
        given.setdefault(LM_HEAD, head.projection(target))
        about: dict[str, Any] = {"block_size": cfg.block, "attention.causal": False}
        words = {**words, "tokenizer.ggml.mask_token_id": cfg.mask_token}
        if cfg.markov_rank:
            about["sample_from_anchor"] = cfg.kind == "dspark"
            about["has_confidence_head"] = cfg.confidence > 0
    else:
        arch, given = "eagle3", eagle3_tensors(made, "layers.0")
        about = {
            "target_hidden_size": target.hidden_size,
            "norm_before_residual": cfg.norm_before_residual,
            "norm_before_fc": cfg.norm_joined,
        }
    tensors = {
        _named(name): value.detach().float().cpu()
        for name, value in given.items()
        if value.is_floating_point()
    }
    if (ids := head.ids()) is not None:
        tensors["d2t"] = ids.detach().cpu().long()
    if arch == "eagle3":
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            name = f"blk.0.attn_{part}.weight"
            tensors[name] = paired(tensors[name], layer[heads])
        tensors |= rope_factors(layer)
    about |= {"target_layers": list(head.taps), **_layer_keys(layer, target.vocab_size)}
    return GgufModel(arch, {f"{arch}.{k}": v for k, v in about.items()} | words, tensors)


def _named(name: str) -> str:
    """llama.cpp's name for a tensor of a head, as engines call it."""
    stem, _, part = name.rpartition(".")
    known = USUAL.get_name(stem if stem == "lm_head" else f"model.{stem}")
    return f"{NAMES.get(stem) or known}.{part}"


def paired(rows: Tensor, heads: int) -> Tensor:
    """[H hd, in] or [H hd] with the halves of every head interleaved: llama.cpp turns rows 2i
    and 2i + 1 where transformers turns rows i and i + hd/2."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def _layer_keys(layer: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """Return keys that describe the layers, by their names behind the architecture's."""
    return {
        "context_length": layer["max_position_embeddings"],
        "embedding_length": layer["hidden_size"],
        "block_count": layer["num_hidden_layers"],
        "feed_forward_length": layer["intermediate_size"],
        "attention.head_count": layer["num_attention_heads"],
        "attention.head_count_kv": layer["num_key_value_heads"],
        "attention.key_length": layer["head_dim"],
        "attention.value_length": layer["head_dim"],
        "attention.layer_norm_rms_epsilon": float(layer["rms_norm_eps"]),
        "rope.dimension_count": layer["head_dim"],
        "rope.freq_base": float(layer["rope_parameters"].get("rope_theta", 10000.0)),
        "vocab_size": vocab,
    }


def rope_factors(layer: Mapping[str, Any]) -> dict[str, Tensor]:
    """{} for plain rotary positions, else rope_freqs [hd/2]: by what each frequency is
    divided. Of FACTORS alone: others also scale attention or change with the length."""
    rope = layer["rope_parameters"]
    if (kind := rope.get("rope_type")) not in FACTORS:
        return {}
    frequency, _ = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**layer), torch.device("cpu"))
    size = layer["head_dim"]
    plain = float(rope["rope_theta"]) ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return {"rope_freqs.weight": (plain / frequency.double()).float()}


def tokenizer_keys(source: Path, vocab: int) -> dict[str, Any]:
    """Return keys tokenizer.* of the target's GGUF file. Raises UserError where it holds
    another number of tokens than `vocab`, or cannot be read."""
    try:
        found = read_gguf(source, with_tensors=False)
    except UserError as error:
        raise UserError(f"tokenizer_from: {error}") from None
    words = found.fields.get("tokenizer.ggml.tokens")
    if not isinstance(words, list) or len(words) != vocab:
        size = len(words) if isinstance(words, list) else "no"
        raise UserError(
            f"tokenizer_from: {source} holds {size} tokens, the target {vocab}; give the target's "
            "own GGUF file"
        )
    return {k: v for k, v in found.fields.items() if k.startswith("tokenizer.")}


# -- the file


def rounded(tensor: Tensor, dtype: str) -> Tensor:
    """Return what a file of this type keeps of a float tensor."""
    kind = _kind(tensor, dtype)
    kept = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
    return torch.from_numpy(np.array(kept)).view(tensor.shape)


def _kind(tensor: Tensor, dtype: str) -> GGMLQuantizationType:
    """Vectors (norms, biases) stay float32, as llama.cpp's converter leaves them; rows that
    Q8_0 cannot cut into its blocks are float16."""
    if tensor.dim() < 2:
        return GGMLQuantizationType.F32
    block = gguf.GGML_QUANT_SIZES[TYPES[dtype]][0]
    return TYPES[dtype] if tensor.shape[-1] % block == 0 else GGMLQuantizationType.F16


def write(path: Path, model: GgufModel, dtype: str) -> None:
    """One file. dtype: float32, bfloat16, float16 or q8_0.

    Raises UserError for numbers that the type cannot hold."""
    writer = gguf.GGUFWriter(path, model.arch)
    kind = TYPES[dtype].name
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, value in model.keys.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in model.tensors.items():
        if not tensor.is_floating_point():
            writer.add_tensor(name, tensor.numpy().astype(np.int64))
            continue
        data, stored = tensor.float().contiguous(), _kind(tensor, dtype)
        if not bool(rounded(data, dtype).isfinite().all()):
            raise UserError(
                f"dtype: {dtype} cannot hold {float(data.abs().max()):.3g} of {name}; set "
                "dtype=float32, or train the head again where it is NaN or infinite"
            )
        writer.add_tensor(name, gguf.quants.quantize(data.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.chmod(0o644)
