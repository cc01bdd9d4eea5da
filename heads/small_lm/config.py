"""Keys of a separate small draft model (heads/small_lm/head.py); conf/head/small_lm.yaml holds
their values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outrider.conf.rules import BelowOne
from outrider.heads.config import (
    Count,
    CountOrZero,
    HeadConfig,
    Levels,
    LossWeights,
    SomeLayers,
    Width,
)


@dataclass(frozen=True)
class LoraKeys:
    """A LoRA on linear layers of the draft; the rest stays as it is."""

    # rank of the update; 0 = no LoRA, all weights learn
    rank: CountOrZero = 0
    # the update counts alpha / rank
    alpha: CountOrZero = 16
    # dropout before it
    dropout: BelowOne = 0.0
    # names of the layers it is put on, such as q_proj; empty = all linear layers
    targets: list[str] = field(default_factory=list)

    def validate(self) -> list[str]:
        if not self.rank and (self.targets or self.dropout):
            return ["rank: 0 is no LoRA; give 1 or more, or leave targets and dropout out"]
        return []


@dataclass(frozen=True)
class SmallLMConfig(HeadConfig):
    """Keys of a separate small draft model."""

    kind: Literal["small_lm"] = "small_lm"
    # cut the draft from the target: its so many layers, evenly spaced, the first and the last
    # among them; 0 = start from another model (head.path or head.name)
    from_target_layers: SomeLayers = 0
    # start from this folder of a smaller causal language model with the target's tokenizer
    path: str = ""
    # start from this Hugging Face repository
    name: str = ""
    # branch, tag or commit of head.name
    revision: str = "main"
    # embedding and LM head: shared = frozen, own = trained as the model has them
    embedding: Literal["shared", "own"] = "shared"
    # a LoRA in place of full weights, merged when the draft is saved
    lora: LoraKeys = field(default_factory=LoraKeys)
    # number of frequent tokens the drafter proposes (the LM head's other rows are not
    # computed); 0 = all
    draft_vocab: CountOrZero = 0
    # what the draft learns from, over its whole vocabulary
    loss: LossWeights = field(default_factory=lambda: LossWeights(hard=0.0, soft=1.0))
    # supervised tokens whose logits exist at the same time
    chunk: Count = 256
    # levels of the draft
    depth: Levels = 5
    # dynamic tree: nodes expanded per level, and children looked at of each
    width: Width = 4

    def validate(self) -> list[str]:
        found = []
        sources = sum(map(bool, (self.from_target_layers, self.path, self.name)))
        if sources != 1:
            found.append(
                f"from_target_layers: the draft has {sources} sources; give it one: "
                "head.from_target_layers=N, head.path=FOLDER or head.name=REPOSITORY"
            )
        if self.lora.rank and self.embedding != "shared":
            found.append("embedding: own would train it beside a LoRA; use shared, or lora.rank=0")
        return found
