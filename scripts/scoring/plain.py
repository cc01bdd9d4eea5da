"""The target as Hugging Face runs it: plain passes with its own attention, no tree, and what
rounding does to their logits.

Shape letters: n tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.decode.target import Target

BEST = 8  # tokens that rounding could make the greedy one


@dataclass
class Plain:
    """The target as Hugging Face runs it, with the attention it was loaded with."""

    target: Target

    @torch.no_grad()
    def logits(self, ids: list[int], start: int, guidance: float | None = None) -> Tensor:
        """Return logits [len(ids) - start, V] that predict ids[start:], in one pass.

        guidance: classifier-free guidance as in transformers (Sanchez et al. 2306.17806):
        log-probabilities moved away from those of an unconditional pass, which sees the
        prompt's last token and what was generated. None: without it.
        """
        count, keep = len(ids) - start, {}
        with self.target.as_loaded() as model:
            if "logits_to_keep" in inspect.signature(model.forward).parameters:
                keep["logits_to_keep"] = count
            now = torch.tensor([ids[:-1]], device=self.target.device)
            found: Tensor = model(now, use_cache=False, **keep).logits[0, -count:]
        if guidance is None:
            return found
        free = self.logits(ids[start - 1 :], 1).float().log_softmax(-1)
        return free + guidance * (found.float().log_softmax(-1) - free)

    @torch.no_grad()
    def _steps(self, ids: list[int], count: int) -> Tensor:
        """Return logits [count, V] behind `ids` and the best tokens that follow, by a
        cached step each."""
        found: list[Tensor] = []
        new, past = list(ids), None
        with self.target.as_loaded() as model:
            for _ in range(count):
                now = torch.tensor([new], device=self.target.device)
                out = model(now, past_key_values=past, use_cache=True)
                found.append(out.logits[0, -1])
                new, past = [int(found[-1].argmax())], out.past_key_values
        return torch.stack(found)

    def rounding(self, prompts: Sequence[Sequence[int]], steps: int = 16) -> float:
        """Return what rounding does in this model and dtype, the engine left out: the most
        that two plain ways to compute the same logits differ by, one pass over the whole
        text and one cached step per token; see `moved`."""
        gap = 0.0
        for prompt in prompts:
            ids = list(prompt)
            stepped = self._steps(ids, min(steps, self.target.context_length - len(ids) + 1))
            whole = self.logits([*ids, *stepped.argmax(-1).tolist()], len(ids))
            gap = max(gap, moved(whole, stepped))
        return gap


def moved(a: Tensor, b: Tensor) -> float:
    """Return, for two ways to compute the same logits [n, V], the largest difference of
    the distance to the best logit, over the BEST tokens of either: what can turn a greedy
    choice."""
    a, b = a.double(), b.double()
    near = torch.zeros_like(a, dtype=torch.bool)
    for x in (a, b):
        near.scatter_(1, x.topk(min(BEST, x.shape[1])).indices, True)
    change = (a - a.amax(1, keepdim=True)) - (b - b.amax(1, keepdim=True))
    return float(change[near].abs().max())
