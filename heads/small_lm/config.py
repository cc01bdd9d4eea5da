"""Keys of a separate small draft model (heads/small_lm/head.py); conf/head/small_lm.yaml holds
their values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from heads.base import HeadConfig
from heads.limits import MOST, MOST_DEPTH, MOST_LAYERS, MOST_NODES, MOST_WIDTH, outside
from heads.lora import LoraKeys
from heads.losses import LossWeights

__all__ = ["LoraKeys", "SmallLMConfig"]


@dataclass
class SmallLMConfig(HeadConfig):
    """Keys of a separate small draft model."""

    kind: str = "small_lm"
    # cut the draft from the target: its so many layers; 0 = start from another model
    # (head.path or head.name)
    from_target_layers: int = 0
    # which layers of the target: first, or even = evenly spaced, the first and the last among
    # them
    spacing: str = "even"
    # start from this folder of a smaller causal language model with the target's tokenizer
    path: str = ""
    # start from this Hugging Face repository
    name: str = ""
    # branch, tag or commit of head.name
    revision: str = "main"
    # embedding and LM head: shared = frozen, tied = trained as one matrix, own = trained as
    # the model has them
    embedding: str = "shared"
    # number of frequent tokens the drafter proposes (the LM head's other rows are not
    # computed); 0 = all
    draft_vocab: int = 0
    # what the draft learns from, over its whole vocabulary
    loss: LossWeights = field(default_factory=lambda: LossWeights(hard=0.0, soft=1.0))
    # supervised tokens whose logits exist at the same time
    chunk: int = 256
    # keep the input of every layer alone and compute the rest again in the backward pass: less
    # memory, slower
    activation_checkpointing: bool = False
    # shape of the draft when the drafter is named without @chain or @tree
    shape: str = "chain"
    # levels of the draft
    depth: int = 5
    # nodes of the draft tree
    nodes: int = 24
    # tree: nodes expanded per level, and children looked at of each
    width: int = 4

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = outside(
            self,
            (
                ("from_target_layers", 0, MOST_LAYERS),
                ("draft_vocab", 0, MOST),
                ("chunk", 1, MOST),
                ("depth", 1, MOST_DEPTH),
                ("nodes", 1, MOST_NODES),
                ("width", 1, MOST_WIDTH),
            ),
        )
        choices = {
            "kind": ("small_lm",),
            "spacing": ("first", "even"),
            "embedding": ("shared", "tied", "own"),
            "shape": ("chain", "tree"),
            "tree_draw": ("fixed", "sampled"),
        }
        found += [
            f"{key}: {getattr(self, key)!r}; choose {' or '.join(good)}"
            for key, good in choices.items()
            if getattr(self, key) not in good
        ]
        sources = sum(map(bool, (self.from_target_layers, self.path, self.name)))
        if sources != 1:
            how = (
                "is set beside another source"
                if sources
                else "is 0, head.path and head.name are empty"
            )
            found.append(
                f"from_target_layers: {how}; give the draft one source: head.from_target_layers=N, "
                "head.path=FOLDER or head.name=REPOSITORY"
            )
        if self.lora.rank and self.embedding != "shared":
            found.append(
                f"embedding: {self.embedding} would train it beside a LoRA; use shared, "
                "or lora.rank=0"
            )
        return found
