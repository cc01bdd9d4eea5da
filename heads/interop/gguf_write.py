"""GGUF files for llama.cpp (build 11549): EAGLE-3 heads (its architecture `eagle3`), block
heads (`dflash`; with a Markov term it is DSpark), separate drafts and targets of the Llama
and Qwen2 classes (`llama`).

    write(path, head_model(head, target, tokenizer_keys(target, None)), "q8_0")

Tensors are those of the other layouts, renamed by the gguf package's own table; of `llama` and
`eagle3`, q and k rows are stored so that the two numbers a frequency turns stand side by side.
`d2t` holds absolute target ids, `target_layers` numbers hidden_states as our taps do.

A Qwen2 is written as a `llama` with biases, the same arithmetic: of its own `qwen2` that build
hands out no layer's input, and a server with an EAGLE-3 or block head ends at its first token.

Shape letters: H heads, hd head size.
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
from outrider.heads.small_lm.head import SmallLM

TYPES = {
    "float32": GGMLQuantizationType.F32,
    "bfloat16": GGMLQuantizationType.BF16,
    "float16": GGMLQuantizationType.F16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
TARGETS = ("LlamaForCausalLM", "Qwen2ForCausalLM")
# What the largest number of a tensor may be; a block of q8_0 has a float16 scale times 127
LARGEST = {
    "float32": torch.finfo(torch.float32).max,
    "bfloat16": torch.finfo(torch.bfloat16).max,
    "float16": 65504.0,
    "q8_0": 65504.0 * 127,
}
NO_MERGE = "Ā Ā"  # llama.cpp wants one; the pair makes no word, so its bytes stay apart
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


# -- what llama.cpp cannot run


def refusals(head: Head, target: Target) -> list[str]:
    """Return why llama.cpp cannot run a head, each with its key; [] when it can."""
    engine = engines.LLAMACPP
    if isinstance(head, SmallLM):
        found = model_refusals(head.net, target.vocab_size, "head")
        if head.cfg.draft_vocab:
            found.append(
                f"head.draft_vocab: {head.cfg.draft_vocab}; llama.cpp would draft from all tokens: "
                "train with head.draft_vocab=0"
            )
        return found
    found = []
    if architecture(target) not in engine.targets["eagle3"]:
        found.append(
            f"target: {engine.title} hands no layer of a {architecture(target)} to a draft head; "
            "choose another format (a separate draft, train/draft.py, needs no layer)"
        )
    if isinstance(head, Eagle3Head):
        found = eagle3_refusals(head, engine, target) + found
        if len(head.taps) != 3:
            found.append(
                f"head.taps: {list(head.taps)}; {engine.name} reads three different features: "
                "train with three taps"
            )
    elif isinstance(head, BlockHead):
        found = block_refusals(head, target) + found
    rope = head.config_json()["layer"]["rope_parameters"]
    kinds = ("default", "llama3", "linear") if isinstance(head, Eagle3Head) else ("default",)
    if rope.get("rope_type") not in (None, *kinds):
        found.append(
            f"rope_parameters.rope_type: {rope['rope_type']}; {engine.name} turns {head.kind} "
            f"heads by {', '.join(kinds)} positions alone"
        )
    return found


def model_refusals(model: Any, vocab: int, what: str) -> list[str]:
    """Return why a whole transformers model is no `llama` of llama.cpp for a target of
    `vocab` tokens; [] when it is. what: it is, target or head."""
    config, found = model.config, []
    if type(model).__name__ not in TARGETS:
        found.append(
            f"{what}: {type(model).__name__}; only {', '.join(TARGETS)} is written here: convert "
            "others with llama.cpp's own converter and name the file in tokenizer_from"
        )
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(config, key, False):
            found.append(f"{what}: {key} is true; llama.cpp's llama has no such thing")
    if getattr(config, "hidden_act", "silu") != "silu":
        found.append(f"{what}: hidden_act is {config.hidden_act}; llama.cpp's is silu")
    if getattr(config, "quantization_config", None) is not None:
        found.append(f"{what}: it is quantised; give its unquantised weights")
    rows = model.get_input_embeddings().weight.shape[0]
    if rows != vocab:
        found.append(
            f"{what}: it has {rows} tokens, the target {vocab}; llama.cpp wants one vocabulary for "
            "both"
        )
    return found


# -- models


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
        arch = "eagle3"
        given = eagle3_tensors(made, "layers.0")
        about = {
            "target_hidden_size": target.hidden_size,
            "norm_before_residual": cfg.norm_before_residual,
            "norm_before_fc": cfg.norm_joined,
        }
    about["target_layers"] = list(head.taps)
    tensors = {
        _named(name): value.detach().float().cpu()
        for name, value in given.items()
        if value.is_floating_point()
    }
    if (ids := head.ids()) is not None:
        tensors["d2t"] = ids.detach().cpu().long()
    if arch == "eagle3":
        tensors = {**_paired(tensors, layer), **rope_factors(layer)}
    about |= _layer_keys(layer, target.vocab_size)
    return GgufModel(arch, {f"{arch}.{k}": v for k, v in about.items()} | words, tensors)


def whole_model(model: Any, vocab: int, words: dict[str, Any]) -> GgufModel:
    """Return a whole transformers model of TARGETS as llama.cpp's `llama`. vocab: the
    target's tokens.

    Raises UserError for a model of another architecture or with parts that it does not have.
    """
    if reasons := model_refusals(model, vocab, "target"):
        raise UserError("format=gguf: " + "; ".join(reasons))
    config: dict[str, Any] = model.config.to_dict()
    heads = config["num_attention_heads"]
    layer = {**config, "head_dim": config.get("head_dim") or config["hidden_size"] // heads}
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    if torch.equal(state["model.embed_tokens.weight"], state["lm_head.weight"]):
        del state["lm_head.weight"]
    tensors = {_named(name.removeprefix("model.")): value for name, value in state.items()}
    keys = {f"llama.{k}": v for k, v in _layer_keys(layer, vocab).items()}
    return GgufModel("llama", keys | words, {**_paired(tensors, layer), **rope_factors(layer)})


def _named(name: str) -> str:
    """llama.cpp's name for a tensor of a head, as engines call it, or of a model, without
    `model.`."""
    stem, _, part = name.rpartition(".")
    known = USUAL.get_name(stem if stem == "lm_head" else f"model.{stem}")
    return f"{NAMES.get(stem) or known}.{part}"


def _paired(tensors: Mapping[str, Tensor], layer: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors with the rows of queries and keys as `llama` has them."""
    counts = {
        "attn_q": layer["num_attention_heads"],
        "attn_k": layer["num_key_value_heads"],
    }
    out = {}
    for name, value in tensors.items():
        part = name.split(".")[-2] if "." in name else ""
        out[name] = paired(value, counts[part]) if part in counts else value
    return out


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
    divided.

    Raises UserError for kinds that also scale attention or change with the length."""
    rope = layer["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if kind in (None, "default"):
        return {}
    if kind not in ("llama3", "linear"):
        raise UserError(
            f"format=gguf: rope_parameters.rope_type: {kind} is not written; default, llama3 and "
            "linear are"
        )
    frequency, _ = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**layer), torch.device("cpu"))
    size = layer["head_dim"]
    plain = float(rope["rope_theta"]) ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return {"rope_freqs.weight": (plain / frequency.double()).float()}


# -- the tokenizer


def tokenizer_keys(target: Target, source: Path | None) -> dict[str, Any]:
    """Return keys tokenizer.*: copied from a GGUF of the target, or made from its
    byte-level BPE.

    Raises UserError where the file's vocabulary is not the target's, and for a tokenizer that
    needs such a file."""
    if source is not None:
        return _copied(source, target.vocab_size)
    tokenizer: Any = target.tokenizer
    core = getattr(tokenizer, "backend_tokenizer", None)
    said = json.loads(core.to_str()) if core is not None else {}
    model = said.get("model", {})
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    pre = split_name(said) if merges else "gpt-2"  # without merges words are bytes however cut
    if model.get("type") != "BPE" or pre is None:
        raise UserError(
            "format=gguf: llama.cpp's name for the target's tokenizer is not known here; give the "
            "target's own GGUF file: tokenizer_from=FILE.gguf"
        )
    words = {number: word for word, number in model["vocab"].items()}
    kinds = dict.fromkeys(words, gguf.TokenType.NORMAL)
    for extra in said.get("added_tokens", []):
        words[extra["id"]] = extra["content"]
        special = gguf.TokenType.CONTROL if extra["special"] else gguf.TokenType.USER_DEFINED
        kinds[extra["id"]] = special
    size = range(target.vocab_size)
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [words.get(i, f"[PAD{i}]") for i in size],
        "token_type": [int(kinds.get(i, gguf.TokenType.UNUSED)) for i in size],
        "merges": merges or [NO_MERGE],
        "add_bos_token": tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "padding_token_id": tokenizer.pad_token_id,
    }
    found = {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}
    if isinstance(tokenizer.chat_template, str):
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def split_name(said: dict[str, Any]) -> str | None:
    """llama.cpp's name for what a tokenizer.json does before the merges; None when it is not
    known."""
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


def _copied(source: Path, vocab: int) -> dict[str, Any]:
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
        _check_range(name, tensor, dtype)
        data, stored = tensor.float().contiguous().numpy(), _kind(tensor, dtype)
        writer.add_tensor(name, gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.chmod(0o644)


def _check_range(name: str, tensor: Tensor, dtype: str) -> None:
    if not bool(tensor.isfinite().all()):
        raise UserError(f"format=gguf: {name} holds NaN or infinite values; train the head again")
    if float(tensor.abs().max()) > LARGEST[dtype]:
        raise UserError(
            f"dtype: {dtype} cannot hold {float(tensor.abs().max()):.3g} of {name}; set "
            "dtype=float32"
        )
