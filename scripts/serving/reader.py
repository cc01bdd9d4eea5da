"""How a serving engine reads an exported head, written from the engines' forward passes and
from nothing of heads/: the self-check of every export, and the oracle of the import tests.

It reads config.json and the tensors as the engine would (its layer numbers, its flags, its
renamings) and computes greedy drafts in float32 without a cache. What an engine ignores, it
ignores: Medusa biases without medusa_fc_bias, vLLM's fc.bias.

Shape letters: n committed tokens that have a feature, D width, F features, K drafted tokens, V
vocabulary, T rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from scripts.serving.block_reader import BlockFile, block_rows, chosen

Features = Callable[
    [tuple[int, ...]], Tensor
]  # taps -> [n, F, D], taps counted as hidden_states[k]


@dataclass
class Drafts:
    """tokens: [K]. logits: [K, V], -inf where the head has no logit."""

    tokens: Tensor
    logits: Tensor


class Exported:
    """An exported folder as `format`'s engine sees it. embed, lm_head: the target's [V, D];
    layers: its layers.
    """

    def __init__(
        self, folder: Path, format: str, embed: Tensor, lm_head: Tensor, layers: int
    ) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.format, self.layers = format, layers
        raw = {
            k: v
            for file in sorted(folder.glob("*.safetensors"))
            for k, v in load_file(file).items()
        }
        self.tensors = {k: v.float() if v.is_floating_point() else v for k, v in raw.items()}
        self.embed, self.lm_head = embed.float().cpu(), lm_head.float().cpu()

    def draft(self, ids: Tensor, features: Features, count: int) -> Drafts:
        """Greedy drafts behind ids [n + 1] (the last one has no feature yet)."""
        if any(name.split(".")[0] == "blocks" or name[0].isdigit() for name in self.tensors):
            return self._medusa(features)
        if "hidden_norm.weight" in self.tensors:
            return self._block(ids, features, count)
        return self._eagle(ids, features, count)

    # -- block heads

    def _block(self, ids: Tensor, features: Features, count: int) -> Drafts:
        file = BlockFile.of(self.config, self.tensors)
        cos, sin = rotary(file.shape, len(ids) + file.block)

        def turn(x: Tensor, places: Tensor) -> Tensor:
            left, right = x.chunk(2, -1)
            return x * cos[places] + torch.cat([-right, left], -1) * sin[places]

        feats = features(file.taps).float()
        hidden = block_rows(file, self.embed, ids, feats, turn)[file.before :][:count]
        bias = None
        if "markov_head.markov_w1.weight" in self.tensors:
            near, far = (self.tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            bias = (near, self._spread(far, 0.0))
        return Drafts(*chosen(hidden, int(ids[-1]), lambda h: self._read(h, True), bias))

    def _spread(self, own: Tensor, rest: float) -> Tensor:
        """Rows of the draft vocabulary at their target ids; `rest` elsewhere."""
        if "d2t" not in self.tensors:
            return own
        out = torch.full((self.embed.shape[0], *own.shape[1:]), rest)
        out[torch.arange(len(own)) + self.tensors["d2t"]] = own
        return out

    # -- Medusa

    def _medusa(self, features: Features) -> Drafts:
        x = features((self.layers,))[-1, 0].float()
        native = "lm_heads.0.weight" in self.tensors
        biased = not native or bool(self.config.get("medusa_fc_bias"))
        heads = self.config["num_heads" if native else "medusa_num_heads"]
        blocks = self.config["num_hidden_layers" if native else "medusa_num_layers"]
        rows = []
        for k in range(heads):
            y = x
            for number in range(blocks):
                name = f"blocks.{k}.layers.{number}" if native else f"{k}.{number}.linear"
                z = self.tensors[f"{name}.weight"] @ y
                y = y + F.silu(z + self.tensors[f"{name}.bias"] if biased else z)
            rows.append(
                self.tensors[f"lm_heads.{k}.weight" if native else f"{k}.{blocks}.weight"] @ y
            )
        logits = torch.stack(rows)
        return Drafts(logits.argmax(-1), logits)

    # -- EAGLE

    def taps(self) -> tuple[int, ...]:
        """Which inner layers the engine hands over, in ascending order, counted as
        hidden_states[k].
        """
        nested = (self.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        top = self.config.get("eagle_aux_hidden_state_layer_ids")
        default = (2, self.layers // 2, self.layers - 3)
        if self.format == "eagle":
            return default
        if self.format == "sglang":
            return tuple(k + 1 for k in nested) if nested else default
        return tuple(sorted(top or nested or default))

    def _eagle(self, ids: Tensor, features: Features, count: int) -> Drafts:
        three = any("hidden_norm" in name for name in self.tensors)
        shape = self.config.get("transformer_layer_config", self.config)
        get = self._layer()
        flag = self.config.get
        eps = float(shape["rms_norm_eps"])
        if three:
            hidden = self._fused(features(self.taps()).float().flatten(1), eps)
        else:
            hidden = features((self.layers,))[:, 0].float()
        embed = self.tensors.get("embed_tokens.weight", self.embed)
        tokens = ids[1:].tolist()
        cos, sin = rotary(shape, len(tokens) + count)
        out, logits = [], []
        for _ in range(count):
            e = embed[torch.tensor(tokens)]
            if three:
                normed = norm(hidden, get("hidden_norm.weight"), eps)
                base = normed if self._residual_normed() else hidden
                read = torch.cat([norm(e, get("input_layernorm.weight"), eps), normed], -1)
            else:
                base = torch.cat([e, hidden], -1) @ self.tensors["fc.weight"].T
                if self.format != "vllm" and "fc.bias" in self.tensors:
                    base = base + self.tensors["fc.bias"]
                read = base
            y = base + attention(read, get, shape, cos, sin)
            z = norm(y, get("post_attention_layernorm.weight"), eps)
            up = F.silu(z @ get("mlp.gate_proj.weight").T) * (z @ get("mlp.up_proj.weight").T)
            y = (y + up @ get("mlp.down_proj.weight").T)[-1]
            after = norm(y, self.tensors["norm.weight"], eps) if three else y
            row = self._read(after, three)
            out.append(int(row.argmax()))
            logits.append(row)
            handed = (after if three and flag("norm_output") else y)[None]
            if "mask_hidden" in self.tensors:  # P-EAGLE: masks in place of what was drafted
                handed = self._fused(self.tensors["mask_hidden"], eps)
                tokens.append(flag("pard_token", flag("mask_token_id")))
            else:
                tokens.append(out[-1])
            hidden = torch.cat([hidden, handed])
        return Drafts(torch.tensor(out), torch.stack(logits))

    def _fused(self, x: Tensor, eps: float) -> Tensor:
        """Features side by side [n, F D] -> [n, D]."""
        if self.config.get("norm_before_fc"):
            x = norm(x, self.tensors["input_norm.weight"], eps)
        if self.config.get("fc_norm"):
            parts = enumerate(x.chunk(len(self.taps()), -1))
            x = torch.cat([norm(p, self.tensors[f"fc_norm.{i}.weight"], eps) for i, p in parts], -1)
        return x @ self.tensors["fc.weight"].T

    def _layer(self) -> Callable[[str], Tensor]:
        prefix = (
            "midlayer."
            if any(name.startswith("midlayer.") for name in self.tensors)
            else "layers.0."
        )
        return lambda name: self.tensors[prefix + name]

    def _residual_normed(self) -> bool:
        """The speculators reader of vLLM takes true where the key is absent, the others false."""
        return bool(self.config.get("norm_before_residual", self.format == "speculators"))

    def _read(self, h: Tensor, three: bool) -> Tensor:
        if not three:
            return (self.lm_head @ h) * float(self.config.get("logit_scale", 1.0))
        return self._spread(self.tensors.get("lm_head.weight", self.lm_head) @ h, -torch.inf)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotary(shape: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head size]; each frequency serves the two halves of a head."""
    scaled = shape.get("rope_scaling")
    size = int(shape["head_dim"])
    if scaled:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = LlamaConfig(
            **{k: v for k, v in shape.items() if k not in ("architectures", "model_type")}
        )
        frequency, factor = ROPE_INIT_FUNCTIONS[scaled["rope_type"]](config, torch.device("cpu"))
    else:
        frequency = float(shape["rope_theta"]) ** (-torch.arange(0, size, 2).float() / size)
        factor = 1.0
    angle = torch.arange(length).float()[:, None] * frequency
    angle = torch.cat([angle, angle], -1)
    return angle.cos() * factor, angle.sin() * factor


