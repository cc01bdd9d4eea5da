"""The config.json of a Llama layer, as the EAGLE layouts share it: from a head's draft layer,
and back.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.typed import from_json
from outrider.heads.interop.layout import Facts, number
from outrider.heads.interop.reading import Foreign
from outrider.heads.layers.shape import LayerShape

# Tensors of a layer and their shapes, by the letters of `sizes`.
LAYER = {
    "self_attn.q_proj": "A W",
    "self_attn.k_proj": "G W",
    "self_attn.v_proj": "G W",
    "self_attn.o_proj": "D A",
    "mlp.gate_proj": "I D",
    "mlp.up_proj": "I D",
    "mlp.down_proj": "D I",
    "post_attention_layernorm": "D",
}


def sizes(layer: dict[str, Any], vocab: int, wide: int = 1) -> dict[str, int]:
    """The letters of a draft layer: D width, V vocabulary, I width of the MLP, S head size, A
    query heads x S, G key heads x S, W what the attention reads, `wide` times D."""
    size = layer["head_dim"]
    return {
        "D": layer["hidden_size"],
        "W": wide * layer["hidden_size"],
        "V": vocab,
        "I": layer["intermediate_size"],
        "S": size,
        "A": layer["num_attention_heads"] * size,
        "G": layer["num_key_value_heads"] * size,
    }


def fields(layer: dict[str, Any], facts: Facts, dtype: str) -> dict[str, Any]:
    """Keys of a LlamaConfig. The rotary base stands there twice: old engines read rope_theta
    and rope_scaling.
    """
    rope = dict(layer["rope_parameters"])
    scaled = {k: v for k, v in rope.items() if k != "rope_theta"}
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    return {
        "model_type": "llama",
        **{k: layer[k] for k in keys},
        "vocab_size": facts.vocab,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_parameters": rope,
        "rope_scaling": None if rope.get("rope_type") in (None, "default") else scaled,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": facts.bos,
        "eos_token_id": facts.eos[0] if len(facts.eos) == 1 else facts.eos,
        "torch_dtype": dtype,
    }


def window(size: int | None, layers: int) -> dict[str, Any]:
    """Keys of a LlamaConfig for layers that look back over so many positions, None: over all."""
    kinds = ["sliding_attention"] * layers
    return {} if size is None else {"sliding_window": size, "layer_types": kinds}


def window_in(foreign: Foreign, config: dict[str, Any]) -> int | None:
    """How many positions the layers look back over, None: over all. As in engines, layer_types
    decides: `sliding_window` alone stands in many configs and means nothing.

    Raises UserError for a window of no whole number above 0, and for layers that differ.
    """
    where, kinds = foreign.folder / "config.json", config.get("layer_types")
    if not kinds or not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return None
    if any(kind != "sliding_attention" for kind in kinds):
        raise UserError(
            f"{where}: layer_types: some layers slide and some do not; heads whose layers are "
            "alike are read"
        )
    return number(foreign, config, "sliding_window")


def layer(foreign: Foreign, config: dict[str, Any]) -> dict[str, Any]:
    """The draft layer (heads.layers.shape.layer_config) that a LlamaConfig describes.

    Raises UserError for a key that is missing or absurd, and for layers that this repository
    cannot run.
    """
    where = foreign.folder / "config.json"
    for key in ("attention_bias", "mlp_bias", "qkv_bias"):
        if config.get(key):
            raise UserError(f"{where}: {key} is true; draft layers with biases are not read")
    width, heads = (number(foreign, config, key) for key in ("hidden_size", "num_attention_heads"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict):
        rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0), **rope}
        if "type" in rope:  # the key's older name
            rope["rope_type"] = rope.pop("type")
    usual = {
        "num_hidden_layers": 1,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    }
    given = {k: config[k] for k in LayerShape.__dataclass_fields__ if config.get(k) is not None}
    known, found = from_json({**usual, **given, "rope_parameters": rope}, LayerShape)
    if found:
        raise UserError(
            f"{where}: {found[0].partition('; set ')[0]}; no draft layer can be made of it"
        )
    return asdict(known)
