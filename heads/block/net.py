"""The network of block heads: what training and decoding both run, so that they cannot drift
apart.

The target's tapped features of a committed token are fused once, c = norm(fc(h / scale)), for
all layers (DFlash, arXiv 2602.06036). A layer's keys and values are projected from c and from
the block's own rows by the same matrices; queries come from the rows alone. Rotary positions
are those of the text. The first row of a block is the anchor's embedding, all others a trained
mask vector. Layers are those of Qwen3: pre-norm, queries and keys normed per head.

Shape letters: B rows, n positions or rows, D width, H query heads, Hkv key heads, hd head
size, F taps, Vd draft vocabulary, r rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from outrider.heads.block.attention import Keys
from outrider.heads.block.config import BlockConfig
from outrider.heads.layers import pieces
from outrider.heads.layers.layer import MLP, DraftNet, Linear, RMSNorm, Rope, in_input_dtype

Attend = Callable[[int, Tensor, Keys], Tensor]  # layer, queries, the rows' own keys
SLOWEST = 0.04  # radians a position: slower pairs cannot tell neighbours apart
SHARP = 2.0  # of the queries' norm, of a fresh head that looks back


class BlockLayer(nn.Module):
    """One layer. Weights are float32; it computes in its input's dtype."""

    def __init__(self, config: LlamaConfig, key_norm: bool) -> None:
        super().__init__()
        width, eps, size = config.hidden_size, config.rms_norm_eps, int(config.head_dim or 0)
        self.size, self.eps = size, eps
        near, far = config.num_attention_heads * size, int(config.num_key_value_heads or 0) * size
        self.q_proj = Linear(width, near, bias=False)
        self.k_proj = Linear(width, far, bias=False)
        self.v_proj = Linear(width, far, bias=False)
        self.o_proj = Linear(near, width, bias=False)
        self.q_norm = RMSNorm(size, eps)
        self.k_norm = RMSNorm(size, eps) if key_norm else None
        self.mlp = in_input_dtype(MLP(config))
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def keys(self, x: Tensor, rope: Rope) -> Keys:
        """[B, n, D] -> keys and values of fused features or of normed rows."""
        key = self._heads(self.k_proj(x))
        if self.k_norm is None:
            key = F.rms_norm(key, (self.size,), eps=self.eps)
        else:
            key = self.k_norm(key)
        return pieces.turned(key, *rope), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rope: Rope, attend: Callable[[Tensor, Keys], Tensor]) -> Tensor:
        """Return rows [B, n, D] -> [B, n, D]. attend: (queries [B, H, n, hd], own keys) ->
        the same shape as the queries."""
        normed = self.input_layernorm(x)
        query = pieces.turned(self.q_norm(self._heads(self.q_proj(normed))), *rope)
        found = attend(query, self.keys(normed, rope))
        x = x + self.o_proj(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)


