"""Hydra heads (Ankner et al. 2024, arXiv 2402.05109): Medusa heads that read the tokens
drafted before them.

Head i (0-based) reads c = (f_t, e_{t+1} .. e_{t+i+1}), the target's output feature and the
embeddings of the tokens between it and the guess, and predicts x_{t+i+2}: a first block R c +
SiLU(W c + b), then L - 1 blocks x + SiLU(W x + b), then a vocabulary projection. R starts as
the identity on the feature, W and b at 0 and the projection as the LM head's rows, so a fresh
head equals the LM head. Embeddings are brought to unit mean square, the size of features.

Hydra++: prefix_layers = 1 puts a Llama-style decoder layer over the target's features in
front of all heads, which starts as the identity. (Hydra alone means the config library.)

Shape letters: B rows, T positions, D width, E width of an embedding, K heads, L blocks, n
supervised tokens, P parents.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.decode import attention
from outrider.decode.grow import Form, Nodes
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.batch import Batch
from outrider.heads.layers.attention import NAME, Memory
from outrider.heads.layers.drafter import CachedNet
from outrider.heads.layers.layer import DraftLayer, DraftNet, Rope, run_layers
from outrider.heads.layers.plan import Plan
from outrider.heads.layers.shape import LayerShape, as_made, layer_config
from outrider.heads.medusa.base import LastFeature, ParallelHead, ParallelSaved, residual_blocks
from outrider.heads.medusa.config import HydraHeadsConfig as HydraHeadsConfig

LARGEST_SCALE = 1e6  # of embeddings that are next to zero


@dataclass(kw_only=True)
class HydraHeadsSaved(ParallelSaved):
    """embed_scale: what embeddings are multiplied by. prefix: shape of the prefix layers, None
    without any."""

    config: HydraHeadsConfig
    embed_width: int
    embed_scale: float
    prefix: LayerShape | None

    def fits(self, target: Target) -> list[str]:
        found = super().fits(target)
        wide = target.embedding_weight.shape[1]
        if self.embed_width != wide:
            found.append(f"embed_width: {self.embed_width}, the target's embeddings have {wide}")
        if not 0 < self.embed_scale <= LARGEST_SCALE:
            found.append(f"embed_scale: {self.embed_scale} is outside (0, {LARGEST_SCALE:g}]")
        layers = self.config.prefix_layers
        if bool(layers) != (self.prefix is not None):
            found.append(f"prefix: does not go with config.prefix_layers {layers}")
        elif self.prefix is not None:
            found += self.prefix.fits(target, layers, "prefix")
        return found


def first_block(feature: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """R c + SiLU(W c + b) of c = (feature [.., D], embeddings [.., (i + 1) E]); weight is R
    above W: [.., D]."""
    both = F.linear(torch.cat([feature, embeddings], -1), weight.to(feature.dtype))
    carried, gate = both.chunk(2, -1)
    return carried + F.silu(gate + bias.to(feature.dtype))


class Prefix(DraftNet):
    """Llama-style layers of the shape heads.layers.shape.layer_config. Weights are float32."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__(shape)
        self.shape = shape
        self.config._attn_implementation = NAME
        self.layers = nn.ModuleList(
            DraftLayer(self.config, i, False, True) for i in range(shape["num_hidden_layers"])
        )
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.dim() > 1:
                nn.init.normal_(weight, 0.0, 0.02)

    def forward(self, x: Tensor, rope: Rope, keep: Tensor, **kwargs: Any) -> Tensor:
        """Return features [B, T, D] -> [n, D] at the flat rows `keep` [n], distinct."""
        normed = self.layers[0].input_layernorm(x)  # type: ignore[operator]
        return run_layers(self.layers, x, normed, rope, keep, **kwargs)

    def at(self, feats: Tensor, plan: Plan) -> Tensor:
        """feats [B, T, D] of a batch -> [K, n, D] at the rows that each head reads."""
        cos, sin = self.rope(feats.shape[1], feats.dtype, feats.device)
        rope, memory = (cos[plan.depth], sin[plan.depth]), Memory(plan.layout).at(0)
        return self(feats, rope, plan.rows, memory=memory)[plan.spot]  # type: ignore[no-any-return]


