"""The sampling layer of a certificate: every emitted token, placed in the distribution that it was
verified against (recorder.py, transforms.py). Whether that is the target's is judged by the greedy
layer, whose tokens come from the same passes, masks and cache.

Shape letters: R tokens, V vocabulary, O orders, G strata, n sample size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from outrider.decode.drafters import Drafter
from outrider.decode.engine import Generation, Request
from outrider.decode.sampling import Sampling
from outrider.scripts.certificate import transforms, uniformity
from outrider.scripts.certificate.recorder import Recorded, mismatches, recorded
from outrider.scripts.certificate.setup import CHUNK, CertifySetup
from outrider.scripts.certificate.uniformity import Test
from outrider.scripts.common.progress import named

ORDERS = ("by probability", "by id")
GROUPS = (
    "all tokens",
    "first of an answer",
    "first of a cycle, after a rejection",
    "first of a cycle, after a whole draft",
    "place 1",
    "place 2",
    "place 3 and on",
    "bonus of a whole draft",
)
# of every order and stratum, and of neighbours in every order
MOST_TESTS = 2 * (len(ORDERS) + len(GROUPS) - 1) + 3 * 2 * len(ORDERS)
COIN = 20240601  # beside the seed of the run: places a token within its own mass
# what is kept of every token, and how many numbers of it
COLUMNS = {"u": len(ORDERS), "groups": len(GROUPS), "sequence": 1, "cycle": 1, "depth": 1}
COLUMNS |= {"outside": 1, "drafted": 1, "draft": 1}


@dataclass
class Sample:
    """n emitted tokens in the order of their requests, an array each.

    u: [n, O] transforms, one column per order; groups: [n, G] strata; sequence: which request;
    cycle: number of its cycle in its answer (0 = the prefill's); depth: place in its cycle (0 =
    first token of a cycle, or the prefill's); outside: it has no mass; drafted: it was an accepted
    draft token; draft: a cycle that had a draft to verify begins with it.
    mismatches: answers that hold something else than verification chose.
    """

    u: np.ndarray
    groups: np.ndarray
    sequence: np.ndarray
    cycle: np.ndarray
    depth: np.ndarray
    outside: np.ndarray
    drafted: np.ndarray
    draft: np.ndarray
    mismatches: int

    def tests(self) -> list[Test]:
        """Return every test of the sample.

        The strata are known before the token: that a cycle got as far as place d says nothing
        about the token there, given those before it (docs/lossless.md). Whether the token
        itself was an accepted draft token would."""
        found: list[Test] = []
        for i, order in enumerate(ORDERS):
            found += uniformity.uniformity(self.u[:, i], GROUPS[0], order)
        for g, name in enumerate(GROUPS[1:], 1):
            some = self.u[self.groups[:, g] > 0, 0]
            found += uniformity.uniformity(some, name) if len(some) >= uniformity.SMALLEST else []
        same = np.r_[False, self.sequence[1:] == self.sequence[:-1]][: len(self.u)]
        found += _pairs(self.u, same & (self.depth > 0), "two tokens inside a cycle")
        found += _pairs(self.u, same & (self.depth == 0), "two tokens between cycles")
        # neighbouring requests at the same place of the same cycle, where two that share their
        # random numbers would draw by the same ones
        ranked = np.lexsort((self.sequence, self.depth, self.cycle))
        place = np.stack([self.cycle, self.depth], 1)[ranked]
        alike = np.r_[False, (place[1:] == place[:-1]).all(1)][: len(place)]
        return found + _pairs(self.u[ranked], alike, "two answers at one place")

    def p(self) -> float:
        """Return the p-value of all tests together; 0 where a token has no business being
        there."""
        if self.outside.any() or self.mismatches:
            return 0.0
        return uniformity.overall(self.tests())

    def json(self, alpha: float) -> dict[str, Any]:
        """Return the layer in certificate.json."""
        tests, outside = sorted(self.tests(), key=lambda t: t.p), int(self.outside.sum())
        if self.mismatches:
            why = f"{self.mismatches} answers hold other tokens than verification chose"
        elif outside:
            why = (
                f"{outside} emitted tokens have probability 0 under the distribution they were "
                "verified against"
            )
        else:
            why = uniformity.objection(tests, alpha)
        return {
            "name": "sampling",
            "passed": not why,
            "why": why,
            "tokens": len(self.u),
            "alpha": alpha,
            "p": uniformity.overall(tests),
            "tests": [asdict(t) for t in tests],
            "drafted_share": float(self.drafted.mean()),
            "cycles_with_a_draft": int(self.draft.sum()),
            "outside_the_law": outside,
        }


def sampling_layer(
    setup: CertifySetup,
    drafter: Drafter,
    stop: Callable[[Sample], bool] = lambda sample: False,
    name: str = "sampling",
) -> Sample:
    """Decode until as many tokens are out as the plan says (the prompts again and again, each time
    with other random numbers), and place every one of them in the distribution it was verified
    against.

    Exactly that many are used, cut in the order of the requests, so that neither a stop token
    nor the budget selects. stop(sample so far) ends early: for controls that are known to fail
    already. name: of what is kept in `setup.memo`.
    """
    memo, wanted = setup.memo, setup.plan.tokens
    rows, progress = memo.lines(name), named(setup.on_progress, name)
    while (done := sum(row["tokens"] for row in rows)) < wanted:
        if rows and stop(gather(rows, wanted)):
            break
        progress(done, wanted)
        rows.append(_chunk(setup, drafter, sum(row["requests"] for row in rows), done))
        memo.add(name, rows[-1])
    progress(wanted, wanted)
    return gather(rows, wanted)


def gather(rows: Sequence[dict[str, Any]], most: int) -> Sample:
    """Return the first `most` tokens of all chunks as one sample."""
    columns: dict[str, np.ndarray] = {}
    for name, width in COLUMNS.items():
        shape = (-1, width) if width > 1 else (-1,)
        found = [np.array(row["columns"][name], dtype=float).reshape(shape) for row in rows]
        columns[name] = np.concatenate(found)[:most]
    return Sample(**columns, mismatches=sum(row["mismatches"] for row in rows))


def _chunk(setup: CertifySetup, drafter: Drafter, number: int, done: int) -> dict[str, Any]:
    """Return the requests from `number` on, behind `done` tokens: what is kept of their tokens."""
    plan, prompts = setup.plan, setup.prompts
    usual = max(1.0, done / number) if number else plan.max_new_tokens  # tokens of an answer
    count = min(CHUNK * plan.batch_size, math.ceil((plan.tokens - done) / usual))
    requests = [
        Request(list(prompts[i % len(prompts)]), plan.max_new_tokens, id=i)
        for i in range(number, number + count)
    ]
    run, lines = recorded(setup.target, drafter, requests, plan)
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for request, g, line in zip(requests, run.generations, lines, strict=True):
        coin = np.random.default_rng([plan.seed, COIN, request.id])
        for name, values in _columns(g, line, plan.sampling, coin).items():
            columns[name] += values
        columns["sequence"] += [request.id] * len(line)
    return {
        "requests": count,
        "tokens": len(columns["sequence"]),
        "mismatches": mismatches(lines, run),
        "columns": columns,
    }


def _columns(
    g: Generation, line: Recorded, sampling: Sampling, coin: np.random.Generator
) -> dict[str, list[Any]]:
    """Return what is kept of the tokens `line`, which begin the generation `g`; placed in
    blocks of transforms.ROWS."""
    depth, cycle = depths(g)[: len(line)], cycles(g)[: len(line)]
    starts = {c.start for c in g.cycles if c.proposed > 0}
    columns: dict[str, list[Any]] = {
        "depth": depth.tolist(),
        "cycle": cycle.tolist(),
        "groups": strata(g, depth, cycle).astype(int).tolist(),
        "drafted": [int(d) for d in g.from_draft[: len(line)]],
        "draft": [int(t in starts) for t in range(len(line))],
        "u": [],
        "outside": [],
    }
    text, start = [*g.prompt_ids, *g.token_ids], len(g.prompt_ids)
    for a in range(0, len(line), transforms.ROWS):
        tokens, kept = zip(*line[a : a + transforms.ROWS], strict=True)
        chosen = torch.tensor(tokens, device=kept[0].device)
        ends = range(start + a, start + a + len(tokens)) if sampling.uses_history else ()
        past = [text[:end] for end in ends]
        p = transforms.places(torch.stack(kept), chosen, sampling, past)
        # a token without mass has no transform: it is counted apart, and its place is drawn
        v = coin.random((len(chosen), len(ORDERS)))
        u = np.stack([p.below, p.below_by_id], 1) + v * p.mass[:, None]
        columns["u"] += np.where(p.outside[:, None], v, u.clip(0, 1)).tolist()
        columns["outside"] += p.outside.astype(int).tolist()
    return columns


def _pairs(u: np.ndarray, joined: np.ndarray, name: str) -> list[Test]:
    """Return whether neighbours are independent in every order; joined: see
    uniformity.independence."""
    every = enumerate(ORDERS)
    return [t for i, o in every for t in uniformity.independence(u[:, i], joined, name, o)]


def strata(g: Generation, depth: np.ndarray, cycle: np.ndarray) -> np.ndarray:
    """[n, G] bool, of the first n tokens of an answer. Where an answer will end is not known
    before its last token, so no stratum asks."""
    proposed = np.array([0, *(c.proposed for c in g.cycles)])
    accepted = np.array([0, *(c.accepted for c in g.cycles)])
    whole, rejected = (proposed > 0) & (accepted == proposed), proposed > accepted
    previous, first = np.maximum(cycle - 1, 0), (depth == 0) & (cycle > 1)
    masks = (
        np.ones(len(depth), dtype=bool),
        np.arange(len(depth)) == 0,
        first & rejected[previous],
        first & whole[previous],
        depth == 1,
        depth == 2,
        depth >= 3,
        (depth > 0) & (depth == proposed[cycle]),
    )
    return np.stack(masks, 1)


def cycles(generation: Generation) -> np.ndarray:
    """Number of every token's cycle; 0: the prefill's, a cycle of its own."""
    starts = np.array([0, *(c.start for c in generation.cycles)])
    return np.searchsorted(starts, np.arange(len(generation.token_ids)), side="right") - 1


def depths(generation: Generation) -> np.ndarray:
    """Place of every token in its cycle."""
    starts = np.array([0, *(c.start for c in generation.cycles)])
    return np.arange(len(generation.token_ids)) - starts[cycles(generation)]
