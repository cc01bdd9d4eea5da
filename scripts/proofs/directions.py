"""Direction tests: does the decoder lean towards tokens of some kind, whatever their place in
the order of probability?

A direction gives every token a score d_t(x) in [-1, 1] that is fixed before token t is drawn:
it may look at the distribution, at ids, at earlier tokens and at a key, not at x_t. If x_t ~
p_t, then

    S = sum_t d_t(x_t) - E_p d_t     with     sum_t Var_p d_t     and     sum_t of the third
                                     cumulants

is a martingale with known conditional variance: S over its root is normal in the limit,
whatever the distributions, and a gamma distribution with the same three cumulants says its
tail (`tail`). Directions are kept on how a distribution is read, not on what is read: ids,
ranks, tails, other distributions at hand.

Learned directions score a token by what earlier tokens of the run told: what occurred more
often than its distributions said gets a positive score. They find any bias that is fixed in
the ids or in the ranks, at the price of learning it, and are judged by betting: the product
of 1 + c (d_t(x_t) - E_p d_t) is a martingale that starts at 1 and stays positive, so it ever
reaches 1 / a with probability a at most (Ville 1939): exact for every n, without any limit
theorem.

Shape letters: R tokens, V vocabulary, K directions, F ranks looked at, G strata, C stakes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.scripts.proofs.pit import FEW
from outrider.scripts.proofs.uniformity import Test

TAILS = (0.1, 0.02, 0.005)  # tokens below these probabilities form a tail
TAIL = 0.02  # the tail whose ids are looked at
LEARNED_TAILS = (0.1, 0.02)
# where a tail may start from which ranks are counted: parity needs them close
STARTS = np.geomspace(0.3, 0.003, 512)
HASHES, TAIL_HASHES, TAIL_BITS = 16, 8, 2
FIRST = "first of a cycle"  # how the strata of such tokens begin
RECENT = 8  # tokens of the same answer that a stale row could repeat
ENOUGH = 50.0  # variance from which on the limit distribution is trusted
# a direction that counts tokens is 0 or 1: half a token less makes the gamma distribution's
# tails too large from this variance on (tests/scripts/test_directions.py)
ENOUGH_COUNTED = 10.0
COUNTED = (
    "tokens of the same answer",
    "last tokens of the other rows",
    "the likeliest token",
    "stop tokens",
)
STAKES = (1.0, 0.5, 0.25, 0.125, 0.0625)
# a learned score is (observed - expected) / (expected + SHRINK), cut at REACH; pairs are rarer
SHRINK, PAIR_SHRINK, REACH = 40.0, 4.0, 0.45


@dataclass
class TokenBlock:
    """What is known before each of R consecutive tokens. distribution [R, V] float32;
    before: the distribution of the step before in the same answer, others: the mean
    distribution of the rows decoded at the same time, both [R, V] and 0 where there is none;
    recent [R, *] the last tokens of the same answer, theirs [R, *] the last ones of the
    other rows, -1 padded."""

    distribution: Tensor
    before: Tensor
    others: Tensor
    recent: Tensor
    theirs: Tensor

    @classmethod
    def of(
        cls,
        distribution: Tensor,
        last: Tensor | None,
        others: Tensor,
        text: tuple[list[int], int],
        theirs: list[list[int]],
    ) -> TokenBlock:
        """last: [1, V] distribution of the step before the first token, None for none. text:
        ids of the answer, and where its first token stands. theirs: R id lists."""
        (ids, at), device = text, distribution.device
        recent = [([-1] * RECENT + ids[: at + i])[-RECENT:] for i in range(len(distribution))]
        most = max(map(len, theirs))
        padded = [row + [-1] * (most - len(row)) for row in theirs]
        last = torch.zeros_like(distribution[:1]) if last is None else last
        return cls(
            distribution,
            torch.cat([last, distribution[:-1]]),
            others,
            torch.tensor(recent, device=device),
            torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(distribution), most),
        )


class Bank:
    """The directions over one vocabulary. key: any int that no decoder knew. stops: ids of the
    tokens that end an answer, where it may end before its limit."""

    def __init__(
        self,
        vocab_size: int,
        key: int,
        device: torch.device | str = "cpu",
        stops: Sequence[int] = (),
    ) -> None:
        self.stops = torch.tensor([sorted({*stops})], dtype=torch.int64, device=device)
        ids = torch.arange(vocab_size)
        bits = max(1, (vocab_size - 1).bit_length())
        by_id = torch.stack([_signs(ids >> b) for b in range(bits)], 1)
        by_hash = keyed_signs(vocab_size, key, HASHES)
        self.ids = torch.cat([by_id, by_hash], 1).to(device)
        self.tail_ids = torch.cat([by_hash[:, :TAIL_HASHES], by_id[:, :TAIL_BITS]], 1).to(device)
        self.few = min(vocab_size, FEW)
        rank = torch.arange(self.few)
        self.ranks = torch.stack([_signs(rank >> b) for b in range(min(4, bits))], 1).to(device)
        self.names = [
            *(f"id bit {b}" for b in range(bits)),
            *(f"keyed id bit {h}" for h in range(HASHES)),
            *(f"tail, keyed id bit {h}" for h in range(TAIL_HASHES)),
            *(f"tail, id bit {b}" for b in range(min(TAIL_BITS, bits))),
            *(f"rank bit {b}" for b in range(self.ranks.shape[1])),
            *(f"tail below {t:g}, rank parity" for t in TAILS),
            "log-probability",
            "distribution of the step before",
            "distributions of the other rows",
            *COUNTED[:3],
            *(COUNTED[3:] if stops else ()),
        ]

    def open(self, block: TokenBlock) -> DirectionScores:
        """The scores of every token of the vocabulary at each of the block's places."""
        return DirectionScores(self, block)


