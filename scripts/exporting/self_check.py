"""The self-check of an export: the logits that the engine would draft by (reader.py) against
those of the source head, behind real prompts with the real target.

Shape letters: n committed tokens, F features, D width, K drafted tokens, V vocabulary, Vd draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads.base import Batch, Head
from outrider.heads.interop.block import folded
from outrider.scripts.exporting.reader import EngineFile

FROM_TARGET = ("net.mask", "net.mask_embed")  # of exported heads: rows of the target's table
TOLERANCE = 5e-4  # of the largest logit; float32 against float32 in another order of sums


@dataclass
class ExportCheck:
    """prompts, drafted tokens compared, the largest difference of a logit and the largest
    logit."""

    prompts: int = 0
    draft_tokens_equal: int = 0
    largest_logit_difference: float = 0.0
    largest_logit: float = 0.0

    def add(self, theirs: Tensor, mine: Tensor) -> None:
        """Compare logits [K, V] behind a prompt. Raises UserError when they differ by more than
        rounding."""
        self.prompts += 1
        for depth, (row, wanted) in enumerate(zip(theirs, mine, strict=True), 1):
            error, largest = float((row - wanted).abs().max()), float(wanted.abs().max())
            room = TOLERANCE * max(1.0, largest)
            if not error <= room:
                raise UserError(
                    f"export: prompt {self.prompts}, draft token {depth}: the export's logits "
                    f"differ from the head's by {error:.3g} (allowed {room:.3g}); nothing was "
                    "written"
                )
            self.largest_logit_difference = max(self.largest_logit_difference, error)
            self.largest_logit = max(self.largest_logit, largest)
            self.draft_tokens_equal += 1


def rounded(head: Head, keep: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of the head as an engine has it: with what `keep` leaves of the weights
    that its file holds, EAGLE-1 over the whole vocabulary."""
    twin = folded(head)
    for name, weight in twin.named_parameters():
        if name not in FROM_TARGET:
            weight.data = keep(weight.data)
    if twin.kind == "eagle1" and twin.cfg.draft_vocab:
        twin.cfg, twin.d2t, twin._rows = replace(twin.cfg, draft_vocab=0), None, None
    return twin


@torch.inference_mode()
def check_head(
    file: EngineFile, twin: Head, target: Target, prompts: Sequence[Tensor]
) -> ExportCheck:
    """Compare a file with `twin`, the head with the exported numbers, behind every prompt (1-D
    int64, two tokens or more) and as many of its own tokens as the head drafts. target: in
    float32. Raises UserError at the first difference."""
    out, count, ids = ExportCheck(), twin.usual, twin.ids()
    for prompt in prompts:
        text = prompt.repeat(2 + count // len(prompt))[: len(prompt) + count].to(target.device)
        known = text[: len(prompt) - 1][None]
        mask = torch.ones_like(known, dtype=torch.bool)

        def features(taps: tuple[int, ...], known: Tensor = known, mask: Tensor = mask) -> Tensor:
            return target.features(known, mask, taps)[0].cpu()

        behind = text[len(prompt) : -1].cpu()
        theirs = file.logits(prompt.cpu(), features, behind)[:count]
        theirs = theirs if ids is None else theirs[:, ids.cpu()]
        out.add(theirs, teacher_forced_logits(twin, target, text, len(prompt)).cpu())
    return out


def teacher_forced_logits(head: Head, target: Target, text: Tensor, start: int) -> Tensor:
    """[K, Vd]: of the tokens from place `start` of text [start + K] on, as the head guesses each
    behind those before it and the features of the first start - 1."""
    mask = torch.ones_like(text, dtype=torch.bool)[None]
    wanted = torch.arange(len(text), device=text.device)[None] >= start
    batch = Batch(text[None], mask, wanted, torch.zeros(1, dtype=torch.int64))
    rows = [
        logits[flat - start == level]
        for flat, level, logits in head.teacher_forced(batch, target, len(text) - start)
    ]
    return torch.cat(rows)


@torch.inference_mode()
def check_model(
    logits: Callable[[Tensor], Tensor], model: Any, prompts: Sequence[Tensor]
) -> ExportCheck:
    """Compare a whole model that was read again with `model`, which has the exported numbers:
    their logits [V] behind every prompt. Raises UserError at the first difference."""
    out = ExportCheck()
    for prompt in prompts:
        wanted = model(prompt.cpu()[None]).logits[0, -1].float()
        out.add(logits(prompt.cpu())[None], wanted[None])
    return out
