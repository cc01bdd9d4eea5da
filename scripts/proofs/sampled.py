"""The sample that a certificate judges: every emitted token, placed in the distribution it
was verified against, and that distribution beside plain decoding's.

Two questions are asked of each token, so that rounding enters one of them only. Is it a draw
from the distribution of the logits that verification had (recorder.py, pit.py,
directions.py)? How far do these logits lie from a plain pass's (passes.py)?

Shape letters: R tokens, V vocabulary, O orders, G strata, n sample size.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
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
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress, silent
from outrider.scripts.proofs import directions, passes, pit, uniformity
from outrider.scripts.proofs.greedy import Plain
from outrider.scripts.proofs.recorder import Emitted, Recorder, astray
from outrider.scripts.proofs.repeats import Repeats

ROWS = 128  # distributions at once
KEYED = 4  # pseudo-random orders of the ids
PAIRED = 3  # orders in which two tokens are looked at
ORDERS = ("by probability", "by id", *(f"by key {k}" for k in range(KEYED)))
GROUPS = (
    "all tokens",
    "first of an answer",
    "first of a cycle, after a rejection",
    "first of a cycle, after a whole draft",
    "place 1",
    "place 2",
    "place 3 and on",
    "bonus of a whole draft",
    "first of a cycle, after two rejections",
    "first of a cycle, without a draft",
    "cycle after a row joined or left",
    "second half of the answer",
    "last before the limit",
    "flat distributions",
)
FLAT = 0.5  # a distribution is flat when its largest mass is below
COLUMNS = (
    "u",
    "mass",
    "cycle",
    "depth",
    "sequence",
    "prompt",
    "groups",
    "outside",
    "edge",
    "edge_mass",
    "passes",
    "drafted",
    "draft",
    "tokens",
)


@dataclass
class Sample:
    """n emitted tokens in the order of their requests.

    u: [n, O] transforms, one column per order; cycle: number of its cycle in its answer (0 = the
    prefill's); depth: place in its cycle (0 = first token of a cycle, or the prefill's); sequence:
    which request; groups: [n, G] bool; outside: tokens without mass; edge: tokens at a truncation's
    edge within float32's tolerance, edge mass: how many the distributions expect there;
    passes: [n, 2] of passes.distances; drafted: share that were accepted draft tokens;
    proposals: cycles that had a draft to verify; astray: answers that hold something else
    than verification chose; tally: the direction tests; repeats: answers beside earlier ones
    to their prompt.
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
    tally: directions.Tally | None
    repeats: Repeats

    def strata(self) -> dict[str, np.ndarray]:
        """The transforms by probability of all tokens and, where both are large enough, of
        first and later tokens of a cycle: for figures."""
        first, u = self.depth == 0, self.u[:, 0]
        cut = {"first of a cycle": u[first], "later in a cycle": u[~first]}
        return {
            "all tokens": u,
            **(cut if min(map(len, cut.values())) >= uniformity.SMALLEST else {}),
        }

    def tests(self) -> list[uniformity.Test]:
        """Every test of the sample.

        The strata are known before the token: that a cycle got as far as place d says nothing
        about the token there, given those before it (docs/lossless.md). Whether the token
        itself was an accepted draft token would."""
        found = marginals(self.u, self.groups, GROUPS)
        same = np.r_[False, self.sequence[1:] == self.sequence[:-1]][: len(self.u)]
        found += pairs(self.u, same & (self.depth > 0), "two tokens inside a cycle")
        found += pairs(self.u, same & (self.depth == 0), "two tokens between cycles")
        found += self._rows()
        found += uniformity.edge_test(self.edge, self.edge_mass, len(self.u)) + self.repeats.tests()
        return found + (self.tally.tests() if self.tally else [])

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
    tally = _tally(rows, target)
    while sum(row["size"] for row in rows) < how.tokens:
        if stop is not None and rows and stop(gather(rows, tally)):
            break
        done = sum(row["size"] for row in rows)
        # Within a chunk, more than will be kept may be drawn: the last token is said when it is.
        drawn = lambda count, done=done: on_progress(min(done + count, how.tokens - 1), how.tokens)
        drawn(0)
        row, tally = _chunk(plain, target, drafter, prompts, how, rows, tally, drawn)
        rows.append(row)
        memo.add("sampling", row)
    on_progress(sum(row["size"] for row in rows), how.tokens)
    return gather(rows, tally)


