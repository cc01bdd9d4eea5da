"""At T = 0 every drafter must write what `none` writes. Where it does not, how close were the
two best logits?

Scoring a tree and scoring one token are different sums in floating point: a near tie may fall
either way. So each first difference is looked up in the target itself: how far below the best
logit either choice is. A few units in the last place are rounding. Where it is more, what
rounding does to such distances in this model and dtype is measured (two plain ways to compute
the same logits, see Plain.rounding): a distance beyond twice that is an error in our
code, and is called so.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from outrider.decode.target import Target
from outrider.heads.names import NONE
from outrider.scripts.scoring.interleaved import Contest, ScoredAnswer, System
from outrider.scripts.scoring.plain import Plain

# Gap, in units in the last place of the larger logit, up to which two evaluation orders may
# disagree unmeasured.
ROUNDING_ULPS = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 64, torch.float64: 64}
LOOKED_UP = 100
PROBED = 4  # prompts on which rounding is measured
SAFETY = 2  # a largest value over so few is no bound


def lossless(contest: Contest, systems: list[System], target: Target) -> dict[str, dict[str, Any]]:
    """Return for each drafter {checked, equal, within_rounding, beyond_rounding, differences:
    [...]} against `none`. measured_rounding: the distance that counts as rounding, where it
    had to be measured, else None."""
    found: dict[str, dict[str, Any]] = {}
    measured: dict[int, float] = {}
    answers: dict[str, dict[tuple[str, int], ScoredAnswer]] = {s.name: {} for s in systems}
    for a in contest.answers:
        answers[a.drafter][a.prompt_id, a.turn] = a
    for system in systems:
        own, baseline = system.target or target, answers[NONE]
        pairs = [(baseline[key], a) for key, a in answers[system.name].items()]
        unequal = [(n, a) for n, a in pairs if n.generation.token_ids != a.generation.token_ids]
        differences = [_difference(n, a, own) for n, a in unequal[:LOOKED_UP]]
        doubtful = [d for d in differences if d["gap"] is not None and not d["within_rounding"]]
        if doubtful and id(own) not in measured:
            prompts = [a.generation.prompt_ids for a in baseline.values()][:PROBED]
            measured[id(own)] = SAFETY * Plain(own).rounding(prompts)
        for d in doubtful:
            d["within_rounding"] = d["gap"] <= measured[id(own)]
        beyond = sum(not d["within_rounding"] for d in differences)
        found[system.name] = {
            "checked": len(pairs),
            "equal": len(pairs) - len(unequal),
            "within_rounding": len(differences) - beyond,
            "beyond_rounding": beyond,
            "not_looked_up": len(unequal) - len(differences),
            "measured_rounding": measured.get(id(own)),
            "differences": differences,
        }
    return found


@torch.inference_mode()
def _difference(none: ScoredAnswer, other: ScoredAnswer, target: Target) -> dict[str, Any]:
    a, b = none.generation.token_ids, other.generation.token_ids
    place = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    found: dict[str, Any] = {"prompt_id": none.prompt_id, "turn": none.turn, "position": place}
    if place >= min(len(a), len(b)):  # one is a prefix of the other: no rounding explains that
        unknown = dict.fromkeys(("none", "other", "margin", "gap", "margin_ulps"))
        return {**found, **unknown, "within_rounding": False}
    ids = torch.tensor([[*none.generation.prompt_ids, *a[:place]]], device=target.device)
    logits = target.model(ids).logits[0, -1].float()
    best = logits.topk(2)
    high, low = best.values.tolist()
    ulp = torch.finfo(target.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(high), 1e-30)))
    # How far below the best either choice is.
    gap = max(high - logits[[a[place], b[place]]].min().item(), 0.0)
    return {
        **found,
        "none": a[place],
        "other": b[place],
        "margin": high - low,
        "gap": gap,
        "margin_ulps": gap / ulp,
        "within_rounding": gap <= ROUNDING_ULPS[target.dtype] * ulp,
    }
