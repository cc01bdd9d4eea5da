"""Draft heads: modules that hang on a frozen target and learn to guess what it says next.

The contract is heads.base.Head:

    for_target(target, cfg, counts)  a fresh head; its keys are a Config, its weights float32
    forward(batch, target)           the training loss, summed, with its count
    forced(batch, target, levels)    what a draft would be on the text's own tokens
    drafter(target, draft)           a drafter over a copy of the weights, see names.DraftSpec
    config_json() / from_json()      what rebuilds it (heads.saved)

Vocabulary, calibration, disk and the target's distribution are the base's. `forced` and
`drafter` must agree: parity.py compares them. To add a head: docs/new-head.md, a folder
with a subclass of Head and a YAML, here or in a package of one's own, and a line in
registry.py.

What goes where: names.py reads a drafter's name, folders.py and hub.py find its files,
saved.py and checkpoint.py write and read them, tuned.py adds what scripts/tune.py left,
drafters.py makes the drafter; layers/ is what heads with decoder layers share, interop/
other engines' formats.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.heads.base import Head
    from outrider.heads.batch import Batch, LossOut
    from outrider.heads.checkpoint import load_head, save_head
    from outrider.heads.config import HeadConfig
    from outrider.heads.folders import find_head, head_folder, head_in
    from outrider.heads.registry import head_class, kinds

__all__ = [
    "Batch",
    "Head",
    "HeadConfig",
    "LossOut",
    "find_head",
    "head_class",
    "head_folder",
    "head_in",
    "kinds",
    "load_head",
    "save_head",
]
# Where these stand: looked up when somebody asks, so that a module of keys loads no torch.
MODULES = ("config", "registry", "folders", "batch", "base", "checkpoint")


def __getattr__(name: str) -> Any:
    for module in MODULES if name in __all__ else ():
        found = importlib.import_module(f"outrider.heads.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
