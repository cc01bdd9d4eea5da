"""What a run of n tokens would have found: the power of its tests against random biases of
many families, and how many tokens a wanted power takes.

The distributions are those of plain decoding of the same prompts (a server's: of its first
answers), some hundred of them. A bias e moves each distribution to (1 - e) p + e r, so the
mean shift of every statistic is e times one that is summed exactly over the tokens of these
distributions: the average over ever more redrawn tokens, without redrawing
(tests/scripts/test_directions.py redraws them and compares). A bias counts as found with the
power of the one test that finds it best: all tests together find it at least as often.

Shape letters: R distributions, V vocabulary, K directions, L answers, C cells.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decode.sampling import Sampling
from outrider.scripts.proofs import pit, uniformity
from outrider.scripts.proofs.biases import FAMILIES, Distributions, Member
from outrider.scripts.proofs.directions import (
    ENOUGH,
    LEARNED_TAILS,
    REACH,
    SHRINK,
    STAKES,
    STARTS,
    Bank,
    DirectionScores,
    TokenBlock,
)

SIZE = 2**24  # numbers in the distributions that are looked at
FEWEST, MOST = 128, 1024  # distributions
MEMBERS = 16  # random members of each family
SHOWN = (0.01, 0.02, 0.05, 0.1)
GRID = np.geomspace(0.002, 1, 48)  # mean total variations of the curves
WANTED, LEAST = 0.99, 0.8
STEPS = 8  # of the integrals over a run
ROWS = 64
LIMITS = (2.0, *LEARNED_TAILS)  # the first lets every token in


@dataclass
class AnswerDistributions:
    """The distributions of consecutive tokens of one answer, and before truncation: [R, V]
    float32."""

    distribution: Tensor
    whole: Tensor

    @classmethod
    def of(
        cls, logits: Tensor, sampling: Sampling, histories: Sequence[Sequence[int]] = ()
    ) -> AnswerDistributions:
        """From logits [R, V]; histories: see pit."""
        whole = (logits.float() / sampling.temperature).softmax(-1)
        return cls(pit.distribution_of(logits, sampling, histories).float(), whole)


def rows_wanted(vocab_size: int) -> int:
    """How many distributions are looked at."""
    return int(np.clip(SIZE // vocab_size, FEWEST, MOST))


@dataclass
class _Shift:
    """Means over the distributions of what full bias e = 1 does. mean: [K] of every
    direction; parity: [S] of ranks from the start of each tail; cells: [C] of U by
    probability; ids: [D, L, V] of ids, in all distributions and in the tails that are
    learned, sums per answer; total: variation; impossible: mass outside the distribution."""

    mean: Tensor
    parity: Tensor
    cells: Tensor
    ids: Tensor
    total: float = 0.0
    impossible: float = 0.0


class Power:
    """Power of a run of `n` tokens at level alpha / tests, from the distributions of `answers`."""

    def __init__(
        self, answers: Sequence[AnswerDistributions], bank: Bank, n: int, alpha: float, tests: int
    ) -> None:
        self.answers, self.bank, self.n, self.level = list(answers), bank, n, alpha / max(tests, 1)
        self.count = sum(len(a.distribution) for a in self.answers)
        self.lengths = torch.tensor([len(a.distribution) for a in self.answers]).double()
        self.blocks = list(self._blocks())
        self.mean, self.variance = self._moments(
            [s.moments(s.distribution)[:2] for s, _, _ in self.blocks]
        )
        every = [
            torch.stack([s.distribution * (s.distribution < x) for x in LIMITS])
            for s, _, _ in self.blocks
        ]
        self.rate = torch.stack([p.double().sum(1) for p in every]).sum(0) / self.count  # [D, V]
        square = torch.stack([(p.double() ** 2).sum(1) for p in every]).sum(0) / self.count
        self.spread = self.rate - square
        self.z = _quantile(1 - self.level / 2)
        parities = [s.parities(s.distribution) for s, _, _ in self.blocks]
        self.parity, self.parity_variance = self._moments(parities)

    def _moments(self, found: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], np.ndarray]:
        """The means of every block, and the mean variance, from (E d, E d^2) of the blocks."""
        spread = torch.stack([(m2 - m1**2).double().sum(0) for m1, m2 in found]).sum(0)
        return [m1 for m1, _ in found], spread.cpu().numpy() / self.count

    def _blocks(self) -> Iterator[tuple[DirectionScores, Distributions, int]]:
        """Scores, distributions and numbers of the answers, block by block."""
        for i, answer in enumerate(self.answers):
            other = self.answers[(i + 1) % len(self.answers)]
            for a in range(0, len(answer.distribution), ROWS):
                distribution = answer.distribution[a : a + ROWS]
                last = answer.distribution[a - 1 : a] if a else torch.zeros_like(distribution[:1])
                before = torch.cat([last, distribution[:-1]])
                there = [o for o in self.answers if o is not answer]
                mixed, lone = torch.zeros_like(distribution), torch.zeros_like(distribution)
                if there:
                    for o in there:
                        some = o.distribution[a : a + ROWS][: len(distribution)]
                        mixed[: len(some)] += some / len(there)
                    some = other.distribution[a : a + ROWS][: len(distribution)]
                    lone[: len(some)] = some
                none = torch.full((len(distribution), 1), -1, device=distribution.device)
                block = TokenBlock(distribution, before, mixed, none, none)
                distributions = Distributions(
                    distribution, before, lone, answer.whole[a : a + ROWS]
                )
                yield self.bank.open(block), distributions, i

    def shift(self, member: Member) -> _Shift:
        """What the member does to the statistics at e = 1."""
        zero = lambda size: torch.zeros(size, dtype=torch.float64)
        ids = self.bank.ids.new_zeros(len(LIMITS), len(self.answers), len(self.bank.ids))
        found = _Shift(zero(len(self.bank.names)), zero(len(STARTS)), zero(uniformity.CELLS), ids)
        blocks = zip(self.blocks, self.mean, self.parity, strict=True)
        for (scores, distributions, number), mean, parity in blocks:
            p, r = distributions.distribution, member(distributions)
            found.mean += (scores.mean(r) - mean).double().sum(0).cpu()
            found.parity += (scores.parities(r)[0] - parity).double().sum(0).cpu()
            found.cells += _cells(scores, r).cpu()
            for i, limit in enumerate(LIMITS):
                found.ids[i, number] += ((r - p) * (p < limit)).sum(0)
            found.total += float((r - p).abs().sum()) / 2
            found.impossible += float((r * (p == 0)).sum())
        for name in ("mean", "parity", "cells", "total", "impossible"):
            setattr(found, name, getattr(found, name) / self.count)
        return found

    def of_size(self, n: int) -> Power:
        """The same for a run of `n` tokens."""
        other = copy.copy(self)
        other.n = n
        return other

    def curve(self, member: Member) -> tuple[np.ndarray, float]:
        """Power at every total variation of GRID (nan beyond reach), and the largest reached."""
        s = self.shift(member)
        return self.found(s, GRID), s.total

    def found(self, s: _Shift, total: np.ndarray) -> np.ndarray:
        """Power against a bias of each `total` variation, nan beyond what the shift can reach."""
        share = total / max(s.total, 1e-12)
        share = np.where(share <= 1, share, np.nan)[:, None]
        return np.fmax.reduce(
            [
                self._directions(s, share),
                self._cells(s, share),
                self._single(s, share),
                self._learned(s, share),
                1 - (1 - np.clip(share[:, 0] * s.impossible, 0, 1)) ** self.n,
            ]
        )

    def _directions(self, s: _Shift, share: np.ndarray) -> np.ndarray:
        own = self._best(s.mean.numpy(), self.variance, share, self.level)
        level = self.level / len(STARTS)
        return np.fmax(own, self._best(s.parity.numpy(), self.parity_variance, share, level))

    def _best(
        self, mean: np.ndarray, variance: np.ndarray, share: np.ndarray, level: float
    ) -> np.ndarray:
        """Of tests whose sums are normal."""
        known = self.n * variance >= ENOUGH
        if not known.any():
            return np.full(len(share), np.nan)
        center = np.sqrt(self.n) * float((np.abs(mean[known]) / np.sqrt(variance[known])).max())
        return _normal_cdf(share[:, 0] * center - _quantile(1 - level / 2))

    def _cells(self, s: _Shift, share: np.ndarray) -> np.ndarray:
        cells, n = s.cells.numpy(), self.n
        farthest = np.abs(np.cumsum(cells)).max()
        needed = math.sqrt(math.log(2 / self.level) / 2)
        kolmogorov = _normal_cdf(2 * (share[:, 0] * math.sqrt(n) * farthest - needed))
        free = uniformity.CELLS - 1
        center = n * share[:, 0] ** 2 * uniformity.CELLS * (cells**2).sum()
        # a bound from above (Laurent and Massart 2000)
        critical = free + self.z * math.sqrt(2 * free) + self.z**2
        chi_square = _normal_cdf((free + center - critical) / np.sqrt(2 * (free + 2 * center)))
        return np.fmax(kolmogorov, chi_square)

    def _single(self, s: _Shift, share: np.ndarray) -> np.ndarray:
        spread = self.spread[0].cpu().numpy()
        many = max(int((self.n * spread >= ENOUGH).sum()), 1)
        mean = s.ids[0].sum(0).cpu().numpy() / self.count
        return self._best(mean, spread, share, self.level / many)

    def _learned(self, s: _Shift, share: np.ndarray) -> np.ndarray:
        """The bets on token ids, in all distributions or in a tail."""
        if len(self.answers) < 2:
            return np.full(len(share), np.nan)
        places = zip(s.ids, self.rate, self.spread, strict=True)
        return np.fmax.reduce([self._bets(*place, share) for place in places])

    def _bets(self, ids: Tensor, rate: Tensor, spread: Tensor, share: np.ndarray) -> np.ndarray:
        """ids: [L, V] shifts, summed over each answer; rate, spread: [V] mean of p and of p (1
        - p). What an id gains is measured between answers: within one it is partly chance."""
        counts = self.lengths
        whole = ids.double().sum(0)
        square = (whole**2 - (ids.double() ** 2).sum(0)) / (counts.sum() ** 2 - (counts**2).sum())
        steps = torch.arange(STEPS, dtype=torch.float64, device=square.device)
        times = (steps + 0.5)[:, None] * self.n / STEPS
        weight = 1 / (times * rate + SHRINK)
        lean = torch.minimum(square.clamp(min=0).sqrt(), rate)
        power = []
        for e in share[:, 0]:
            if not math.isfinite(e):
                power.append(math.nan)
                continue
            whole_score = e * lean * times * weight
            expected = whole_score.clamp(max=REACH)
            kept = expected / whole_score.clamp(min=1e-30)
            # chance cancels where signed
            gain = float((e**2 * square * times * weight * kept).sum()) * self.n / STEPS
            variance = spread * (expected**2 + times * spread * weight**2)
            noise = float(variance.sum()) * self.n / STEPS
            if noise <= 0:
                power.append(0.0)
                continue
            needed = math.log(len(STAKES) / self.level)
            root = math.sqrt(noise)
            growth = max((c * gain - c**2 * noise / 2 - needed) / (c * root) for c in STAKES)
            power.append(float(_normal_cdf(np.array(growth))))
        return np.array(power)


def _cells(scores: DirectionScores, distribution: Tensor) -> Tensor:
    """[C] what `distribution` does to the cells of U by probability: mass in each minus 1 /
    C, summed over the block. Tokens beyond the ranks looked at are one."""
    own, new = scores.mass.double(), distribution.gather(1, scores.order).double()
    ends = [torch.cat([x, (1 - x.sum(-1, keepdim=True)).clamp(min=0)], 1) for x in (own, new)]
    edges = [torch.cat([torch.zeros_like(x[:, :1]), x.cumsum(-1)], 1) for x in ends]
    cut = torch.linspace(
        0, 1, uniformity.CELLS + 1, dtype=torch.float64, device=distribution.device
    )
    cut = cut.expand(len(own), -1).contiguous()
    at = (torch.searchsorted(edges[0], cut, right=True) - 1).clamp(0, own.shape[1])
    start, width = edges[0].gather(1, at), ends[0].gather(1, at)
    part = torch.where(width > 0, (cut - start) / width.clamp(min=1e-300), 0.0).clamp(0, 1)
    reached = edges[1].gather(1, at) + part * ends[1].gather(1, at)
    reached[:, -1] = edges[1][:, -1]
    return (reached.diff(dim=-1) - 1 / uniformity.CELLS).sum(0)


def measure(power: Power, detect: float, seed: int, members: int | None = None) -> dict[str, Any]:
    """The power of every family, as certificate.json holds it.

    min_detectable: smallest mean total variation from which on a random member of every family
    is found with power 0.99. A family that cannot move so much counts with the most it can.
    blind: families found with less than 0.8 at `detect`.
    """
    members = members or MEMBERS
    rows: dict[str, Any] = {}
    for number, (name, family) in enumerate(FAMILIES.items()):
        rng = np.random.default_rng([seed, number])
        found = [power.curve(family(rng, len(power.bank.ids))) for _ in range(members)]
        curves, reach = (np.array(part) for part in zip(*found, strict=True))
        rows[name] = _family(curves, reach, detect)
    least = [row["min_detectable"] for row in rows.values()]
    seen = {name: row["at_detect"] for name, row in rows.items()}
    return {
        "power": WANTED,
        "min_detectable": None if None in least else max(least),
        "measure": "mean total variation between the emitted and the target's distribution, "
        "random members of every family",
        "members": members,
        "laws": power.count,
        "grid": [round(float(x), 5) for x in GRID],
        "families": rows,
        "blind": [name for name, found in seen.items() if found is not None and found < LEAST],
    }


def enough(
    power: Power, detect: float, seed: int, steps: Sequence[int], members: int | None = None
) -> int | None:
    """The first of `steps` tokens, rising, with which `measure` says a min_detectable of at
    most `detect` and nothing blind; None where the last one is too few. It asks for the
    model's distributions alone: no token of the run is known yet."""
    members, at = members or MEMBERS, 0
    total = GRID[max(int(np.searchsorted(GRID, detect * (1 + 1e-9), side="right")) - 1, 0) :]
    if detect < GRID[0]:
        return None
    for number, family in enumerate(FAMILIES.values()):
        rng = np.random.default_rng([seed, number])
        shifts = [power.shift(family(rng, len(power.bank.ids))) for _ in range(members)]
        while at < len(steps):
            sized = power.of_size(steps[at])
            mean = _mean(np.array([sized.found(s, total) for s in shifts]))
            if not (mean < WANTED).any():  # nan is not below
                break
            at += 1
    return steps[at] if at < len(steps) else None


