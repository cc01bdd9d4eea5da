"""What an engine makes of an exported file, for scripts/exporting/reader.py: a folder of a head,
or a GGUF file. Written from the engines' loaders and from nothing of heads/ but the reader of
GGUF's bytes.

Each counts layers, takes flags and renames tensors as its engine does; what an engine ignores is
ignored: Medusa biases without medusa_fc_bias, vLLM's fc.bias.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.heads.interop.reading import read_gguf
from outrider.scripts.exporting.reader import LAYER, EngineFile, Kind, LayerDims, Turn, rotary

# llama.cpp's names of tensors -> plain ones; the longer ones first
NAMES = {
    "output_norm": "norm",
    "blk.": "layers.",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm_2": "hidden_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KINDS: dict[str, Kind] = {"dflash": "block", "eagle3": "eagle3"}
TAPS = "eagle_aux_hidden_state_layer_ids"


def folder(path: Path, format: str, embed: Tensor, lm_head: Tensor, layers: int) -> EngineFile:
    """Return an exported folder as `format`'s engine sees it. embed, lm_head: the target's
    [V, D]; layers: its layers."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    raw = {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
    tensors = {
        k.replace("midlayer.", LAYER).removeprefix("markov_head."): v.float()
        if v.is_floating_point()
        else v
        for k, v in raw.items()
    }
    embed, lm_head = embed.float().cpu(), lm_head.float().cpu()
    if "lm_heads.0.weight" in tensors:
        stacks = tuple(_stack(config, tensors, k) for k in range(config["num_heads"]))
        return EngineFile("medusa", tensors, embed, embed, taps=(layers,), stacks=stacks)
    d2t = tensors.get("d2t")
    ids = None if d2t is None else torch.arange(len(d2t)) + d2t
    head = tensors.get("lm_head.weight", lm_head)
    if "hidden_norm.weight" in tensors:
        if format == "sglang":  # whatever the file holds
            head, ids = lm_head, None
        return EngineFile("block", tensors, embed, head, ids, **_block(config))
    embed = tensors.get("embed_tokens.weight", embed)
    shape = config.get("transformer_layer_config", config)
    how: dict[str, Any] = {"shape": shape_of(shape), "turn": turn_of(shape)}
    if f"{LAYER}hidden_norm.weight" not in tensors:
        if format == "vllm":
            tensors.pop("fc.bias", None)
        scale = float(config.get("logit_scale", 1.0))
        return EngineFile("eagle1", tensors, embed, lm_head, taps=(layers,), scale=scale, **how)
    return EngineFile(
        "eagle3",
        tensors,
        embed,
        head,
        ids,
        taps_of(config, format, layers),
        norm_before_fc=bool(config.get("norm_before_fc")),
        fc_norm=bool(config.get("fc_norm")),
        norm_output=bool(config.get("norm_output")),
        # the speculators reader of vLLM takes true where the key is absent, the others false
        norm_before_residual=bool(config.get("norm_before_residual", format == "speculators")),
        mask=config.get("pard_token", config.get("mask_token_id", -1)),
        **how,
    )


def _stack(config: dict[str, Any], tensors: dict[str, Tensor], head: int) -> tuple[Any, Tensor]:
    """Return the blocks and the projection of one Medusa head."""
    biased = bool(config.get("medusa_fc_bias"))
    names = [f"blocks.{head}.layers.{number}" for number in range(config["num_hidden_layers"])]
    blocks = [(tensors[f"{n}.weight"], tensors[f"{n}.bias"] if biased else None) for n in names]
    return blocks, tensors[f"lm_heads.{head}.weight"]


