"""The target as Hugging Face runs it, and the greedy layer of a certificate: token equality
with its `generate`.

The reference is always a plain pass of the Hugging Face model with its own attention, no cache
and no tree; rounding is measured, not assumed (see `rounding`).

Shape letters: T sequence length, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Sequence
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
from outrider.scripts.scoring.reference import hf_generate

BUDGET = 64 * 2**20  # logits held at once, in numbers
BEST = 8  # tokens that rounding could make the greedy one
CHUNK = 4  # batches of requests between two saves
ALONE = 8  # one prompt of so many is decoded by itself: a single row takes ways of its own


@dataclass
class Plain:
    """The target as Hugging Face runs it, with the attention it was loaded with."""

    target: Target

    @torch.no_grad()
    def logits(self, sequences: Sequence[tuple[list[int], int]]) -> list[Tensor]:
        """For each (ids, start): logits [len(ids) - start, V] that predict ids[start:], in one
        pass, right-padded."""
        longest = max(len(ids) for ids, _ in sequences) - 1
        first = min(start for _, start in sequences) - 1
        batch = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask = torch.zeros_like(batch)
        for b, (ids, _) in enumerate(sequences):
            batch[b, : len(ids) - 1] = torch.tensor(ids[:-1])
            mask[b, : len(ids) - 1] = 1
        with self.target.as_loaded() as model:
            keep = {}
            if "logits_to_keep" in inspect.signature(model.forward).parameters:
                keep["logits_to_keep"] = longest - first
            batch, mask = batch.to(self.target.device), mask.to(self.target.device)
            out = model(batch, attention_mask=mask, use_cache=False, **keep).logits
        before = 1 + longest - out.shape[1]
        ends = enumerate(sequences)
        return [out[b, start - before : len(ids) - before] for b, (ids, start) in ends]

    def in_batches(
        self, sequences: Sequence[tuple[list[int], int]], guidance: float | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """(index, logits) of every sequence, as many at once as the memory budget allows,
        alike lengths together.

        guidance: classifier-free guidance as in transformers (Sanchez et al. 2306.17806):
        log-probabilities moved away from those of an unconditional pass, which sees the
        prompt's last token and what was generated.
        """
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]))
        while order:
            size, longest = 0, 0
            for i in order:
                longest = max(longest, len(sequences[i][0]))
                if size and (size + 1) * longest * self.target.vocab_size > BUDGET:
                    break
                size += 1
            chunk, order = order[:size], order[size:]
            found = self.logits([sequences[i] for i in chunk])
            if guidance is not None:
                texts = (sequences[i] for i in chunk)
                free = self.logits([(ids[start - 1 :], 1) for ids, start in texts])
                found = [_guided(a, b, guidance) for a, b in zip(found, free, strict=True)]
            yield from zip(chunk, found, strict=True)

    def stepped(self, ids: list[int], start: int, guidance: float | None = None) -> Tensor:
        """Logits [len(ids) - start, V] of one text by a cached step per token."""
        found = self._steps(ids[:start], len(ids) - start, ids[start:])
        if guidance is None:
            return found
        return _guided(
            found, self._steps(ids[start - 1 : start], len(found), ids[start:]), guidance
        )

    @torch.no_grad()
    def _steps(self, ids: list[int], count: int, then: Sequence[int] = ()) -> Tensor:
        """Logits [count, V] behind `ids`, which grow by the tokens `then`, and by the best one
        where these have ended, by a cached step each."""
        found: list[Tensor] = []
        new, past = list(ids), None
        with self.target.as_loaded() as model:
            while len(found) < count:
                now = torch.tensor([new], device=self.target.device)
                out = model(now, past_key_values=past, use_cache=True)
                found.append(out.logits[0, -1])
                given = then[len(found) - 1 : len(found)]
                new, past = list(given) or [int(found[-1].argmax())], out.past_key_values
        return torch.stack(found)

    def rounding(self, prompts: Sequence[Sequence[int]], steps: int = 16) -> dict[str, float]:
        """What rounding does in this model and dtype, the engine left out: two plain ways to
        compute the same logits, one pass over the whole text and one cached step per token,
        compared.

        logit: largest difference of any logit. gap: see `moved`.
        """
        worst = gap = 0.0
        for prompt in prompts:
            ids = list(prompt)
            stepped = self._steps(ids, min(steps, self.target.context_length - len(ids) + 1))
            whole = self.logits([([*ids, *stepped.argmax(-1).tolist()], len(ids))])[0]
            a, b = whole.double(), stepped.double()
            worst = max(worst, float((a - b).abs().max()))
            gap = max(gap, moved(a, b))
        return {"logit": worst, "gap": gap}


def moved(a: Tensor, b: Tensor) -> float:
    """Of two ways to compute the same logits [n, V], the largest difference of the distance to the
    best logit, over the BEST tokens of either: what can turn a greedy choice."""
    a, b = a.double(), b.double()
    near = torch.zeros_like(a, dtype=torch.bool)
    for x in (a, b):
        near.scatter_(1, x.topk(min(BEST, x.shape[1])).indices, True)
    change = (a - a.amax(1, keepdim=True)) - (b - b.amax(1, keepdim=True))
    return float(change[near].abs().max())


def _guided(given: Tensor, free: Tensor, guidance: float) -> Tensor:
    a, b = given.float().log_softmax(-1), free.float().log_softmax(-1)
    return b + guidance * (a - b)


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
