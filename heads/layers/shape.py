"""The shape of draft layers: from a target and the keys of a head, and as a file gives it,
every value checked before anything of its size is made.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeVar

import torch
from annotated_types import Interval
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.conf.errors import UserError, first_line
from outrider.conf.rules import BelowOne
from outrider.conf.typed import SHORT
from outrider.decode.target import Target
from outrider.heads.config import Count, Layers
from outrider.heads.config import LayerKeys as LayerKeys
from outrider.heads.layers.layer import rope_table

WIDEST_HEAD = 1 << 16  # rotary positions are tried at this width
# What configs call the number of their experts (transformers maps the rest onto these).
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Times the hidden width: of a mixture of experts the config's own is one expert's, or that of
# a few dense layers. Dense targets have 3 to 4; heads published for mixtures have 6 (gpt-oss,
# Qwen3-30B-A3B) to 8 (Qwen3-Next).
WIDE = 4


K = TypeVar("K", bound=LayerKeys)


def as_made(keys: K, layer: dict[str, Any]) -> K:
    """`keys` that say what layers of the shape `layer` (layer_config) have."""
    return replace(keys, intermediate_size=layer["intermediate_size"])


def layer_config(target: Target, layers: int, keys: LayerKeys) -> dict[str, Any]:
    """Return keys of a LlamaConfig that describe a draft layer for `target`; plain JSON.

    Raises UserError when the target's embeddings and hidden states differ in width."""
    config, width = target.config, target.hidden_size
    get = functools.partial(_first, config)
    wide = target.embedding_weight.shape[1]
    if wide != width:
        raise UserError(
            f"head: the target's embeddings are {wide} wide and its hidden states {width}: EAGLE "
            "puts them side by side; use head=medusa"
        )
    heads = get("num_attention_heads", default=1)
    head_dim = get("head_dim", default=width // heads)
    rope = dict(get("rope_parameters", default={}))
    # Families with a sliding window keep one set per layer type.
    rope = dict(rope.get("full_attention") or rope)
    for part in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        rope.pop(part, None)  # a Llama layer rotates whole heads, and a text has one axis
    if rope.get("rope_type") == "proportional":  # of a part of each head, in Gemma 4
        rope["rope_type"] = "linear" if "factor" in rope else "default"
    if len(rope.get("short_factor") or ()) not in (0, head_dim // 2):  # LongRoPE of a part alone
        rope = {"rope_theta": rope.get("rope_theta", 10000.0)}
    return {
        "hidden_size": width,
        "intermediate_size": keys.intermediate_size or _inner(config, width),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": get("num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "hidden_act": "silu",  # whatever the target's is: engines know no other
        "rms_norm_eps": get(
            "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", default=1e-6
        ),
        "max_position_embeddings": min(target.context_length, 1 << 20),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
    }


def _inner(config: Any, width: int) -> int:
    """Width of the MLP of a draft layer after a target's config. width: of its hidden
    states."""
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    inner = _first(config, *names, default=4 * width)
    inner = max(map(int, inner)) if isinstance(inner, list | tuple) else int(inner)  # Gemma 3n
    experts = _first(config, *EXPERTS, default=0)
    return max(inner, WIDE * width) if experts > 1 else inner


def _first(config: Any, *names: str, default: Any) -> Any:
    """Return the first of a config's keys that is there."""
    return next((v for n in names if (v := getattr(config, n, None)) is not None), default)


@dataclass
class LayerShape:
    """What layer_config gives, as a file holds it: the keys of a LlamaConfig that shape draft
    layers.

    rope_parameters: as transformers names them, by rope_type."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Interval(ge=1, le=WIDEST_HEAD)]
    hidden_act: str
    rms_norm_eps: BelowOne
    max_position_embeddings: Count
    rope_parameters: dict[str, Any]

    def validate(self) -> list[str]:
        found = []
        if self.num_attention_heads % self.num_key_value_heads:
            found.append(
                f"num_key_value_heads: {self.num_key_value_heads} does not divide "
                f"{self.num_attention_heads}"
            )
        if self.head_dim % 2:
            found.append(f"head_dim: {self.head_dim} is odd, and rotary positions turn pairs")
        if self.hidden_act not in ACT2FN:
            found.append(
                f"hidden_act: {self.hidden_act[:40]!r} is no activation that transformers knows"
            )
        return found or self._turns()

    def _turns(self) -> list[str]:
        """Return what is wrong with the rotary positions: transformers has a rule for every
        type, so they are tried."""
        kind = self.rope_parameters.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ("default", *ROPE_INIT_FUNCTIONS):
            return [
                f"rope_parameters.rope_type: {SHORT.repr(kind)} is none that transformers knows"
            ]
        try:
            with torch.device("cpu"):
                cos, sin = rope_table(
                    LlamaConfig(**asdict(self)), 4, torch.float32, torch.device("cpu")
                )
        except Exception as error:  # other people's code: whatever it raises, the file is wrong
            return [f"rope_parameters: make no rotary positions ({first_line(error)})"]
        sound = cos.shape == sin.shape == (4, self.head_dim) and bool(
            (cos.isfinite() & sin.isfinite()).all()
        )
        return [] if sound else ["rope_parameters: make no rotary positions of this head_dim"]

    def fits(self, target: Target, layers: int, key: str) -> list[str]:
        """Return why a stack of `layers` of them cannot read `target`, "key.name: what"; []."""
        found = []
        if self.hidden_size != target.hidden_size:
            found.append(
                f"{key}.hidden_size: {self.hidden_size}, the target's is {target.hidden_size}"
            )
        if self.num_hidden_layers != layers:
            found.append(
                f"{key}.num_hidden_layers: {self.num_hidden_layers}, the head's config "
                f"says {layers}"
            )
        return found
