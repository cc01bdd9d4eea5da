"""The prefix layer of Hydra++ (Ankner et al. 2024): decoder layers over the target's features,
read by all Hydra heads.

Row t sees the features up to t, at rotary position t. In training all rows run at once; in
drafting the newly committed rows extend a cache. The layers start as the identity: both
outputs onto the residual stream are 0.

Shape letters: B rows, T positions, D width, n rows of a packed pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from decode import attention
from decode.target import Target
from heads import lora
from heads.batch import Batch
from heads.eagle.cache import DraftCache
from heads.eagle.layer import DraftLayer
from heads.eagle.rope import Rope, rope_table


class Prefix(nn.Module):
    """Llama-style layers shaped after the target (`shape`: heads.eagle.shape.layer_config).
    Weights are float32.
    """

    def __init__(self, shape: dict[str, Any], std: float = 0.02) -> None:
        super().__init__()
        self.shape = shape
        self.config = LlamaConfig(**shape)
        self.config._attn_implementation = (
            "sdpa"  # causal without a mask: rows are padded on the right
        )
        self.layers = nn.ModuleList(
            DraftLayer(self.config, i, False, True) for i in range(shape["num_hidden_layers"])
        )
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.dim() > 1:
                nn.init.normal_(weight, 0.0, std)

    def forward(
        self, x: Tensor, rope: Rope, keep: Tensor, mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Features [B, T, D] -> [n, D] at the flat rows `keep` [n], distinct."""
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)  # type: ignore[operator]
            x = layer(
                x,
                normed,
                rope,
                keep if i == last else None,
                attention_mask=mask,
                past_key_values=cache,
            )
        return x

    def at(self, feats: Tensor, reads: Tensor, batch: Batch) -> Tensor:
        """feats [B, T, D] of `batch`; flat rows `reads` [K, n], in any order and number -> [K,
        n, D].
        """
        rows, length, _ = feats.shape
        needed = torch.zeros(rows * length, dtype=torch.bool, device=feats.device)
        needed[reads.reshape(-1)] = True
        keep = needed.nonzero()[:, 0]
        packed = torch.zeros(rows * length, dtype=torch.int64, device=feats.device)
        packed[keep] = torch.arange(keep.numel(), device=feats.device)
        cos, sin = rope_table(self.config, length, feats.dtype, feats.device)
        rope, mask, apart = (cos[None], sin[None]), None, batch.apart()
        if (
            apart is not None
        ):  # packed documents: each at its own positions, and no document sees another
            rope = (cos[batch.position], sin[batch.position])
            mask = (~apart).tril()[:, None]
        out = self(feats, rope, keep, mask)
        return out.index_select(0, packed[reads.reshape(-1)]).view(*reads.shape, -1)


class PrefixState:
    """The layers' cache while drafting, row by row as the drafter's."""

    def __init__(self, prefix: Prefix, target: Target, ahead: int) -> None:
        self.net = copy.deepcopy(prefix)
        lora.merge(self.net)
        self.net.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self.net.config._attn_implementation = attention.NAME
        self.dtype, self.device, self.ahead = target.dtype, target.device, ahead
        self.lengths: list[int] = []
        self.reset(1, 1)

    def reset(self, rows: int, max_len: int) -> None:
        """Forget everything; room for `rows` rows of `max_len` committed tokens."""
        slots = max_len + self.ahead + 2  # a padded observation may stick out
        self.cache = DraftCache(self.net, rows, slots, self.dtype, self.device)
        self.rope = rope_table(self.net.config, slots, self.dtype, self.device)
        self.lengths = []

    def begin(self, count: int) -> None:
        """Append empty rows."""
        self.lengths += [0] * count

    def observe(self, feats: Tensor, n: Tensor, rows: slice) -> Tensor:
        """New features [b, n_max, D] of live `rows`, n [b] of them real -> the layers' output
        at each row's last one, [b, D]; meaningless where n = 0."""
        lengths, counts = self.lengths[rows], n.tolist()
        new = max(counts)
        places = self.cache.aim(slice(rows.start, rows.stop), lengths, 0, new)
        mask = None
        if new > 1 and max(lengths) or new == 1 and places.shape[0] > 1:
            mask = (torch.arange(self.cache.reach, device=self.device) <= places[..., None])[
                :, None
            ]
        last = torch.tensor(
            [i * new + max(c, 1) - 1 for i, c in enumerate(counts)], device=self.device
        )
        self.lengths[rows] = [a + b for a, b in zip(lengths, counts, strict=True)]
        rope = (self.rope[0][places], self.rope[1][places])
        return self.net(feats[:, :new].to(self.dtype), rope, last, mask, self.cache)

    def select(self, rows: list[int]) -> None:
        """Keep these rows in this order."""
        if rows != list(range(len(rows))):
            self.cache.select(rows, max((self.lengths[r] for r in rows), default=0))
        self.lengths = [self.lengths[r] for r in rows]
