"""The table of heads: the only place where their names meet their classes, one line each."""

from __future__ import annotations

from pathlib import Path

from conf.errors import UserError
from decode.target import Target
from heads.base import Head
from heads.block.head import DFlashHead, DSparkHead
from heads.checkpoint import CARD, load_as, read_card
from heads.eagle.eagle1 import Eagle1Head
from heads.eagle.head import Eagle3Head
from heads.parallel.hydra_heads import HydraHeads
from heads.parallel.medusa import MedusaHead
from heads.parallel.medusa2 import Medusa2Head
from heads.small_lm.head import SmallLM

HEADS: dict[str, type[Head]] = {
    "medusa": MedusaHead,
    "medusa2": Medusa2Head,
    "hydra_heads": HydraHeads,
    "eagle1": Eagle1Head,
    "eagle3": Eagle3Head,
    "dflash": DFlashHead,
    "dspark": DSparkHead,
    "small_lm": SmallLM,
}


def load_head(folder: Path | str, target: Target, relative: bool = False) -> Head:
    """The head in `folder` on the target's device, in the dtype it was trained in. relative:
    see heads.checkpoint.load_as.

    Raises UserError for an unknown kind of head, and as heads.checkpoint.load_as does.
    """
    kind = read_card(Path(folder))["kind"]
    if kind not in HEADS:
        raise UserError(
            f"{Path(folder) / CARD}: unknown kind of head {kind[:80]!r}; known: "
            f"{', '.join(sorted(HEADS))}"
        )
    return load_as(HEADS[kind], folder, target, relative)
