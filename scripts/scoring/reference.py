"""Outside references: Hugging Face `generate`, alone and with a draft model
(`assistant_model=`), on the same loaded weights and behind the same call as our engine.

They are rows of the table like any other (`hf_generate`, `hf_assisted@DIR`), measured in the same
interleaved run. What an assisted pass committed is read off the target itself: where each of
its passes starts in the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from outrider.conf.rules import SEEDS
from outrider.decode.engine import Cycle, DecodedRun, Generation, Request, Timing
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target

LOG = logging.getLogger("transformers.generation.utils")


@dataclass
class Pass:
    """A pass of the target: where in the cache it starts, how many tokens it reads, when it
    began and how long it took, seconds."""

    start: int
    tokens: int
    began: float
    seconds: float = 0.0


@contextlib.contextmanager
def watched(model: Any) -> Iterator[list[Pass]]:
    """Collect the model's passes while the block runs."""
    passes: list[Pass] = []

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        ids = kwargs.get("input_ids", args[0] if args else None)
        start = int(cache.get_seq_length()) if cache is not None else 0
        passes.append(Pass(start, 0 if ids is None else ids.shape[1], time.perf_counter()))

    def after(module: Any, args: Any, out: Any) -> None:
        passes[-1].seconds = time.perf_counter() - passes[-1].began

    hooks = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    )
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def without_wishes(model: Any, **fields: Any) -> Iterator[None]:
    """The model with no generation_config of its own but `fields`. `generate` fills every
    setting that a run leaves open from there: repetition_penalty, suppress_tokens or num_beams
    of the model would become part of the distribution."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(**fields)
    try:
        yield
    finally:
        model.generation_config = kept


def room(target: Target, request: Request) -> int:
    """Return most tokens the engine would write for this request: its limit or the end of
    the context."""
    return min(request.max_new_tokens, target.context_length - len(request.prompt))


def settings(target: Target, sampling: Sampling, max_new_tokens: int) -> GenerationConfig:
    """Our settings in transformers' words."""
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sampling.temperature > 0,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=target.eos_ids[0] if target.eos_ids else 0,
        use_cache=True,
        repetition_penalty=sampling.repetition_penalty,
    )
    if sampling.temperature > 0:
        config.temperature, config.top_k = sampling.temperature, sampling.top_k
        config.top_p, config.min_p = sampling.top_p, sampling.min_p or None
    return config


def generated(
    target: Target,
    batch: Sequence[Request],
    sampling: Sampling,
    seed: int,
    timing: Timing,
    guidance: float | None = None,
    helper: Any = None,
) -> tuple[list[Generation], list[Pass]]:
    """Return the answers that target.model.generate writes to prompts padded on the left, and
    its passes. helper: an assistant, which takes one prompt at a time. timing: takes what was
    spent; `cycles` counts passes after the prefill, which ends with the first token, and a
    guided token's two passes once. Random numbers come from torch's global generator, seeded
    here and restored."""
    longest = max(len(r.prompt) for r in batch)
    how = settings(target, sampling, max(room(target, r) for r in batch))
    how.guidance_scale = guidance
    left = [longest - len(r.prompt) for r in batch]
    padded = [[how.pad_token_id] * n + list(r.prompt) for n, r in zip(left, batch, strict=True)]
    ids = torch.tensor(padded, device=target.device)
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in left], device=target.device)
    first: list[float] = []

    def never(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        first.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    criteria = StoppingCriteriaList([never])  # type: ignore[list-item]
    given: dict[str, Any] = {"generation_config": how, "stopping_criteria": criteria}
    given |= {} if helper is None else {"assistant_model": helper}
    with (
        target.as_loaded() as model,
        without_wishes(model),
        watched(model) as passes,
        torch.inference_mode(),
        torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []),
    ):
        begin = time.perf_counter()
        torch.manual_seed((seed * 1_000_003 + batch[0].id) % SEEDS)
        rows = model.generate(ids, attention_mask=mask, **given)[:, longest:].tolist()
        end = time.perf_counter()
    later = [p for p in passes if first and p.began >= first[0]]
    timing.total_s += end - begin
    timing.prefill_s += (first or [end])[0] - begin
    timing.target_s += sum(p.seconds for p in later)
    timing.cycles += len(later) if helper else max(len(rows[0]) - 1, 0)
    begins = [*(p.began for p in later), end]
    timing.cycle_s += [after - before for before, after in itertools.pairwise(begins)]
    return [_trim(r, row, target.eos_ids) for r, row in zip(batch, rows, strict=True)], passes


