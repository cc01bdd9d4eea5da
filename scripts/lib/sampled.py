"""The sampling layer of a certificate: every emitted token placed in the law of an independent plain pass.

Shape letters: R tokens, V vocabulary, n sample size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.drafters import Drafter
from decode.engine import Generation, Request, Rule, generate
from decode.sampling import Sampling
from decode.target import Target
from scripts.lib import pit
from scripts.lib.live import Advance, Plain
from scripts.lib.parts import Parts

ROWS = 128  # laws in float64 at once


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


@dataclass(frozen=True)
class Setting:
    """What one sample is drawn under. slack: how far rounding may move a logit. chunk: batches between two saves."""

    sampling: Sampling
    tokens: int
    max_new_tokens: int
    batch_size: int
    seed: int = 0
    verify: str | Rule = "traversal"
    slack: float = 0.0
    guidance: float | None = None
    chunk: int = 2


def sampling_layer(plain: Plain, target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], how: Setting,
                   stop: Callable[[Sample], bool] | None = None, advance: Advance = lambda n: None,
                   parts: Parts | None = None) -> Sample:  # fmt: skip
    """Decode until `how.tokens` tokens are out (the prompts again and again, each time with other random numbers) and
    place every one of them in the law of an independent plain pass.

    Exactly that many are used, cut in the order of the requests, so that neither a stop token nor the budget selects.
    stop(sample so far) ends early: for controls that are known to fail already. parts: keeps what is done.
    """
    parts = parts or Parts(None)
    rows = parts.lines("sampling")
    sample = _gather(rows, how.tokens)
    while len(sample.u) < how.tokens and not (stop is not None and rows and stop(sample)):
        advance(len(sample.u))
        number = sum(row["requests"] for row in rows)
        rows.append(_chunk(plain, target, drafter, prompts, how, number))
        parts.add("sampling", rows[-1])
        sample = _gather(rows, how.tokens)
    advance(len(sample.u))
    return sample


def _chunk(plain: Plain, target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], how: Setting,
           number: int) -> dict[str, Any]:  # fmt: skip
    """The next requests, from `number` on: lists over their tokens, and how many requests there were."""
    asked = [Request(list(prompts[(number + i) % len(prompts)]), how.max_new_tokens, id=number + i)
             for i in range(how.chunk * how.batch_size)]  # fmt: skip
    run = generate(target, drafter, asked, how.sampling, batch_size=how.batch_size, seed=how.seed, verify=how.verify,
                   guidance=how.guidance)  # fmt: skip
    texts = [([*g.prompt_ids, *g.token_ids], len(g.prompt_ids)) for g in run.generations]
    found = {i: _place(logits, texts[i], how) for i, logits in plain.in_batches(texts, how.guidance)}
    coin = np.random.default_rng([how.seed, 20240601, number])  # the V: independent of every number decoded with
    names = ("u", "top", "depth", "sequence", "outside", "edge", "drafted", "draft")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for i, g in enumerate(run.generations):
        p, count = found[i], len(g.token_ids)
        v = coin.random(count)
        columns["u"] += np.where(p.outside, v, np.clip(p.below + v * p.mass, 0, 1)).tolist()
        columns["top"] += p.top.tolist()
        columns["depth"] += _depths(g).tolist()
        columns["sequence"] += [number + i] * count
        columns["outside"] += p.outside.astype(int).tolist()
        columns["edge"] += p.edge.astype(int).tolist()
        columns["drafted"] += [int(d) for d in g.from_draft]
        starts = {c.start for c in g.cycles if c.proposed > 0}
        columns["draft"] += [int(t in starts) for t in range(count)]  # a cycle with a draft begins here
    return {"requests": len(asked), **columns}


def _place(logits: Tensor, text: tuple[list[int], int], how: Setting) -> pit.Places:
    ids, start = text
    tokens = torch.tensor(ids[start:], device=logits.device)
    histories = [ids[: start + i] for i in range(len(tokens))] if how.sampling.uses_history else []
    parts = [pit.places(logits[i : i + ROWS], tokens[i : i + ROWS], how.sampling, histories[i : i + ROWS], how.slack)
             for i in range(0, len(tokens), ROWS)]  # fmt: skip
    return pit.Places(*(np.concatenate([getattr(p, name) for p in parts])
                        for name in ("below", "mass", "top", "outside", "edge")))  # fmt: skip


def _depths(generation: Generation) -> np.ndarray:
    """Place of every token in its cycle; the prefill's token is a cycle of its own."""
    starts = np.array([0, *(c.start for c in generation.cycles)])
    place = np.arange(len(generation.token_ids))
    return place - starts[np.searchsorted(starts, place, side="right") - 1]


def _gather(rows: Sequence[dict[str, Any]], most: int) -> Sample:
    """The first `most` tokens of all chunks."""

    def column(name: str) -> np.ndarray:
        return np.concatenate([np.array(row[name], dtype=float) for row in rows])[:most] if rows else np.zeros(0)

    u = column("u")
    outside, edge, proposals = (int(column(name).sum()) for name in ("outside", "edge", "draft"))
    return Sample(u, column("top"), column("depth"), column("sequence"), outside, edge,
                  float(column("drafted").sum()) / max(len(u), 1), proposals)  # fmt: skip