def taps_of(config: dict[str, Any], format: str, layers: int) -> tuple[int, ...]:
    """Return which inner layers the engine hands to EAGLE-3, in ascending order, counted as
    hidden_states[k]."""
    nested = (config.get("eagle_config") or {}).get(TAPS)
    default = (2, layers // 2, layers - 3)
    if format == "sglang":
        return tuple(k + 1 for k in nested) if nested else default
    return tuple(sorted(config.get(TAPS) or nested or default))


def _block(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a block head's config says. Whether the rows of a block see each other
    goes by the rules of vLLM's loaders."""
    if config.get("speculators_model_type") is not None:
        shape = config["transformer_layer_config"]
        causal = not config.get("sliding_window_non_causal", False)
        taps, mask = config["aux_hidden_state_layer_ids"], config["mask_token_id"]
        first = config.get("sample_from_anchor", False)
    else:
        nested = config.get("dflash_config", {})
        shape, given = config, {**config, **nested}
        causal = config.get("is_causal", nested.get("causal", False))
        taps, mask = [number + 1 for number in given["target_layer_ids"]], given["mask_token_id"]
        first = config.get("sample_from_anchor", "DSpark" in config["architectures"][0])
    return {
        "taps": tuple(taps),
        "shape": shape_of(shape, int(shape["num_hidden_layers"])),
        "turn": turn_of(shape),
        "mask": mask,
        "block": config["block_size"],
        "causal": causal,
        "before": int(not first),
    }


def shape_of(config: dict[str, Any], layers: int = 1) -> LayerDims:
    """Return the shape of a transformers config's layers."""
    sliding = "sliding_attention" in (config.get("layer_types") or ())
    return LayerDims(
        int(config["num_attention_heads"]),
        int(config["num_key_value_heads"]),
        int(config["head_dim"]),
        float(config["rms_norm_eps"]),
        layers,
        int(config["sliding_window"]) if sliding else 0,
    )


def turn_of(config: dict[str, Any]) -> Turn:
    """Return the rotary positions of a transformers config."""
    scaled = config.get("rope_scaling")
    if not scaled:
        return rotary(frequencies(float(config["rope_theta"]), int(config["head_dim"])))
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    made = ROPE_INIT_FUNCTIONS[scaled["rope_type"]](LlamaConfig(**plain), torch.device("cpu"))
    return rotary(*made)


def frequencies(base: float, size: int) -> Tensor:
    """[S / 2] of rotary positions."""
    return base ** (-torch.arange(0, size, 2).float() / size)


def gguf(path: Path, embed: Tensor) -> EngineFile:
    """Return a GGUF file as llama.cpp sees it: an `eagle3` or `dflash` file. embed: the
    target's [V, D]. Rotary positions of the first turn neighbouring numbers, those of the second
    the halves of a head, and d2t holds target ids."""
    file = read_gguf(path)
    arch = str(file.fields["general.architecture"])
    lead = f"{arch}."
    field = {k.removeprefix(lead): v for k, v in file.fields.items() if k.startswith(lead)}
    tensors = {_plain(name, arch): value for name, value in file.tensors.items()}
    size = int(field["attention.key_length"])
    frequency = frequencies(float(field["rope.freq_base"]), size)
    if arch != "dflash":
        frequency = frequency / tensors.get("rope_freqs.weight", torch.ones(()))
    first = "markov_w1.weight" in tensors and field.get("sample_from_anchor", True)
    return EngineFile(
        KINDS[arch],
        tensors,
        embed.detach().float().cpu(),
        tensors["output.weight"],
        tensors.get("d2t"),
        tuple(int(k) for k in field.get("target_layers", ())),
        LayerDims(
            int(field["attention.head_count"]),
            int(field["attention.head_count_kv"]),
            size,
            float(field["attention.layer_norm_rms_epsilon"]),
            int(field["block_count"]),
        ),
        rotary(frequency, neighbours=arch != "dflash"),
        norm_before_fc=bool(field.get("norm_before_fc")),
        norm_before_residual=bool(field.get("norm_before_residual")),
        mask=int(file.fields.get("tokenizer.ggml.mask_token_id", -1)),
        causal=bool(field.get("attention.causal")),
        before=int(not first),
    )


def _plain(name: str, arch: str) -> str:
    """Return the plain name of a tensor of llama.cpp's."""
    inner = "hidden_norm" if arch == "dflash" else "input_norm"
    name = name.replace("enc.output_norm", inner)
    for theirs, plain in NAMES.items():
        name = name.replace(theirs, plain)
    return name