def _known(memo: Memo, tokens: int) -> list[dict[str, Any]]:
    """The chunks done so far, without one that an earlier run cut short."""
    rows = list({row["number"]: row for row in memo.lines("sampling")}.values())
    short = sum(row["size"] for row in rows) < tokens
    return rows[:-1] if rows and short and not rows[-1]["whole"] else rows


def _tally(rows: Sequence[dict[str, Any]], target: Target) -> directions.Tally | None:
    """The direction tests after the last chunk."""
    if not rows:
        return None
    found = directions.Tally(bank_of(target, rows[0]["key"]), GROUPS)
    tally = io.BytesIO(base64.b64decode(rows[-1]["tally"]))
    with np.load(tally, allow_pickle=False) as known:
        found.restore(dict(known))
    return found


def bank_of(target: Target, key: int) -> directions.Bank:
    """All directions over the target's vocabulary."""
    return directions.Bank(target.vocab_size, key, target.device, target.eos_ids)


def _packed(tally: directions.Tally) -> str:
    file = io.BytesIO()
    np.savez_compressed(file, **tally.state())  # type: ignore[arg-type]
    return base64.b64encode(file.getvalue()).decode()


def hashed_key(answers: Sequence[list[int]]) -> int:
    """The key of all pseudo-random orders and directions: a hash of the first answers, which
    no decoder knew before."""
    text = json.dumps(answers).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8])


def _chunk(
    plain: Plain,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    how: Setting,
    rows: Sequence[dict[str, Any]],
    tally: directions.Tally | None,
    drawn: Callable[[int], None],
) -> tuple[dict[str, Any], directions.Tally]:
    """The next requests: what is kept of their tokens, as many as are still wanted. drawn: told
    how many were decoded so far."""
    number = sum(row["requests"] for row in rows)
    wanted = how.tokens - sum(row["size"] for row in rows)
    requested = [
        Request(list(prompts[(number + i) % len(prompts)]), how.max_new_tokens, id=number + i)
        for i in range(how.chunk * how.batch_size)
    ]
    run, lines = _recorded(target, drafter, requested, how, drawn)
    key = rows[0]["key"] if rows else hashed_key([g.token_ids for g in run.generations])
    tally = tally or directions.Tally(bank_of(target, key), GROUPS)
    judge = _Judge(how, key, tally, np.random.default_rng([how.seed, 20240601, number]))
    texts = [([*g.prompt_ids, *g.token_ids], len(g.prompt_ids)) for g in run.generations]
    lengths = np.array([len(line) for line in lines])
    counts = np.clip(wanted - np.r_[0, lengths.cumsum()[:-1]], 0, lengths)
    used = [i for i, count in enumerate(counts) if count]
    near: dict[int, np.ndarray] = {}
    for i, logits in plain.in_batches([texts[i] for i in used], how.guidance):
        ids, start = texts[used[i]]
        past = [ids[:j] for j in range(start, len(ids))] if how.sampling.uses_history else []
        near[used[i]] = passes.distances(_logits(lines[used[i]]), logits, how.sampling, past)
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for i in used:
        found = judge.answer(run.generations[i], lines[i][: counts[i]])
        found["sequence"] = [number + i] * int(counts[i])
        found["prompt"] = [(number + i) % len(prompts)] * int(counts[i])
        found["passes"] = near[i][: counts[i]].tolist()
        for name in COLUMNS:
            columns[name] += found[name]
    size = int(counts.sum())
    row = {
        "number": number,
        "requests": len(requested),
        "size": size,
        "whole": size == int(lengths.sum()),
        "key": key,
        "astray": astray(lines, run),
        "tally": _packed(tally),
        **columns,
    }
    return row, tally


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