class BlockNet(DraftNet):
    """mask: [D]. scale: [F, D], by which tapped features are divided. lm_head [Vd, D], None
    for the target's; markov_in [V, r], markov_out [Vd, r] and confidence [D + r] where
    there are such."""

    scale: Tensor

    def __init__(self, cfg: BlockConfig, shape: dict[str, Any], features: int, size: int) -> None:
        """size: V."""
        super().__init__(shape)
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        vocab, rank = cfg.draft_vocab or size, cfg.markov_rank
        self.fc = Linear(features * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.mask = nn.Parameter(torch.zeros(width))
        layers = (BlockLayer(self.config, cfg.key_norm) for _ in range(cfg.layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(width, eps)
        self.lm_head = None if cfg.share_lm_head else Linear(width, vocab, bias=False)
        self.markov_in = nn.Parameter(torch.zeros(size, rank)) if rank else None
        self.markov_out = nn.Parameter(torch.zeros(vocab, rank)) if rank else None
        self.confidence = Linear(width + rank, 1) if cfg.confidence else None
        self.register_buffer("scale", torch.ones(features, width))

    def fuse(self, feats: Tensor) -> Tensor:
        """Target features [.., F, D] -> c [.., D]."""
        scaled = feats / self.scale.to(feats.dtype)
        return self.hidden_norm(self.fc(scaled.flatten(-2)))

    def context(self, c: Tensor, rope: Rope) -> list[Keys]:
        """c [B, n, D] -> every layer's keys and values."""
        return [layer.keys(c, rope) for layer in self.layers]  # type: ignore[operator]

    def rows(self, anchors: Tensor, size: int) -> Tensor:
        """Embeddings of anchors [.., D] -> the rows of their blocks [.., size, D]."""
        mask = self.mask.to(anchors.dtype).expand(*anchors.shape[:-1], size - 1, -1)
        return torch.cat([anchors[..., None, :], mask], -2)

    def run(self, x: Tensor, rope: Rope, attend: Attend, again: bool = False) -> Tensor:
        """Return rows [B, n, D] -> what the LM head reads, [B, n, D]. again: the backward pass
        computes the layers again."""
        call: Any = lambda layer, *args: layer(*args)
        if again:
            call = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for i, layer in enumerate(self.layers):
            x = call(layer, x, rope, functools.partial(attend, i))
        return self.norm(x)

    def before(self, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the side of the tokens of the Markov term [.., r]; None without one."""
        return None if self.markov_in is None else F.embedding(tokens, self.markov_in).to(dtype)

    def after(self, logits: Tensor, before: Tensor | None) -> Tensor:
        """Return logits [.., Vd] with the Markov term of the tokens before (their side,
        [.., r])."""
        if before is None or self.markov_out is None:
            return logits
        return logits + F.linear(before, self.markov_out.to(logits.dtype))

    def chance(self, h: Tensor, before: Tensor | None) -> Tensor:
        """Logit [..] that the target accepts what follows from h [.., D] and the token before
        (its side of the Markov term)."""
        assert self.confidence is not None
        return self.confidence(h if before is None else torch.cat([h, before], -1))[..., 0]


@torch.no_grad()
def look_back(net: BlockNet, feats: Tensor, embedded: Tensor) -> None:
    """Let the attention of a fresh block head look back, in place. A mask must find the
    anchor and the newest feature before it can guess better than by frequency, and random
    attention spreads over the whole text: here head d starts by reading what is d
    positions before, as far as rotary positions tell it apart. Nothing is added to the
    network: it is one direction that all keys share. feats: [N, F, D] of some text.
    embedded: [N, D] rows of the target's table."""
    config, mask = net.config, F.normalize(net.mask, dim=0)
    shared = F.normalize(torch.randn_like(mask), dim=0)
    scaled = (feats / net.scale).flatten(1)
    size = net.fc(scaled).norm(dim=-1).mean()
    net.fc.weight += size * torch.outer(shared, reading(scaled.mean(0)))
    c = net.fuse(feats)
    share = float((c @ shared).mean() / c.shape[1] ** 0.5)
    rows = F.rms_norm(embedded, (embedded.shape[1],))
    heads, groups = config.num_attention_heads, int(config.num_key_value_heads or 1)
    cos, sin = (t[1].double() for t in net.rope(2, torch.float64, net.mask.device))
    turn = torch.atan2(sin, cos)[: len(cos) // 2]  # radians of a position, [h]
    back = torch.arange(1, heads + 1, device=turn.device)
    for layer in net.layers:
        part: Any = layer
        spread = float(part.k_proj.weight.std())
        angle = torch.rand(groups, len(turn)).to(turn) * 2 * torch.pi
        key = torch.polar((turn > SLOWEST).double() + 0 * angle, angle)
        key = key / key.abs().square().mean().clamp(min=1e-9).sqrt() / 2**0.5
        ahead = key.repeat_interleave(heads // groups, 0) * torch.exp(-1j * back[:, None] * turn)
        wide, near = (
            torch.cat([z.real, z.imag], -1).flatten().to(net.mask) * spread for z in (key, ahead)
        )
        part.k_proj.weight += torch.outer(wide, shared) / max(share, 0.1)
        part.k_proj.weight += torch.outer(wide, reading(rows.mean(0))) * rows.shape[1] ** 0.5
        part.k_proj.weight -= torch.outer(part.k_proj.weight @ mask, mask)
        part.q_proj.weight += torch.outer(near - part.q_proj.weight @ mask, mask)
        part.q_norm.weight.fill_(SHARP)


def reading(mean: Tensor) -> Tensor:
    """Return the weights [n] that read 1 off a vector [n]."""
    return mean / mean.square().sum().clamp(min=1e-9)
