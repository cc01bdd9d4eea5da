"""Outside reference: Hugging Face `generate` on the same loaded weights, behind the same call
as our engine.

It is a row of the table like any other (drafter name `hf_generate`), so "no slower than
generate" is measured in the same interleaved run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from conf.rules import SEEDS
from decode.engine import Cycle, Generation, Request, Run, Timing
from decode.sampling import Sampling
from decode.target import Target


class FirstToken(StoppingCriteria):
    """Never stops; `at` is when the first token was there, which ends the prefill."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.at is None:
            self.at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextlib.contextmanager
def without_wishes(model: Any, **fields: Any) -> Iterator[None]:
    """The model with no generation_config of its own but `fields`. `generate` fills every
    setting that a run leaves open from there: repetition_penalty, suppress_tokens or num_beams
    of the model would become part of the law."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(**fields)
    try:
        yield
    finally:
        model.generation_config = kept


def room(target: Target, request: Request) -> int:
    """Most tokens the engine would write for this request: its limit or the end of the
    context.
    """
    return min(request.max_new_tokens, target.context_length - len(request.prompt))


def hf_generate(
    target: Target,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    batch_size: int = 1,
    seed: int = 0,
    guidance: float | None = None,
) -> Run:
    """Decode `requests` with target.model.generate under the same settings, left-padded in
    batches.

    guidance: classifier-free guidance from the prompt's last token; it wants batch_size 1.

    A token drawn after the first is a cycle of length one, as for `none`. Random numbers come
    from torch's global generator, seeded per batch and restored afterwards: samples differ
    from our engine's, their law does not. Rows run one by one where their padding could reach
    the end of the context or the switch of a rotary embedding.
    """
    timing, generations = Timing(), []
    for start in range(0, len(requests), batch_size):
        rows = requests[start : start + batch_size]
        longest = max(len(r.prompt) for r in rows) + max(r.max_new_tokens for r in rows)
        for batch in [rows] if longest <= target.span else [[row] for row in rows]:
            generations += _batch(target, batch, sampling, seed, timing, guidance)
    return Run(generations, timing, law_rows=0)


def settings(
    target: Target, sampling: Sampling, max_new_tokens: int
) -> tuple[GenerationConfig, LogitsProcessorList]:
    """Our settings in transformers' words."""
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sampling.temperature > 0,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=target.eos_ids[0] if target.eos_ids else 0,
        use_cache=True,
    )
    if sampling.temperature > 0:
        config.temperature, config.top_k = sampling.temperature, sampling.top_k
        config.top_p, config.min_p = sampling.top_p, sampling.min_p or None
    # In our order: generate() itself would put the penalty in front of foreign processors.
    processors = LogitsProcessorList(sampling.processors)
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    return config, processors


def _batch(
    target: Target,
    batch: Sequence[Request],
    sampling: Sampling,
    seed: int,
    timing: Timing,
    guidance: float | None = None,
) -> list[Generation]:
    longest, limit = max(len(r.prompt) for r in batch), max(room(target, r) for r in batch)
    pad = target.eos_ids[0] if target.eos_ids else 0
    ids = torch.tensor(
        [[pad] * (longest - len(r.prompt)) + list(r.prompt) for r in batch], device=target.device
    )
    mask = torch.tensor(
        [[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in batch], device=target.device
    )
    config, processors = settings(target, sampling, limit)
    if guidance is not None:
        config.guidance_scale = guidance
    first = FirstToken()
    devices = [target.device] if target.device.type == "cuda" else []
    with (
        target.as_loaded() as model,
        without_wishes(model),
        _passes(model) as spent,
        torch.inference_mode(),
        torch.random.fork_rng(devices=devices),
    ):
        begin = time.perf_counter()  # the model is as transformers loads it
        torch.manual_seed((seed * 1_000_003 + batch[0].id) % SEEDS)
        out = model.generate(
            ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([first]),
        )
        rows = out[:, longest:].tolist()
        end = time.perf_counter()
    timing.total_s += end - begin
    timing.prefill_s += (first.at or end) - begin
    timing.target_s += sum(seconds for began, seconds in spent if began >= (first.at or end))
    timing.cycles += max(len(rows[0]) - 1, 0)
    return [_trim(r, tokens, target.eos_ids) for r, tokens in zip(batch, rows, strict=True)]


@contextlib.contextmanager
def _passes(model: Any) -> Iterator[list[tuple[float, float]]]:
    """(when it began, seconds) of every pass of the model while the block runs, by hooks."""
    found: list[tuple[float, float]] = []

    def before(*_: Any) -> None:
        found.append((time.perf_counter(), 0.0))

    def after(*_: Any) -> None:
        found[-1] = (found[-1][0], time.perf_counter() - found[-1][0])

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _trim(request: Request, tokens: list[int], eos: tuple[int, ...]) -> Generation:
    tokens = tokens[: request.max_new_tokens]
    stop = next((i + 1 for i, t in enumerate(tokens) if t in eos), None)
    tokens = tokens[:stop]
    return Generation(
        list(request.prompt),
        tokens,
        [
            Cycle(proposed=0, accepted=0, ranks=(), cut=False, start=i)
            for i in range(1, len(tokens))
        ],
        [False] * len(tokens),
        "eos" if stop else "length",
    )
