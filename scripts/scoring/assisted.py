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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteriaList

from conf.errors import UserError
from conf.rules import SEEDS
from decode.draft_model import DraftModel
from decode.engine import Cycle, Generation, Request, Run, Timing
from decode.sampling import Sampling
from decode.target import Target
from scripts.scoring.reference import FirstToken, room, settings, without_wishes

LOOKUP_TOKENS, LOOKUP_GRAM = 10, 3  # our n-gram drafter's
DEFAULT_TOKENS = 20  # transformers' own number of assistant tokens
# How long the assistant drafts.
DRAFTING = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)


@dataclass(frozen=True)
class Assisted:
    """hf_assisted or hf_prompt_lookup. draft: the assistant, None for prompt lookup. tokens:
    K, None: the defaults.
    """

    target: Target
    draft: Target | None
    tokens: int | None

    def __call__(self, requests: Sequence[Request], sampling: Sampling, seed: int) -> Run:
        """Decode `requests` one by one with target.model.generate."""
        timing = Timing()
        with self.target.as_loaded() as model, contextlib.ExitStack() as stack:
            helper = stack.enter_context(self.draft.as_loaded()) if self.draft else None
            found = [self._one(r, model, helper, sampling, seed, timing) for r in requests]
        return Run(found, timing, law_rows=0)

    def _one(
        self,
        request: Request,
        model: Any,
        helper: Any,
        sampling: Sampling,
        seed: int,
        timing: Timing,
    ) -> Generation:
        begin, device = time.perf_counter(), self.target.device
        ids = torch.tensor([list(request.prompt)], device=device)
        limit = room(self.target, request)
        config, processors = settings(self.target, sampling, limit)
        extra: dict[str, Any] = {}
        if helper is None:
            config.prompt_lookup_num_tokens = LOOKUP_TOKENS
            if self.tokens is not None:
                config.prompt_lookup_num_tokens, config.max_matching_ngram_size = (
                    self.tokens,
                    LOOKUP_GRAM,
                )
        else:
            extra["assistant_model"] = helper
        first, passes = FirstToken(), _Passes()
        devices = [device] if device.type == "cuda" else []
        with (
            without_wishes(model),
            self._settings(helper),
            passes.watch(model, helper),
            torch.inference_mode(),
            torch.random.fork_rng(devices=devices),
        ):
            torch.manual_seed((seed * 1_000_003 + request.id) % SEEDS)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList([first]),
                **extra,
            )
        tokens = out[0, ids.shape[1] :].tolist()
        end = time.perf_counter()
        timing.total_s += end - begin
        timing.prefill_s += (first.at or end) - begin
        later = [p for p in passes.target if p.began >= (first.at or end)]
        timing.target_s += sum(p.seconds for p in later)
        timing.draft_s += sum(s for began, s in passes.draft if began >= (first.at or end))
        timing.drafter_s = timing.draft_s
        timing.cycles += len(later)
        stop = "eos" if tokens and tokens[-1] in self.target.eos_ids else "length"
        cycles = self._cycles(passes.target, ids.shape[1], len(tokens), limit, stop)
        drafted = [False] * len(tokens)
        for cycle in cycles:
            drafted[cycle.start : cycle.start + cycle.accepted] = [True] * cycle.accepted
        return Generation(list(request.prompt), tokens, cycles, drafted, stop)

    @contextlib.contextmanager
    def _settings(self, helper: Any) -> Iterator[None]:
        """The assistant's generation config, which is where transformers looks for K; restored
        afterwards. What its own one says about drafting counts under the defaults, and nothing
        else of it does."""
        if helper is None:
            yield
            return
        fields = {name: getattr(helper.generation_config, name, None) for name in DRAFTING}
        if self.tokens is not None:
            fields |= {
                "num_assistant_tokens": self.tokens,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }
        with without_wishes(helper, **fields):
            yield

    def _cycles(
        self, passes: list[_Pass], prompt: int, total: int, limit: int, stop: str
    ) -> list[Cycle]:
        """One cycle for every pass after the first, which belongs to the prefill. A pass reads
        the last token and the candidates; the next one starts where it has stopped accepting."""
        ends = [p.start + 1 - prompt for p in passes[1:]] + [
            total
        ]  # tokens generated when the pass begins
        cycles = []
        for p, before, after in zip(passes[1:], ends, ends[1:], strict=False):
            committed, proposed = after - before, p.tokens - 1
            if committed < 1 or before < 1:
                return []  # another loop than the one this reading knows
            room = limit - before - 1  # transformers proposes no more than may still be written
            last = after == total
            cut = (last and stop == "eos") or (self.tokens is not None and room < self.tokens)
            cycles.append(Cycle(proposed, committed - 1, (0,) * (committed - 1), cut, before))
        return cycles


@dataclass
class _Pass:
    start: int
    tokens: int
    began: float
    seconds: float = 0.0


class _Passes:
    """Notes every pass of the target and every draft of the assistant, by hooks."""

    def __init__(self) -> None:
        self.target: list[_Pass] = []
        self.draft: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def watch(self, model: Any, helper: Any) -> Iterator[None]:
        """Hooks while the block runs."""

        def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            cache = kwargs.get("past_key_values")
            ids = kwargs.get("input_ids", args[0] if args else None)
            start = int(cache.get_seq_length()) if cache is not None else 0
            self.target.append(
                _Pass(start, 0 if ids is None else ids.shape[1], time.perf_counter())
            )

        def after(module: Any, args: Any, out: Any) -> None:
            self.target[-1].seconds = time.perf_counter() - self.target[-1].began

        hooks = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]
        plain = helper.generate if helper is not None else None

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            config = kwargs.get(
                "generation_config"
            )  # transformers' own call gives settings beside it, and warns of it
            for key in [k for k in kwargs if k != "generation_config" and hasattr(config, k)]:
                setattr(config, key, kwargs.pop(key))
            out = plain(*args, **kwargs)  # type: ignore[misc]
            self.draft.append((began, time.perf_counter() - began))
            return out

        if helper is not None:
            helper.generate = timed
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            if helper is not None:
                del helper.generate


def assistants(
    spec: str, target: Target, draft: DraftModel | None
) -> list[tuple[str, Assisted, int]]:
    """(name, reference, K) of the two rows that `spec` stands for. draft: of hf_assisted@DIR,
    None for hf_prompt_lookup.

    Raises UserError for a draft that transformers itself would refuse.
    """
    if draft is None:
        return [
            (spec, Assisted(target, None, LOOKUP_TOKENS), LOOKUP_TOKENS),
            (f"{spec} (defaults)", Assisted(target, None, None), LOOKUP_TOKENS),
        ]
    sizes = [m.model.config.get_text_config().vocab_size for m in (target, draft.draft)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"drafters: {spec}: transformers takes no assistant with {sizes[1]} rows of "
            "vocabulary for a "
            f"target with {sizes[0]}; leave this reference out"
        )
    k = draft.max_depth
    return [
        (spec, Assisted(target, draft.draft, k), k),
        (f"{spec} (defaults)", Assisted(target, draft.draft, None), DEFAULT_TOKENS),
    ]
