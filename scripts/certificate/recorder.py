"""Watch verification from inside the decode loop: every emitted token with the very logits it was
verified against.

A recorder wraps the rule, lets the rule decide and notes what it decided. A test
of the rule on these logits is free of rounding in the model: the distribution that was owed and the
token that came out are those of one pass.

Shape letter: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.decode.drafters import Drafter
from outrider.decode.engine import DecodedRun, Request, Rule, generate
from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.verify import Coins, Verdict
from outrider.scripts.certificate.setup import CertificatePlan

Recorded = list[tuple[int, Tensor]]  # the tokens of an answer, each with its logits [V]


class Recorder:
    """A rule that remembers. committed: by request, every token that verification chose, with its
    logits [V] in the model's own dtype."""

    def __init__(self, rule: Rule, requests: Sequence[Request]) -> None:
        self.rule, self.rows = rule, list[int]()
        self.committed: dict[int, Recorded] = {r.id: [] for r in requests}

    def coins(self, seed: int, requests: Tensor, cycles: Tensor) -> Rng:
        """Return the random numbers of the next verification, which tell whose rows they are."""
        self.rows = requests.tolist()
        return Rng(seed, requests, cycles)

    def __call__(self, tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        verdict = self.rule(tree, distribution, rng)
        drafted, paths, bonus = tree.tokens.tolist(), verdict.path.tolist(), verdict.bonus.tolist()
        for b, (request, length) in enumerate(zip(self.rows, verdict.length.tolist(), strict=True)):
            path = paths[b][:length]
            tokens = [*(drafted[b][node] for node in path), bonus[b]]
            logits = distribution.logits[b, [0, *(node + 1 for node in path)]]
            self.committed[request] += zip(tokens, logits, strict=True)
        return verdict


def recorded(
    target: Target,
    drafter: Drafter,
    requests: list[Request],
    plan: CertificatePlan,
) -> tuple[DecodedRun, list[Recorded]]:
    """Decode; and the tokens of every generation as verification chose them, up to a stop token or
    the length limit."""
    seen = Recorder(plan.rule, requests)
    run = generate(
        target,
        drafter,
        requests,
        plan.sampling,
        batch_size=plan.batch_size,
        seed=plan.seed,
        verify=seen,
        guidance=plan.guidance,
        coins=seen.coins,
    )
    pairs = zip(requests, run.generations, strict=True)
    return run, [seen.committed[r.id][: len(g.token_ids)] for r, g in pairs]


def mismatches(lines: Sequence[Recorded], run: DecodedRun) -> int:
    """Generations that hold something else than verification chose."""
    pairs = zip(lines, run.generations, strict=True)
    return sum([token for token, _ in line] != g.token_ids for line, g in pairs)