def hf_generate(
    target: Target,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    batch_size: int = 1,
    seed: int = 0,
    guidance: float | None = None,
) -> DecodedRun:
    """Decode `requests` with target.model.generate under the same settings, left-padded in
    batches.

    guidance: classifier-free guidance from the prompt's last token; it wants batch_size 1.

    A token drawn after the first is a cycle of length one, as for `none`. Samples differ from our
    engine's, their distribution does not. Rows run one by one where their padding could reach the
    end of the context.
    """
    timing, generations = Timing(), []
    for start in range(0, len(requests), batch_size):
        rows = requests[start : start + batch_size]
        longest = max(len(r.prompt) for r in rows) + max(r.max_new_tokens for r in rows)
        for batch in [rows] if longest <= target.context_length else [[row] for row in rows]:
            generations += generated(target, batch, sampling, seed, timing, guidance)[0]
    return DecodedRun(generations, timing)


def _trim(request: Request, tokens: list[int], eos: tuple[int, ...]) -> Generation:
    tokens = tokens[: request.max_new_tokens]
    stop = next((i + 1 for i, t in enumerate(tokens) if t in eos), None)
    tokens = tokens[:stop]
    cycles = [Cycle(0, 0, cut=False, start=i) for i in range(1, len(tokens))]
    end = "eos" if stop else "length"
    return Generation(list(request.prompt), tokens, cycles, [False] * len(tokens), end)


def hf_assisted(
    target: Target,
    draft: Target,
    k: int,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    seed: int = 0,
) -> DecodedRun:
    """Decode `requests` one by one with target.model.generate(assistant_model=draft), which
    takes one row at a time: K tokens a draft on a constant schedule, no confidence threshold,
    nothing carried over from one prompt to the next."""
    timing, found = Timing(), []
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    # transformers warns of a call of its own
    mute = lambda record: "generation-related arguments" not in record.getMessage()
    with draft.as_loaded() as helper, contextlib.ExitStack() as stack:
        # its generation config is where transformers looks for K
        stack.enter_context(without_wishes(helper, **constant, num_assistant_tokens=k))
        LOG.addFilter(mute)
        stack.callback(LOG.removeFilter, mute)
        for request in requests:
            (answer,), passes = generated(target, [request], sampling, seed, timing, helper=helper)
            answer.cycles = _cycles(passes, answer, room(target, request), k)
            for cycle in answer.cycles:
                kept = slice(cycle.start, cycle.start + cycle.accepted)
                answer.from_draft[kept] = [True] * cycle.accepted
            found.append(answer)
    return DecodedRun(found, timing)


def _cycles(passes: list[Pass], answer: Generation, limit: int, k: int) -> list[Cycle]:
    """Return one cycle for every pass after the first, which belongs to the prefill. A pass reads
    the last token and the candidates; the next one starts where it has stopped accepting."""
    prompt, total = len(answer.prompt_ids), len(answer.token_ids)
    # Tokens generated when each pass begins, and at the end.
    ends = [*(p.start + 1 - prompt for p in passes[1:]), total]
    cycles = []
    for p, before, after in zip(passes[1:], ends, ends[1:], strict=False):
        accepted = after - before - 1
        if accepted < 0 or before < 1:
            return []  # another loop than the one this reading knows
        # transformers proposes no more than may still be written
        cut = (after == total and answer.finish == "eos") or limit - before - 1 < k
        cycles.append(Cycle(p.tokens - 1, accepted, cut, before))
    return cycles
