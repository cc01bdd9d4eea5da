"""What the sampling layer of a certificate says of decoders that are sound and of biased ones, on
a tiny target.

The sound decoder is drafted for by the target's own first layer, so that tokens are accepted,
rejected and drawn as bonus alike; the biased ones draw from the families of
scripts/proofs/biases.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decode.draft_model import DraftModel
from outrider.decode.models.tiny import tiny_model
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.verify import Coins, Verdict
from outrider.scripts.proofs import uniformity
from outrider.scripts.proofs.biases import FAMILIES, Distributions, Member
from outrider.scripts.proofs.greedy import Plain
from outrider.scripts.proofs.sampled import Sample, Setting, sampling_layer

VOCAB, ANSWER, BATCH = 320, 64, 16
TOTAL, TOKENS, ALPHA = 0.05, 20_000, 1e-4
SOUND_TOKENS, SOUND_ALPHA = 3000, 1e-3
CUT = Sampling(1.0, top_p=0.9)
SETTINGS = (
    (Sampling(1.0), "float32"),
    (Sampling(0.7, top_p=0.9), "bfloat16"),
    (Sampling(1.0), "bfloat16"),
    (CUT, "float32"),
)


class Bench:
    """A tiny target in one dtype, its own first layer as drafter, and prompts."""

    def __init__(self, dtype: str) -> None:
        kind = getattr(torch, dtype)
        self.target = Target(tiny_model(vocab=VOCAB).to(kind))
        draft = tiny_model(vocab=VOCAB, layers=1)
        draft.load_state_dict(tiny_model(vocab=VOCAB).state_dict(), strict=False)
        self.plain, self.drafter = Plain(self.target), DraftModel(Target(draft.to(kind)), 3)
        self.prompts = [[3 + i, 5, 7 + 2 * i, 9] for i in range(12)]
        self.target.probe()

    def sample(self, sampling: Sampling, tokens: int, seed: int, rule: Any = "traversal") -> Sample:
        how = Setting(sampling, tokens, ANSWER, BATCH, seed, rule)
        return sampling_layer(self.plain, self.target, self.drafter, self.prompts, how)


def verdict(found: Sample, alpha: float) -> dict[str, Any]:
    """What the sampling layer says of one sample."""
    tests = sorted(found.tests(), key=lambda t: t.p)
    p = uniformity.overall(tests)
    return {
        "p": p,
        "impossible": found.outside,
        "rejected": bool(found.outside or p < alpha),
        "tokens": len(found.u),
        "tests": len(tests),
        "by": "probability 0" if found.outside else f"{tests[0].name} of {tests[0].stratum}",
    }


def family(bench: Bench, name: str, member: int) -> dict[str, Any]:
    """What the layer says of a member of a family of biases at total variation TOTAL."""
    rule = biased_rule(name, member, VOCAB, Sampling(1.0), TOTAL)
    return verdict(bench.sample(Sampling(1.0), TOKENS, member, rule), ALPHA)


class BiasedRule:
    """Plain decoding from (1 - e) p + e r: ignores the draft and draws each token from the
    biased distribution.

    total: mean total variation to reach; e follows from what the distributions so far allow,
    and never exceeds 1. reached: the mean that came out.
    """

    def __init__(self, member: Member, sampling: Sampling, total: float) -> None:
        self.member, self.sampling, self.total = member, sampling, total
        self.before: dict[int, Tensor] = {}
        self.moved = self.unit = 0.0
        self.seen = 0

    def __call__(self, tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        rows = torch.arange(tree.tokens.shape[0])
        zero = torch.zeros_like(rows)
        p = distribution.at(rows, zero).dense(distribution.vocab_size).double()
        requests = rng._address[1].tolist()  # type: ignore[attr-defined]
        before = torch.stack([self.before.get(r, torch.zeros_like(p[0])) for r in requests])
        whole = (distribution.logits[:, 0].double() / self.sampling.temperature).softmax(-1)
        r = self.member(Distributions(p, before, p.roll(1, 0) if len(p) > 1 else p, whole))
        for request, line in zip(requests, p, strict=True):
            self.before[request] = line
        self.unit += float((r - p).abs().sum()) / 2
        self.seen += len(p)
        share = min(1.0, self.total * self.seen / max(self.unit, 1e-12))
        q = (1 - share) * p + share * r
        self.moved += float((q - p).abs().sum()) / 2
        path = torch.full((len(p), tree.layout.levels), -1, dtype=torch.int64)
        return Verdict(path, zero, rng.draw(q, rows, zero - 1))

    @property
    def reached(self) -> float:
        """Mean total variation between what was owed and what was drawn from."""
        return self.moved / max(self.seen, 1)


def biased_rule(family: str, seed: int, size: int, sampling: Sampling, total: float) -> BiasedRule:
    """A decoder of one member of `family`, which member `seed` says."""
    return BiasedRule(FAMILIES[family](np.random.default_rng(seed), size), sampling, total)
