"""The heads that are compared on the same data: what a recipe trains, and with which keys."""

from __future__ import annotations

# Short blocks: at these budgets later slots are hardly ever accepted, and every row that a block
# has less is a block more for the first slot (docs/internals/experiments.md).
# name -> (kind of head, keys)
RECIPES: dict[str, tuple[str, list[str]]] = {
    "medusa": ("medusa", []),
    "hydra_heads": ("hydra_heads", []),
    "eagle3": (
        "eagle3",
        ["head=eagle3", "head.norm_before_fc=true", "head.norm_output=true"],
    ),
    "eagle3_portable": ("eagle3", ["head=eagle3"]),  # without the norms that few engines know
    "p_eagle": ("eagle3", ["head=p_eagle"]),
    "dflash": ("dflash", ["head=dflash", "head.block=4"]),
    "dspark": ("dspark", ["head=dspark", "head.block=3"]),
}
