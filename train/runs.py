"""The keys of each entry point under train/: those of train/config.py and those of its
heads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from outrider.conf.errors import UserError
from outrider.heads.block.config import BlockConfig
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.medusa.config import HydraHeadsConfig, MedusaConfig
from outrider.heads.small_lm.config import SmallLMConfig
from outrider.train.config import TrainConfig


@dataclass(frozen=True)
class MedusaRun(TrainConfig):
    """A Medusa run: conf/medusa.yaml."""

    head: MedusaConfig = field(default_factory=MedusaConfig)


@dataclass(frozen=True)
class HydraHeadsRun(TrainConfig):
    """A run of Hydra heads: conf/hydra_heads.yaml."""

    head: HydraHeadsConfig = field(default_factory=HydraHeadsConfig)


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


@dataclass(frozen=True)
class HeadRun(TrainConfig):
    """A run of any kind of head, those of own packages too: conf/head.yaml."""

    # the keys of conf/head/NAME.yaml; head=NAME chooses
    head: dict[str, Any]  # type: ignore[assignment]

    @classmethod
    def exact(cls, cfg: DictConfig) -> type[TrainConfig]:
        """Return the schema with the keys of the kind that `cfg` names. Raises UserError
        where it names none that there is."""
        if not cfg.get("head"):
            return cls  # the key is missing
        if (kind := OmegaConf.select(cfg, "head.kind")) is None:
            raise UserError("head.kind: is required; choose a head by head=NAME")
        return entry_of(str(kind))[1]


# kind of head -> the script under train/ that trains it, by whose name conf/ has its defaults
ENTRIES = {
    "medusa": "medusa",
    "hydra_heads": "hydra_heads",
    "eagle1": "eagle",
    "eagle3": "eagle",
    "dflash": "block",
    "dspark": "block",
    "small_lm": "draft",
}
# script -> its keys
SCHEMAS: dict[str, type[TrainConfig]] = {
    "medusa": MedusaRun,
    "hydra_heads": HydraHeadsRun,
    "eagle": EagleRun,
    "block": BlockRun,
    "draft": DraftRun,
    "head": HeadRun,
}


def entry_of(kind: str) -> tuple[str, type[TrainConfig]]:
    """Return the script that trains any kind of head, and the schema of its keys. Raises
    UserError for a kind that nobody brings."""
    if kind in ENTRIES:
        return ENTRIES[kind], SCHEMAS[ENTRIES[kind]]
    from outrider.heads.registry import head_class

    keys = head_class(kind).Config
    made = dataclasses.make_dataclass(
        HeadRun.__name__,
        [("head", keys, field(default_factory=keys))],
        bases=(TrainConfig,),
        frozen=True,
    )
    return "head", made
