"""The greedy layer of a certificate: token equality with Hugging Face `generate` at T = 0.

Rounding is measured, not assumed (scripts/scoring/plain.py).
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request
from outrider.decode.target import Target
from outrider.scripts.certificate import transforms
from outrider.scripts.certificate.recorder import recorded
from outrider.scripts.certificate.setup import (
    CHUNK,
    CertificatePlan,
    CertifySetup,
    chunks,
    reference,
)
from outrider.scripts.common.progress import named
from outrider.scripts.scoring.plain import Plain

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
    answers, one of ALONE, are written in a batch of one. name: of what is kept in
    `setup.memo`.
    """
    plan = replace(setup.plan, sampling=setup.plan.greedy)
    together = len(setup.requests) - math.ceil(len(setup.requests) / ALONE)
    batches = chunks(setup.requests[:together], CHUNK * plan.batch_size)
    batches += [[request] for request in setup.requests[together:]]
    write = functools.partial(_written, setup.target, drafter, plan)
    found = setup.memo.each(name, batches, write, named(setup.on_progress, name))
    rows = [row for batch in found for row in batch]
    divergences = []
    for request, row, theirs in zip(setup.requests, rows, setup.references, strict=True):
        if row["tokens"] != theirs:
            alone = reference(setup.plain, [request], plan)[0]
            if row["tokens"] != alone:
                divergences.append(
                    divergence(setup.plain, request, row["tokens"], alone, plan, setup.tie)
                )
    defects = sum(d["kind"] == "defect" for d in divergences)
    other, why = sum(row["not_best"] for row in rows), ""
    if defects:
        why = f"{defects} of {len(rows)} outputs differ from generate beyond rounding"
    if other:
        why = f"{other} emitted tokens are not the best one of the logits they were verified with"
    return {
        "name": "greedy",
        "passed": not why,
        "why": why,
        "prompts": len(rows),
        "tokens": sum(len(row["tokens"]) for row in rows),
        "drafted_tokens": sum(row["drafted"] for row in rows),
        "rounding_ties": len(divergences) - defects,
        "defects": defects,
        "not_the_verifiers_best": other,
        "rounding": setup.gap,
        "tie_margin": setup.tie,
        "divergences": divergences[:SHOWN],
    }


def _written(
    target: Target, drafter: Drafter, plan: CertificatePlan, requests: list[Request]
) -> list[dict[str, Any]]:
    """Return for every answer its tokens, how many were drafted, and how many are not
    the best ones (lowest id among equals, in the decoder's precision) of the logits that
    they were verified against."""
    run, lines = recorded(target, drafter, requests, plan)
    rows = []
    for g, line in zip(run.generations, lines, strict=True):
        kept = torch.stack([logits for _, logits in line])
        ends = range(len(g.prompt_ids), len(g.prompt_ids) + len(line))
        past = [[*g.prompt_ids, *g.token_ids][:end] for end in ends]
        scores = kept if kept.dtype == torch.float64 else kept.float()
        scores = transforms.processed(scores, plan.sampling, past)
        best = (scores == scores.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1).tolist()
        triples = zip(g.token_ids, (token for token, _ in line), best, strict=False)
        good = sum(own == token == top for own, token, top in triples)
        bad = len(g.token_ids) - good
        rows.append({"tokens": g.token_ids, "drafted": sum(g.from_draft), "not_best": bad})
    return rows


def divergence(
    plain: Plain,
    request: Request,
    ours: list[int],
    theirs: list[int],
    plan: CertificatePlan,
    tie: float,
) -> dict[str, Any]:
    """Return the first place where two answers differ, {prompt, position, ours, theirs,
    margin, kind}: "rounding tie" within a distance of `tie`, else "defect"."""
    pairs = list(zip(ours, theirs, strict=False))
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))
    a, b, margin = None, None, None
    if at < len(pairs):  # else one stopped where the other went on
        a, b = pairs[at]
        ids = [*request.prompt, *ours[:at], a]
        logits = plain.logits(ids, len(request.prompt), plan.guidance)[-1:]
        scores = transforms.processed(logits.double(), plan.sampling, [ids[:-1]])[0]
        margin = float(scores.max() - torch.minimum(scores[a], scores[b]))
    return {
        "prompt": request.id,
        "position": at,
        "ours": a,
        "theirs": b,
        "margin": margin,
        "kind": "rounding tie" if margin is not None and margin <= tie else "defect",
    }