class PrefixState(CachedNet):
    """The layers while drafting, row by row as the drafter's."""

    def __init__(self, prefix: Prefix, target: Target) -> None:
        super().__init__(prefix, target)
        self.net.config._attn_implementation = attention.NAME

    def observe(self, feats: Tensor, n: Tensor, rows: slice) -> Tensor:
        """New features [b, n_max, D] of live `rows`, n [b] of them real -> the layers' output
        at each row's last one, [b, D]; meaningless where n = 0."""
        counts = n.tolist()
        places = self.commit(rows, counts)
        mask = self.cache.back(places)[:, None] if self.cache.masked(places) else None
        x = feats[:, : places.shape[1]].to(self.dtype)
        seen = {"attention_mask": mask, "past_key_values": self.cache}
        return self.net(x, self.turned(places), self.last(counts), **seen)  # type: ignore[no-any-return]


class HydraDrafter(LastFeature):
    """Each level reads the embeddings of its parents' own paths."""

    def __init__(self, head: HydraHeads, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        self.embed, self.scale, some = target.embed, head.embed_scale, range(form.depth)

        def copied(weight: Tensor) -> Tensor:
            return weight.detach().to(target.dtype, copy=True)

        self.enter, self.enter_bias = [copied(head.enter[d]) for d in some], copied(head.enter_bias)
        self.blocks: list[list[tuple[Tensor, Tensor]]] = [[] for _ in some]
        if head.block_weight is not None and head.block_bias is not None:
            pair = copied(head.block_weight), copied(head.block_bias)
            self.blocks = [list(zip(*(t[d] for t in pair), strict=True)) for d in some]
        self.prefix = None if head.prefix is None else PrefixState(head.prefix, target)
        self.reset(1, 1)

    def reset(self, rows: int, max_len: int) -> None:
        super().reset(rows, max_len)
        if self.prefix is not None:  # a padded observation may stick out
            self.prefix.room(rows, max_len + self.max_depth + 2)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        super().begin(prompts, sampling)
        if self.prefix is not None:
            self.prefix.append(len(prompts))

    @torch.inference_mode()
    def observe(
        self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice = slice(None)
    ) -> None:
        """Keep the feature of each row's last token; with prefix layers their output there."""
        if self.prefix is None or feats is None:
            return super().observe(tokens, feats, n, rows)
        last = self.prefix.observe(feats[:, :, 0], n, rows)
        super().observe(tokens, last[:, None, None].expand(-1, tokens.shape[1], -1, -1), n, rows)

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        if self.prefix is not None:
            self.prefix.select(rows)

    def open(self, levels: int) -> Tensor:
        self.path = self.last[:, None, None]  # [B, P, d + 1], from the last committed token on
        return self._logits(0)

    def level(self, nodes: Nodes) -> Tensor:
        self.path = torch.cat([nodes.of_parents(self.path), nodes.tokens[..., None]], 2)
        return self._logits(nodes.level)

    def _logits(self, d: int) -> Tensor:
        """Return what head d guesses behind each path: [B, P, Vd]."""
        e = (self.embed(self.path).to(self.feats.dtype) * self.scale).flatten(2)
        x = self.feats[:, None].expand(-1, e.shape[1], -1)  # [B, P, D]; e: [B, P, (d + 1) E]
        x = first_block(x, e, self.enter[d], self.enter_bias[d])
        for weight, bias in self.blocks[d]:
            x = x + F.silu(F.linear(x, weight, bias))
        return F.linear(x, self.proj if self.proj.dim() == 2 else self.proj[d])


class HydraHeads(ParallelHead):
    """K Hydra heads: enter[i] [2 D, D + (i + 1) E] holds R above W of head i's first block,
    enter_bias [K, D]; block_weight [K, L - 1, D, D] and block_bias [K, L - 1, D] (absent for L
    = 1); the rest as in ParallelHead."""

    kind = "hydra_heads"
    Config, Saved, Drafts = HydraHeadsConfig, HydraHeadsSaved, HydraDrafter
    block_weight: nn.Parameter | None
    block_bias: nn.Parameter | None

    def __init__(
        self,
        cfg: Any,
        width: int,
        vocab_size: int,
        tap: int,
        device: torch.device | str | None = None,
        embed_width: int = 0,
        prefix: dict[str, Any] | None = None,
    ) -> None:
        cfg = as_made(cfg, prefix) if prefix else cfg
        super().__init__(cfg, width, vocab_size, tap, device)
        self.cfg: HydraHeadsConfig = cfg
        self.embed_width, self.embed_scale = embed_width or width, 1.0
        self.enter = nn.ParameterList()
        for i in range(cfg.heads):
            first = torch.zeros(2 * width, width + (i + 1) * self.embed_width, device=device)
            first[:width, :width].fill_diagonal_(1.0)
            self.enter.append(nn.Parameter(first))
        self.enter_bias = nn.Parameter(torch.zeros(cfg.heads, width, device=device))
        self.block_weight = self.block_bias = None
        if more := cfg.blocks - 1:
            size = cfg.heads, more, width
            self.block_weight = nn.Parameter(torch.zeros(*size, width, device=device))
            self.block_bias = nn.Parameter(torch.zeros(size, device=device))
        self.prefix = Prefix(prefix).to(device) if prefix else None

    @classmethod
    def completed(
        cls, cfg: HydraHeadsConfig, target: Target, counts: Tensor | None = None
    ) -> HydraHeadsConfig:
        layers = cfg.prefix_layers
        return as_made(cfg, layer_config(target, layers, cfg)) if layers else cfg

    @classmethod
    def build(cls, target: Target, cfg: Any) -> Self:
        some = torch.arange(min(target.vocab_size, 4096), device=target.device)
        rows = target.embed(some).detach().float()
        prefix = layer_config(target, cfg.prefix_layers, cfg) if cfg.prefix_layers else None
        sizes = target.hidden_size, target.vocab_size, target.num_layers, target.device
        head = cls(cfg, *sizes, rows.shape[-1], prefix)
        head.embed_scale = float(rows.square().mean().clamp(min=LARGEST_SCALE**-2).rsqrt())
        return head

    @classmethod
    def restored(cls, known: Any, target: Target) -> Self:
        prefix = None if known.prefix is None else asdict(known.prefix)
        sizes = known.width, known.vocab_size, known.taps[0], None, known.embed_width
        head = cls(known.config, *sizes, prefix)
        head.embed_scale = known.embed_scale
        return head

    def config_json(self) -> dict[str, Any]:
        return {
            **super().config_json(),
            "embed_width": self.embed_width,
            "embed_scale": self.embed_scale,
            "prefix": self.prefix.shape if self.prefix else None,
        }

    def states(self, batch: Batch, target: Target, feats: Tensor, reads: Tensor) -> Tensor:
        """Let head i read the feature at t = reads[i] and the true tokens t + 1 .. t + i +
        1."""
        ids, entered = batch.ids.reshape(-1), []
        if self.prefix is None:
            x = feats[reads]  # [K, n, D]
        else:
            x = self.prefix.at(feats.view(*batch.ids.shape, -1), self.planned(batch))
        for i, at in enumerate(reads):
            # Beyond the end only where t does not exist.
            ahead = at[:, None] + torch.arange(1, i + 2, device=at.device)
            e = target.embed(ids[ahead.clamp(max=ids.numel() - 1)]).detach().to(feats.dtype)
            e = (e * self.embed_scale).flatten(1)  # [n, (i + 1) E]
            entered.append(first_block(x[i], e, self.enter[i], self.enter_bias[i]))
        return residual_blocks(torch.stack(entered), self.block_weight, self.block_bias)
