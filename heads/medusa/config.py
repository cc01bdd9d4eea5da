"""Keys of Medusa and Hydra heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from outrider.heads.config import (
    CountOrZero,
    HeadConfig,
    LayerKeys,
    Layers,
    Levels,
    LossWeights,
    Nodes,
    Shape,
    SomeLayers,
)


@dataclass(frozen=True)
class ParallelConfig(HeadConfig):
    """Keys that Medusa and Hydra heads share."""

    # K: how many tokens ahead of the LM head to guess
    heads: Levels = 4
    # L: residual blocks of each head
    blocks: Layers = 1
    # use the target's frozen LM head in place of a projection of each head's own
    share_lm_head: bool = False
    # head i's loss counts decay ** i
    decay: Annotated[float, Interval(gt=0, le=1)] = 0.8
    shape: Shape = "tree"
    nodes: Nodes = 16


@dataclass(frozen=True)
class MedusaConfig(ParallelConfig):
    """Medusa's keys."""

    kind: Literal["medusa"] = "medusa"
    # rank of a term of the token before the guessed one, added to all heads' logits; 0 = none
    markov_rank: CountOrZero = 0


@dataclass(frozen=True)
class HydraHeadsConfig(LayerKeys, ParallelConfig):
    """Keys of Hydra heads; those of layers are the prefix layers'."""

    kind: Literal["hydra_heads"] = "hydra_heads"
    # L: blocks of each head, the first of which reads the tokens (Ankner et al.: 4)
    blocks: Layers = 2
    # decoder layers over the target's features in front of all heads; 0 = none, 1 = Hydra++
    prefix_layers: SomeLayers = 0
    loss: LossWeights = field(default_factory=lambda: LossWeights(hard=0.0, soft=1.0))
