"""Wrong distributions by family: what a decoder that leans somewhere would emit instead of
the distribution it owes.

Each family makes random members (a key, a threshold, a share ...); a member turns the
distributions of a block into others. What a decoder emits with bias e is (1 - e) p + e r.
scripts/proofs/power.py asks how much of each a run would find; the tests make real decoders
of them, which the certificate must reject.

Shape letters: R distributions, V vocabulary, F ranks looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.scripts.proofs import directions

RANKS = 1024  # best tokens among which ranks are told apart


@dataclass
class Distributions:
    """[R, V] each: the distribution owed, that of the step before (0 where none), that of
    another row (0 where none), and the distribution before truncation."""

    distribution: Tensor
    before: Tensor
    other: Tensor
    whole: Tensor


Member = Callable[[Distributions], Tensor]
Family = Callable[
    [np.random.Generator, int], Member
]  # of a generator and the size of the vocabulary


def _threshold(rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(np.log(0.005), np.log(0.3))))


def _normal(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def tail_by_hash(rng: np.random.Generator, size: int) -> Member:
    """Half of the ids, by a hash, never come from the tail; their mass goes to the other half."""
    limit, mine = (
        _threshold(rng),
        directions.keyed_signs(size, int(rng.integers(2**62)), 1)[:, 0] > 0,
    )

    def change(distributions: Distributions) -> Tensor:
        p = distributions.distribution
        tail = p < limit
        kept = torch.where(tail & mine.to(p.device), p, 0.0)
        lost = torch.where(tail & ~mine.to(p.device), p, 0.0).sum(-1, keepdim=True)
        mass = kept.sum(-1, keepdim=True)
        moved = torch.where(tail, kept * (1 + lost / mass.clamp(min=1e-30)), p)
        return torch.where(mass > 0, moved, p)

    return change


def neighbours_by_rank(rng: np.random.Generator, size: int) -> Member:
    """Every second token of the tail, by rank, loses its mass to the one before it."""
    limit, phase, from_start = _threshold(rng), int(rng.integers(2)), bool(rng.integers(2))

    def change(distributions: Distributions) -> Tensor:
        p = distributions.distribution
        mass, ids = p.topk(min(p.shape[1], RANKS), -1)
        rank = torch.arange(mass.shape[1], device=p.device).expand_as(mass)
        start = (mass >= limit).sum(-1, keepdim=True)
        odd = ((rank - start if from_start else rank) + phase) % 2 == 1
        gone = torch.where(odd & (rank > start), mass, 0.0)
        return p.scatter(1, ids, mass - gone + torch.nn.functional.pad(gone[:, 1:], (0, 1)))

    return change


def neighbours_by_id(rng: np.random.Generator, size: int) -> Member:
    """Every second id loses its mass to the id below it where it is in the tail."""
    limit, phase = _threshold(rng), int(rng.integers(2))

    def change(distributions: Distributions) -> Tensor:
        p = distributions.distribution
        ids = torch.arange(p.shape[1], device=p.device)
        gone = torch.where((p < limit) & (ids % 2 == phase) & (ids > 0), p, 0.0)
        return p - gone + torch.nn.functional.pad(gone[:, 1:], (0, 1))

    return change


def rare_to_frequent(rng: np.random.Generator, size: int) -> Member:
    """Mass of the tail goes to the rest in proportion, or the other way round."""
    limit, up = _threshold(rng), bool(rng.integers(2))

    def change(distributions: Distributions) -> Tensor:
        p = distributions.distribution
        chosen = (p < limit) == up
        moved = _normal(torch.where(chosen, 0.0, p))
        return torch.where(moved.sum(-1, keepdim=True) > 0.5, moved, p)

    return change


def frequent_suppressed(rng: np.random.Generator, size: int) -> Member:
    """A frequent token never comes, or a few that together hold some share of the distributions."""
    many, wanted, known = bool(rng.integers(2)), float(rng.uniform(0.05, 0.2)), dict[str, Tensor]()
    first = int(rng.integers(8))

    def change(distributions: Distributions) -> Tensor:
        p = distributions.distribution
        if "ids" not in known:
            share, ids = p.mean(0).topk(min(64, p.shape[1]))
            share, ids = share[first:], ids[first:]
            known["ids"] = ids[: 1 + int((share.cumsum(0) < wanted).sum())] if many else ids[:1]
        rest = p.clone()
        rest[:, known["ids"]] = 0
        return torch.where(rest.sum(-1, keepdim=True) > 1e-3, _normal(rest), p)

    return change


def step_before(rng: np.random.Generator, size: int) -> Member:
    """The distribution of the step before is mixed in: a stale row."""

    def change(distributions: Distributions) -> Tensor:
        return torch.where(
            distributions.before.sum(-1, keepdim=True) > 0,
            distributions.before,
            distributions.distribution,
        )

    return change


def temperature(rng: np.random.Generator, size: int) -> Member:
    """Another temperature, half to twice."""
    power = float(2 ** (rng.uniform(0.2, 1) * rng.choice((-1, 1))))

    def change(distributions: Distributions) -> Tensor:
        return _normal(distributions.distribution**power)

    return change


def truncation(rng: np.random.Generator, size: int) -> Member:
    """Another top-p: a smaller one, or none where the distribution has one."""
    share, ignored = float(rng.uniform(0.5, 0.97)), bool(rng.integers(2))

    def change(distributions: Distributions) -> Tensor:
        p = distributions.distribution
        if ignored and bool(((p == 0) & (distributions.whole > 0)).any()):
            return distributions.whole
        mass, ids = p.topk(min(p.shape[1], RANKS), -1)
        kept = mass.cumsum(-1) - mass < share
        return _normal(torch.zeros_like(p).scatter(1, ids, mass * kept))

    return change


def other_row(rng: np.random.Generator, size: int) -> Member:
    """The distribution of another row of the batch is mixed in: a row mix-up."""

    def change(distributions: Distributions) -> Tensor:
        return torch.where(
            distributions.other.sum(-1, keepdim=True) > 0,
            distributions.other,
            distributions.distribution,
        )

    return change


FAMILIES: dict[str, Family] = {
    "within the tail, by a hash of the id": tail_by_hash,
    "neighbours by rank in the tail": neighbours_by_rank,
    "neighbours by id in the tail": neighbours_by_id,
    "between rare and frequent tokens": rare_to_frequent,
    "a frequent token or a few suppressed": frequent_suppressed,
    "distribution of the step before": step_before,
    "temperature": temperature,
    "top-p": truncation,
    "distribution of another row": other_row,
}
