"""At T = 0 every drafter must write what `none` writes. Where it does not, how close were the two best logits?

Scoring a tree and scoring one token are different sums in floating point: an exact tie may fall either way. So each
first difference is looked up in the target itself, with the gap between its two best logits in units in the last
place; a gap beyond rounding is an error in our code, and is called so.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from decode.target import Target
from scripts.lib.contest import Answer, Contest, Lane

# Gap, in units in the last place of the larger logit, up to which two evaluation orders may disagree.
ROUNDING_ULPS = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 64, torch.float64: 64}
LOOKED_UP = 100


def lossless(contest: Contest, lanes: list[Lane], target: Target) -> dict[str, dict[str, Any]]:
    """Per drafter: {checked, equal, within_rounding, beyond_rounding, differences: [...]} against its own `none`."""
    found: dict[str, dict[str, Any]] = {}
    for lane in lanes:
        baseline = {(a.prompt_id, a.turn): a for a in contest.answers if a.drafter == lane.base}
        pairs = [(baseline[a.prompt_id, a.turn], a) for a in contest.answers if a.drafter == lane.name]
        unequal = [(n, a) for n, a in pairs if n.generation.token_ids != a.generation.token_ids]
        differences = [_difference(n, a, lane.target or target) for n, a in unequal[:LOOKED_UP]]
        beyond = [d for d in differences if not d["within_rounding"]]
        found[lane.name] = {
            "checked": len(pairs),
            "equal": len(pairs) - len(unequal),
            "within_rounding": len(differences) - len(beyond),
            "beyond_rounding": len(beyond),
            "not_looked_up": len(unequal) - len(differences),
            "differences": differences,
        }
    return found


@torch.inference_mode()
def _difference(none: Answer, other: Answer, target: Target) -> dict[str, Any]:
    a, b = none.generation.token_ids, other.generation.token_ids
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    found: dict[str, Any] = {"prompt_id": none.prompt_id, "turn": none.turn, "position": place}
    if place >= min(len(a), len(b)):  # one is a prefix of the other: no rounding explains that
        return {**found, "none": None, "other": None, "margin": None, "margin_ulps": None, "within_rounding": False}
    ids = torch.tensor([[*none.generation.prompt_ids, *a[:place]]], device=target.device)
    logits = target.model(ids).logits[0, -1].float()
    best = logits.topk(2)
    high, low = best.values.tolist()
    ulp = torch.finfo(target.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(high), 1e-30)))
    gap = max(high - logits[[a[place], b[place]]].min().item(), 0.0)  # how far below the best either choice lies
    return {
        **found,
        "none": a[place],
        "other": b[place],
        "margin": high - low,
        "margin_ulps": gap / ulp,
        "within_rounding": gap <= ROUNDING_ULPS[target.dtype] * ulp,
    }