class Orders:
    """The transforms of tokens, a column for each of ORDERS. coin: places a token within its
    own mass."""

    def __init__(
        self, size: int, key: int, coin: np.random.Generator, device: torch.device | str = "cpu"
    ) -> None:
        keyed = [directions.hashed(size, key + 1 + k).argsort().argsort() for k in range(KEYED)]
        self.keyed, self.coin = torch.tensor(np.stack(keyed), device=device), coin

    def transforms(self, p: pit.TokenPlaces, distribution: Tensor, chosen: Tensor) -> np.ndarray:
        """[R, O]. A token without mass has none: it is counted apart, and its place is drawn."""
        one = chosen[:, None]
        below = [
            torch.from_numpy(p.below),
            (distribution.cumsum(-1) - distribution).gather(1, one)[:, 0].cpu(),
        ]
        for order in self.keyed:
            below.append((distribution * (order < order[one])).sum(-1).cpu())
        v = self.coin.random((len(chosen), len(ORDERS)))
        found = np.stack([b.double().numpy() for b in below], 1) + v * p.mass[:, None]
        return np.where(p.outside[:, None], v, found.clip(0, 1))


def marginals(u: np.ndarray, groups: np.ndarray, names: Sequence[str]) -> list[uniformity.Test]:
    """Whether the transforms [n, O] are uniform: of all tokens in every order, and by
    probability in every stratum of [n, G] that is large enough."""
    found: list[uniformity.Test] = []
    for i, order in enumerate(ORDERS):
        found += uniformity.uniformity(u[:, i], names[0], order)
    for g, name in enumerate(names[1:], 1):
        some = u[groups[:, g], 0]
        found += uniformity.uniformity(some, name) if len(some) >= uniformity.SMALLEST else []
    return found


def pairs(u: np.ndarray, joined: np.ndarray, name: str) -> list[uniformity.Test]:
    """Whether neighbours are independent in the first three orders; joined: see pit."""
    found: list[uniformity.Test] = []
    for i, order in enumerate(ORDERS[:PAIRED]):
        found += uniformity.independence(u[:, i], joined, name, order)
    return found


def most_tests(bank: directions.Bank) -> int:
    """How many tests a sample has at most, whatever its size: see Sample.tests."""
    uniform = 2 * (len(ORDERS) + len(GROUPS) - 1)
    joined = 3 * 2 * len(ORDERS[:PAIRED])
    return uniform + joined + 2 + directions.Tally(bank, GROUPS).most


class _Judge:
    """Places the tokens of a chunk, answer by answer, in blocks of ROWS."""

    def __init__(
        self, how: Setting, key: int, tally: directions.Tally, coin: np.random.Generator
    ) -> None:
        self.how, self.tally = how, tally
        ids = tally.bank.ids
        self.orders = Orders(len(ids), key, coin, ids.device)
        self.mean: dict[int, Tensor] = {}

    def answer(self, g: Generation, line: Sequence[Emitted]) -> dict[str, list[Any]]:
        """The columns of the tokens `line`, which begin the generation `g`."""
        ids, start = [*g.prompt_ids, *g.token_ids], len(g.prompt_ids)
        tokens = [e.token for e in line]
        depth, cycle = _depths(g)[: len(line)], _cycles(g)[: len(line)]
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        before: Tensor | None = None
        moved = np.array([e.call.moved for e in line], dtype=bool)
        groups = _groups(g, depth, cycle, moved, self.how.max_new_tokens)
        for a in range(0, len(line), ROWS):
            some = slice(a, min(a + ROWS, len(line)))
            past = range(some.start, some.stop) if self.how.sampling.uses_history else ()
            histories = [ids[: start + i] for i in past]
            logits = _logits(line[some])
            chosen = torch.tensor(tokens[some], device=logits.device)
            p = pit.places(logits, chosen, self.how.sampling, histories)
            groups[some, -1] = p.top < FLAT
            distribution = p.distribution.float()
            others = torch.stack([self._mean(e) for e in line[some]])
            theirs = [[t for r, t in enumerate(e.call.last) if r != e.row] for e in line[some]]
            block = directions.TokenBlock.of(distribution, before, others, (ids, start + a), theirs)
            before = distribution[-1:]
            self.tally.add(self.tally.bank.open(block), chosen, groups[some])
            columns["u"] += self.orders.transforms(p, distribution, chosen).tolist()
            for name in ("mass", "outside", "edge", "edge_mass"):
                columns[name] += getattr(p, name).astype(float).tolist()
        starts = {c.start for c in g.cycles if c.proposed > 0}
        columns["depth"], columns["cycle"] = depth.tolist(), cycle.tolist()
        columns["groups"] = (groups @ (1 << np.arange(len(GROUPS)))).tolist()
        columns["drafted"] = [int(d) for d in g.from_draft[: len(line)]]
        # a cycle with a draft begins here
        columns["draft"] = [int(t in starts) for t in range(len(line))]
        columns["tokens"] = tokens
        return columns

    def _mean(self, e: Emitted) -> Tensor:
        """The mean distribution of the call's rows, near enough for a direction."""
        if id(e.call) not in self.mean:
            logits = e.call.kept[e.call.start].float() / self.how.sampling.temperature
            mean = logits.softmax(-1).mean(0)
            self.mean[id(e.call)] = mean if len(e.call.start) > 1 else torch.zeros_like(mean)
        return self.mean[id(e.call)]


