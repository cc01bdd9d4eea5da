"""The keys of block heads; conf/head/dflash.yaml and conf/head/dspark.yaml choose them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from outrider.conf.rules import AboveZero
from outrider.heads.config import MOST_DEPTH, CountOrZero, LayeredConfig, Layers, Size


@dataclass(frozen=True)
class BlockConfig(LayeredConfig):
    """Keys of DFlash and DSpark. kind: where the slots of a block stand, dflash = behind the
    anchor (row k predicts token k behind it), dspark = from the anchor on (row k predicts
    token k + 1 behind it)."""

    kind: Literal["dflash", "dspark"] = "dflash"
    # rows of a block, the anchor's among them
    block: Annotated[int, Interval(ge=2, le=MOST_DEPTH)] = 8
    layers: Layers = 2
    # a weight in the keys' norm, as published heads have; false: fixed at one, because some
    # engines read the first layer's weight for all
    key_norm: bool = False
    # a fresh head's masks look at the tokens before them, each attention head at its own
    # distance; false: anywhere
    look_back: bool = False
    # target features to fuse, hidden_states[k] of transformers; empty = three, evenly spread
    taps: list[int] = field(default_factory=list)
    # use the target's frozen LM head in place of one of the head's own
    share_lm_head: bool = False
    # rank of a term of the token before the guessed one, added to the logits; 0 = none
    markov_rank: CountOrZero = 0
    # blocks per document in training, redrawn every epoch; 0 = as many as predict every
    # supervised token twice
    anchors: CountOrZero = 0
    # slots in which the weight of a slot falls to 1 / e
    decay: AboveZero = 4.0
    # weight of a head that predicts whether the target will accept a slot, for engines that
    # read one; 0 = no such head
    confidence: Size = 0.0
    # levels of the draft; 0 = as many as the block has slots
    depth: Annotated[int, Interval(ge=0, le=MOST_DEPTH)] = 0

    masked = True  # it reads a mask

    @property
    def slots(self) -> int:
        """Tokens that a trained block predicts."""
        return self.block - self.before

    @property
    def before(self) -> int:
        """Rows in front of the first slot: the anchor's own, or none."""
        return int(self.kind == "dflash")

    def validate(self) -> list[str]:
        if self.depth <= self.slots:
            return []
        return [
            f"depth: {self.depth} slots of blocks trained with {self.slots} that see each other; "
            f"give {self.slots} or less"
        ]
