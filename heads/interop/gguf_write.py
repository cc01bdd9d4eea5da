"""GGUF files for llama.cpp: EAGLE-3 heads, separate drafts and targets of the Llama and Qwen2
architectures.

    file = eagle3(head, target, tokenizer_fields(target, None))
    write(path, file, "q8_0")

What llama.cpp cannot run is refused by the key that would have to be different. Names, keys
and the order of rotary rows are those of its loaders (build 11549): q and k rows are stored
so that the two numbers a frequency turns stand side by side, `d2t` holds absolute target ids,
`target_layers` numbers hidden_states as our taps do.

A Qwen2 is written as a `llama` with biases, the same arithmetic: of its own `qwen2` that build
hands out no layer's input, and a server with an EAGLE-3 or block head ends at its first token.

Shape letters: D width, F features, Vd draft vocabulary, V vocabulary, H heads, hd head size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.interop import engines
from outrider.heads.interop.eagle1 import layer_refusals
from outrider.heads.interop.gguf_read import read_gguf

# Ours -> general.file_type
DTYPES = {"float32": 0, "bfloat16": 32, "float16": 1, "q8_0": 7}
TARGETS = ("LlamaForCausalLM", "Qwen2ForCausalLM")
NORMAL, CONTROL, DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
# What the largest number of a tensor may be; a block of q8_0 has a float16 scale times 127
LARGEST = {
    "float32": torch.finfo(torch.float32).max,
    "bfloat16": torch.finfo(torch.bfloat16).max,
    "float16": 65504.0,
    "q8_0": 65504.0 * 127,
}
NO_MERGE = "Ā Ā"  # llama.cpp wants one; the pair makes no word, so its bytes stay apart
BLOCK = 32  # values of a Q8_0 block
# What a byte-level tokenizer does before its merges -> tokenizer.ggml.pre
SPLITS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    ("Split", "ByteLevel"): "qwen2",
}
# The pattern by which Qwen2 splits; its letters, digits and signs then stay as they are.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Fields = dict[str, tuple[GGUFValueType, Any]]


@dataclass
class GgufModel:
    """arch: general.architecture. fields: keys with their types. tensors: of
    floats in any format, or int64."""

    arch: str
    fields: Fields
    tensors: dict[str, Tensor]


def eagle3_refusals(head: Head, layers: int) -> list[str]:
    """Why llama.cpp cannot run a head, each with its key; [] when it can. layers: the
    target's."""
    if not isinstance(head, Eagle3Head):
        return [
            f"head: llama.cpp has no {head.kind} heads; the nearest that is served: head=eagle3 "
            "or a separate draft (train/draft.py)"
        ]
    engine = engines.LLAMACPP
    found = layer_refusals(head, engine.name)
    for key, part in engines.NORMS.items():
        if getattr(head.cfg, key) and not engine.loads(part):
            found.append(
                f"head.{key}: {engine.title} has no such norm; train with head.{key}=false "
                "(recipe smollm2_eagle3_portable)"
            )
    if head.cfg.parallel:
        found.append(
            f"head.parallel: {engine.title} drafts with no masks; train with head.parallel=false"
        )
    if len(head.taps) != 3 or list(head.taps) != sorted(set(head.taps)):
        found.append(
            f"head.taps: {list(head.taps)}; {engine.name} reads three different features in "
            "ascending order: train with three taps"
        )
    if layers in head.taps:
        found.append(
            f"head.taps: {layers} is the output after the final norm here, and before it in "
            f"llama.cpp: train with taps below {layers}"
        )
    try:
        rope_factors(head.config_json()["layer"])
    except UserError as error:
        found.append(str(error).removeprefix("format=gguf: "))
    return found


