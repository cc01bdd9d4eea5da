"""A head that starts from another one's weights: a run of one's own, a checkpoint, or a
published head that scripts/import_head.py has read.

The old head may have been trained for a relative of the target (same tokenizer and widths, as
after fine-tuning), may draft from another vocabulary, guess fewer or more levels, and have
fewer or more layers. A token that both vocabularies have keeps its rows; every other token
starts as in a fresh head, from the target's LM head. What does not go by tokens or levels must
have the same shape, and mean the same: a head that reads other layers of the target, norms at
other places or has layers of another make would read its weights as something else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads import hub, vocab, words
from outrider.heads.base import Head
from outrider.heads.checkpoint import read_card
from outrider.heads.eagle.shape import LayerKeys
from outrider.heads.folders import head_in
from outrider.heads.layered import LayeredHead
from outrider.heads.registry import load_head

# Weights by the last parts of their names that go by the heads of a parallel head: another number
# of those is no other shape.
LEVELS = ("proj", "block_weight", "block_bias", "enter_bias")
# Keys that give the same weights another meaning; most change no shape.
MEANING = (
    "norm_before_fc",
    "norm_output",
    "norm_joined",
    "norm_before_residual",
    "fc_bias",
    "key_norm",
)
# Keys by which a head chooses of what make its layers are.
MAKE = tuple(key.name for key in fields(LayerKeys))
GROWS = ("num_hidden_layers", "max_position_embeddings")  # of a layer's make, what may differ
# Keys under which a head may go on differently from how it began; what changes is said.
OTHERWISE = ("parallel", "sliding_window", "block", "share_lm_head", "mask_token")
BEFORE = "start_"  # before what the head that another one started from had taken, in its card


class Start:
    """The head that another one starts from. sha256: of its weights file. spent: what its own
    training took, and that of the head that it had started from, by name."""

    def __init__(self, path: str, kind: str, target: Target) -> None:
        """Loads it. path: a head folder, or a run folder. kind: of the head that will start
        from it.

        Raises UserError where there is none, or one of another kind, width or tokenizer.
        """
        try:
            folder = head_in(path)
        except UserError as error:
            raise UserError(f"start: {error}") from None
        if folder is None:
            raise UserError(
                f"start: {path}: no head there (no head.json, head/, best/ or checkpoints/); give "
                "a run folder or a head folder"
            )
        card = read_card(folder)
        if card["kind"] != kind:
            raise UserError(
                f"start: {path}: a {card['kind'][:80]} head cannot start a {kind} head; give one "
                f"of kind {kind}"
            )
        commit = hub.commit_of(folder)
        self.path, self.folder = f"{path} ({commit})" if commit else path, folder
        self.sha256 = str(card["weights"]["sha256"])
        self.spent = _spent(card["extra"].get("training"))
        try:
            self.head = load_head(folder, target, relative=True)
        except UserError as error:
            raise UserError(f"start: {error}") from None

    def counts(self, counts: Tensor) -> Tensor:
        """[V] int64 to choose a draft vocabulary by: as `counts`, and the tokens that the old
        head drafts behind those that the data hold."""
        return words.ranked(counts, self.head.ids())

    @torch.no_grad()
    def give(self, head: Head) -> str:
        """Copy the old weights into a fresh `head`; returns what was taken, in a line.

        Raises UserError for a weight of another shape, and where it would mean something else."""
        self._same_meaning(head)
        if isinstance(head, LayeredHead) and isinstance(self.head, LayeredHead):
            head.reads_table = self.head.reads_table
        old = dict(_weights(self.head))
        new = dict(_weights(head))
        fresh = [name for name in new if name not in old]
        behind = [name for name in old if name not in new]
        taken = 0
        for name, weight in new.items():
            if name in old:
                taken += self._copy(name, old[name], weight, head)
        if not taken:
            raise UserError(
                f"start: {self.path}: no weight of it has a place in this head; give the head.* "
                "keys that it was trained with"
            )
        total = sum(weight.numel() for weight in new.values())
        message = f"starts from {self.path}: {taken / total:.1%} of the weights"
        message += self._words(head)
        message += f"; fresh: {_short(fresh)}" if fresh else ""
        message += f"; left behind: {_short(behind)}" if behind else ""
        changed = _differing(OTHERWISE, self.head.cfg, head.cfg)
        there = ", ".join(f"head.{key} ({_plain(value)} there)" for key, value in changed.items())
        return message + (f"; other than there: {there}" if changed else "")

    def _same_meaning(self, head: Head) -> None:
        """Raises UserError where the new head reads other layers, norms at other places or has
        layers of another make."""
        old, new = self.head, head
        made, here = _made(old), _made(new)
        odd = [k for k in made if here and k not in GROWS and made[k] != here.get(k)]
        wanted = _differing(MEANING, old.cfg, new.cfg) | {k: made[k] for k in odd if k in MAKE}
        fixes = [f"head.{key}={_plain(value)}" for key, value in wanted.items()]
        if old.taps != new.taps and hasattr(new.cfg, "taps"):
            fixes.append(f"'head.taps={list(old.taps)}'".replace(" ", ""))
        if fixes:
            raise UserError(
                f"start: {self.path}: its weights were trained with other keys and mean something "
                f"else under these; give {' '.join(fixes)}"
            )

        if odd:
            name, had, has = odd[0], made[odd[0]], here.get(odd[0])
            raise UserError(
                f"start: {self.path}: its layers have {name} {had!s:.80}, those of a head for this "
                f"target {has!s:.80}: its weights would mean something else; give "
                "head.lora.rank=16, which keeps its layers, or another head"
            )

    def _copy(self, name: str, old: Tensor, new: Tensor, head: Head) -> int:
        """How many numbers of `new` were taken from `old`."""
        last = name.rpartition(".")[2]
        axis = words.axis_of(name, old, self.head), words.axis_of(name, new, head)
        by_token = axis[0] if axis[0] == axis[1] else None
        old = old.to(new.device)
        if last in LEVELS and old.dim() == new.dim():
            least = min(old.shape[0], new.shape[0])
            old, new = old[:least], new[:least]
        if by_token is not None and old.dim() == new.dim():
            here, there = self._shared(head)
            if _but(old.shape, by_token) == _but(new.shape, by_token):
                rows = old.index_select(by_token, there.to(new.device))
                new.index_copy_(by_token, here.to(new.device), rows.to(new.dtype))
                return rows.numel()
        if old.shape != new.shape:
            raise UserError(
                f"start: {self.path}: {name} is {list(old.shape)} there and {list(new.shape)} "
                "here; give the head.* keys that it was trained with"
            )
        new.copy_(old)
        return new.numel()

    def _shared(self, head: Head) -> tuple[Tensor, Tensor]:
        """The tokens that both heads draft: their places in the new head's vocabulary and in
        the old one's, [n] int64 each."""
        old, new = (words.ids_of(one) for one in (self.head, head))
        spot = vocab.places(old, new) if old.numel() else torch.full_like(new, -1)
        here = (spot >= 0).nonzero()[:, 0]
        return here, spot[here]

    def _words(self, head: Head) -> str:
        """How many tokens of the draft vocabulary are known, "" where it is the whole one."""
        if head.ids() is None:
            return ""
        here, _ = self._shared(head)
        return f", {here.numel():,} of {words.ids_of(head).numel():,} draft tokens"


