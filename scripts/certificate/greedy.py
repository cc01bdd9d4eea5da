"""The greedy layer of a certificate: token equality with Hugging Face `generate`.

Rounding is measured, not assumed (scripts/scoring/plain.py).

Shape letters: T sequence length, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outrider.decode.drafters import Drafter
from outrider.decode.engine import Generation, Request, Rule, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.certificate import pit
from outrider.scripts.certificate.recorder import Recorder
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress, silent
from outrider.scripts.scoring.plain import Plain
from outrider.scripts.scoring.reference import hf_generate

CHUNK = 4  # batches of requests between two saves
ALONE = 8  # one prompt of so many is decoded by itself: a single row takes ways of its own


@dataclass
class Greedy:
    """divergences: {prompt, position, ours, theirs, margin, kind: "rounding tie" | "defect"},
    first one per prompt. astray: emitted tokens that are not the best one of the very logits
    they were verified against."""

    prompts: int
    tokens: int
    accepted: int
    astray: int
    divergences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def defects(self) -> int:
        return sum(d["kind"] == "defect" for d in self.divergences)


@dataclass
class GreedyReading:
    """How answers are read off and judged at T = 0. tokens: of the longest answer. tolerance:
    distance of two logits that rounding may turn. sampling: where the repetition penalty
    comes from. guidance: of classifier-free guidance, None = none."""

    tokens: int
    batch_size: int
    tolerance: float
    verify: str | Rule = "traversal"
    sampling: Sampling = field(default_factory=Sampling)
    guidance: float | None = None


def greedy_layer(
    plain: Plain,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    reading: GreedyReading,
    theirs: list[list[int]] | None = None,
    on_progress: OnProgress = silent,
    memo: Memo | None = None,
) -> Greedy:
    """Token equality at T = 0 with Hugging Face `generate`, every first divergence classified.

    A divergence is a rounding tie when a plain pass puts the two tokens and the best one
    within `reading.tolerance` of each other; anything else is a defect. An answer that differs
    from the reference's is generated again by itself first, since left padding moves the last
    bits of a batch. Besides, and whatever rounding does, every emitted token must be the best
    one (lowest id among equals) of the logits it was verified against. The last answers, one of
    ALONE, are written in a batch of one. theirs: the reference's tokens, when known already.
    memo: keeps what is done.
    """
    reading = replace(reading, sampling=greedy_of(reading.sampling))
    sampling, guidance = reading.sampling, reading.guidance
    memo = memo or Memo(None)
    requests = [Request(list(p), reading.tokens, id=i) for i, p in enumerate(prompts)]
    if theirs is None:
        theirs = reference_tokens(plain, requests, sampling, reading.batch_size, guidance)
    ours = memo.lines("greedy")
    on_progress(len(ours), len(requests))
    together = len(requests) - math.ceil(len(requests) / ALONE)
    while len(ours) < len(requests):
        size = reading.batch_size if len(ours) < together else 1
        end = together if len(ours) < together else len(requests)
        chunk = requests[len(ours) : min(end, len(ours) + CHUNK * size)]
        for row in _written(target, drafter, chunk, reading, size):
            ours.append(row)
            memo.add("greedy", row)
        on_progress(len(ours), len(requests))
    result = Greedy(
        len(prompts), sum(len(o[0]) for o in ours), sum(o[1] for o in ours), sum(o[2] for o in ours)
    )
    for i, (out, wanted) in enumerate(zip((o[0] for o in ours), theirs, strict=True)):
        if out == wanted:
            continue
        alone = reference_tokens(plain, [requests[i]], sampling, 1, guidance)[0]
        if out != alone:
            known = Generation(list(prompts[i]), out)
            result.divergences.append(_classify(plain, i, known, alone, reading))
    return result


def _written(
    target: Target, drafter: Drafter, requested: list[Request], reading: GreedyReading, size: int
) -> list[list[Any]]:
    """Of every answer its tokens, how many were drafted, and how many are not the best ones of
    the logits that they were verified against."""
    seen = Recorder(reading.verify, requested, functools.partial(_is_best, reading.sampling))
    how: dict[str, Any] = {"verify": seen, "guidance": reading.guidance, "coins": seen.coins}
    run = generate(target, drafter, requested, reading.sampling, batch_size=size, **how)
    rows = []
    for g, line in zip(run.generations, seen.emitted(run, requested), strict=True):
        pairs = zip(line, g.token_ids, strict=False)
        good = sum(e.call.kept[e.index] and e.token == t for e, t in pairs)
        rows.append([g.token_ids, sum(g.from_draft), len(g.token_ids) - good])
    return rows


def _is_best(
    sampling: Sampling, logits: Tensor, tokens: Tensor, histories: list[list[int]]
) -> list[bool]:
    """Whether each token [K] is the best of its logits [K, V], in the decoder's precision."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    scores = pit.processed(scores, sampling, histories)
    best = (scores == scores.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)
    found: list[bool] = (best == tokens).tolist()
    return found


def greedy_of(sampling: Sampling) -> Sampling:
    """The same settings at T = 0, where truncation has nothing to cut."""
    return Sampling(0.0, repetition_penalty=sampling.repetition_penalty)


def reference_tokens(
    plain: Plain,
    requests: Sequence[Request],
    sampling: Sampling,
    batch_size: int = 1,
    guidance: float | None = None,
    on_progress: OnProgress = silent,
    memo: Memo | None = None,
) -> list[list[int]]:
    """What Hugging Face `generate` writes; guided rows alone, since it cannot batch them."""
    memo = memo or Memo(None)
    size = 1 if guidance is not None else batch_size
    found = memo.lines("reference")
    on_progress(len(found), len(requests))
    while len(found) < len(requests):
        chunk = requests[len(found) : len(found) + size]
        with plain.target.as_loaded():
            run = hf_generate(plain.target, chunk, sampling, batch_size=size, guidance=guidance)
        for generation in run.generations:
            found.append(generation.token_ids)
            memo.add("reference", found[-1])
        on_progress(len(found), len(requests))
    return found


def _classify(
    plain: Plain, prompt: int, out: Generation, wanted: list[int], reading: GreedyReading
) -> dict[str, Any]:
    pairs = list(zip(out.token_ids, wanted, strict=False))
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))
    a, b, margin = None, None, None
    if at < len(pairs):  # else one stopped where the other went on
        a, b = pairs[at]
        ids, start = [*out.prompt_ids, *out.token_ids[:at], a], len(out.prompt_ids)
        logits = next(plain.in_batches([(ids, start)], reading.guidance))[1][-1:].double()
        scores = pit.processed(logits, reading.sampling, [ids[:-1]])[0]
        margin = float(scores.max() - torch.minimum(scores[a], scores[b]))
    tie = margin is not None and margin <= reading.tolerance
    return {
        "prompt": prompt,
        "position": at,
        "ours": a,
        "theirs": b,
        "margin": margin,
        "kind": "rounding tie" if tie else "defect",
    }
