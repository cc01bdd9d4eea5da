"""The keys that every head has, and those that families share; nothing here loads torch, so
that help need not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from outrider.conf.rules import NotNegative

# How large the numbers of a configuration may be: what a file or a command line asks for is
# compared with these before anything of that size is made.
MOST_NODES, MOST_DEPTH, MOST_WIDTH = 1024, 64, 256  # of a draft
MOST_LAYERS = 256  # of a stack: heads, blocks, decoder layers
MOST = 2**31 - 1  # of anything else that is counted

# The same as types of keys (conf/rules.py).
Shape = Literal["chain", "tree"]
Draw = Literal["sampled", "fixed"]
Nodes = Annotated[int, Interval(ge=1, le=MOST_NODES)]
Levels = Annotated[int, Interval(ge=1, le=MOST_DEPTH)]
Width = Annotated[int, Interval(ge=1, le=MOST_WIDTH)]
Layers = Annotated[int, Interval(ge=1, le=MOST_LAYERS)]
SomeLayers = Annotated[int, Interval(ge=0, le=MOST_LAYERS)]
Count = Annotated[int, Interval(ge=1, le=MOST)]
CountOrZero = Annotated[int, Interval(ge=0, le=MOST)]
TokenId = Annotated[int, Interval(ge=-1, le=MOST)]  # -1: none
Size = Annotated[float, Interval(ge=0, le=MOST)]

Mask = Literal["token", "argmax", "all"]


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms; at least one above 0."""

    # cross-entropy with the token of the data
    hard: NotNegative = 1.0
    # cross-entropy with the target's own distribution (the forward KL up to a constant)
    soft: NotNegative = 0.0
    # the rejection rate: total variation between the target's distribution and the head's
    tv: NotNegative = 0.0
    # minus the logarithm of the acceptance rate
    lk: NotNegative = 0.0
    # where the target's distribution teaches a draft vocabulary: token = the data's token is
    # inside, argmax = the target's most probable one does (needs the whole LM head), all =
    # everywhere
    mask: Mask = "token"

    @property
    def needs_distribution(self) -> bool:
        """Say whether the target's distribution must be computed."""
        return bool(self.soft or self.tv or self.lk)

    def validate(self) -> list[str]:
        if self.hard or self.needs_distribution:
            return []
        return ["hard: all loss weights are 0; set one above 0"]


@dataclass(frozen=True)
class LayerKeys:
    """What of its draft layers a head chooses; the rest of their shape is the target's."""

    # width of the draft layers' MLP; null = the target's, and 4 times its hidden width or more
    # where it has experts
    intermediate_size: Count | None = None


@dataclass(frozen=True)
class HeadConfig:
    """The keys every head has; `head=` YAMLs choose the rest."""

    # which head (outrider ls heads)
    kind: str = ""
    # tree at temperature > 0: sampled = drawn without replacement on a static tree, fixed =
    # the most probable tokens
    tree_draw: Draw = "sampled"
    # frequent tokens the head predicts; 0 = all, null = those of the head at start=, else 8,192
    draft_vocab: CountOrZero | None = 8192
    # what the head learns from
    loss: LossWeights = field(default_factory=LossWeights)
    # supervised tokens whose logits exist at the same time; null = 512 on CPUs, 4096 on GPUs
    chunk: Count | None = None
    # shape of the draft when the drafter is named without @chain or @tree
    shape: Shape = "chain"
    # nodes of the draft tree
    nodes: Nodes = 24


@dataclass(frozen=True)
class LayeredConfig(LayerKeys, HeadConfig):
    """Keys of heads that run decoder layers of their own."""

    # decoder layers of the drafter
    layers: Layers = 1
    # keep only what goes from step to step, of a block head from layer to layer, and compute
    # the rest again in the backward pass: less memory, slower
    activation_checkpointing: bool = False
    # id of a reserved token whose embedding in the target is the mask's, as in engines; null =
    # one that the tokenizer has for nobody, where there is one; -1 = a trained mask, for this
    # engine alone
    mask_token: TokenId | None = None
    # dynamic tree: nodes expanded per level, and children looked at of each
    width: Width = 6
