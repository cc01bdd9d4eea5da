"""How a serving engine drafts with an exported head, written from the engines' forward passes and
from nothing of heads/: the self-check of every export, and the oracle of the import tests.

An EngineFile is what an engine makes of an export (scripts/exporting/loaders.py): its tensors
under plain names, and every flag as the engine takes it. It computes the logits of a draft behind
given tokens, in float32, without a cache.

Shape letters: n committed tokens that have a feature, D width, F features, K drafted tokens, V
vocabulary, Vd draft vocabulary, T rows, R of them with queries, H heads, S head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# taps -> [n, F, D], taps counted as hidden_states[k]
Features = Callable[[tuple[int, ...]], Tensor]
Turn = Callable[[Tensor, Tensor], Tensor]  # [.., T, S] and places [T] -> turned by them
Kind = Literal["medusa", "eagle1", "eagle3", "block"]
LAYER = "layers.0."


@dataclass(frozen=True)
class LayerDims:
    """Of decoder layers. groups: key-value heads. size: of a head. window: how many keys back a
    row sees, itself counted; 0: all."""

    heads: int
    groups: int
    size: int
    eps: float
    layers: int = 1
    window: int = 0


@dataclass(frozen=True)
class EngineFile:
    """An export as its engine sees it.

    embed: [V, D]. head: [Vd, D], the LM head. ids: [Vd] int64, the target's ids of its rows; None:
    all of the vocabulary. scale: of its logits. taps: what is read of the target. turn: the rotary
    positions. stacks: of Medusa, for each head its blocks (weight, bias or None) and its
    projection. mask: the token of a mask. block, causal, before: of block heads, rows of a
    block, whether they see earlier ones alone, and how many stand in front of the first slot."""

    kind: Kind
    tensors: Mapping[str, Tensor]
    embed: Tensor
    head: Tensor
    ids: Tensor | None = None
    taps: tuple[int, ...] = ()
    shape: LayerDims = LayerDims(1, 1, 1, 1e-6)
    turn: Turn = lambda x, _: x
    scale: float = 1.0
    stacks: tuple[tuple[list[tuple[Tensor, Tensor | None]], Tensor], ...] = ()
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    mask: int = -1
    block: int = 0
    causal: bool = True
    before: int = 0

    def logits(self, ids: Tensor, features: Features, drafted: Tensor) -> Tensor:
        """[K, V], -inf where the head has none: of the tokens behind ids [n + 1], whose last one
        has no feature yet, and behind each of the K - 1 `drafted` ones."""
        feats = features(self.taps).float()
        if self.kind == "medusa":
            return torch.stack([self._medusa(feats[-1, 0], *stack) for stack in self.stacks])
        if self.kind == "block":
            return self._block(ids, feats.flatten(1), drafted.tolist())
        return self._eagle(ids, feats.flatten(1), drafted.tolist())

    # -- the kinds

    def _medusa(
        self, x: Tensor, blocks: list[tuple[Tensor, Tensor | None]], projection: Tensor
    ) -> Tensor:
        for weight, bias in blocks:
            z = weight @ x
            x = x + F.silu(z if bias is None else z + bias)
        return projection @ x

    def _eagle(self, ids: Tensor, feats: Tensor, drafted: list[int]) -> Tensor:
        three, get = self.kind == "eagle3", self.tensors
        hidden = self._fused(feats) if three else feats
        tokens, rows = ids[1:].tolist(), list[Tensor]()
        for token in (*drafted, -1):
            e = self.embed[torch.tensor(tokens)]
            if three:
                normed = self._norm(hidden, f"{LAYER}hidden_norm")
                base = normed if self.norm_before_residual else hidden
                read = torch.cat([self._norm(e, f"{LAYER}input_layernorm"), normed], -1)
            else:
                base = torch.cat([e, hidden], -1) @ get["fc.weight"].T + get.get("fc.bias", 0.0)
                read = base
            y = self._layer(LAYER, base, read, read, earlier(len(read), self.shape.window))[-1]
            after = self._norm(y, "norm") if three else y
            rows.append(self._unembed(after))
            handed = (after if self.norm_output else y)[None]
            if "mask_hidden" in get:  # P-EAGLE: masks in place of what was drafted
                handed, token = self._fused(get["mask_hidden"]), self.mask
            tokens.append(token)
            hidden = torch.cat([hidden, handed])
        return torch.stack(rows)

    def _fused(self, x: Tensor) -> Tensor:
        """Return features side by side [n, F D] -> [n, D]."""
        if self.norm_before_fc:
            x = self._norm(x, "input_norm")
        if self.fc_norm:
            parts = enumerate(x.chunk(len(self.taps), -1))
            x = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in parts], -1)
        return x @ self.tensors["fc.weight"].T

    def _block(self, ids: Tensor, feats: Tensor, drafted: list[int]) -> Tensor:
        get, count = self.tensors, len(drafted) + 1
        rows = self.block or count + self.before
        context = self._norm(feats @ get["fc.weight"].T, "hidden_norm")
        x = torch.cat([self.embed[ids[-1:]], self.embed[torch.full((rows - 1,), self.mask)]])
        hidden = torch.zeros(rows, len(context) + rows, dtype=torch.bool)
        if self.causal:
            hidden[:, len(context) :] = earlier(rows)
        for number in range(self.shape.layers):
            name = f"layers.{number}."
            y = self._norm(x, f"{name}input_layernorm")
            x = self._layer(name, x, y, torch.cat([context, y]), hidden)
        near, far = (get.get(f"markov_w{i}.weight") for i in (1, 2))
        logits = [self._unembed(slot) for slot in self._norm(x, "norm")[self.before :][:count]]
        if near is not None and far is not None:
            last = [int(ids[-1]), *drafted]
            terms = (self._spread(far @ near[token], 0.0) for token in last)
            logits = [row + term for row, term in zip(logits, terms, strict=False)]
        return torch.stack(logits)

    # -- parts of a layer

    def _unembed(self, h: Tensor) -> Tensor:
        return self._spread((self.head @ h) * self.scale, -torch.inf)

    def _spread(self, own: Tensor, rest: float) -> Tensor:
        """Return rows of the draft vocabulary at their target ids; `rest` elsewhere."""
        if self.ids is None:
            return own
        out = torch.full((self.embed.shape[0], *own.shape[1:]), rest)
        out[self.ids] = own
        return out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.shape.eps)

    def _layer(self, name: str, base: Tensor, read: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        """Return one layer over base [R, D]. read: [R, ..], what queries come from, the
        last of keys [T, ..]. hidden: [R, T] bool, keys that a row does not see."""
        y = base + self._attention(name, read, keys, hidden)
        z = self._norm(y, f"{name}post_attention_layernorm")
        parts = ("gate", "up", "down")
        gate, up, down = (self.tensors[f"{name}mlp.{part}_proj.weight"].T for part in parts)
        return y + (F.silu(z @ gate) * (z @ up)) @ down

    def _attention(self, name: str, read: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        shape, places = self.shape, torch.arange(len(keys))

        def split(part: str, rows: Tensor, count: int) -> Tensor:
            made = rows @ self.tensors[f"{name}self_attn.{part}_proj.weight"].T
            made = made + self.tensors.get(f"{name}self_attn.{part}_proj.bias", 0.0)
            made = made.view(len(rows), count, shape.size).transpose(0, 1)
            own = f"{name}self_attn.{part}_norm"
            return self._norm(made, own) if f"{own}.weight" in self.tensors else made

        q = self.turn(split("q", read, shape.heads), places[len(keys) - len(read) :])
        k, v = self.turn(split("k", keys, shape.groups), places), split("v", keys, shape.groups)
        mixed = F.scaled_dot_product_attention(q, k, v, ~hidden, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1) @ self.tensors[f"{name}self_attn.o_proj.weight"].T


def earlier(length: int, window: int = 0) -> Tensor:
    """[T, T] bool: the keys that a causal row does not see."""
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return hidden | torch.ones_like(hidden).tril(-window) if window else hidden


def rotary(frequency: Tensor, factor: float = 1.0, neighbours: bool = False) -> Turn:
    """Return positions by [S / 2] frequencies: each turns the two halves of a head, or
    (neighbours) two numbers side by side."""

    def turn(x: Tensor, places: Tensor) -> Tensor:
        angle = places.float()[:, None] * frequency
        cos, sin = angle.cos() * factor, angle.sin() * factor
        a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
        parts = [a * cos - b * sin, a * sin + b * cos]
        return torch.stack(parts, -1).flatten(-2) if neighbours else torch.cat(parts, -1)

    return turn
