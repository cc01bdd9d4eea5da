"""Draft heads: modules that hang on a frozen target and learn to guess what it says next.

The contract is heads.base.Head: `forward(batch, target)` is the training loss, summed, with
its count; `forced` is what a draft would be on the text's own tokens; `drafter(target,
draft)` makes a drafter over a copy of the weights, of the form that was asked for
(names.DraftSpec, then decode.grow.Form); `for_target`, `config_json` and `from_json` make a
head and bring it back. Vocabulary, calibration, disk and the distributions of the loss are
the base's. The target is frozen.

To add a head: docs/new-head.md, a folder with a subclass of Head (or of
medusa.base.ParallelHead) and a YAML, here or in a package of one's own. Its `Drafts`, the
class of its drafters, implements decode.grow.LevelSource.

A drafter's name is read by names.parse and nowhere else; drafters.requested adds what
scripts/tune.py left, drafters.resolve_drafter makes the drafter. Not to be changed: the
names of stored tensors and keys (tests/golden holds heads of earlier versions), and
`forced` without `drafter` or the other way round (parity.py compares them).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.heads.base import Head
    from outrider.heads.batch import Batch, LossOut
    from outrider.heads.checkpoint import save_head
    from outrider.heads.config import HeadConfig
    from outrider.heads.folders import find_head, head_folder, head_in
    from outrider.heads.registry import head_class, kinds, load_head

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

# Where the names above stand: they are looked up when somebody asks, so that a module of keys
# (heads.config and its kin) loads no torch.
MODULES = ("config", "batch", "base", "folders", "checkpoint", "registry")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in MODULES:
            found = getattr(importlib.import_module(f"outrider.heads.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
