"""The keys of runs whose heads bring layers or a model of their own (train/config.py has the
others, and what all share)."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.heads.block.config import BlockConfig
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.small_lm.config import SmallLMConfig
from outrider.train.config import TrainConfig


@dataclass(frozen=True)
class EagleRun(TrainConfig):
    """An EAGLE run: conf/eagle.yaml."""

    head: EagleConfig = field(default_factory=EagleConfig)


@dataclass(frozen=True)
class DraftRun(TrainConfig):
    """A run of a separate small draft model: conf/draft.yaml."""

    head: SmallLMConfig = field(default_factory=SmallLMConfig)


@dataclass(frozen=True)
class BlockRun(TrainConfig):
    """A run of a block head: conf/block.yaml."""

    head: BlockConfig = field(default_factory=BlockConfig)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found, most = super().validate(), self.data.max_length
        if self.head.anchors > most:
            found.append(
                f"head.anchors: {self.head.anchors} blocks in rows of at most {most} tokens "
                f"(data.max_length); give {most} or less, or 0"
            )
        return found
