"""The keys of each entry point under train/: those of train/config.py and those of its
heads."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from outrider.conf.errors import UserError
from outrider.train.config import TrainConfig

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
# script -> the keys of its heads, in heads/; head.py has those of any kind
HEAD_KEYS = {
    "medusa": "medusa.config:MedusaConfig",
    "hydra_heads": "medusa.config:HydraHeadsConfig",
    "eagle": "eagle.config:EagleConfig",
    "block": "block.config:BlockConfig",
    "draft": "small_lm.config:SmallLMConfig",
    "head": "",
}


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


@functools.cache
def keys_of(script: str) -> type[TrainConfig]:
    """Return the keys of a script under train/."""
    module, _, name = HEAD_KEYS[script].partition(":")
    if not name:
        return HeadRun
    return _run_of(getattr(importlib.import_module(f"outrider.heads.{module}"), name))


def _run_of(keys: Any) -> type[TrainConfig]:
    """Return TrainConfig with these keys of a head."""
    head = ("head", keys, field(default_factory=keys))
    return dataclasses.make_dataclass("HeadRun", [head], bases=(TrainConfig,), frozen=True)


def entry_of(kind: str) -> tuple[str, type[TrainConfig]]:
    """Return the script that trains any kind of head, and the schema of its keys. Raises
    UserError for a kind that nobody brings."""
    if kind in ENTRIES:
        return ENTRIES[kind], keys_of(ENTRIES[kind])
    from outrider.heads.registry import head_class

    return "head", _run_of(head_class(kind).Config)
