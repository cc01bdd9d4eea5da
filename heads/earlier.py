"""What earlier versions wrote into a head's card or checkpoint and this one does without."""

from __future__ import annotations

from typing import Any

# Keys of a head that later versions do without, and the values that change nothing for it now
# (None: any).
GONE: dict[str, tuple[Any, ...] | None] = {
    "tune": None,
    "activation_checkpointing": (False,),
    "causal": (False,),
    "layer": ("llama",),
    "init": None,
    "init_layer": None,
    "compile": None,
}


LAYER = ("intermediate_size", "hidden_act")  # of draft layers, before a head had keys for them


def implied(saved: dict[str, Any]) -> dict[str, Any]:
    """Keys that the card of an earlier version lacks, by what it says of the layers. saved: what
    stands under "head" in head.json."""
    config, layer = saved.get("config"), saved.get("layer") or saved.get("prefix")
    if not isinstance(config, dict) or not isinstance(layer, dict):
        return {}
    return {key: layer[key] for key in LAYER if key in layer and key not in config}


def is_gone(key: str, value: Any) -> bool:
    """Whether a saved key of a head, or of one of its groups, may be passed over."""
    harmless = GONE.get(key, GONE.get(key.partition(".")[0], ()))
    return harmless is None or value in harmless


def without_gone(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a saved head (parsed JSON) and of its groups without those that may be passed
    over."""
    kept = {key: value for key, value in config.items() if not is_gone(str(key), value)}
    for group, keys in kept.items():
        if isinstance(keys, dict):
            kept[group] = {k: v for k, v in keys.items() if not is_gone(f"{group}.{k}", v)}
    return kept