def _weights(head: Head) -> Iterator[tuple[str, Tensor]]:
    """What is learned, and what was measured for it (scales); never the target's own tensors,
    nor the draft vocabulary. A LoRA's wrapping does not count."""
    for name, weight in head.named_parameters():
        if weight.requires_grad:
            yield name, weight
    stored = head.state_dict()
    for name, buffer in head.named_buffers():
        if name in stored and buffer.is_floating_point():
            yield name, buffer


def _made(head: Head) -> dict[str, Any]:
    """The shape of a head's own decoder layers (heads.eagle.shape.layer_config); {} without any."""
    message = head.config_json()
    return message.get("layer") or message.get("prefix") or {}


def _differing(keys: Sequence[str], old: Any, new: Any) -> dict[str, Any]:
    """Those of the keys that both configs have and that differ, as they are in `old`."""
    both = [key for key in keys if hasattr(old, key) and hasattr(new, key)]
    return {key: getattr(old, key) for key in both if getattr(old, key) != getattr(new, key)}


def _plain(value: Any) -> str:
    """A value of a key as a command line takes it."""
    return "null" if value is None else str(value).lower()


def _but(shape: torch.Size, axis: int) -> list[int]:
    """A shape without one axis."""
    return [size for place, size in enumerate(shape) if place != axis]


def _short(names: list[str]) -> str:
    """Some names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _spent(training: Any) -> dict[str, float]:
    """All that a head's card tells of its training, earlier stages included; {} for one that
    tells nothing."""
    found: dict[str, float] = {}
    for name, amount in training.items() if isinstance(training, dict) else ():
        # Compared, not asked by isfinite: a card may hold a number that is no float any more.
        if isinstance(amount, int | float) and abs(amount) <= sys.float_info.max:
            name = str(name).removeprefix(BEFORE)
            found[name] = found.get(name, 0.0) + amount
    return found
