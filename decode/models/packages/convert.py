"""A GGUF file to a folder as transformers writes it: bfloat16 safetensors, config,
generation config, tokenizer, each tensor dequantised by itself.

Shape letters: H heads, hd head size.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.models.identity import INDEX, WHOLE
from outrider.decode.models.packages import checks
from outrider.decode.models.packages.table import FORMAT, PackagedTarget
from outrider.decode.models.packages.tell import progress

SHARD = 1 << 30  # bytes of a safetensors file
ROWS = 8192  # of a matrix that are dequantised at a time
HELD = 2  # bytes of a bfloat16
# Names in the file -> names of transformers, in layers of Llama and of Qwen2
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What the file says of itself -> key of the config
FACTS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
NORMAL, CONTROL, DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type


def convert(target: PackagedTarget, file: Path, out: Path) -> None:
    """Write the folder `out` from the GGUF `file`, load it and check it. Raises UserError
    when a check fails, OSError where the disk is full."""
    out.mkdir()
    reader = gguf.GGUFReader(file)
    problems = unlike(target, reader)
    if not problems:
        write_weights(target, reader, out)
        write_tokenizer(target, reader, out)
        _write(out / "config.json", target.config)
        _write(out / "generation_config.json", target.generation)
        del reader
        problems = checks.folder(target, out)
    if problems:
        raise UserError(
            f"target={target.kind}: the conversion fails its own checks ("
            + "; ".join(problems[:3])
            + "); use the transformers version of constraints.txt"
        )
    mark = {"format": FORMAT, "gguf_sha256": target.gguf["sha256"], "weights": target.weights}
    _write(out / "outrider.json", mark)


def _write(path: Path, said: dict[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def unlike(target: PackagedTarget, reader: gguf.GGUFReader) -> list[str]:
    """Where the file says otherwise than the published config, one line each."""
    arch, config = _field(reader, "general.architecture"), target.config
    theta = config["rope_parameters"]["rope_theta"]
    wanted = {f"{arch}.{name}": config[key] for name, key in FACTS.items()}
    wanted |= {"general.architecture": config["model_type"], f"{arch}.rope.freq_base": theta}
    found = {key: _field(reader, key) for key in wanted}
    return [
        f"{key} is {found[key]}, not {wanted[key]}" for key in wanted if found[key] != wanted[key]
    ]


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def write_weights(target: PackagedTarget, reader: gguf.GGUFReader, out: Path) -> None:
    """Every tensor in bfloat16, in files of about SHARD bytes and never more than one of
    them in memory."""
    shards = list(_shards({name_of(t.name): t for t in reader.tensors}))
    total = sum(t.n_elements * HELD for t in reader.tensors)
    placed: dict[str, str] = {}
    with progress(target, "converting to bfloat16", total) as advance:
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            file = WHOLE if len(shards) == 1 else file
            held = {}
            for name, tensor in shard.items():
                held[name] = _turned(target, name, bfloat16(tensor))
                advance(tensor.n_elements * HELD)
            placed |= dict.fromkeys(held, file)
            _save(held, out / file)
    if len(shards) > 1:
        _write(out / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def _save(held: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(held, path, metadata={"format": "pt"})
    except SafetensorError as e:
        if "os error 28" in str(e):  # its own exception for a full disk
            raise OSError(errno.ENOSPC, "No space left on device", str(path)) from e
        raise


def _shards(tensors: dict[str, gguf.ReaderTensor]) -> Iterator[dict[str, gguf.ReaderTensor]]:
    """The tensors in name order, cut where SHARD bytes are reached."""
    shard: dict[str, gguf.ReaderTensor] = {}
    size = 0
    for name in sorted(tensors):
        if shard and size + tensors[name].n_elements * HELD > SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = tensors[name]
        size += tensors[name].n_elements * HELD
    yield shard


def name_of(name: str) -> str:
    """transformers' name of a tensor. Raises UserError for one that neither Llama nor Qwen2
    has."""
    parts = name.split(".")
    if name in OUTER:
        return OUTER[name]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
    raise UserError(f"target: the GGUF holds {name}, which is no tensor of Llama or Qwen2")


def bfloat16(tensor: gguf.ReaderTensor) -> Tensor:
    """The numbers of a tensor, ROWS at a time in float32."""
    shape = [int(size) for size in reversed(tensor.shape)]
    packed = tensor.data.reshape(-1, tensor.data.shape[-1])
    rows = [
        torch.from_numpy(
            np.array(gguf.dequantize(packed[at : at + ROWS], tensor.tensor_type))
        ).bfloat16()
        for at in range(0, len(packed), ROWS)
    ]
    return torch.cat(rows).reshape(shape)


def _turned(target: PackagedTarget, name: str, weight: Tensor) -> Tensor:
    """Query and key rows [H hd, in] in transformers' order: llama.cpp keeps the two that a
    frequency turns side by side in Llama's layers, not in Qwen2's."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if target.config["model_type"] != "llama" or part not in heads:
        return weight
    pairs = weight.reshape(target.config[heads[part]], -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def write_tokenizer(target: PackagedTarget, reader: gguf.GGUFReader, out: Path) -> None:
    """Vocabulary, merges and template of the file; how text is normalised and split, and
    which added tokens are special, as the published tokenizer has it: the file does not
    say."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    said = target.tokenizer
    words = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    # Rows behind the last token pad the matrix; the published vocabulary has no words for them.
    vocab = {w: i for i, (w, kind) in enumerate(zip(words, kinds, strict=True)) if kind != UNUSED}
    added = [i for i, kind in enumerate(kinds) if kind in (CONTROL, DEFINED)]
    plain = {*said["plain"], *(i for i in added if kinds[i] == DEFINED)}
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    inside = {w: i for w, i in vocab.items() if said["added_in_vocabulary"] or i not in added}
    merges = [merge.split(" ") for merge in _field(reader, "tokenizer.ggml.merges")]
    core = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": words[i], **how, "special": i not in plain} for i in added
        ],
        **said["steps"],
        "model": {"type": "BPE", **said["model"], "vocab": inside, "merges": merges},
    }
    backend = Tokenizer.from_str(json.dumps(core))
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **said["special"],
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=target.config["max_position_embeddings"],
    ).save_pretrained(out)
