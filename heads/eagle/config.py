"""The keys of EAGLE heads; conf/head/eagle1.yaml and conf/head/eagle3.yaml choose them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from outrider.heads.config import Count, CountOrZero, LayeredConfig, Levels, LossWeights, Size

EAGLE3_ONLY = (
    *("taps", "parallel"),
    *("norm_before_fc", "norm_output", "norm_joined", "norm_before_residual"),
)


@dataclass(frozen=True)
class EagleConfig(LayeredConfig):
    """Keys of EAGLE-1, EAGLE-3 and HASS (EAGLE-1 with steps above 1)."""

    kind: Literal["eagle1", "eagle3"] = "eagle3"
    # eagle3: target features to fuse, hidden_states[k] of transformers; empty = 2, L // 2, L - 3
    taps: list[int] = field(default_factory=list)
    # steps the drafter goes on its own outputs in training: 1 = none, 3 is usual
    steps: Levels = 3
    # the loss of step s counts step_decay ** s
    step_decay: Annotated[float, Interval(gt=0, le=1)] = 0.8
    loss: LossWeights = field(default_factory=lambda: LossWeights(hard=0.0, soft=1.0))
    # weight of the smooth L1 distance to the target's feature (EAGLE-1: 1.0 beside soft 0.1)
    feature_loss: Size = 0.0
    # distil only the target's so many most probable tokens (HASS: 10); 0 = all
    top_k: CountOrZero = 0
    # spread of uniform noise on the input features, scaled by 512 / tokens of the row; 0 =
    # none, EAGLE-1: 0.2
    noise: Size = 0.0
    # positions that the draft layers look back over, the row's own among them; null = all
    sliding_window: Count | None = None
    # eagle3: from the second step on read a trained mask in place of the token and of own
    # outputs, so that one pass drafts all levels (P-EAGLE)
    parallel: bool = False
    # eagle3: norm every tapped feature before fusing them (EAGLE-3.1)
    norm_before_fc: bool = False
    # eagle3: hand the normed output on to the next step (EAGLE-3.1)
    norm_output: bool = False
    # eagle3: one norm over the tapped features side by side; for imported heads
    norm_joined: bool = False
    # eagle3: the first layer adds to the normed feature, not to the feature; for imported heads
    norm_before_residual: bool = False
    # eagle1: fc has a bias; for imported heads, and serving engines drop it
    fc_bias: bool = False
    # levels of the draft
    depth: Levels = 5

    @property
    def masked(self) -> bool:
        """Say whether it reads a mask."""
        return self.parallel

    def validate(self) -> list[str]:
        parallel, longest = self.parallel, max(self.steps, self.depth)
        only = EAGLE3_ONLY if self.kind == "eagle1" else ("fc_bias", "feature_loss")
        other = "eagle3" if self.kind == "eagle1" else "eagle1"
        found = [
            f"{key}: belongs to {other}; leave it out, or use head={other}"
            for key in only
            if getattr(self, key)
        ]
        if parallel and self.steps < 2:
            found.append("steps: 1, but a parallel head's mask is read from the second on; set 2")
        if self.sliding_window is not None and self.sliding_window <= longest:
            found.append(
                f"sliding_window: {self.sliding_window} leaves a draft of {longest} steps nothing "
                f"of the text; give more than {longest}, or null for all of it"
            )
        if self.mask_token not in (None, -1) and not parallel:
            found.append("mask_token: nothing reads a mask; set parallel=true, or leave it out")
        if parallel and self.norm_output:
            found.append("norm_output: with parallel=true no output is handed on; leave it out")
        if self.norm_joined and self.norm_before_fc:
            found.append("norm_joined: norm_before_fc norms the features already; use one of them")
        return found