def attention(
    x: Tensor, get: Callable[[str], Tensor], shape: dict[str, Any], cos: Tensor, sin: Tensor
) -> Tensor:
    """Causal attention of one Llama layer over rows x [T, ..] at positions 0 .. T - 1."""
    length, size = x.shape[0], int(shape["head_dim"])
    heads, groups = int(shape["num_attention_heads"]), int(shape["num_key_value_heads"])

    def split(name: str, count: int) -> Tensor:
        return (
            (x @ get(f"self_attn.{name}_proj.weight").T).view(length, count, size).transpose(0, 1)
        )

    def turn(y: Tensor) -> Tensor:
        left, right = y.chunk(2, -1)
        return y * cos[:length] + torch.cat([-right, left], -1) * sin[:length]

    q, k, v = turn(split("q", heads)), turn(split("k", groups)), split("v", groups)
    k, v = (t.repeat_interleave(heads // groups, 0) for t in (k, v))
    score = q @ k.transpose(1, 2) / size**0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    if "sliding_attention" in (shape.get("layer_types") or ()):
        hidden |= torch.ones_like(hidden).tril(-int(shape["sliding_window"]))
    mixed = torch.softmax(score.masked_fill(hidden, -torch.inf), -1) @ v
    return mixed.transpose(0, 1).reshape(length, heads * size) @ get("self_attn.o_proj.weight").T
