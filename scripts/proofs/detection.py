"""Does the certificate see? Biased decoders that it must reject, and sound ones that it must
pass, on a tiny target.

The sound decoder is drafted for by the target's own first layer, so that tokens are accepted,
rejected and drawn as bonus alike; the biased ones are those of scripts/proofs/biases.py, and
two that an earlier certificate let through.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from decode.drafters import DraftModel
from decode.models.tiny import tiny_model
from decode.sampling import Sampling
from decode.target import Target
from scripts.common.parts import Parts
from scripts.proofs import biases, pit
from scripts.proofs.controls import rules as wrong_rules
from scripts.proofs.greedy import Plain
from scripts.proofs.sampled import Sample, Setting, sampling_layer

Tick = Callable[[str, int, int], None]
VOCAB, ANSWER, BATCH = 320, 64, 16
TOTAL, TOKENS, ALPHA, MEMBERS = 0.05, 20_000, 1e-4, 3
SEEDS, SOUND_TOKENS, SOUND_ALPHA = 200, 3000, 1e-3
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
    p = pit.overall(tests)
    return {
        "p": p,
        "impossible": found.outside,
        "rejected": bool(found.outside or p < alpha),
        "tokens": len(found.u),
        "tests": len(tests),
        "by": "probability 0" if found.outside else f"{tests[0].name} of {tests[0].stratum}",
    }


def family(bench: Bench, name: str, member: int, tokens: int = TOKENS) -> dict[str, Any]:
    """What the layer says of a member of a family of biases at total variation TOTAL."""
    rule = biases.biased_rule(name, member, VOCAB, Sampling(1.0), TOTAL)
    found = verdict(bench.sample(Sampling(1.0), tokens, member, rule), ALPHA)
    return {"decoder": name, "member": member, "variation": rule.reached, **found}


def biased(parts: Parts, tick: Tick) -> dict[str, Any]:
    """Biased decoders of every family at mean total variation 0.05, and the two that an
    earlier certificate passed.
    """
    exact, rough = Bench("float32"), Bench("bfloat16")

    def passed(name: str, bench: Bench, sampling: Sampling, rule: Any) -> dict[str, Any]:
        found = verdict(bench.sample(sampling, TOKENS, 0, rule), ALPHA)
        return {"decoder": name, "member": 0, "variation": None, **found}

    merged = ("every second tail token merged into its neighbour", exact, Sampling(1.0))
    uncut = ("top-p ignored, bfloat16", rough, CUT)
    every = [(name, member) for name in biases.FAMILIES for member in range(MEMBERS)]
    work: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        *((f"{name} {m}", functools.partial(family, exact, name, m)) for name, m in every),
        ("neighbours merged", lambda: passed(*merged, wrong_rules.merges_neighbours(0.02))),
        ("top-p ignored", lambda: passed(*uncut, wrong_rules.ignores_truncation)),
    ]
    rows = parts.each(
        "biased", work, lambda one: one[1](), lambda i: tick(work[i][0], i, len(work))
    )
    return {
        "target": f"tiny, {VOCAB} tokens",
        "tokens": TOKENS,
        "alpha": ALPHA,
        "variation": TOTAL,
        "decoders": len(rows),
        "rejected": sum(r["rejected"] for r in rows),
        "rows": rows,
    }


def sound(parts: Parts, tick: Tick, seeds: int = SEEDS) -> dict[str, Any]:
    """The sound engine under so many seeds: how often it is rejected, against the binomial law
    of that.
    """
    benches = {dtype: Bench(dtype) for dtype in ("float32", "bfloat16")}

    def one(seed: int) -> dict[str, Any]:
        sampling, dtype = SETTINGS[seed % len(SETTINGS)]
        found = benches[dtype].sample(sampling, SOUND_TOKENS, 1000 + seed)
        words = f"T = {sampling.temperature:g}, top-p {sampling.top_p:g}, {dtype}"
        told = {"seed": seed, "settings": words, "drafted": found.drafted}
        return {**told, **verdict(found, SOUND_ALPHA)}

    rows = parts.each("sound", range(seeds), one, lambda seed: tick("sound", seed, seeds))
    rejected, p = sum(r["rejected"] for r in rows), np.array([r["p"] for r in rows])
    at_most = sum(
        math.comb(seeds, k) * SOUND_ALPHA**k * (1 - SOUND_ALPHA) ** (seeds - k)
        for k in range(rejected)
    )
    return {
        "target": f"tiny, {VOCAB} tokens",
        "tokens": SOUND_TOKENS,
        "alpha": SOUND_ALPHA,
        "seeds": seeds,
        "rejected": rejected,
        "chance_of_as_many": 1 - at_most,
        "smallest_p": float(p.min()),
        "p_below_0.1": int((p < 0.1).sum()),
        "rows": rows,
    }
