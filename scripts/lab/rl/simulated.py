"""Policies that are tables, and the rules of engines that sample from them: fast enough to ask
the gate 200 times.

A token's distribution depends on the token before it alone, V of them, from nearly certain to
flat as a language model's are; a drafter has a table of its own. Rollouts of many seeds are drawn
side by side.

numpy alone. Shape letters: B rollouts side by side, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

VOCAB, DEPTH = 256, 7
TYPICAL, SHARE = 0.09, 0.3  # Medusa's typical acceptance: p(x) > min(0.09, 0.3 exp(-H))
FLAT = 0.3  # share of log V from which on a deferred rule forgives


def softmax(scores: np.ndarray) -> np.ndarray:
    """[..., V] of scores [..., V]."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@dataclass(frozen=True)
class World:
    """scores: [V, V] of every token after every token; p, q: what they and the drafter say;
    logp, entropy, variance, above, beyond: the gate's columns of p, by token before and by
    token."""

    scores: np.ndarray
    p: np.ndarray
    q: np.ndarray
    logp: np.ndarray
    entropy: np.ndarray
    variance: np.ndarray
    above: np.ndarray
    beyond: np.ndarray

    @classmethod
    def drawn(cls, seed: int) -> World:
        """A policy whose entropies lie between 0 and 5 nats, and a drafter of whose tokens the
        exact rule keeps two in three."""
        rng = np.random.default_rng(seed)
        sharpness = np.exp(rng.uniform(0, np.log(20), (VOCAB, 1)))
        scores = sharpness * rng.normal(size=(VOCAB, VOCAB))
        q = softmax(scores + 1.5 * np.sqrt(sharpness) * rng.normal(size=scores.shape))
        return cls.of(scores, q)

    @classmethod
    def of(cls, scores: np.ndarray, q: np.ndarray) -> World:
        """From the policy's scores and the drafter's distributions, [V, V] each."""
        p = softmax(scores)
        logp = np.log(p.clip(1e-300))
        entropy = -(p * logp).sum(-1)
        variance = (p * logp**2).sum(-1) - entropy**2
        distance = np.abs(logp + entropy[:, None])
        masses = [in_front(p, -p), in_front(p, -distance)]
        return cls(scores, p, q, logp, entropy, variance, *masses)

    def columns(self, before: np.ndarray, tokens: np.ndarray, ranks: bool) -> dict[str, Any]:
        """What Gate.add takes, of `tokens` behind the tokens `before`; ranks: all of it."""
        found: dict[str, Any] = {
            "logprob": self.logp[before, tokens],
            "entropy": self.entropy[before],
            "variance": self.variance[before],
        }
        if ranks:
            found |= {"above": self.above[before, tokens], "beyond": self.beyond[before, tokens]}
        return found


def in_front(p: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[V, V] mass of the tokens whose keys [V, V] are smaller; all keys of a row differ."""
    order = np.argsort(keys, axis=-1, kind="stable")
    ranked = np.take_along_axis(p, order, -1)
    found = np.empty_like(p)
    np.put_along_axis(found, order, ranked.cumsum(-1) - ranked, -1)
    return found


class Table:
    """Draws from the rows of [S, V] distributions, many at once."""

    def __init__(self, rows: np.ndarray) -> None:
        total = rows.cumsum(-1)
        self.edges = (total / total[:, -1:] + np.arange(len(rows))[:, None]).ravel()
        self.width = rows.shape[1]

    def draw(self, which: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One token [B] from each of the rows `which` [B]."""
        at = np.searchsorted(self.edges, which + rng.random(len(which)), side="right")
        return (at - which * self.width).clip(0, self.width - 1)


Rollouts = tuple[np.ndarray, np.ndarray]  # tokens before, and tokens: [B, T]
Which = Callable[[int, np.ndarray], np.ndarray | int]  # of a place and the rows [B]


def plain(
    tables: np.ndarray, many: int, length: int, seed: int, which: Which = lambda place, rows: 0
) -> Rollouts:
    """Token by token, from one of the tables [S, V, V] each."""
    rng, table = np.random.default_rng([seed, 1]), Table(tables.reshape(-1, VOCAB))
    state, rows = rng.integers(VOCAB, size=many), np.arange(many)
    before, tokens = np.zeros((2, many, length), int)
    for t in range(length):
        before[:, t] = state
        state = tokens[:, t] = table.draw(state + VOCAB * which(t, rows), rng)
    return before, tokens


Keep = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def drafted(
    world: World, many: int, length: int, seed: int, keep: Keep | None = None, greedy: bool = False
) -> Rollouts:
    """Speculative chains of DEPTH tokens, exact without `keep`. keep(states [B, DEPTH], drafted
    [B, DEPTH], accepted by the exact rule [B, DEPTH]) says which are kept in its place. greedy:
    the draft is the drafter's best token, which the exact rule keeps with probability p."""
    rng = np.random.default_rng([seed, 2])
    state = rng.integers(VOCAB, size=many)
    before, tokens = np.zeros((2, many, length + DEPTH + 1), int)
    filled, rows = np.zeros(many, int), np.arange(many)
    best, drafter, policy = world.q.argmax(-1), Table(world.q), Table(world.p)
    while filled.min() < length:
        states, drafts = np.zeros((2, many, DEPTH), int)
        at = state
        for k in range(DEPTH):
            states[:, k] = at
            at = drafts[:, k] = best[at] if greedy else drafter.draw(at, rng)
        p = world.p[states, drafts]
        ratio = p if greedy else p / world.q[states, drafts]
        accepted = rng.random((many, DEPTH)) < ratio
        kept = accepted if keep is None else keep(states, drafts, accepted)
        count = kept.cumprod(-1).sum(-1)
        ended = np.concatenate([states, at[:, None]], 1)[rows, count]
        cut = np.minimum(count, DEPTH - 1)
        bonus = policy.draw(ended, rng)
        # a lossy rule turns down what the exact one would keep: it then draws from p itself
        turned = np.flatnonzero((count < DEPTH) & ~accepted[rows, cut])
        owed, less = world.p[ended[turned]], world.q[ended[turned]]
        if greedy:
            less = np.eye(VOCAB)[drafts[turned, cut[turned]]]
        bonus[turned] = Table((owed - less).clip(1e-300)).draw(np.arange(len(turned)), rng)
        line = np.concatenate([drafts, bonus[:, None]], 1)
        for k in range(DEPTH + 1):
            some = (k <= count) & (filled + k < tokens.shape[1])
            before[rows[some], filled[some] + k] = np.where(
                k < count, states[:, min(k, DEPTH - 1)], ended
            )[some]
            tokens[rows[some], filled[some] + k] = np.where(k < count, line[:, k], bonus)[some]
        filled = np.minimum(filled + count + 1, length + DEPTH + 1)
        state = bonus
    return before[:, :length], tokens[:, :length]


def typical(world: World) -> Keep:
    """Typical acceptance: by p alone."""
    edge = np.minimum(TYPICAL, SHARE * np.exp(-world.entropy))

    def keep(states: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        return world.p[states, drafts] > edge[states]

    return keep


def deferred(world: World, window: int) -> Keep:
    """As FLy does: a rejected token of a flat distribution is kept where the next `window`
    drafted ones are accepted (all that there are, at the end of the draft)."""

    def keep(states: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        flat = world.entropy[states] > FLAT * np.log(VOCAB)
        after = np.stack([accepted[:, k + 1 : k + 1 + window].all(-1) for k in range(DEPTH)], 1)
        whole = np.arange(DEPTH) + window < DEPTH
        return accepted | (flat & after & whole)

    return keep
