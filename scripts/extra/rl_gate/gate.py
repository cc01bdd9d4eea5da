"""Is a rollout from the policy? A gate for reinforcement learning, numpy alone.

    from outrider.gate import Gate

    gate = Gate()                       # one for the whole training
    verdict = gate.add(logprob, entropy, variance, mask)  # after every batch of rollouts
    if not verdict:
        raise RuntimeError(str(verdict))

A trainer scores the tokens of a rollout under its own policy anyway. Surprise is minus the
log-probability; where a token is a draw from the policy, the mean of its surprise is the entropy
there, and its variance is known too. So surprise minus entropy is a martingale, whatever the
policy is and however it changes from step to step, and scripts/extra/rl_gate/anytime.py bets on it.
docs/rl-gate.md says what is seen, what is not, and how rounding is told from a wrong rule.

Shape letters: B rollouts, T tokens of the longest one, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.scripts.extra.rl_gate.anytime import Bets, Stream

EDGES = (0.7, 2.0)  # entropies in nats that part sharp, middling and flat distributions
IMPOSSIBLE = (1e-3, 2e-2)  # share of tokens without probability: tolerated, and bet on
SURPRISE = (
    "surprise",
    "surprise at sharp distributions",
    "surprise at middling distributions",
    "surprise at flat distributions",
    "surprise of first tokens",
    "surprise within a rollout",
)
RANKS = tuple(f"rank, {shape}" for shape in ("order", "middle against ends", "thirds"))
DISTANCE = "distance of the surprise from the entropy"


@dataclass(frozen=True)
class GateVerdict:
    """ok: nothing speaks against the policy so far, also as truth value. p: an anytime-valid
    p-value of all batches together. tokens: seen so far. by: the stream that speaks loudest,
    and shift: by how many standard deviations a token its mean is off there. impossible:
    tokens that have no probability under the policy."""

    ok: bool
    p: float
    tokens: int
    by: str
    shift: float
    impossible: int

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        said = "from the policy" if self.ok else "NOT from the policy"
        lost = f"; {self.impossible} tokens have no probability" if self.impossible else ""
        loudest = f"{self.by} off by {self.shift:+.3f} standard deviations a token"
        return f"{said}: p = {self.p:.2g} after {self.tokens:,} tokens ({loudest}{lost})"


class Gate:
    """Judges rollouts batch by batch; the chance that it ever says no to rollouts of the
    policy is `alpha` at most, however often it is asked.

    tolerance: what rounding between sampler and trainer may do, in standard deviations of the
    mean surprise (see `mismatch`); 0 where both compute the same numbers.
    """

    def __init__(self, alpha: float = 1e-3, tolerance: float = 0.01, seed: int = 0) -> None:
        self.alpha, self.tokens, self.impossible = alpha, 0, 0
        self.bets = Bets((*SURPRISE, *RANKS, DISTANCE), tolerance)
        self.coin, self.odds, self.p = np.random.default_rng(seed), 0.0, 1.0

    def add(
        self,
        logprob: np.ndarray,
        entropy: np.ndarray,
        variance: np.ndarray,
        mask: np.ndarray | None = None,
        above: np.ndarray | None = None,
        beyond: np.ndarray | None = None,
    ) -> GateVerdict:
        """The next batch, [B, T] each (or [T]: one rollout), in nats, under the distribution
        that the tokens were meant to be drawn from: after temperature and truncation.

        logprob: of the sampled tokens. entropy: sum of -p log p. variance: sum of p log(p)^2
        less entropy^2. mask: 1 for a sampled token, 0 for padding, prompts, tool results.
        above: [B, T] mass of the tokens more probable than the sampled one. beyond: [B, T] mass
        of those whose surprise lies farther from the entropy; without these two, both are
        optional, a bias that keeps the mean surprise of every distribution is not seen. Raises
        ValueError for shapes that differ and for values that are not finite (-inf is a
        log-probability).
        """
        columns = [np.atleast_2d(np.asarray(c, float)) for c in (logprob, entropy, variance)]
        counted = np.ones(columns[0].shape, bool)
        if mask is not None:
            counted = np.atleast_2d(np.asarray(mask)).astype(bool)
        for ranks in (above, beyond):
            columns += [] if ranks is None else [np.atleast_2d(np.asarray(ranks, float))]
        if any(c.shape != counted.shape for c in columns):
            shapes = [c.shape for c in columns]
            raise ValueError(f"gate: shapes differ: {shapes}, mask {counted.shape}")
        own, counted = columns[0][counted], counted & (columns[0] != -np.inf)
        if any(not np.isfinite(c[counted]).all() for c in columns):
            raise ValueError("gate: a value is not finite; log-probabilities alone may be -inf")
        if (columns[0][counted] > 0.01).any():
            raise ValueError("gate: a log-probability is positive; give log p, not -log p")
        self._impossible(own)
        columns = [np.where(counted, c, 0.0) for c in columns]
        columns[2] = columns[2].clip(0)  # entropy and variance come with rounding
        streams = _surprise(columns[0], columns[1], columns[2], counted)
        coin = self.coin.random(counted.shape)
        if above is not None:
            streams |= _waves(RANKS, columns, columns[3], counted, coin)
        if beyond is not None:
            streams |= _waves((DISTANCE,), columns, columns[-1], counted, coin)
        self.bets.add(streams)
        return self._verdict()

    def _impossible(self, logprob: np.ndarray) -> None:
        """A bet on tokens of probability 0: of none where nothing may be rounded."""
        lost = int((logprob == -np.inf).sum())
        self.tokens, self.impossible = self.tokens + len(logprob), self.impossible + lost
        tolerated, wrong = IMPOSSIBLE if self.bets.tolerance else (0.0, IMPOSSIBLE[1])
        with np.errstate(divide="ignore"):
            odds = np.log([wrong, 1 - wrong]) - np.log([tolerated, 1 - tolerated])
        self.odds += (lost * odds[0] if lost else 0.0) + (len(logprob) - lost) * odds[1]

    def _verdict(self) -> GateVerdict:
        self.p = min(self.p, 2 * self.bets.p, 2 * float(np.exp(-max(self.odds, 0.0))))
        by = self.bets.largest()
        shift = self.bets.shift(by)
        ok = self.p > self.alpha
        return GateVerdict(ok, self.p, self.tokens, by, shift, self.impossible)


def from_policy(
    logprob: np.ndarray,
    entropy: np.ndarray,
    variance: np.ndarray,
    mask: np.ndarray | None = None,
    above: np.ndarray | None = None,
    beyond: np.ndarray | None = None,
    alpha: float = 1e-3,
    tolerance: float = 0.01,
) -> GateVerdict:
    """One batch by itself: see Gate, which is asked again and again at one false-alarm rate."""
    return Gate(alpha, tolerance).add(logprob, entropy, variance, mask, above, beyond)


def mismatch(sampled: np.ndarray, trained: np.ndarray) -> float:
    """How far the numbers of two engines differ, from log-probabilities [N] of the same sampled
    tokens: the root of the mean chi-square divergence. Whatever lies so near the policy moves the
    mean surprise by at most as many standard deviations (Cauchy and Schwarz): a tolerance."""
    difference = np.asarray(sampled, float) - np.asarray(trained, float)
    return float(np.sqrt((2 * np.cosh(difference) - 2).mean()))


def _surprise(
    logprob: np.ndarray, entropy: np.ndarray, variance: np.ndarray, counted: np.ndarray
) -> dict[str, Stream]:
    """Surprise minus entropy, weighted by what was known before the token."""
    excess = np.where(counted, -logprob - entropy, 0.0)
    place = np.digitize(entropy, EDGES)
    spread = np.where(counted, variance, 0.0)
    # what the rollout has shown so far, in standard deviations
    past = (excess.cumsum(1) - excess) / np.sqrt(1 + spread.cumsum(1) - spread)
    weights = [np.ones_like(excess), place == 0, place == 1, place == 2]
    weights += [counted.cumsum(1) == 1, past.clip(-2, 2)]
    found = {}
    for name, weight in zip(SURPRISE, weights, strict=True):
        some = counted & (weight != 0)
        w = np.broadcast_to(weight, some.shape)[some].astype(float)
        found[name] = Stream(w * excess[some], w**2 * variance[some])
    return found


def _waves(
    names: Sequence[str],
    columns: list[np.ndarray],
    before: np.ndarray,
    counted: np.ndarray,
    coin: np.ndarray,
) -> dict[str, Stream]:
    """Where the token stood in some order: uniform on [0, 1) when the place within its own
    mass is drawn, before being the mass in front of it. Sharp distributions tell little and
    weigh little."""
    own, variance = np.exp(columns[0][counted]), columns[2][counted]
    u = (before[counted] + coin[counted] * own).clip(0, 1)
    weight = np.sqrt(np.minimum(variance, 1))
    waves = (np.sqrt(2) * np.cos(k * np.pi * u) for k in range(1, len(names) + 1))
    return {name: Stream(weight * wave, weight**2) for name, wave in zip(names, waves, strict=True)}