def _mean(curves: np.ndarray) -> np.ndarray:
    """Over the members that reach each total variation; nan where none does."""
    there = np.isfinite(curves)
    return np.where(there.any(0), np.nansum(curves, 0) / np.maximum(there.sum(0), 1), np.nan)


def _family(curves: np.ndarray, reach: np.ndarray, detect: float) -> dict[str, Any]:
    """Mean power over the members that reach each total variation; None where none does."""
    mean = _mean(curves)
    low = np.flatnonzero(mean < WANTED)  # nan is not below
    first = low[-1] + 1 if len(low) else 0
    least = float(GRID[first]) if first < len(GRID) else None

    def summary(y: float) -> float | None:
        return None if not math.isfinite(y) else round(float(y), 4)

    def at(x: float) -> float | None:
        return summary(mean[int(np.searchsorted(GRID, x * (1 + 1e-9), side="right")) - 1])

    return {
        "min_detectable": least,
        "largest": round(float(reach.max()), 4),
        "at_detect": at(detect),
        "power_at": {f"{x:g}": at(x) for x in SHOWN},
        "curve": [summary(y) for y in mean],
    }


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return torch.special.ndtr(torch.as_tensor(x, dtype=torch.float64)).numpy()


def _quantile(p: float) -> float:
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))