def eagle3(head: Head, target: Target, words: Fields) -> GgufModel:
    """The head as llama.cpp's `eagle3` architecture. words: tokenizer_fields.

    Raises UserError with every reason why it cannot be.
    """
    refused = eagle3_refusals(head, target.num_layers)
    if refused:
        raise UserError("format=gguf: " + "; ".join(refused))
    layer = head.config_json()["layer"]
    state = {name: value.detach().float().cpu() for name, value in head.state_dict().items()}
    fields = layer_fields("eagle3", layer, target.vocab_size)
    fields |= {
        "eagle3.target_layers": (GGUFValueType.ARRAY, list(head.taps)),
        "eagle3.target_hidden_size": (GGUFValueType.UINT32, target.hidden_size),
        "eagle3.norm_before_residual": (GGUFValueType.BOOL, head.cfg.norm_before_residual),
        "eagle3.norm_before_fc": (GGUFValueType.BOOL, head.cfg.norm_joined),
    }
    tensors = {
        "fc.weight": state["net.fc.weight"],
        "blk.0.attn_norm.weight": state["net.embed_norm.weight"],
        "blk.0.attn_norm_2.weight": state["net.hidden_norm.weight"],
        "output_norm.weight": state["net.norm.weight"],
        "output.weight": state["net.lm_head.weight"],
        **block(0, "net.layers.0.", state, layer),
        **rope_factors(layer),
    }
    if head.cfg.norm_joined:
        tensors["enc.output_norm.weight"] = state["net.input_norm.weight"]
    ids = head.ids()
    if ids is not None:
        tensors["d2t"] = ids.detach().cpu().long()
    return GgufModel("eagle3", fields | words, tensors)


def model_refusals(model: Any, what: str) -> list[str]:
    """Why a whole transformers model is no `llama` of llama.cpp; [] when it is. what: it
    is, target or head."""
    config, name = model.config, type(model).__name__
    reasons = []
    if name not in TARGETS:
        reasons.append(
            f"{what}: {name}; only {', '.join(TARGETS)} is written here: convert others with "
            "llama.cpp's own converter and name the file in tokenizer_from"
        )
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            reasons.append(f"{what}: {key} is true; the llama architecture has no such bias")
    if getattr(config, "use_sliding_window", False):
        reasons.append(f"{what}: use_sliding_window is true; llama.cpp's llama has no window")
    if getattr(config, "hidden_act", "silu") != "silu":
        reasons.append(f"{what}: hidden_act is {config.hidden_act}; llama.cpp's is silu")
    if getattr(config, "quantization_config", None) is not None:
        reasons.append(f"{what}: it is quantised; give its unquantised weights")
    return reasons


def whole_model(model: Any, vocab: int, words: Fields) -> GgufModel:
    """A whole transformers model of TARGETS as llama.cpp's `llama`. vocab: its rows.

    Raises UserError for a model of another architecture or with parts that it does not have.
    """
    config = model.config
    if reasons := model_refusals(model, "target"):
        raise UserError("format=gguf: " + "; ".join(reasons))
    layer = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope_parameters),
    }
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    embed, head = state["model.embed_tokens.weight"], state["lm_head.weight"]
    tensors = {
        "token_embd.weight": embed,
        "output_norm.weight": state["model.norm.weight"],
        **rope_factors(layer),
    }
    if not torch.equal(embed, head):
        tensors["output.weight"] = head
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        tensors |= block(number, prefix, state, layer)
        tensors[f"blk.{number}.attn_norm.weight"] = state[f"{prefix}input_layernorm.weight"]
    return GgufModel("llama", layer_fields("llama", layer, vocab) | words, tensors)


