"""What a way of drafting or verifying is worth on real text: accepted lengths at one
temperature, paired by prompt.

Three questions, each a pair of drafters or rules with as many nodes on both sides:
rule         traversal against rejection on the same sampled drafts (expected, coins averaged
             out)
chain        a sampled chain against the most probable one
tree         siblings drawn without replacement against the most probable ones
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decode import stats
from decode.drafters import Drafter
from decode.engine import Cycle, Request, generate
from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree
from decode.verify import verify
from heads import find_head, load_head
from heads.names import Draft
from scripts.common.parts import Parts
from scripts.proofs.expected import Watched
from scripts.proofs.greedy import Advance

Values = dict[
    str, list[list[float]]
]  # request -> cycles -> [rejection, traversal, realised] accepted draft tokens


class MostProbable:
    """A drafter that drafts as at T = 0 whatever the target's temperature: every candidate is
    a point mass.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.inner = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return self.inner.propose(budget, Sampling(0.0), rng)


def lanes(path: str, target: Target) -> dict[str, Drafter]:
    """The drafters to compare for the head folder `path`: sampled and most probable chain, and
    so for trees.
    """
    head = load_head(find_head(path), target)
    chain = head.drafter(target, Draft(shape="chain"))
    tree = head.drafter(target, Draft(shape="tree", draw="sampled"))
    return {
        "sampled chain": chain,
        "chain": MostProbable(chain),
        "tree": MostProbable(tree),
        "sampled tree": tree,
    }


@dataclass(frozen=True)
class Decoding:
    """How prompts are decoded: tokens of the longest answer, prompts at a time, and the seed
    that addresses all random numbers.
    """

    sampling: Sampling
    tokens: int
    batch_size: int
    seed: int


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    how: Decoding,
    parts: Parts,
    name: str,
    advance: Advance,
) -> Values:
    """Decode every prompt once with traversal; a chunk of prompts is a part."""
    found: Values = {}
    for row in parts.lines(name):
        found.update(row)
    done = len(parts.lines(name)) * how.batch_size
    advance(min(done, len(prompts)))
    for start in range(done, len(prompts), how.batch_size):
        asked = [
            Request(list(p), how.tokens, id=start + i)
            for i, p in enumerate(prompts[start : start + how.batch_size])
        ]
        rule = Watched(
            functools.partial(verify, rule="traversal"),
            drafter.max_nodes,
            name.startswith("sampled"),
        )
        generate(
            target,
            drafter,
            asked,
            how.sampling,
            batch_size=how.batch_size,
            seed=how.seed,
            verify=rule,
            eos_ids=(),
        )
        row = {str(r.id): rule.seen.get(r.id, []) for r in asked}
        parts.add(name, row)
        found.update(row)
        advance(len(asked))
    return found


def _cycles(values: Values, column: int) -> list[list[Any]]:
    """As decode.stats wants them. A cycle's accepted length counts the bonus token; stats adds
    it.
    """
    return [
        [Cycle(0, row[column], (), False, 0) for row in values[k]]  # type: ignore[arg-type]
        for k in sorted(values, key=int)
    ]


def compare(found: dict[str, Values], seed: int = 0) -> dict[str, Any]:
    """Expected accepted length (bonus token counted) of every lane and the paired differences,
    with intervals.
    """
    means = {
        name: stats.accepted_length(_cycles(v, 1 if name.startswith("sampled") else 0), seed).json()
        for name, v in found.items()
    }
    realised = {
        name: stats.accepted_length(_cycles(v, 2), seed).json() for name, v in found.items()
    }
    pairs: dict[str, Any] = {}

    def pair(title: str, a: Values, b: Values, i: int, j: int) -> None:
        pairs[title] = stats.paired_difference(_cycles(a, i), _cycles(b, j), seed).json()

    for shape in ("chain", "tree"):
        sampled, plain = found.get(f"sampled {shape}"), found.get(shape)
        if sampled:
            pair(f"traversal over rejection, sampled {shape}", sampled, sampled, 1, 0)
        if sampled and plain:
            pair(f"sampled over most probable {shape}, traversal", sampled, plain, 1, 0)
            pair(f"sampled over most probable {shape}, rejection", sampled, plain, 0, 0)
    cycles = {name: sum(map(len, v.values())) for name, v in found.items()}
    return {
        "accepted_length": means,
        "accepted_length_realised": realised,
        "differences": pairs,
        "cycles": cycles,
    }
