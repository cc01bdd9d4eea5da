"""The self-check of an export: what the engine would draft from the folder
(scripts/exporting/reader.py) against what the source head drafts through its own drafter, on
real prompts with the real target.

LayerDims letters: n committed tokens, F features, D width, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.interop.block import folded
from outrider.heads.layers.drafter import LayeredDrafter
from outrider.heads.medusa.head import MedusaDrafter
from outrider.heads.names import DraftSpec
from outrider.scripts.exporting import loaders
from outrider.scripts.exporting.reader import EngineFile

FROM_TARGET = ("net.mask", "net.mask_embed")  # of exported heads: rows of the target's table
TOLERANCE = 5e-4  # of the largest logit; float32 against float32 in another order of sums


@dataclass
class ExportCheck:
    """prompts, drafted tokens compared, the largest difference of a logit and the largest
    logit. rounded: of a whole model, the share of its numbers that the file's type changed.
    """

    prompts: int
    tokens: int
    error: float
    largest: float
    rounded: float | None = None

    def json(self) -> dict[str, Any]:
        """For the manifest and the model card."""
        return {
            "prompts": self.prompts,
            "draft_tokens_equal": self.tokens,
            "largest_logit_difference": self.error,
            "largest_logit": self.largest,
            **({} if self.rounded is None else {"rounded_share": self.rounded}),
        }


def comparable(head: Head, dtype: torch.dtype) -> Head:
    """A copy of the head as an engine has it: rounded to the exported dtype, EAGLE-1 over the
    whole vocabulary.
    """
    twin = rounded(head, lambda weight: weight.to(dtype).float())
    if twin.kind == "eagle1" and twin.cfg.draft_vocab:
        twin.cfg, twin.d2t, twin._rows = replace(twin.cfg, draft_vocab=0), None, None
    return twin


def rounded(head: Head, keep: Callable[[Tensor], Tensor]) -> Any:
    """A copy of the head with what `keep` leaves of the weights that its file holds."""
    twin = folded(head)
    for name, weight in twin.named_parameters():
        if name not in FROM_TARGET:
            weight.data = keep(weight.data)
    return twin


def check_export(
    folder: Path,
    format: str,
    head: Head,
    target: Target,
    prompts: Sequence[Tensor],
    dtype: torch.dtype,
) -> ExportCheck:
    """Compare drafts behind every prompt (1-D int64, two tokens or more). Raises UserError at
    the first difference.
    """
    served = loaders.folder(
        folder,
        format,
        target.embedding_weight,
        target.lm_head_weight,
        target.num_layers,
    )
    return check_drafts(served, comparable(head, dtype), target, prompts)


@torch.inference_mode()
def check_drafts(
    served: EngineFile, twin: Any, target: Target, prompts: Sequence[Tensor]
) -> ExportCheck:
    """Compare the drafts of a reader with those of `twin`, a head with the exported numbers.

    prompts: 1-D int64, two tokens or more. Raises UserError at the first difference.
    """
    if target.dtype != torch.float32:
        raise ValueError("check_export: load the target in float32")
    drafter = twin.drafter(target, DraftSpec(shape="chain"))
    count = drafter.max_depth
    out = ExportCheck(len(prompts), 0, 0.0, 0.0)
    for number, prompt in enumerate(prompts):
        prompt = prompt.to(target.device)
        mask = torch.ones(1, len(prompt), dtype=torch.bool, device=target.device)

        def features(taps: tuple[int, ...], prompt: Tensor = prompt, mask: Tensor = mask) -> Tensor:
            return target.features(prompt[None], mask, taps)[0].cpu()

        following = target.unembed(
            target.features(prompt[None], mask, (target.num_layers,))[0, -1, 0]
        ).argmax()
        ids = torch.cat([prompt, following[None]])
        wanted, rows = source_drafts(
            drafter, ids, features(tuple(drafter.taps)).to(target.device), count
        )
        got = served.draft(ids.cpu(), features, count)
        compare(
            f"prompt {number + 1}",
            wanted.cpu(),
            rows.cpu(),
            head_ids(twin),
            got.tokens,
            got.logits,
            out,
        )
    return out


def source_drafts(
    drafter: Drafter, ids: Tensor, feats: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Greedy tokens [K] and draft logits [K, Vd] of a chain drafter behind ids [n + 1]; feats
    [n, F, D].
    """
    n = len(ids) - 1
    drafter.reset(1, n + 1)
    drafter.begin([ids[:-1]], Sampling())
    drafter.observe(ids[None, 1:], feats[None], torch.tensor([n], device=ids.device), slice(0, 1))
    zero = torch.zeros(1, dtype=torch.int64, device=ids.device)

    def drafted() -> Tensor:
        return drafter.propose(zero + count, Sampling(), Rng(0, zero, zero)).tokens[0]

    if not isinstance(drafter, LayeredDrafter):
        assert isinstance(drafter, MedusaDrafter), "heads that are exported draft so or so"
        return drafted(), drafter.logits(count)[:, 0]
    seen: list[Tensor] = []
    watched: Any = drafter
    for name in ("open", "level"):  # decode.grow.LevelSource: each gives one level's logits

        def kept(given: Any, of: Any = getattr(drafter, name)) -> Tensor:
            seen.append(of(given))
            return seen[-1]

        setattr(watched, name, kept)
    try:
        tokens = drafted()
    finally:
        del watched.open, watched.level
    return tokens, torch.cat([level[0] for level in seen])


def head_ids(head: Head) -> Tensor | None:
    """The draft vocabulary's target ids on the CPU."""
    ids = head.ids()
    return None if ids is None else ids.cpu()


def compare(
    where: str,
    tokens: Tensor,
    rows: Tensor,
    ids: Tensor | None,
    theirs: Tensor,
    logits: Tensor,
    out: ExportCheck,
) -> None:
    """Add one draft to `out`. Raises UserError when tokens or logits differ by more than
    rounding.
    """
    if len(tokens) != len(theirs):
        raise UserError(
            f"export: {where}: the export drafts {len(theirs)} tokens, the head {len(tokens)}"
        )
    for depth in range(len(tokens)):
        row = logits[depth] if ids is None else logits[depth][ids]
        error, largest = float((row - rows[depth]).abs().max()), float(rows[depth].abs().max())
        out.error, out.largest = max(out.error, error), max(out.largest, largest)
        room = TOLERANCE * max(1.0, largest)
        if not error <= room:
            raise UserError(
                f"export: {where}, draft token {depth + 1}: the export's logits differ "
                "from the head's by "
                f"{error:.3g} (allowed {room:.3g}); nothing was written"
            )
        if int(tokens[depth]) != int(theirs[depth]):
            best = rows[depth].topk(2).values
            if float(best[0] - best[1]) > 2 * room:
                raise UserError(
                    f"export: {where}, draft token {depth + 1}: the export drafts "
                    f"{int(theirs[depth])}, "
                    f"the head {int(tokens[depth])}; nothing was written"
                )
            return  # a tie within rounding: what follows stands behind different tokens
        out.tokens += 1