def block(
    number: int, prefix: str, state: Mapping[str, Tensor], layer: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Attention and MLP of one layer, with the biases of queries, keys and values that it has."""
    heads, groups = layer["num_attention_heads"], layer["num_key_value_heads"]
    names = {
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_norm": "post_attention_layernorm",
    }
    out = {f"blk.{number}.{t}.weight": state[f"{prefix}{o}.weight"] for t, o in names.items()}
    for part, count in (("q", heads), ("k", groups)):
        for kind in ("weight", "bias"):
            if (rows := state.get(f"{prefix}self_attn.{part}_proj.{kind}")) is not None:
                out[f"blk.{number}.attn_{part}.{kind}"] = paired(rows, count)
    if (bias := state.get(f"{prefix}self_attn.v_proj.bias")) is not None:
        out[f"blk.{number}.attn_v.bias"] = bias
    return out


def paired(rows: Tensor, heads: int) -> Tensor:
    """[H hd, in] or [H hd] with the halves of every head interleaved: llama.cpp turns rows 2i
    and 2i + 1 where transformers turns rows i and i + hd/2."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def layer_fields(arch: str, layer: Mapping[str, Any], vocab: int) -> Fields:
    """Keys that describe the layers."""
    whole = {
        "context_length": layer["max_position_embeddings"],
        "embedding_length": layer["hidden_size"],
        "block_count": layer["num_hidden_layers"],
        "feed_forward_length": layer["intermediate_size"],
        "attention.head_count": layer["num_attention_heads"],
        "attention.head_count_kv": layer["num_key_value_heads"],
        "attention.key_length": layer["head_dim"],
        "attention.value_length": layer["head_dim"],
        "rope.dimension_count": layer["head_dim"],
        "vocab_size": vocab,
    }
    theta = float(layer["rope_parameters"].get("rope_theta", 10000.0))
    fractions = {
        "attention.layer_norm_rms_epsilon": float(layer["rms_norm_eps"]),
        "rope.freq_base": theta,
    }
    out: Fields = {f"{arch}.{k}": (GGUFValueType.UINT32, int(v)) for k, v in whole.items()}
    return out | {f"{arch}.{k}": (GGUFValueType.FLOAT32, v) for k, v in fractions.items()}


def rope_factors(layer: Mapping[str, Any]) -> dict[str, Tensor]:
    """{} for plain rotary positions, else rope_freqs [hd/2]: by what each frequency is divided.

    Raises UserError for kinds that also scale attention or change with the length.
    """
    rope = layer["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if kind in (None, "default"):
        return {}
    if kind not in ("llama3", "linear"):
        raise UserError(
            f"format=gguf: rope_parameters.rope_type: {kind} is not written; default, llama3 and "
            "linear are"
        )
    frequency, factor = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**layer), torch.device("cpu"))
    if factor != 1.0:
        raise UserError(f"format=gguf: rope_parameters: attention factor {factor}; only 1 works")
    size = layer["head_dim"]
    plain = float(rope["rope_theta"]) ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return {"rope_freqs.weight": (plain / frequency.double()).float()}


def tokenizer_fields(target: Target, source: Path | None) -> Fields:
    """Keys tokenizer.*: copied from a GGUF of the target, or made from its byte-level BPE.

    Raises UserError where the file's vocabulary is not the target's, and for a tokenizer that
    needs such a file.
    """
    if source is not None:
        return _copied(source, target.vocab_size)
    core = getattr(target.tokenizer, "backend_tokenizer", None)
    said = json.loads(core.to_str()) if core is not None else {}
    model = said.get("model", {})
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    pre = _split(said) if merges else "gpt-2"  # without merges the words are bytes however cut
    if model.get("type") != "BPE" or pre is None:
        raise UserError(
            "format=gguf: llama.cpp's name for the target's tokenizer is not known here; give the "
            "target's own GGUF file: tokenizer_from=FILE.gguf"
        )
    words = {number: word for word, number in model["vocab"].items()}
    kinds = dict.fromkeys(words, NORMAL)
    for extra in said.get("added_tokens", []):
        words[extra["id"]] = extra["content"]
        kinds[extra["id"]] = CONTROL if extra["special"] else DEFINED
    size = target.vocab_size
    tokenizer = target.tokenizer
    first = tokenizer("a").input_ids[:1]
    fields: Fields = {
        "tokenizer.ggml.model": (GGUFValueType.STRING, "gpt2"),
        "tokenizer.ggml.pre": (GGUFValueType.STRING, pre),
        "tokenizer.ggml.tokens": (
            GGUFValueType.ARRAY,
            [words.get(i, f"[PAD{i}]") for i in range(size)],
        ),
        "tokenizer.ggml.token_type": (
            GGUFValueType.ARRAY,
            [kinds.get(i, UNUSED) for i in range(size)],
        ),
        "tokenizer.ggml.merges": (GGUFValueType.ARRAY, merges or [NO_MERGE]),
        "tokenizer.ggml.add_bos_token": (
            GGUFValueType.BOOL,
            first == [tokenizer.bos_token_id],
        ),
    }
    numbers = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "padding": tokenizer.pad_token_id,
    }
    for name, number in numbers.items():
        if number is not None:
            fields[f"tokenizer.ggml.{name}_token_id"] = (GGUFValueType.UINT32, int(number))
    if isinstance(tokenizer.chat_template, str):
        fields["tokenizer.chat_template"] = (GGUFValueType.STRING, tokenizer.chat_template)
    return fields