def _groups(
    g: Generation, depth: np.ndarray, cycle: np.ndarray, moved: np.ndarray, limit: int
) -> np.ndarray:
    """[n, G] bool; the last column is left to whoever knows the distributions. moved: [n] of
    Call. limit: most tokens of an answer. Where an answer will end is not known before its
    last token, so no stratum asks: "stop tokens" is a direction."""
    proposed = np.array([0, *(c.proposed for c in g.cycles)])
    accepted = np.array([0, *(c.accepted for c in g.cycles)])
    whole = (proposed > 0) & (accepted == proposed)
    previous = np.maximum(cycle - 1, 0)
    first = (depth == 0) & (cycle > 1)
    rejected = proposed > accepted
    twice = first & rejected[previous] & (cycle > 2) & rejected[np.maximum(cycle - 2, 0)]
    every, place = np.ones(len(depth), dtype=bool), np.arange(len(depth))
    return np.stack(
        [
            every,
            place == 0,
            first & rejected[previous],
            first & whole[previous],
            depth == 1,
            depth == 2,
            depth >= 3,
            (depth > 0) & (depth == proposed[cycle]),
            twice,
            (depth == 0) & (cycle > 0) & (proposed[cycle] == 0),
            moved & (cycle > 0),
            place >= limit // 2,
            place == limit - 1,
            ~every,
        ],
        1,
    )


def _cycles(generation: Generation) -> np.ndarray:
    """Number of every token's cycle; 0: the prefill's, a cycle of its own."""
    starts = np.array([0, *(c.start for c in generation.cycles)])
    return np.searchsorted(starts, np.arange(len(generation.token_ids)), side="right") - 1


def _depths(generation: Generation) -> np.ndarray:
    """Place of every token in its cycle."""
    starts = np.array([0, *(c.start for c in generation.cycles)])
    return np.arange(len(generation.token_ids)) - starts[_cycles(generation)]


def gather(rows: Sequence[dict[str, Any]], tally: directions.Tally | None) -> Sample:
    """All chunks as one sample."""

    def column(name: str, *width: int) -> np.ndarray:
        found = [np.array(row[name], dtype=float).reshape(-1, *width) for row in rows]
        return np.concatenate([np.zeros((0, *width)), *found])

    u = column("u", len(ORDERS))
    outside, edge, proposals = (int(column(name).sum()) for name in ("outside", "edge", "draft"))
    groups = (column("groups").astype(np.int64)[:, None] >> np.arange(len(GROUPS))) & 1
    drafted = float(column("drafted").sum()) / max(len(u), 1)
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
        drafted,
        proposals,
        sum(row["astray"] for row in rows),
        tally,
        _repeats(rows),
    )


def _repeats(rows: Sequence[dict[str, Any]]) -> Repeats:
    """Every answer in the order of the requests, beside those before it."""
    found = Repeats()
    for row in rows:
        message = zip(row["sequence"], row["prompt"], row["tokens"], row["mass"], strict=True)
        for (_, prompt), answer in itertools.groupby(message, lambda line: line[:2]):
            tokens, mass = list(zip(*answer, strict=True))[2:]
            found.add([prompt], tokens, mass)
    return found


def texts_of(
    rows: Sequence[dict[str, Any]], prompts: Sequence[Sequence[int]]
) -> list[tuple[list[int], int]]:
    """(ids, start) of the answers in `rows`, as far as their tokens were used."""
    found: dict[int, list[int]] = {}
    for row in rows:
        for request, token in zip(row["sequence"], row["tokens"], strict=True):
            found.setdefault(request, []).append(token)
    begun = {request: list(prompts[request % len(prompts)]) for request in found}
    return [([*begun[request], *tokens], len(begun[request])) for request, tokens in found.items()]
