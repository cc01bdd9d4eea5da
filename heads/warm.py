"""A head that starts from another one's weights: a run of one's own, a checkpoint, or a
published head that scripts/import_head.py has read.

The old head may have been trained for a relative of the target. It is of the same kind, and
its weights have the same shapes and mean the same. Its draft vocabulary is the new head's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads import hub
from outrider.heads.base import Head
from outrider.heads.checkpoint import load_head, read_card
from outrider.heads.config import LayerKeys
from outrider.heads.folders import head_in, no_head
from outrider.heads.saved import differing

# Keys that give the same weights another meaning; most change no shape.
MEANING = (
    "norm_before_fc",
    "norm_output",
    "norm_joined",
    "norm_before_residual",
    "fc_bias",
    "key_norm",
    "parallel",
    "sliding_window",
    "block",
    "mask_token",
    *(key.name for key in fields(LayerKeys)),
)
GROWS = "max_position_embeddings"  # of the shape of a head's layers, what may differ


class Start:
    """The head that another one starts from. sha256: of its weights file."""

    def __init__(self, path: str, kind: str, target: Target) -> None:
        """Load it. path: a head folder, or a run folder. kind: of the head that will start
        from it.

        Raises UserError where there is none, or one of another kind, width or tokenizer."""
        try:
            folder = head_in(path)
            if folder is None:
                raise UserError(no_head(path)[0])
            card = read_card(folder)
            if card["kind"] != kind:
                raise UserError(
                    f"{path}: a {card['kind'][:80]} head cannot start a {kind} head; give one of "
                    f"kind {kind}"
                )
            self.head = load_head(folder, target, relative=True)
        except UserError as error:
            raise UserError(f"start: {error}") from None
        commit = hub.commit_of(folder)
        self.path = f"{path} ({commit})" if commit else path
        self.sha256 = str(card["weights"]["sha256"])

    @torch.no_grad()
    def give(self, head: Head) -> str:
        """Copy the old weights into a fresh `head`; returns what was taken, in a line.

        Raises UserError for weights of other shapes, and where they would mean something
        else."""
        self._same_meaning(head)
        old, new = dict(_weights(self.head)), dict(_weights(head))
        shapes = [{name: tuple(w.shape) for name, w in one.items()} for one in (new, old)]
        if odd := differing(*shapes):
            raise UserError(
                f"start: {self.path}: {odd[0].replace(' by the card', ' here')}; give the head.* "
                "keys that it was trained with"
            )
        for name, weight in new.items():
            weight.copy_(old[name])
        return f"starts from {self.path}: {sum(w.numel() for w in new.values()):,} weights"

    def _same_meaning(self, head: Head) -> None:
        """Raise UserError where the new head reads other layers, norms at other places or has
        layers of another make."""
        old, new = self.head, head
        both = [key for key in MEANING if hasattr(old.cfg, key) and hasattr(new.cfg, key)]
        wanted = {key: getattr(old.cfg, key) for key in both}
        fixes = [
            f"head.{key}={'null' if value is None else str(value).lower()}"
            for key, value in wanted.items()
            if value != getattr(new.cfg, key)
        ]
        if old.taps != new.taps and hasattr(new.cfg, "taps"):
            fixes.append(f"'head.taps={list(old.taps)}'".replace(" ", ""))
        if fixes:
            raise UserError(
                f"start: {self.path}: its weights were trained with other keys and mean something "
                f"else under these; give {' '.join(fixes)}"
            )
        made, here = _layers(old), _layers(new)
        for name, had in made.items() if here else ():
            if name != GROWS and had != here.get(name):
                raise UserError(
                    f"start: {self.path}: its layers have {name} {had!s:.80}, those of a head for "
                    f"this target {here.get(name)!s:.80}: its weights would mean something else; "
                    "give another head"
                )


def _weights(head: Head) -> Iterator[tuple[str, Tensor]]:
    """Yield what is learned, and what was measured for it (scales); never the target's own
    tensors, nor the draft vocabulary."""
    for name, weight in head.named_parameters():
        if weight.requires_grad:
            yield name, weight
    stored = head.state_dict()
    for name, buffer in head.named_buffers():
        if name in stored and buffer.is_floating_point():
            yield name, buffer


def _layers(head: Head) -> dict[str, Any]:
    """Return the shape of a head's own decoder layers (heads.layers.shape.layer_config); {}
    without."""
    saved = head.config_json()
    return saved.get("layer") or saved.get("prefix") or {}