def _split(said: dict[str, Any]) -> str | None:
    """llama.cpp's name for what happens before the merges; None when it is not known."""
    top = said.get("pre_tokenizer") or {}
    steps = top.get("pretokenizers", [top])
    split = any(step.get("type") == "Split" for step in steps)
    plain: dict[Any, dict[str, Any]] = {
        "Digits": {"individual_digits": True},
        "ByteLevel": {"use_regex": not split},
        "Split": {"pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False},
    }
    for step in steps:
        wanted = plain.get(step.get("type"), {"": None})
        if any(step.get(key) != value for key, value in wanted.items()):
            return None
    return SPLITS.get(tuple(step["type"] for step in steps))


def _copied(source: Path, vocab: int) -> Fields:
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
    return {
        name: (found.kinds[name], value)
        for name, value in found.fields.items()
        if name.startswith("tokenizer.")
    }


def rounded(tensor: Tensor, dtype: str) -> Tensor:
    """What a file of this type keeps of a float tensor: vectors (norms, biases) stay float32, as
    llama.cpp's converter leaves them, and so does the rest where dtype is float32; rows that
    Q8_0 cannot cut into blocks of 32 are float16."""
    kind = _kind(tensor, dtype)
    if kind == GGMLQuantizationType.F32:
        return tensor
    if kind == GGMLQuantizationType.F16:
        return tensor.half().float()
    if kind == GGMLQuantizationType.BF16:
        return tensor.bfloat16().float()
    blocks = gguf.quants.quantize(tensor.numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind).reshape(tensor.shape).copy())


def _kind(tensor: Tensor, dtype: str) -> GGMLQuantizationType:
    if dtype == "float32" or tensor.dim() < 2:
        return GGMLQuantizationType.F32
    if dtype == "bfloat16":
        return GGMLQuantizationType.BF16
    if dtype == "q8_0" and tensor.shape[-1] % BLOCK == 0:
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.F16


def write(path: Path, model: GgufModel, dtype: str) -> None:
    """One file. dtype: float32, bfloat16, float16 or q8_0.

    Raises UserError for numbers that the type cannot hold.
    """
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_file_type(DTYPES[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, (kind, value) in model.fields.items():
        if kind == GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, kind)
    for name, tensor in model.tensors.items():
        if tensor.is_floating_point():
            _check_range(name, tensor, dtype)
            _add(writer, name, tensor.float().contiguous().numpy(), _kind(tensor, dtype))
        else:
            writer.add_tensor(name, tensor.numpy().astype(np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.chmod(0o644)


def _add(writer: gguf.GGUFWriter, name: str, value: np.ndarray, kind: GGMLQuantizationType) -> None:
    if kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, value)
    elif kind == GGMLQuantizationType.F16:
        writer.add_tensor(name, value.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)


def _check_range(name: str, tensor: Tensor, dtype: str) -> None:
    if not bool(tensor.isfinite().all()):
        raise UserError(f"format=gguf: {name} holds NaN or infinite values; train the head again")
    if float(tensor.abs().max()) > LARGEST[dtype]:
        raise UserError(
            f"dtype: {dtype} cannot hold {float(tensor.abs().max()):.3g} of {name}; set "
            "dtype=float32"
        )
