"""How far the distributions that verification used lie from those of plain decoding, and how
far two plain computations do.

The sampling layer judges the rule on the verifier's own logits. This one judges these logits:
masks, positions, cache and commit. Two numbers per token, against a pass of the Hugging Face
model over the finished text:

variation   total variation between the two distributions
shift       largest change of a log-probability (before truncation), over the tokens that have
            transforms.LIKELY or more

The yardstick is what rounding does to the same texts when Hugging Face itself computes them in
two ways: one pass over the whole text, and one cached step per token.

Shape letters: n sample size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.decode.sampling import Sampling
from outrider.scripts.certificate import transforms
from outrider.scripts.certificate.sampled import Sample
from outrider.scripts.certificate.setup import CertifySetup
from outrider.scripts.scoring.plain import Plain

TEXTS = 6  # answers that are computed in two plain ways
# a stratum's mean, and a single shift, beyond so many times the yardstick's are no rounding
MEAN, FAR = 2.0, 4.0
FLOOR = 1e-5  # mean total variation that is never called a difference
# Share of tokens that may be shifted far: the yardstick's largest is one of a few hundred.
STRAYS = 0.002
STRATA = ("after the prompt", "first of a cycle", "place 1", "place 2", "place 3 and on")


def yardstick(
    plain: Plain, texts: Sequence[tuple[list[int], int]], sampling: Sampling, guidance: float | None
) -> dict[str, Any]:
    """What two plain computations of the same texts (ids, start) differ by."""
    found = []
    for i, whole in plain.in_batches(texts, guidance):
        ids, start = texts[i]
        past = transforms.histories(ids, start) if sampling.uses_history else []
        found.append(
            transforms.distances(plain.stepped(ids, start, guidance), whole, sampling, past)
        )
    every = np.concatenate(found)
    return {
        "tokens": len(every),
        "variation": float(every[:, 0].mean()),
        "largest_shift": float(every[:, 1].max()),
    }


def passes_layer(setup: CertifySetup, sample: Sample) -> dict[str, Any]:
    """The verifier's distributions beside those of plain decoding, by place in the cycle, as
    certificate.json holds it."""
    plan, texts = setup.plan, sample.texts[:TEXTS]
    plainly = setup.memo.once(
        "plainly", lambda: yardstick(setup.plain, texts, plan.sampling, plan.guidance)
    )
    return passes_json(sample, plainly)


def passes_json(sample: Sample, plainly: dict[str, Any]) -> dict[str, Any]:
    """The layer of a sample. plainly: of `yardstick`."""
    limit = max(MEAN * plainly["variation"], FLOOR)
    shift = max(FAR * plainly["largest_shift"], FLOOR)
    depth, first = sample.depth, np.r_[True, sample.sequence[1:] != sample.sequence[:-1]]
    masks = (first, (depth == 0) & ~first, depth == 1, depth == 2, depth >= 3)
    rows, why = [], ""
    for name, mask in zip(STRATA, masks, strict=True):
        if not mask.any():
            continue
        variation, far = sample.passes[mask, 0], int((sample.passes[mask, 1] > shift).sum())
        mean, count = float(variation.mean()), len(variation)
        rows.append({"stratum": name, "tokens": count, "variation": mean, "far": far})
        # a few tokens at a truncation's edge are no bug
        sure = float(mean - 3 * variation.std() / np.sqrt(count))
        if not why and sure > limit:
            why = (
                f"{name}: the verifier's distributions lie {mean:.2g} (mean total variation) "
                f"from plain decoding's, two plain computations {plainly['variation']:.2g}"
            )
        if not why and far > max(2, STRAYS * count):
            why = (
                f"{name}: {far} of {count} tokens have distributions shifted by more than "
                f"{shift:.2g}, {FAR:g} times what two plain computations ever differ by"
            )
    return {
        "name": "passes",
        "passed": not why,
        "why": why,
        "tokens": len(sample.passes),
        "variation": float(sample.passes[:, 0].mean()),
        "largest_shift": float(sample.passes[:, 1].max()),
        "far": sum(row["far"] for row in rows),
        "strata": rows,
        "two_plain_computations": plainly,
        "limits": {"variation": limit, "shift": shift},
    }
