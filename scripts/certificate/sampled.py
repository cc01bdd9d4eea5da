"""The sample that a certificate judges: every emitted token, placed in the distribution it
was verified against, and that distribution beside plain decoding's.

Two questions are asked of each token, so that rounding enters one of them only. Is it a draw
from the distribution of the logits that verification had (recorder.py, pit.py)? How far do
these logits lie from a plain pass's (passes.py)?

Shape letters: R tokens, V vocabulary, O orders, G strata, n sample size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decode.drafters import Drafter
from outrider.decode.engine import DecodedRun, Generation, Request, Rule, generate
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.verify import Coins, Verdict
from outrider.scripts.certificate import passes, pit, uniformity
from outrider.scripts.certificate.recorder import Emitted, Recorder, astray
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress, silent
from outrider.scripts.scoring.plain import Plain

ROWS = 128  # distributions at once
ORDERS = ("by probability", "by id", "by a shuffle of the ids")
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
# Of every order and stratum, of neighbours in every order, and of the edges of truncations.
MOST_TESTS = 2 * (len(ORDERS) + len(GROUPS) - 1) + 3 * 2 * len(ORDERS) + 1
SHUFFLE = 20240601  # the seed of the shuffle is the run's own beside this
# tokens of an answer, by name; all of them numbers
COLUMNS = ("u", "cycle", "depth", "groups", "outside", "edge", "edge_mass", "drafted", "draft")


@dataclass
class Sample:
    """n emitted tokens in the order of their requests.

    u: [n, O] transforms, one column per order; cycle: number of its cycle in its answer (0 = the
    prefill's); depth: place in its cycle (0 = first token of a cycle, or the prefill's); sequence:
    which request; groups: [n, G] bool; outside: tokens without mass; edge: tokens at a truncation's
    edge within float32's tolerance, edge mass: how many the distributions expect there;
    passes: [n, 2] of passes.distances; drafted: share that were accepted draft tokens;
    proposals: cycles that had a draft to verify; astray: answers that hold something else
    than verification chose; texts: (ids, where the answer begins) of the first ones.
    """

    u: np.ndarray
    cycle: np.ndarray
    depth: np.ndarray
    sequence: np.ndarray
    groups: np.ndarray
    outside: int
    edge: int
    edge_mass: float
    passes: np.ndarray
    drafted: float
    proposals: int
    astray: int
    texts: list[tuple[list[int], int]]

    def tests(self) -> list[uniformity.Test]:
        """Every test of the sample.

        The strata are known before the token: that a cycle got as far as place d says nothing
        about the token there, given those before it (docs/lossless.md). Whether the token
        itself was an accepted draft token would."""
        found: list[uniformity.Test] = []
        for i, order in enumerate(ORDERS):
            found += uniformity.uniformity(self.u[:, i], GROUPS[0], order)
        for g, name in enumerate(GROUPS[1:], 1):
            some = self.u[self.groups[:, g], 0]
            found += uniformity.uniformity(some, name) if len(some) >= uniformity.SMALLEST else []
        same = np.r_[False, self.sequence[1:] == self.sequence[:-1]][: len(self.u)]
        found += pairs(self.u, same & (self.depth > 0), "two tokens inside a cycle")
        found += pairs(self.u, same & (self.depth == 0), "two tokens between cycles")
        found += self._rows()
        return found + uniformity.edge_test(self.edge, self.edge_mass, len(self.u))

    def _rows(self) -> list[uniformity.Test]:
        """Neighbouring requests at the same place of the same cycle, where two that share
        their random numbers would draw by the same ones."""
        ranked = np.lexsort((self.sequence, self.depth, self.cycle))
        place = np.stack([self.cycle, self.depth], 1)[ranked]
        same = np.r_[False, (place[1:] == place[:-1]).all(1)][: len(place)]
        return pairs(self.u[ranked], same, "two answers at one place")


@dataclass(frozen=True)
class Setting:
    """What one sample is drawn under. chunk: batches between two saves."""

    sampling: Sampling
    tokens: int
    max_new_tokens: int
    batch_size: int
    seed: int = 0
    verify: str | Rule = "traversal"
    guidance: float | None = None
    chunk: int = 2


def sampling_layer(
    plain: Plain,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    how: Setting,
    stop: Callable[[Sample], bool] | None = None,
    on_progress: OnProgress = silent,
    memo: Memo | None = None,
) -> Sample:
    """Decode until `how.tokens` tokens are out (the prompts again and again, each time with
    other random numbers), place every one of them in the distribution it was verified against,
    and compare that distribution with a plain pass's.

    Exactly that many are used, cut in the order of the requests, so that neither a stop token
    nor the budget selects. stop(sample so far) ends early: for controls that are known to fail
    already. memo: keeps what is done.
    """
    memo = memo or Memo(None)
    rows = _known(memo, how.tokens)
    judge = _Judge(target, how)
    while sum(row["size"] for row in rows) < how.tokens:
        if stop is not None and rows and stop(gather(rows)):
            break
        done = sum(row["size"] for row in rows)
        # Within a chunk, more than will be kept may be drawn: the last token is said when it is.
        drawn = lambda count, done=done: on_progress(min(done + count, how.tokens - 1), how.tokens)
        drawn(0)
        rows.append(_chunk(plain, judge, drafter, prompts, rows, drawn))
        memo.add("sampling", rows[-1])
    on_progress(sum(row["size"] for row in rows), how.tokens)
    return gather(rows)


def _known(memo: Memo, tokens: int) -> list[dict[str, Any]]:
    """The chunks done so far, without one that an earlier run cut short."""
    rows = list({row["number"]: row for row in memo.lines("sampling")}.values())
    short = sum(row["size"] for row in rows) < tokens
    return rows[:-1] if rows and short and not rows[-1]["whole"] else rows


def _chunk(
    plain: Plain,
    judge: _Judge,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[dict[str, Any]],
    drawn: Callable[[int], None],
) -> dict[str, Any]:
    """The next requests: what is kept of their tokens, as many as are still wanted. drawn: told
    how many were decoded so far."""
    how, number = judge.how, sum(row["requests"] for row in rows)
    done = sum(row["size"] for row in rows)
    wanted = how.tokens - done
    usual = max(1.0, done / number) if number else how.max_new_tokens  # tokens of an answer
    count = min(how.chunk * how.batch_size, math.ceil(wanted / usual))
    requested = [
        Request(list(prompts[(number + i) % len(prompts)]), how.max_new_tokens, id=number + i)
        for i in range(count)
    ]
    run, lines = _recorded(judge.target, drafter, requested, how, drawn)
    texts = [([*g.prompt_ids, *g.token_ids], len(g.prompt_ids)) for g in run.generations]
    lengths = np.array([len(line) for line in lines])
    counts = np.clip(wanted - np.r_[0, lengths.cumsum()[:-1]], 0, lengths)
    used = [i for i, count in enumerate(counts) if count]
    near: dict[int, np.ndarray] = {}
    for i, logits in plain.in_batches([texts[i] for i in used], how.guidance):
        ids, start = texts[used[i]]
        past = [ids[:j] for j in range(start, len(ids))] if how.sampling.uses_history else []
        near[used[i]] = passes.distances(_logits(lines[used[i]]), logits, how.sampling, past)
    columns: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, "sequence", "passes")}
    coin = np.random.default_rng([how.seed, SHUFFLE, number])
    for i in used:
        found = judge.answer(run.generations[i], lines[i][: counts[i]], coin)
        found["sequence"] = [number + i] * int(counts[i])
        found["passes"] = near[i][: counts[i]].tolist()
        for name, values in columns.items():
            values += found[name]
    size = int(counts.sum())
    first = [[texts[i][0][: texts[i][1] + int(counts[i])], texts[i][1]] for i in used]
    return {
        "number": number,
        "requests": len(requested),
        "size": size,
        "whole": size == int(lengths.sum()),
        "astray": astray(lines, run),
        "texts": [] if number else first,
        **columns,
    }


def _recorded(
    target: Target,
    drafter: Drafter,
    requested: list[Request],
    how: Setting,
    drawn: Callable[[int], None],
) -> tuple[DecodedRun, list[list[Emitted]]]:
    """A run, and where each of its tokens came from."""
    seen, count = Recorder(how.verify, requested), 0

    def verify(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        nonlocal count
        verdict = seen(tree, distribution, rng)
        count += sum(len(line) for line in seen.calls[-1].tokens)
        drawn(count)
        return verdict

    run = generate(
        target,
        drafter,
        requested,
        how.sampling,
        batch_size=how.batch_size,
        seed=how.seed,
        verify=verify,
        guidance=how.guidance,
        coins=seen.coins,
    )
    return run, seen.emitted(run, requested)


def _logits(line: Sequence[Emitted]) -> Tensor:
    return torch.stack([e.call.kept[e.index] for e in line])


def pairs(u: np.ndarray, joined: np.ndarray, name: str) -> list[uniformity.Test]:
    """Whether neighbours are independent in every order; joined: see uniformity.independence."""
    found: list[uniformity.Test] = []
    for i, order in enumerate(ORDERS):
        found += uniformity.independence(u[:, i], joined, name, order)
    return found


class _Judge:
    """Places the tokens of answers, in blocks of ROWS."""

    def __init__(self, target: Target, how: Setting) -> None:
        self.target, self.how = target, how
        generator = torch.Generator().manual_seed(how.seed ^ SHUFFLE)
        self.shuffle = torch.randperm(target.vocab_size, generator=generator).to(target.device)

    def answer(
        self, g: Generation, line: Sequence[Emitted], coin: np.random.Generator
    ) -> dict[str, list[Any]]:
        """The columns of the tokens `line`, which begin the generation `g`. coin: places a token
        within its own mass."""
        ids, start = [*g.prompt_ids, *g.token_ids], len(g.prompt_ids)
        tokens = [e.token for e in line]
        depth, cycle = depths(g)[: len(line)], cycles(g)[: len(line)]
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for a in range(0, len(line), ROWS):
            some = slice(a, min(a + ROWS, len(line)))
            past = range(some.start, some.stop) if self.how.sampling.uses_history else ()
            logits = _logits(line[some])
            chosen = torch.tensor(tokens[some], device=logits.device)
            histories = [ids[: start + i] for i in past]
            p = pit.places(logits, chosen, self.how.sampling, histories)
            columns["u"] += self._transforms(p, chosen, coin).tolist()
            for name in ("outside", "edge", "edge_mass"):
                columns[name] += getattr(p, name).astype(float).tolist()
        starts = {c.start for c in g.cycles if c.proposed > 0}
        columns["depth"], columns["cycle"] = depth.tolist(), cycle.tolist()
        columns["groups"] = (strata(g, depth, cycle) @ (1 << np.arange(len(GROUPS)))).tolist()
        columns["drafted"] = [int(d) for d in g.from_draft[: len(line)]]
        # a cycle with a draft begins here
        columns["draft"] = [int(t in starts) for t in range(len(line))]
        return columns

    def _transforms(
        self, p: pit.TokenPlaces, chosen: Tensor, coin: np.random.Generator
    ) -> np.ndarray:
        """[R, O]. A token without mass has none: it is counted apart, and its place is drawn."""
        one, mass = chosen[:, None], p.distribution
        below = [
            torch.from_numpy(p.below),
            (mass.cumsum(-1) - mass).gather(1, one)[:, 0],
            (mass * (self.shuffle < self.shuffle[one])).sum(-1),
        ]
        v = coin.random((len(chosen), len(ORDERS)))
        found = np.stack([b.cpu().numpy() for b in below], 1) + v * p.mass[:, None]
        return np.where(p.outside[:, None], v, found.clip(0, 1))


def strata(g: Generation, depth: np.ndarray, cycle: np.ndarray) -> np.ndarray:
    """[n, G] bool, of the first n tokens of an answer. Where an answer will end is not known
    before its last token, so no stratum asks."""
    proposed = np.array([0, *(c.proposed for c in g.cycles)])
    accepted = np.array([0, *(c.accepted for c in g.cycles)])
    whole, rejected = (proposed > 0) & (accepted == proposed), proposed > accepted
    previous, first = np.maximum(cycle - 1, 0), (depth == 0) & (cycle > 1)
    return np.stack(
        [
            np.ones(len(depth), dtype=bool),
            np.arange(len(depth)) == 0,
            first & rejected[previous],
            first & whole[previous],
            depth == 1,
            depth == 2,
            depth >= 3,
            (depth > 0) & (depth == proposed[cycle]),
        ],
        1,
    )


def cycles(generation: Generation) -> np.ndarray:
    """Number of every token's cycle; 0: the prefill's, a cycle of its own."""
    starts = np.array([0, *(c.start for c in generation.cycles)])
    return np.searchsorted(starts, np.arange(len(generation.token_ids)), side="right") - 1


def depths(generation: Generation) -> np.ndarray:
    """Place of every token in its cycle."""
    starts = np.array([0, *(c.start for c in generation.cycles)])
    return np.arange(len(generation.token_ids)) - starts[cycles(generation)]


def gather(rows: Sequence[dict[str, Any]]) -> Sample:
    """All chunks as one sample."""

    def column(name: str, *width: int) -> np.ndarray:
        found = [np.array(row[name], dtype=float).reshape(-1, *width) for row in rows]
        return np.concatenate([np.zeros((0, *width)), *found])

    u = column("u", len(ORDERS))
    outside, edge, proposals = (int(column(name).sum()) for name in ("outside", "edge", "draft"))
    groups = (column("groups").astype(np.int64)[:, None] >> np.arange(len(GROUPS))) & 1
    return Sample(
        u,
        column("cycle"),
        column("depth"),
        column("sequence"),
        groups.astype(bool),
        outside,
        edge,
        float(column("edge_mass").sum()),
        column("passes", 2),
        float(column("drafted").sum()) / max(len(u), 1),
        proposals,
        sum(row["astray"] for row in rows),
        [(list(ids), start) for row in rows for ids, start in row["texts"]],
    )
