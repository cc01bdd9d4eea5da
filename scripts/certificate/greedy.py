"""The greedy layer of a certificate: token equality with Hugging Face `generate` at T = 0.

Rounding is measured, not assumed (scripts/scoring/plain.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from outrider.decode.drafters import Drafter
from outrider.decode.engine import Generation, Request
from outrider.decode.sampling import Sampling
from outrider.scripts.certificate import transforms
from outrider.scripts.certificate.recorder import Recorded, recorded
from outrider.scripts.certificate.setup import CHUNK, CertifySetup, reference

ALONE = 8  # one prompt of so many is decoded by itself: a single row takes ways of its own
SHOWN = 50  # divergences in certificate.json


def greedy_layer(setup: CertifySetup, drafter: Drafter, name: str = "greedy") -> dict[str, Any]:
    """Return token equality with the reference, every first divergence classified, as
    certificate.json holds it.

    A divergence is a rounding tie when a plain pass puts the two tokens and the best one
    within `setup.tie` of each other; anything else is a defect. An answer that differs from
    the reference's is generated again by itself first, since left padding moves the last
    bits of a batch. Besides, and whatever rounding does, every emitted token must be the
    best one (lowest id among equals) of the logits it was verified against. The last
    answers, one of ALONE, are written in a batch of one. name: in the progress.
    """
    plan = replace(setup.plan, sampling=setup.plan.greedy)
    together = len(setup.requests) - math.ceil(len(setup.requests) / ALONE)
    size = CHUNK * plan.batch_size
    batches = [setup.requests[i : min(i + size, together)] for i in range(0, together, size)]
    batches += [[request] for request in setup.requests[together:]]
    written: list[Generation] = []
    other = 0
    for batch in batches:
        setup.on_progress(len(written), len(setup.requests), name)
        run, lines = recorded(setup.target, drafter, batch, plan)
        written += run.generations
        pairs = zip(run.generations, lines, strict=True)
        other += sum(not_best(g, line, plan.sampling) for g, line in pairs)
    setup.on_progress(len(written), len(written), name)
    divergences = []
    for request, g, theirs in zip(setup.requests, written, setup.references, strict=True):
        if g.token_ids != theirs:
            alone = reference(setup.plain, [request], plan)[0]
            if g.token_ids != alone:
                divergences.append(divergence(setup, request, g.token_ids, alone))
    defects, why = sum(d["kind"] == "defect" for d in divergences), ""
    if defects:
        why = f"{defects} of {len(written)} outputs differ from generate beyond rounding"
    if other:
        why = f"{other} emitted tokens are not the best one of the logits they were verified with"
    return {
        "name": "greedy",
        "passed": not why,
        "why": why,
        "prompts": len(written),
        "tokens": sum(len(g.token_ids) for g in written),
        "drafted_tokens": sum(sum(g.from_draft) for g in written),
        "cycles_with_a_draft": sum(c.proposed > 0 for g in written for c in g.cycles),
        "rounding_ties": len(divergences) - defects,
        "defects": defects,
        "not_the_verifiers_best": other,
        "rounding": setup.gap,
        "tie_margin": setup.tie,
        "divergences": divergences[:SHOWN],
    }


def not_best(g: Generation, line: Recorded, sampling: Sampling) -> int:
    """Return how many tokens of an answer are not the best ones (lowest id among equals, in
    the decoder's precision) of the logits that they were verified against."""
    scores = torch.stack([logits for _, logits in line])
    scores = scores if scores.dtype == torch.float64 else scores.float()
    text, start = [*g.prompt_ids, *g.token_ids], len(g.prompt_ids)
    past = [text[: start + end] for end in range(len(line))]
    scores = transforms.processed(scores, sampling, past)
    best = (scores == scores.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1).tolist()
    triples = zip(g.token_ids, (token for token, _ in line), best, strict=False)
    return len(g.token_ids) - sum(own == token == top for own, token, top in triples)


def divergence(
    setup: CertifySetup, request: Request, ours: list[int], theirs: list[int]
) -> dict[str, Any]:
    """Return the first place where two greedy answers differ, {prompt, position, ours, theirs,
    margin, kind}: "rounding tie" within a distance of `setup.tie`, else "defect"."""
    pairs = list(zip(ours, theirs, strict=False))
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))
    a, b, margin = None, None, None
    if at < len(pairs):  # else one stopped where the other went on
        a, b = pairs[at]
        ids = [*request.prompt, *ours[:at], a]
        logits = setup.plain.logits(ids, len(request.prompt), setup.plan.guidance)[-1:]
        scores = transforms.processed(logits.double(), setup.plan.greedy, [ids[:-1]])[0]
        margin = float(scores.max() - torch.minimum(scores[a], scores[b]))
    return {
        "prompt": request.id,
        "position": at,
        "ours": a,
        "theirs": b,
        "margin": margin,
        "kind": "rounding tie" if margin is not None and margin <= setup.tie else "defect",
    }
