"""What an export says before it writes: engines that no longer load such a head, and what
Medusa heads cost where they are served."""

from __future__ import annotations

import torch

from outrider.conf.disk import size
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.interop import Facts, HeadLayout, served


def before(
    layout: HeadLayout, head: Head, target: Target, facts: Facts, dtype: torch.dtype
) -> list[str]:
    """Lines for people, none where there is nothing to say."""
    lines = served.gone(layout.format, head)
    if head.kind == "medusa":
        lines.append(_weight(layout, head, target, facts, dtype))
    return lines


def smaller(head: Head, dtype: torch.dtype) -> str:
    """Keys that make the export of a head smaller, with "or" between them."""
    keys = ["dtype=bfloat16"] if dtype == torch.float32 else []
    if head.kind == "medusa" and head.cfg.heads > 1:
        keys.append(f"heads={head.cfg.heads - 1} or fewer")
    return " or ".join(keys)


def _weight(
    layout: HeadLayout, head: Head, target: Target, facts: Facts, dtype: torch.dtype
) -> str:
    """Every head projects onto the whole vocabulary, also one that was trained on a part
    of it."""
    count, width = head.cfg.heads, facts.hidden
    scored = head.cfg.draft_vocab or facts.vocab
    whole = layout.nbytes(head, facts, dtype)
    here = whole - count * (facts.vocab - scored) * width * dtype.itemsize
    share = whole / dtype.itemsize / sum(p.numel() for p in target.model.parameters())
    fix = smaller(head, dtype)
    return (
        f"weights: {size(whole)} in {str(dtype).removeprefix('torch.')} ({count} heads x "
        f"{facts.vocab:,} tokens x {width}), {share:.2f} times the target's own numbers; the "
        "engine keeps them in memory and reads them at every step"
        + (f" ({size(here)} over the {scored:,} tokens trained)" if scored < facts.vocab else "")
        + (f"; smaller: {fix}" if fix else "")
    )
