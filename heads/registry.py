"""Names: of the kinds of heads, whose classes are imported when somebody asks for one, and
of the formats they are exported in. Own packages bring further kinds (docs/new-head.md).
Nothing here loads torch."""

from __future__ import annotations

import importlib
from dataclasses import is_dataclass
from typing import TYPE_CHECKING

from outrider.conf import packages
from outrider.conf.errors import UserError, first_line
from outrider.conf.words import left

if TYPE_CHECKING:
    from outrider.heads.base import Head

# kind -> (module of this package:class, what people call it)
HEADS = {
    "medusa": ("medusa.head:MedusaHead", "Medusa heads"),
    "hydra_heads": ("medusa.hydra_heads:HydraHeads", "Hydra heads"),
    "eagle1": ("eagle.head:Eagle1Head", "an EAGLE-1 head"),
    "eagle3": ("eagle.head:Eagle3Head", "an EAGLE-3 head"),
    "dflash": ("block.head:DFlashHead", "a DFlash head"),
    "dspark": ("block.head:DSparkHead", "a DSpark head"),
    "small_lm": ("small_lm.head:SmallLM", "a draft model"),
}
# The formats of `outrider export` (heads/interop)
FORMATS = ("vllm", "speculators", "sglang", "deepspec", "transformers", "gguf")


def head_class(kind: str, where: str = "head.kind") -> type[Head]:
    """Import the class of a kind of head: one of ours, or what an installed package brings
    (conf/packages.py). where: what names the kind, for an error.

    Raises UserError for a kind that nobody brings, and for a package that is no good."""
    if kind in HEADS:
        module, _, name = HEADS[kind][0].partition(":")
        found: type[Head] = getattr(importlib.import_module(f"outrider.heads.{module}"), name)
        return found
    package = packages.find(kind)
    if package is None:
        if gone := left("kinds", kind):
            raise UserError(f"{where}: {gone}")
        known = ", ".join(kinds())
        raise UserError(f"{where}: unknown kind of head {kind[:80]!r}; known: {known}")
    from outrider.heads.base import Head, HeadConfig

    try:
        made = package.point.load()
    except (Exception, SystemExit) as error:  # another's code
        raise package.wrong(f"cannot be imported ({first_line(error)})") from error
    if not (isinstance(made, type) and issubclass(made, Head)):
        raise package.wrong(f"names {package.point.value}, which is no subclass of heads.base.Head")
    if made.kind != kind:
        raise package.wrong(f"names {package.point.value}, whose kind is {made.kind!r}")
    if not (is_dataclass(made.Config) and issubclass(made.Config, HeadConfig)):
        raise package.wrong(f"names {package.point.value}, whose Config is no HeadConfig")
    return made


def kinds() -> list[str]:
    """List every kind of head by name: ours, and what installed packages say they bring."""
    return sorted({*HEADS, *(one.kind for one in packages.packaged())})


def title(kind: str) -> str:
    """Return what people call a kind of head, with its article."""
    return HEADS[kind][1] if kind in HEADS else f"a {kind} head"