class DirectionScores:
    """d_t of one block, each read in the cheapest way: [R, K] float32."""

    def __init__(self, bank: Bank, block: TokenBlock) -> None:
        p = block.distribution
        self.bank, self.distribution = bank, p
        self.tail = p < TAIL
        self.mass, self.order = p.topk(bank.few, -1)  # [R, F]
        self.below = torch.stack([self.mass < t for t in TAILS])  # [T, R, F]
        starts = torch.tensor(-STARTS, dtype=p.dtype, device=p.device)
        starts = starts.expand(len(p), -1).contiguous()
        # [R, S] ranks before each tail
        self.start = torch.searchsorted(-self.mass, starts, right=True)
        self.turn = (1 - 2 * (self.start & 1)).float()
        log = p.clamp(min=1e-30).log()
        distributions = [contrast(block.before, p), contrast(block.others, p)]
        self.dense = [(log / 8 + 1).clamp(-1, 1), *distributions]
        self.sets = [_once(block.recent), _once(block.theirs), self.order[:, :1]]
        if bank.stops.numel():
            self.sets.append(bank.stops.expand(len(p), -1))
        self.previous: list[int] = block.recent[:, -1].tolist()

    def ranks_of(self, tokens: Tensor) -> Tensor:
        """[R] ranks of `tokens`, F where a token is not among the first F."""
        hit = self.order == tokens[:, None]
        return torch.where(hit.any(1), hit.to(torch.uint8).argmax(1), self.order.shape[1])

    def mean(self, distribution: Tensor) -> Tensor:
        """E d under `distribution` [R, V]."""
        return self.moments(distribution)[0]

    def moments(self, distribution: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E d, E d^2 and E d^3 under `distribution` [R, V]."""
        tail, head = distribution * self.tail, distribution.gather(1, self.order)
        tails = head * self.below  # [T, R, F]
        parity = tails @ self.bank.ranks[:, 0]  # [T, R]
        known = [distribution.gather(1, ids.clamp(min=0)) * (ids >= 0) for ids in self.sets]
        shares = [mass.sum(-1, keepdim=True) for mass in known]
        first = [distribution @ self.bank.ids, tail @ self.bank.tail_ids, head @ self.bank.ranks]
        pairs = zip((distribution, tail, head), first, strict=True)
        sizes = [mass.sum(-1, keepdim=True).expand_as(f) for mass, f in pairs]
        first.append(parity.T)
        sizes.append(tails.sum(-1).T)
        third = list(first)
        for d in self.dense:
            weighted = distribution * d
            first.append(weighted.sum(-1, keepdim=True))
            sizes.append((weighted := weighted * d).sum(-1, keepdim=True))
            third.append((weighted * d).sum(-1, keepdim=True))
        one, two, three = (torch.cat([*each, *shares], 1) for each in (first, sizes, third))
        return one, two, three

    def at(self, tokens: Tensor) -> Tensor:
        """d of `tokens` [R]."""
        one, bank = tokens[:, None], self.bank
        rank = self.ranks_of(tokens)
        seen, rank = (rank < bank.few)[:, None], rank.clamp(max=bank.few - 1)
        ranks = bank.ranks[rank] * seen
        below = self.below.gather(2, rank[None, :, None].expand(len(TAILS), -1, 1))[:, :, 0]
        inside = below.T * ranks[:, :1]
        parts = [bank.ids[tokens], bank.tail_ids[tokens] * self.tail.gather(1, one), ranks, inside]
        parts += [d.gather(1, one) for d in self.dense]
        parts += [(ids == one).any(1, keepdim=True).float() for ids in self.sets]
        return torch.cat(parts, 1)

    def parities(self, distribution: Tensor) -> tuple[Tensor, Tensor]:
        """E d and E d^2 [R, S] under `distribution` of 1, -1, 1, -1 ... from each tail's
        start on."""
        head = distribution.gather(1, self.order)
        found = []
        for weighted in (head * self.bank.ranks[:, 0], head):
            after = weighted.flip(1).cumsum(1).flip(1)
            found.append(torch.nn.functional.pad(after, (0, 1)).gather(1, self.start))
        return found[0] * self.turn, found[1]

    def parities_at(self, tokens: Tensor) -> Tensor:
        """[R, S] of `tokens`."""
        rank = self.ranks_of(tokens)[:, None]
        sign = self.bank.ranks[rank.clamp(max=self.bank.few - 1), 0]
        return sign * self.turn * ((rank >= self.start) & (rank < self.bank.few))


@dataclass
class Learner:
    """One learned direction over some kind of bins (token ids, ranks). over, expected: [bins]
    observed minus expected and expected counts so far; wealth: [C] logarithms of what each
    stake has become."""

    over: Tensor
    expected: Tensor
    wealth: np.ndarray = field(default_factory=lambda: np.zeros(len(STAKES)))

    def score(self) -> Tensor:
        """d of every bin: how much more often than expected, drawn towards 0 at first."""
        return (self.over / (self.expected + SHRINK)).clamp(-REACH, REACH)

    def bet(self, mean: Tensor, own: Tensor) -> None:
        """mean, own: [R] score expected by the distribution, and of the token that came."""
        gain = (own - mean).double().cpu().numpy()
        self.wealth += np.array([np.log1p(stake * gain).sum() for stake in STAKES])

    def learn(self, seen: Tensor, expected: Tensor) -> None:
        """seen, expected: [bins] counts of a block, after it was bet on."""
        self.over += seen - expected
        self.expected += expected

    def test(self, name: str, n: int) -> Test:
        """The stakes played side by side, each with its share."""
        return _bet(name, self.wealth, n)


def _bet(name: str, wealth: np.ndarray, n: int, stratum: str = "all tokens") -> Test:
    top = float(wealth.max())
    total = top + math.log(np.exp(wealth - top).mean())
    return Test(f"learned direction, {name}", stratum, n, total, math.exp(-max(total, 0.0)))


@dataclass
class _Follower:
    """What followed one token so far. place: by which tokens it was followed, each with its
    row in ids [m] and in counts [2, m], m places of which the first len(place) are used:
    observed minus expected, and expected."""

    place: dict[int, int] = field(default_factory=dict)
    ids: np.ndarray = field(default_factory=lambda: np.zeros(4, dtype=np.int64))
    counts: np.ndarray = field(default_factory=lambda: np.zeros((2, 4)))

    def came(self, token: int, mass: float) -> None:
        """One more visit; mass: probability of the token."""
        at = self.place.get(token)
        if at is None:
            at = self.place[token] = len(self.place)
            if at == len(self.ids):
                self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)], 1)
            self.ids[at], self.counts[:, at] = token, (-mass, mass)
        self.counts[0, at] += 1


class PairLearner:
    """A learned direction over pairs (token before, token): it finds a key that the token
    before sets anew, as a watermark's does, at the price of learning every pair.

    A pair is known from its first occurrence on; unknown pairs score 0. What was expected of a
    pair before then is not counted: a token comes where it is likelier than elsewhere, so its
    probability there times the visits so far is far too much, and finds half as much.
    wealth: [C] logarithms; visits: places seen."""

    def __init__(self) -> None:
        self.known: dict[int, _Follower] = {}
        self.wealth = np.zeros(len(STAKES))
        self.visits = 0

    def add(self, distribution: Tensor, previous: Sequence[int], tokens: Tensor) -> None:
        """distribution: [R, V]. previous: R ids, -1 for none. tokens: [R] what came. A block
        is bet on before it is learned."""
        own, came = distribution.gather(1, tokens[:, None])[:, 0].tolist(), tokens.tolist()
        self.visits += len(came)
        rows = [(r, self.known[t]) for r, t in enumerate(previous) if t in self.known]
        if rows:
            sizes = [len(row.place) for _, row in rows]
            ids = np.concatenate([row.ids[:m] for (_, row), m in zip(rows, sizes, strict=True)])
            place = np.repeat([r for r, _ in rows], sizes)
            at = torch.from_numpy(np.stack([place, ids])).to(distribution.device)
            masses = distribution[at[0], at[1]].double().cpu().numpy()
            parts = np.split(masses, np.cumsum(sizes)[:-1])
            gains = [
                self._gain(row, mass, came[r]) for (r, row), mass in zip(rows, parts, strict=True)
            ]
            self.wealth += np.log1p(np.outer(STAKES, gains)).sum(1)
            for (_, row), mass in zip(rows, parts, strict=True):
                row.counts[:, : len(mass)] += (-mass, mass)
        for before, token, mass in zip(previous, came, own, strict=True):
            if before >= 0:
                self.known.setdefault(before, _Follower()).came(token, mass)

    @staticmethod
    def _gain(row: _Follower, mass: np.ndarray, token: int) -> float:
        over, expected = row.counts[:, : len(mass)]
        score = np.clip(over / (expected + PAIR_SHRINK), -REACH, REACH)
        at = row.place.get(token)
        return (0.0 if at is None else float(score[at])) - float(mass @ score)

    def test(self, stratum: str = "all tokens") -> Test:
        return _bet("pairs of tokens", self.wealth, self.visits, stratum)

    def state(self) -> dict[str, np.ndarray]:
        """Flat arrays: token and number of pairs of every row; id and counts of every pair."""
        heads = [(token, len(row.place)) for token, row in self.known.items()]
        ids = [row.ids[: len(row.place)] for row in self.known.values()]
        counts = [row.counts[:, : len(row.place)] for row in self.known.values()]
        return {
            "pair visits": np.array(self.visits),
            "pair wealth": self.wealth,
            "pair rows": np.array(heads, dtype=np.int64).reshape(-1, 2),
            "pair ids": np.concatenate([np.zeros(0, dtype=np.int64), *ids]),
            "pair counts": np.concatenate([np.zeros((2, 0)), *counts], 1),
        }

    def restore(self, known: dict[str, np.ndarray]) -> None:
        """Go on where `state` was asked."""
        self.visits = int(known["pair visits"])
        self.wealth, at = known["pair wealth"].copy(), 0
        for token, many in known["pair rows"].tolist():
            some = slice(at, at + many)
            ids, counts = known["pair ids"][some].copy(), known["pair counts"][:, some].copy()
            place = {x: i for i, x in enumerate(ids.tolist())}
            self.known[token] = _Follower(place, ids, counts)
            at += many


class DirectionSums:
    """What is summed of K named directions in G strata: [3, G, K] S, its variance, its third
    cumulant; count: [G] tokens."""

    def __init__(self, names: Sequence[str], groups: tuple[str, ...]) -> None:
        self.names, self.groups = names, groups
        self.sums = np.zeros((3, len(groups), len(names)))
        self.count = np.zeros(len(groups), dtype=np.int64)

    def note(self, own: Tensor, moments: Sequence[Tensor], groups: np.ndarray) -> None:
        """own: [R, K] d of what came. moments: [R, K] each. groups: [R, G] bool, which strata
        each place belongs to."""
        member = torch.from_numpy(groups.T.astype(np.float64)).to(own.device)
        found = [member @ f for f in _cumulants(own, *moments)]
        self.sums += torch.stack(found).cpu().numpy()
        self.count += groups.sum(0)

    def tests(self) -> list[Test]:
        """Every direction in every stratum that has variance enough."""
        found = []
        for g, group in enumerate(self.groups):
            for k, name in enumerate(self.names):
                s, variance, third = self.sums[:, g, k]
                counted = name in COUNTED
                if variance >= (ENOUGH_COUNTED if counted else ENOUGH):
                    nearer = math.copysign(max(abs(s) - 0.5, 0.0), s) if counted else s
                    z, p = float(s / math.sqrt(variance)), tail(nearer, variance, third)
                    found.append(Test(name, group, int(self.count[g]), z, p))
        return found


def _cumulants(own: Tensor, m1: Tensor, m2: Tensor, m3: Tensor) -> list[Tensor]:
    """What came minus what was expected, the variance and the third cumulant."""
    return [own.double() - m1, m2 - m1**2, m3 - 3 * m1 * m2 + 2 * m1**3]


class Tally(DirectionSums):
    """All direction tests of a run. groups: names of the G strata, all tokens first; those that
    begin with FIRST are the first tokens of cycles, whose pairs are learned apart as well: a
    key that is at work there alone drowns among the pairs of all places."""

    def __init__(self, bank: Bank, groups: tuple[str, ...]) -> None:
        super().__init__(bank.names, groups)
        size, device = bank.ids.shape[0], bank.ids.device
        self.bank = bank
        # sums of p, p^2, p^3 by id
        self.powers = torch.zeros(3, size, dtype=torch.float64, device=device)
        self.parity = np.zeros((3, len(STARTS)))
        bins = {"token ids": size, "ranks": bank.few + 1, "ranks in the tail": bank.few + 1}
        bins |= {f"token ids in the tail below {t:g}": size for t in LEARNED_TAILS}
        zero = lambda n: torch.zeros(n, device=device)
        self.learners = {name: Learner(zero(n), zero(n)) for name, n in bins.items()}
        self.first = [g for g, name in enumerate(groups) if name.startswith(FIRST)]
        self.pairs = [PairLearner() for _ in range(2 if self.first else 1)]

    def add(self, scores: DirectionScores, tokens: Tensor, groups: np.ndarray) -> None:
        """tokens: [R] what came. groups: [R, G] bool, which strata each place belongs to."""
        p = scores.distribution
        self.note(scores.at(tokens), [m.double() for m in scores.moments(p)], groups)
        square = p * p
        self.powers += torch.stack([p.sum(0), square.sum(0), (square * p).sum(0)])
        rank = scores.ranks_of(tokens)
        m1, m2 = (m.double() for m in scores.parities(p))
        found = _cumulants(scores.parities_at(tokens), m1, m2, m1)
        self.parity += torch.stack([f.sum(0) for f in found]).cpu().numpy()
        self._by_id("token ids", p, tokens, 2.0)
        for t in LEARNED_TAILS:
            self._by_id(f"token ids in the tail below {t:g}", p, tokens, t)
        self._by_rank("ranks", scores.mass, rank, torch.zeros_like(rank))
        start = (scores.mass >= TAIL).sum(-1)
        self._by_rank("ranks in the tail", scores.mass, rank, start)
        self.pairs[0].add(p, scores.previous, tokens)
        if self.first and len(some := np.flatnonzero(groups[:, self.first].any(1))):
            previous = [scores.previous[r] for r in some]
            self.pairs[1].add(p[some], previous, tokens[some])

    def _by_id(self, name: str, p: Tensor, tokens: Tensor, limit: float) -> None:
        """Ids of the tokens below `limit` in their distribution; all others score 0."""
        learner = self.learners[name]
        score, inside = learner.score(), p.gather(1, tokens[:, None])[:, 0] < limit
        p = p * (p < limit)
        learner.bet(p @ score, score[tokens] * inside)
        learner.learn(torch.bincount(tokens[inside], minlength=p.shape[1]).to(p.dtype), p.sum(0))

    def _by_rank(self, name: str, mass: Tensor, rank: Tensor, start: Tensor) -> None:
        """Bins count from `start` [R] on; the last one holds all ranks outside."""
        learner, few = self.learners[name], self.bank.few
        place = torch.arange(few, device=mass.device) - start[:, None]
        place = torch.where(place < 0, few, place)
        rest = (1 - mass.sum(-1)).clamp(min=0)
        score = learner.score()
        bins = torch.cat([place, torch.full_like(place[:, :1], few)], 1)
        mass = torch.cat([mass, rest[:, None]], 1)
        own = bins.gather(1, rank[:, None])[:, 0]
        learner.bet((mass * score[bins]).sum(-1), score[own])
        expected = torch.zeros_like(learner.expected).index_add_(0, bins.flatten(), mass.flatten())
        learner.learn(torch.bincount(own, minlength=few + 1).to(mass.dtype), expected)

    @property
    def most(self) -> int:
        """How many tests there are at most."""
        return len(self.names) * len(self.groups) + 2 + len(self.learners) + len(self.pairs)

    def tests(self) -> list[Test]:
        """Every direction and stratum with variance enough, single tokens, learned directions."""
        n = int(self.count[0])
        learned = [learner.test(name, n) for name, learner in self.learners.items()]
        learned += [
            p.test(name) for p, name in zip(self.pairs, ("all tokens", FIRST), strict=False)
        ]
        return [*super().tests(), *self._parity(n), *self._single(n), *learned]

    def _parity(self, n: int) -> list[Test]:
        """Parity of the ranks in a tail, wherever it starts: one test, the smallest p of all."""
        known = [sums for sums in self.parity.T if sums[1] >= ENOUGH]
        if not known:
            return []
        z = float(max(abs(s) / math.sqrt(variance) for s, variance, _ in known))
        p = min(1.0, min(tail(*sums) for sums in known) * len(known))
        return [Test("rank parity from the start of a tail", "all tokens", n, z, p)]

    def _single(self, n: int) -> list[Test]:
        """Tokens that are frequent enough to be counted: one test, the smallest p of all."""
        p1, p2, p3 = self.powers.cpu().numpy()
        over = self.learners["token ids"].over.cpu().numpy()
        variance, third = p1 - p2, p1 - 3 * p2 + 2 * p3
        known = np.flatnonzero(variance >= ENOUGH)
        if not len(known):
            return []
        z = np.abs(over[known]) / np.sqrt(variance[known])
        best = known[np.argsort(-z)[:8]]  # skewness may change the order of near equals
        p = min(tail(float(over[i]), float(variance[i]), float(third[i])) for i in best)
        return [Test("single token ids", "all tokens", n, float(z.max()), min(1.0, p * len(known)))]

    def state(self) -> dict[str, np.ndarray]:
        """Everything that `restore` needs."""
        known = {
            "sums": self.sums,
            "count": self.count,
            "powers": self.powers.cpu().numpy(),
            "parity": self.parity,
        }
        for i, learner in enumerate(self.learners.values()):
            known[f"over {i}"] = learner.over.cpu().numpy()
            known[f"expected {i}"] = learner.expected.cpu().numpy()
            known[f"wealth {i}"] = learner.wealth
        for i, pairs in enumerate(self.pairs):
            known |= {f"{name} {i}": value for name, value in pairs.state().items()}
        return known

    def restore(self, known: dict[str, np.ndarray]) -> None:
        """Go on where `state` was asked."""
        device = self.powers.device
        self.sums, self.count, self.parity = (known[k].copy() for k in ("sums", "count", "parity"))
        self.powers = torch.tensor(known["powers"], device=device)
        for i, learner in enumerate(self.learners.values()):
            learner.over = torch.tensor(known[f"over {i}"], device=device)
            learner.expected = torch.tensor(known[f"expected {i}"], device=device)
            learner.wealth = known[f"wealth {i}"].copy()
        for i, pairs in enumerate(self.pairs):
            pairs.restore({k[:-2]: v for k, v in known.items() if k.endswith(f" {i}")})


def tail(s: float, variance: float, third: float) -> float:
    """Two-sided p-value of a sum of mean 0, from the gamma distribution with these cumulants."""
    z, skew = s / math.sqrt(variance), third / variance**1.5
    if skew < 0:
        z, skew = -z, -skew
    if skew < 1e-3:
        return math.erfc(abs(z) / math.sqrt(2))
    shape = 4 / skew**2
    at = shape + float(z) * math.sqrt(shape)
    if at <= 0:
        return 0.0
    pair = torch.tensor([shape, at], dtype=torch.float64)
    sides = float(torch.special.gammaincc(*pair)), float(torch.special.gammainc(*pair))
    return min(1.0, 2 * min(sides))


def keyed_signs(size: int, key: int, count: int) -> Tensor:
    """[size, count] of 1 and -1: pseudo-random bits of every id, other ones under another key."""
    bits = hashed(size, key)[:, None] >> np.arange(count, dtype=np.uint64)
    return torch.from_numpy(1 - 2 * (bits & np.uint64(1)).astype(np.float32))


def hashed(size: int, key: int) -> np.ndarray:
    """[size] uint64: SplitMix64 of every id under `key`."""
    with np.errstate(over="ignore"):
        x = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(key & (2**64 - 1))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _signs(bits: Tensor) -> Tensor:
    return (1 - 2 * (bits & 1)).float()


def contrast(other: Tensor, distribution: Tensor) -> Tensor:
    """(other - distribution) / (other + distribution); 0 everywhere where there is no other
    distribution."""
    some = other.sum(-1, keepdim=True) > 0
    return torch.where(some, (other - distribution) / (other + distribution + 1e-30), 0.0)


def _once(ids: Tensor) -> Tensor:
    """`ids` [R, m] with repeated ones turned into -1."""
    if ids.shape[1] == 0:
        return ids.new_full((ids.shape[0], 1), -1)
    ordered = ids.sort(-1).values
    again = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return torch.where(again, -1, ordered)
