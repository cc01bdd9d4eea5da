"""The prefix layer of Hydra++ (Ankner et al. 2024): decoder layers over the target's features,
read by all Hydra heads.

Row t sees the features up to t, at rotary position t. In training all rows run at once; in
drafting the newly committed rows extend a cache. The layers start as the identity: both
outputs onto the residual stream are 0.

Shape letters: B rows, T positions, D width, n rows of a packed pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.decode import attention
from outrider.decode.target import Target
from outrider.heads.batch import Batch
from outrider.heads.layers.cache import CachedNet
from outrider.heads.layers.layer import DraftLayer, DraftNet, Rope, run_layers


class Prefix(DraftNet):
    """Llama-style layers shaped after the target (`shape`: heads.layers.shape.layer_config).
    Weights are float32.
    """

    def __init__(self, shape: dict[str, Any], std: float = 0.02) -> None:
        super().__init__(shape)
        self.shape = shape
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
        normed = self.layers[0].input_layernorm(x)  # type: ignore[operator]
        return run_layers(
            self.layers, x, normed, rope, keep, attention_mask=mask, past_key_values=cache
        )

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
        cos, sin = self.rope(length, feats.dtype, feats.device)
        rope, mask, apart = (cos[None], sin[None]), None, batch.apart()
        # Packed documents: each at its own positions, and no document sees another.
        if apart is not None:
            rope = (cos[batch.position], sin[batch.position])
            mask = (~apart).tril()[:, None]
        out = self(feats, rope, keep, mask)
        return out.index_select(0, packed[reads.reshape(-1)]).view(*reads.shape, -1)


class PrefixState(CachedNet):
    """The layers while drafting, row by row as the drafter's."""

    def __init__(self, prefix: Prefix, target: Target, ahead: int) -> None:
        super().__init__(prefix, target)
        self.net.config._attn_implementation = attention.NAME
        self.ahead = ahead
        self.reset(1, 1)

    def reset(self, rows: int, max_len: int) -> None:
        """Forget everything; room for `rows` rows of `max_len` committed tokens."""
        self.room(rows, max_len + self.ahead + 2)  # a padded observation may stick out

    def observe(self, feats: Tensor, n: Tensor, rows: slice) -> Tensor:
        """New features [b, n_max, D] of live `rows`, n [b] of them real -> the layers' output
        at each row's last one, [b, D]; meaningless where n = 0."""
        counts = n.tolist()
        places = self.commit(rows, counts)
        mask = self.cache.back(places)[:, None] if self.cache.masked(places) else None
        x = feats[:, : places.shape[1]].to(self.dtype)
        return self.net(x, self.turned(places), self.last(counts), mask, self.cache)  # type: ignore[no-any-return]
