"""Outside references: Hugging Face's own speculative decoding, with a draft model
(`assistant_model=`) or by prompt lookup, on the same loaded weights and behind the same call
as our engine.

Two settings each. Fair: our K on a constant schedule, no confidence threshold. Defaults: what
transformers does when nobody says anything. Either way nothing is carried over from one prompt
to the next. transformers takes one row at a time here, so larger batches run one after the
other.

What a pass committed is read off the target itself: where each of its passes starts in the
cache.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.decode.engine import Cycle, DecodedRun, Generation, Request, Timing
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.scoring.reference import Pass, generated, room, settings, without_wishes

LOOKUP_TOKENS, LOOKUP_GRAM = 10, 3  # our n-gram drafter's
DEFAULT_TOKENS = 20  # transformers' own number of assistant tokens
# How long the assistant drafts: K tokens, always.
CONSTANT = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
DRAFTING = (*CONSTANT, "num_assistant_tokens")
LOG = logging.getLogger("transformers.generation.utils")


def mute(record: logging.LogRecord) -> bool:
    return "generation-related arguments" not in record.getMessage()


@dataclass(frozen=True)
class Assisted:
    """hf_assisted or hf_prompt_lookup. draft: the assistant, None for prompt lookup. tokens:
    K, None: the defaults.
    """

    target: Target
    draft: Target | None
    tokens: int | None

    def __call__(self, requests: Sequence[Request], sampling: Sampling, seed: int) -> DecodedRun:
        """Decode `requests` one by one with target.model.generate."""
        timing = Timing()
        with self.target.as_loaded() as model, contextlib.ExitStack() as stack:
            helper = stack.enter_context(self.draft.as_loaded()) if self.draft else None
            if helper is not None:  # its generation config is where transformers looks for K
                kept = {name: getattr(helper.generation_config, name, None) for name in DRAFTING}
                fair = {**CONSTANT, "num_assistant_tokens": self.tokens}
                own = kept if self.tokens is None else fair
                stack.enter_context(without_wishes(helper, **own))
                LOG.addFilter(mute)  # transformers warns of a call of its own
                stack.callback(LOG.removeFilter, mute)
            found = [self._one(r, model, helper, sampling, seed, timing) for r in requests]
        return DecodedRun(found, timing)

    def _one(
        self,
        request: Request,
        model: Any,
        helper: Any,
        sampling: Sampling,
        seed: int,
        timing: Timing,
    ) -> Generation:
        ids = torch.tensor([list(request.prompt)], device=self.target.device)
        limit = room(self.target, request)
        how = settings(self.target, sampling, limit)
        if helper is None:
            how.prompt_lookup_num_tokens = self.tokens or LOOKUP_TOKENS
            if self.tokens is not None:
                how.max_matching_ngram_size = LOOKUP_GRAM
        seed = seed * 1_000_003 + request.id
        rows, passes = generated(model, ids, torch.ones_like(ids), how, seed, timing, helper)
        tokens = rows[0]
        stop = "eos" if tokens and tokens[-1] in self.target.eos_ids else "length"
        cycles = self._cycles(passes, ids.shape[1], len(tokens), limit, stop)
        drafted = [False] * len(tokens)
        for cycle in cycles:
            drafted[cycle.start : cycle.start + cycle.accepted] = [True] * cycle.accepted
        return Generation(list(request.prompt), tokens, cycles, drafted, stop)

    def _cycles(
        self, passes: list[Pass], prompt: int, total: int, limit: int, stop: str
    ) -> list[Cycle]:
        """Return one cycle for every pass after the first, which belongs to the prefill. A
        pass reads the last token and the candidates; the next one starts where it has
        stopped accepting."""
        # Tokens generated when each pass begins, and at the end.
        ends = [*(p.start + 1 - prompt for p in passes[1:]), total]
        cycles = []
        for p, before, after in zip(passes[1:], ends, ends[1:], strict=False):
            accepted = after - before - 1
            if accepted < 0 or before < 1:
                return []  # another loop than the one this reading knows
            room = limit - before - 1  # transformers proposes no more than may still be written
            cut = after == total and stop == "eos"
            cut = cut or (self.tokens is not None and room < self.tokens)
            cycles.append(Cycle(p.tokens - 1, accepted, (0,) * accepted, cut, before))
        return cycles
