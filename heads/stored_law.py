"""The target's law as features on disk hold it (train/stored): its most probable tokens."""

from __future__ import annotations

from torch import Tensor

from heads import vocab
from heads.losses import LawFn, Laws


def stored_law(
    stored: tuple[Tensor, Tensor],
    source: Tensor,
    ids: Tensor | None,
    size: int,
    place: Tensor,
    mask: str,
) -> LawFn:
    """As `target_law`, from the target's k most probable tokens, the best first: ids and
    probabilities [N, k]. size: tokens of the whole vocabulary. Where none of the k lies inside
    there is no law."""
    tokens, probabilities = stored

    def law(part: slice) -> tuple[Laws, Tensor]:
        at = source[part]
        spot = vocab.places(ids, tokens[at])
        p = probabilities[at] * (spot >= 0)
        total = p.sum(-1, keepdim=True)
        dense = p.new_zeros(spot.shape[0], size if ids is None else ids.numel())
        own = dense.scatter_add(1, spot.clamp(min=0), p)
        dense.scatter_add_(1, spot.clamp(min=0), p / total.clamp(min=1e-9))
        usable = total[:, 0] > 0
        if mask == "token":
            usable &= place[part] >= 0
        elif mask == "argmax":
            usable &= spot[:, 0] >= 0
        return (dense, own), usable

    return law
