"""The prefix layer of Hydra++ (Ankner et al. 2024): decoder layers over the target's features,
read by all Hydra heads.

Row t sees the features up to t, at rotary position t. In training all rows run at once; in
drafting the newly committed rows extend a cache. The layers start as the identity: both
outputs onto the residual stream are 0.

Shape letters: B rows, T positions, D width, n rows of a packed pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outrider.decode import attention
from outrider.decode.target import Target
from outrider.heads.layers.attention import NAME, Memory
from outrider.heads.layers.cache import CachedNet
from outrider.heads.layers.layer import DraftLayer, DraftNet, Rope, run_layers
from outrider.heads.layers.plan import Plan


class Prefix(DraftNet):
    """Llama-style layers shaped after the target (`shape`: heads.layers.shape.layer_config).
    Weights are float32.
    """

    def __init__(self, shape: dict[str, Any], std: float = 0.02) -> None:
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
                nn.init.normal_(weight, 0.0, std)

    def forward(self, x: Tensor, rope: Rope, keep: Tensor, **kwargs: Any) -> Tensor:
        """Features [B, T, D] -> [n, D] at the flat rows `keep` [n], distinct."""
        normed = self.layers[0].input_layernorm(x)  # type: ignore[operator]
        return run_layers(self.layers, x, normed, rope, keep, **kwargs)

    def at(self, feats: Tensor, plan: Plan) -> Tensor:
        """feats [B, T, D] of a batch -> [K, n, D] at the rows that each head reads."""
        cos, sin = self.rope(feats.shape[1], feats.dtype, feats.device)
        rope, memory = (cos[plan.depth], sin[plan.depth]), Memory(plan.layout).at(0)
        return self(feats, rope, plan.rows, memory=memory)[plan.spot]  # type: ignore[no-any-return]


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
        seen = {"attention_mask": mask, "past_key_values": self.cache}
        return self.net(x, self.turned(places), self.last(counts), **seen)  # type: ignore[no-any-return]
