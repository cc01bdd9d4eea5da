"""The layers of a certificate that run on the user's own target and drafter: greedy equality and sampling.

The reference is always a plain pass of the Hugging Face model with its own attention, no cache and no tree, one
sequence after another; rounding is measured, not assumed (see `rounding`).

Shape letters: R tokens, T sequence length, V vocabulary, n sample size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.drafters import Drafter
from decode.engine import Generation, Request, Rule, generate
from decode.sampling import Sampling
from decode.target import Target
from scripts.lib import pit
from scripts.lib.reference import hf_generate

BUDGET = 64 * 2**20  # logits held at once, in numbers
ROWS = 128  # laws in float64 at once
Advance = Callable[[int], None]


@dataclass
class Plain:
    """The target as Hugging Face runs it, with the attention it was loaded with."""

    target: Target

    @torch.no_grad()
    def logits(self, sequences: Sequence[tuple[list[int], int]]) -> list[Tensor]:
        """For each (ids, start): logits [len(ids) - start, V] that predict ids[start:], in one pass, right-padded."""
        longest, first = max(len(ids) for ids, _ in sequences) - 1, min(start for _, start in sequences) - 1
        batch = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask = torch.zeros_like(batch)
        for b, (ids, _) in enumerate(sequences):
            batch[b, : len(ids) - 1] = torch.tensor(ids[:-1])
            mask[b, : len(ids) - 1] = 1
        with self.target.as_loaded() as model:
            keep = {}
            if "logits_to_keep" in inspect.signature(model.forward).parameters:
                keep["logits_to_keep"] = longest - first
            device = self.target.device
            out = model(batch.to(device), attention_mask=mask.to(device), use_cache=False, **keep).logits
        skip = longest - out.shape[1]
        return [out[b, start - 1 - skip : len(ids) - 1 - skip] for b, (ids, start) in enumerate(sequences)]

    def in_batches(self, sequences: Sequence[tuple[list[int], int]]) -> Iterator[tuple[int, Tensor]]:
        """(index, logits) of every sequence, as many at once as the memory budget allows, alike lengths together."""
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]))
        while order:
            size, longest = 0, 0
            for i in order:
                longest = max(longest, len(sequences[i][0]))
                if size and (size + 1) * longest * self.target.vocab_size > BUDGET:
                    break
                size += 1
            chunk, order = order[:size], order[size:]
            yield from zip(chunk, self.logits([sequences[i] for i in chunk]), strict=True)

    @torch.no_grad()
    def rounding(self, prompts: Sequence[Sequence[int]], steps: int = 16) -> float:
        """Largest difference of any logit between two plain ways to compute it: one pass over the whole text, and
        one cached step per token. What rounding does in this model and dtype, the engine left out."""
        worst = 0.0
        for prompt in prompts:
            ids = list(prompt)
            stepped: list[Tensor] = []
            with self.target.as_loaded() as model:
                out = model(torch.tensor([ids], device=self.target.device), use_cache=True)
                for _ in range(steps):
                    stepped.append(out.logits[0, -1])
                    ids.append(int(stepped[-1].argmax()))
                    out = model(
                        torch.tensor([[ids[-1]]], device=self.target.device),
                        past_key_values=out.past_key_values,
                        use_cache=True,
                    )
            whole = self.logits([(ids, len(prompt))])[0]
            worst = max(worst, float((whole.double() - torch.stack(stepped).double()).abs().max()))
        return worst


@dataclass
class Greedy:
    """divergences: {prompt, position, ours, theirs, margin, kind: "rounding tie" | "defect"}, first one per prompt."""

    prompts: int
    tokens: int
    accepted: int
    divergences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def defects(self) -> int:
        return sum(d["kind"] == "defect" for d in self.divergences)


def greedy_layer(plain: Plain, target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], tokens: int,
                 batch_size: int, verify: str | Rule, tolerance: float, penalty: float = 1.0,
                 theirs: list[list[int]] | None = None, advance: Advance = lambda n: None) -> Greedy:  # fmt: skip
    """Token equality at T = 0 with Hugging Face `generate` (one row at a time), every first divergence classified.

    A divergence is a rounding tie when a plain pass puts the two tokens and the best one within `tolerance` of each
    other; anything else is a defect. theirs: the reference's tokens, when known already.
    """
    sampling = Sampling(0.0, repetition_penalty=penalty)
    requests = [Request(list(p), tokens, id=i) for i, p in enumerate(prompts)]
    if theirs is None:
        theirs = reference_tokens(plain, requests, sampling)
    ours: list[Generation] = []
    for start in range(0, len(requests), batch_size):
        chunk = requests[start : start + batch_size]
        ours += generate(target, drafter, chunk, sampling, batch_size=batch_size, verify=verify).generations
        advance(len(chunk))
    result = Greedy(len(prompts), sum(len(g.token_ids) for g in ours), sum(sum(g.from_draft) for g in ours))
    for i, (out, wanted) in enumerate(zip(ours, theirs, strict=True)):
        if out.token_ids != wanted:
            result.divergences.append(_classify(plain, i, out, wanted, tolerance, sampling))
    return result


def reference_tokens(plain: Plain, requests: Sequence[Request], sampling: Sampling) -> list[list[int]]:
    """What Hugging Face `generate` writes, one row at a time."""
    with plain.target.as_loaded():
        return [g.token_ids for g in hf_generate(plain.target, requests, sampling).generations]


def _classify(plain: Plain, prompt: int, out: Generation, wanted: list[int], tolerance: float,
              sampling: Sampling) -> dict[str, Any]:  # fmt: skip
    at = next((k for k, (a, b) in enumerate(zip(out.token_ids, wanted, strict=False)) if a != b), None)
    if at is None:  # one stopped where the other went on
        short = min(len(out.token_ids), len(wanted))
        return {"prompt": prompt, "position": short, "ours": None, "theirs": None, "margin": None, "kind": "defect"}
    a, b = out.token_ids[at], wanted[at]
    before = [*out.prompt_ids, *out.token_ids[:at]]
    scores = plain.logits([([*before, a], len(before))])[0][0].double()
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(before)), device=scores.device)
        old, penalty = scores[seen], sampling.repetition_penalty
        scores[seen] = torch.where(old < 0, old * penalty, old / penalty)
    margin = float(scores.max() - torch.minimum(scores[a], scores[b]))
    kind = "rounding tie" if margin <= tolerance else "defect"
    return {"prompt": prompt, "position": at, "ours": a, "theirs": b, "margin": margin, "kind": kind}


@dataclass
class Sample:
    """n emitted tokens in the order of their requests. u: transforms; top: largest mass of each law; depth: place in
    its cycle (0 = first token of a cycle, or the prefill's); sequence: which request; outside: tokens without mass,
    edge: those of them at the truncation's edge within rounding; drafted: share that were accepted draft tokens;
    proposals: cycles that had a draft to verify.
    """

    u: np.ndarray
    top: np.ndarray
    depth: np.ndarray
    sequence: np.ndarray
    outside: int
    edge: int
    drafted: float
    proposals: int

    def strata(self) -> dict[str, np.ndarray]:
        """The transforms of all tokens and, where both are large enough, of first and later tokens of a cycle.

        The strata are known before the token: that a cycle got as far as place d says nothing about the token there,
        given those before it (docs/lossless.md). Whether the token itself was an accepted draft token would."""
        first = self.depth == 0
        cut = {"first of a cycle": self.u[first], "later in a cycle": self.u[~first]}
        return {"all tokens": self.u, **(cut if min(map(len, cut.values())) >= pit.SMALLEST else {})}

    def tests(self) -> list[pit.Test]:
        """Uniformity of every stratum, independence of neighbours."""
        tests = [t for name, u in self.strata().items() for t in pit.uniformity(u, name)]
        return tests + pit.independence(self.u, self.sequence)


def sampling_layer(plain: Plain, target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]],
                   sampling: Sampling, tokens: int, max_new_tokens: int, batch_size: int, seed: int,
                   verify: str | Rule, slack: float, stop: Callable[[Sample], bool] | None = None,
                   advance: Advance = lambda n: None) -> Sample:  # fmt: skip
    """Decode until `tokens` tokens are out (the prompts again and again, each time with other random numbers) and place
    every one of them in the law of an independent plain pass.

    Exactly `tokens` are used, cut in the order of the requests, so that neither a stop token nor the budget selects.
    stop(sample so far) ends early: for controls that are known to fail already.
    """
    coin = np.random.default_rng([seed, 20240601])  # the V of the transforms: independent of every number decoded with
    parts: list[list[np.ndarray]] = []
    count, number, outside, edge, drafted, proposals = 0, 0, 0, 0, 0, 0
    sample = _gather(parts, 0, 0, 0, 0)
    while count < tokens:
        chunk = [Request(list(prompts[(number + i) % len(prompts)]), max_new_tokens, id=number + i)
                 for i in range(2 * batch_size)]  # fmt: skip
        run = generate(target, drafter, chunk, sampling, batch_size=batch_size, seed=seed, verify=verify)
        texts = [([*g.prompt_ids, *g.token_ids], len(g.prompt_ids)) for g in run.generations]
        found = {i: _place(logits, texts[i], sampling, slack) for i, logits in plain.in_batches(texts)}
        for i, generation in enumerate(run.generations):
            take = min(len(generation.token_ids), tokens - count)
            p = found[i]
            mass, below, lost, near = (x[:take] for x in (p.mass, p.below, p.outside, p.edge))
            v = coin.random(take)
            u = np.where(lost, v, np.clip(below + v * mass, 0, 1))
            parts.append([u, p.top[:take], _depths(generation)[:take], np.full(take, number + i)])
            count, outside, edge = count + take, outside + int(lost.sum()), edge + int(near.sum())
            drafted += sum(generation.from_draft[:take])
            proposals += sum(c.proposed > 0 and c.start < take for c in generation.cycles)
        number += len(chunk)
        advance(min(count, tokens))
        sample = _gather(parts, outside, edge, drafted, proposals)
        if stop is not None and stop(sample):
            break
    return sample


def _place(logits: Tensor, text: tuple[list[int], int], sampling: Sampling, slack: float) -> pit.Places:
    ids, start = text
    tokens = torch.tensor(ids[start:], device=logits.device)
    histories = [ids[: start + i] for i in range(len(tokens))] if sampling.repetition_penalty != 1 else []
    parts = [pit.places(logits[i : i + ROWS], tokens[i : i + ROWS], sampling, histories[i : i + ROWS], slack)
             for i in range(0, len(tokens), ROWS)]  # fmt: skip
    return pit.Places(*(np.concatenate([getattr(p, name) for p in parts])
                        for name in ("below", "mass", "top", "outside", "edge")))  # fmt: skip


def _depths(generation: Generation) -> np.ndarray:
    """Place of every token in its cycle; the prefill's token is a cycle of its own."""
    starts = np.array([0, *(c.start for c in generation.cycles)])
    place = np.arange(len(generation.token_ids))
    return place - starts[np.searchsorted(starts, place, side="right") - 1]


def _gather(parts: list[list[np.ndarray]], outside: int, edge: int, drafted: int, proposals: int) -> Sample:
    u, top, depth, sequence = (np.concatenate([p[k] for p in parts]) if parts else np.zeros(0) for k in range(4))
    return Sample(u, top, depth, sequence, outside, edge, drafted / max(len(u), 1), proposals)
