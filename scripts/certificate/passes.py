"""How far the distributions that verification used lie from those of plain decoding, and how
far two plain computations do.

The sampling layer judges the rule on the verifier's own logits. This one judges these logits:
masks, positions, cache and commit. Two numbers per token, against a pass of the Hugging Face
model over the finished text:

variation   total variation between the two distributions
shift       largest change of a log-probability (before truncation), over the tokens that have
            LIKELY or more

The yardstick is what rounding does to the same texts when Hugging Face itself computes them in
two ways: one pass over the whole text, and one cached step per token.

Shape letters: R tokens, V vocabulary, n sample size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decode.sampling import Sampling
from outrider.scripts.certificate import pit
from outrider.scripts.scoring.plain import Plain

LIKELY = 0.01
TEXTS = 6  # answers that are computed in two plain ways
# a stratum's mean, and a single shift, beyond so many times the yardstick's are no rounding
MEAN, FAR = 2.0, 4.0
FLOOR = 1e-5  # mean total variation that is never called a difference
# Share of tokens that may be shifted far: the yardstick's largest is one of a few hundred.
STRAYS = 0.002
ROWS = 128
STRATA = ("after the prompt", "first of a cycle", "place 1", "place 2", "place 3 and on")


def distances(
    ours: Tensor, theirs: Tensor, sampling: Sampling, histories: Sequence[Sequence[int]] = ()
) -> np.ndarray:
    """[R, 2] variation and shift between the distributions of two sets of logits [R, V]."""
    found = []
    for i in range(0, len(ours), ROWS):
        a, b, past = ours[i : i + ROWS], theirs[i : i + ROWS], histories[i : i + ROWS]
        tv = (
            pit.distribution_of(a, sampling, past) - pit.distribution_of(b, sampling, past)
        ).abs().sum(-1) / 2
        one, two = ((x.float() / sampling.temperature).log_softmax(-1) for x in (a, b))
        moved = (one - two).abs().masked_fill(torch.maximum(one, two) < np.log(LIKELY), 0).amax(-1)
        found.append(torch.stack([tv.double(), moved.double()], 1).cpu().numpy())
    return np.concatenate(found) if found else np.zeros((0, 2))


def yardstick(
    plain: Plain, texts: Sequence[tuple[list[int], int]], sampling: Sampling, guidance: float | None
) -> dict[str, Any]:
    """What two plain computations of the same texts (ids, start) differ by."""
    found = []
    for i, whole in plain.in_batches(texts, guidance):
        ids, start = texts[i]
        past = [ids[:j] for j in range(start, len(ids))] if sampling.uses_history else []
        found.append(distances(plain.stepped(ids, start, guidance), whole, sampling, past))
    every = np.concatenate(found)
    return {
        "tokens": len(every),
        "variation": float(every[:, 0].mean()),
        "largest_shift": float(every[:, 1].max()),
    }


def strata(depth: np.ndarray, first: np.ndarray) -> dict[str, np.ndarray]:
    """Masks [n] of STRATA. depth: place in the cycle; first: whether it follows the prompt."""
    masks = (first, (depth == 0) & ~first, depth == 1, depth == 2, depth >= 3)
    return dict(zip(STRATA, masks, strict=True))


def passes_json(
    depth: np.ndarray, first: np.ndarray, measured: np.ndarray, plainly: dict[str, Any]
) -> dict[str, Any]:
    """The layer in certificate.json. measured: [n, 2] of `distances`; plainly: `yardstick`."""
    limit = max(MEAN * plainly["variation"], FLOOR)
    shift = max(FAR * plainly["largest_shift"], FLOOR)
    rows, why = [], ""
    for name, mask in strata(depth, first).items():
        if not mask.any():
            continue
        tv, far = measured[mask, 0], int((measured[mask, 1] > shift).sum())
        # a few tokens at a truncation's edge are no bug
        sure = float(tv.mean() - 3 * tv.std() / np.sqrt(len(tv)))
        row = {"stratum": name, "tokens": len(tv), "variation": float(tv.mean()), "far": far}
        if not why and sure > limit:
            why = (
                f"{name}: the verifier's distributions lie {row['variation']:.2g} (mean "
                "total variation) "
                f"from plain decoding's, two plain computations {plainly['variation']:.2g}"
            )
        if not why and far > max(2, STRAYS * len(tv)):
            why = (
                f"{name}: {far} of {len(tv)} tokens have distributions shifted by more than "
                f"{shift:.2g}, "
                f"{FAR:g} times what two plain computations ever differ by"
            )
        rows.append(row)
    return {
        "name": "passes",
        "passed": not why,
        "why": why,
        "tokens": len(measured),
        "variation": float(measured[:, 0].mean()),
        "largest_shift": float(measured[:, 1].max()),
        "far": sum(row["far"] for row in rows),
        "strata": rows,
        "two_plain_computations": plainly,
        "limits": {"variation": limit, "shift": shift},
    }
