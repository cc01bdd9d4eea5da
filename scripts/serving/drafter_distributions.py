"""The distribution that a drafter would draw from at every place of an answer, where the
drafter of a server is known here: what a certificate then looks for is a lean towards it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.base import Batch
from outrider.heads.drafters import drafting_head
from outrider.heads.small_lm.plain import PlainModel
from outrider.scripts.proofs.served import SampledAnswer


def drafter_distributions(
    spec: str, target: Target, sampling: Sampling
) -> Callable[[SampledAnswer], Tensor]:
    """[R, V] distributions behind an answer's text, as the first step of a draft would have
    them; rows of zeros where the drafter has none. spec: a run folder, a head folder or a
    smaller model.

    Raises UserError where there is no such drafter, or for another target.
    """
    head = drafting_head(spec, target)
    head.eval()
    ids = head.ids()

    @torch.inference_mode()
    def distributions(answer: SampledAnswer) -> Tensor:
        text = torch.tensor([[*answer.prompt, *answer.tokens]], device=target.device)
        start, size = len(answer.prompt), len(answer.tokens)
        out = torch.zeros(size, target.vocab_size)
        if isinstance(head, PlainModel):
            rows = head.draft.model(text).logits[0, start - 1 : -1, : target.vocab_size]
            return (rows.float().cpu() / sampling.temperature).softmax(-1).nan_to_num(0.0)
        every = torch.ones_like(text, dtype=torch.bool)
        requested = every.clone()
        requested[:, :start] = False
        batch = Batch(text, every, requested, torch.zeros(1, dtype=torch.int64))
        for flat, level, logits in head.forced(batch, target, 1):
            if level or not len(flat):
                continue
            distribution = (logits.float().cpu() / sampling.temperature).softmax(-1).nan_to_num(0.0)
            places = flat.cpu() - start
            if ids is None:
                out[places] = distribution[:, : target.vocab_size]
            else:
                out[places[:, None], ids.cpu()[None]] = distribution
        return out

    return distributions
