"""The keys of a config.json that describe draft layers, as the EAGLE and block layouts share
them: from a head's layers, and back; and what a folder in the format of the speculators package
says beside them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.typed import from_json
from outrider.decode.target import Target
from outrider.heads.interop.layout import architecture, number
from outrider.heads.interop.reading import Foreign
from outrider.heads.layers.shape import LayerShape

VERSION = "0.9.0"  # of the speculators package


def fields(layer: dict[str, Any], target: Target, dtype: str) -> dict[str, Any]:
    """Keys of a LlamaConfig for layers of the shape `layer` (heads.layers.shape.layer_config).
    The rotary base stands there twice: old engines read rope_theta and rope_scaling."""
    rope, eos = dict(layer["rope_parameters"]), list(target.eos_ids)
    scaled = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "model_type": "llama",
        **{k: v for k, v in layer.items() if k != "rope_parameters"},
        "vocab_size": target.vocab_size,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_parameters": rope,
        "rope_scaling": None if rope.get("rope_type") in (None, "default") else scaled,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": dtype,
    }


def speculators(algorithm: str, target: Target, name: str, depth: int) -> dict[str, Any]:
    """Keys of every folder of speculators: what it holds, how many tokens to draft, for which
    target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": [architecture(target)]},
        },
    }


# -- reading


def described(foreign: Foreign, kind: str) -> dict[str, Any]:
    """The keys that describe the layers: those of config.json, of a folder of speculators its
    transformer_layer_config. Raises UserError where that is missing or not of `kind`."""
    config, where = foreign.config, foreign.folder / "config.json"
    if "speculators_model_type" not in config:
        return config
    found = config.get("transformer_layer_config")
    if not isinstance(found, dict):
        raise UserError(f"{where}: transformer_layer_config is missing; export the head again")
    if found.get("model_type", kind) != kind:
        raise UserError(
            f"{where}: its layer is a {found['model_type']!r:.40} layer; {kind} layers are read"
        )
    return found


def depth_in(config: dict[str, Any], most: int) -> int | None:
    """How many tokens a folder of speculators is to draft, None where it does not tell or tells
    more than `most`."""
    try:
        depth = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return None
    return depth if type(depth) is int and 0 < depth <= most else None


def window_in(foreign: Foreign, config: dict[str, Any]) -> int | None:
    """How many positions the layers look back over, None: over all. As in engines, layer_types
    decides: `sliding_window` alone stands in many configs and means nothing.

    Raises UserError for a window of no whole number above 0, and for layers that differ."""
    where, kinds = foreign.folder / "config.json", config.get("layer_types")
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return None
    if any(kind != "sliding_attention" for kind in kinds):
        raise UserError(
            f"{where}: layer_types: some layers slide and some do not; heads whose layers are "
            "alike are read"
        )
    return number(foreign, config, "sliding_window")


def layer(foreign: Foreign, config: dict[str, Any], target: Target) -> dict[str, Any]:
    """The draft layers (heads.layers.shape.layer_config) that a LlamaConfig describes.

    Raises UserError for a key that is missing or absurd, and for layers that this repository
    cannot run with this target."""
    where = foreign.folder / "config.json"
    for key in ("attention_bias", "mlp_bias", "qkv_bias"):
        if config.get(key):
            raise UserError(f"{where}: {key} is true; draft layers with biases are not read")
    width, heads = (number(foreign, config, key) for key in ("hidden_size", "num_attention_heads"))
    said = foreign.config.get("target_hidden_size") or width
    if not width == said == target.hidden_size:
        raise UserError(
            f"{where}: hidden_size: {width} (target_hidden_size {said!r:.40}); the target's is "
            f"{target.hidden_size}: give the target that the head was trained for"
        )
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
