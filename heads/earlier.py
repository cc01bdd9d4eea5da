"""What earlier versions wrote into a head's card or checkpoint and this one does without."""

from __future__ import annotations

from typing import Any

from outrider.conf.left import LAST

ADAPTER = "adapter_model.safetensors"  # the weights of a LoRA on another head

# Keys of a head, or of its groups, that later versions do without, and the values that change
# nothing for it now (None: any).
GONE: dict[str, tuple[Any, ...] | None] = {
    "tune": None,
    "activation_checkpointing": (False,),
    "causal": (False,),
    "draft_vocab_from": ("",),
    "lora.rank": (0,),
    "lora": None,
    "layer": ("llama",),
    "init": None,
    "init_layer": None,
}


LAYER = ("intermediate_size", "hidden_act")  # of draft layers, before a head had keys for them


def implied(saved: dict[str, Any]) -> dict[str, Any]:
    """Keys that the card of an earlier version lacks, by what it says of the layers. saved:
    what stands under "head" in head.json."""
    config, layer = saved.get("config"), saved.get("layer") or saved.get("prefix")
    if not isinstance(config, dict) or not isinstance(layer, dict):
        return {}
    return {key: layer[key] for key in LAYER if key in layer and key not in config}


def is_gone(key: str, value: Any) -> bool:
    """Whether a saved key of a head, or of one of its groups, may be passed over."""
    harmless = GONE.get(key, GONE.get(key.partition(".")[0], ()))
    return harmless is None or value in harmless


def without_gone(config: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The keys of a saved head (parsed JSON) and of its groups without those that may be
    passed over. known: the keys that there are now, with any values."""
    kept = {k: v for k, v in config.items() if k in known or not is_gone(str(k), v)}
    for group, keys in kept.items():
        now = known.get(group)
        if isinstance(keys, dict) and isinstance(now, dict):
            some = {k: v for k, v in keys.items() if k in now or not is_gone(f"{group}.{k}", v)}
            kept[group] = some
    return kept


def left(config: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """The keys of a saved head that would have changed it and that no version after LAST
    has, as "key: value; rule". known: see without_gone."""
    return [
        f"config.{key}: {config[key]!r:.40}; {LAST} is the last that reads it"
        for key in GONE
        if key in config and key not in known and not is_gone(key, config[key])
    ]
