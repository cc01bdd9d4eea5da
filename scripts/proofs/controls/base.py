"""What a negative control is; controls.py and number_controls.py list them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.decode.sampling import Sampling
from outrider.decode.verify import RULES, verify
from outrider.scripts.proofs.controls import rules as wrong_rules

Rule = wrong_rules.Rule
Measure = Callable[[], float]
ONE = Sampling(1.0)


@dataclass(frozen=True)
class Control:
    """What a layer measures on wrong and on right code; above `limit` means caught."""

    name: str
    layer: str
    seen: str
    wrong: Measure
    right: Measure
    limit: float


def rule_named(name: str | Rule) -> Rule:
    """A rule of decode.verify as a callable, on sampled and deterministic trees alike."""
    if callable(name):
        return name
    assert name in RULES
    return lambda tree, distribution, rng: verify(tree, distribution, rng, name)
