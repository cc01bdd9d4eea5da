"""The exact layers as figures: what scripts/lab/prove.py runs and docs/results/lossless.json
holds. No model is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from outrider.conf.rules import SEEDS
from outrider.decode.cost import Price
from outrider.decode.drafters import DraftModel, NoDraft
from outrider.decode.grow import Form
from outrider.decode.sampling import Sampling
from outrider.decode.tree import TreeShape
from outrider.decode.verify import RULES, walk
from outrider.decode.wrapped import Adaptive
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress, named
from outrider.scripts.lab.proofs.confident import ConfidentTable
from outrider.scripts.proofs.controls.catalogue import controls, measured
from outrider.scripts.proofs.engine_distribution import (
    TableDrafter,
    counted_chain,
    engine_distribution,
    toy_model,
)
from outrider.scripts.proofs.enumerator import SCHEMES, Case, enumerate_case

BLOCK = 50  # cases between two saves


def enumeration(count: int, seed: int, memo: Memo, on_progress: OnProgress) -> dict[str, Any]:
    """Exact distribution of one verification on random worlds (up to 5 tokens, 8 nodes),
    every branch walked, both rules.
    """

    def block(number: int) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % SEEDS)
        return [_case(Case.random(generator, max_nodes=5, max_vocab=5)) for _ in range(BLOCK)]

    numbers = range(-(-count // BLOCK))
    blocks = memo.each("enumeration", numbers, block, named(on_progress, "enumeration"))
    rows = [row for block in blocks for row in block][:count]
    kinds: dict[str, Any] = {}
    for kind in sorted({r["kind"] for r in rows}):
        mine = [r for r in rows if r["kind"] == kind]
        kinds[kind] = {
            "cases": len(mine),
            "max_error": max(r["error"] for r in mine),
            "accepted_rejection": sum(r["rejection"] for r in mine) / len(mine),
            "accepted_traversal": sum(r["traversal"] for r in mine) / len(mine),
        }
    worse = [r for r in rows if r["traversal"] < r["rejection"] - 1e-12]
    loss = max((r["rejection"] - r["traversal"] for r in worse), default=0.0)
    less = {
        "chains": sum("chain" in r["kind"] for r in worse),
        "trees": sum("tree" in r["kind"] for r in worse),
    }
    return {
        "cases": len(rows),
        "branches": sum(r["leaves"] for r in rows),
        "max_error": max(r["error"] for r in rows),
        "limit": 1e-12,
        "max_vocab": max(r["vocab"] for r in rows),
        "max_nodes": max(r["nodes"] for r in rows),
        "kinds": kinds,
        "traversal_accepts_less": {**less, "largest": loss},
        "settings": dict(Counter(r["settings"] for r in rows)),
    }


def _case(case: Case) -> dict[str, Any]:
    found = {name: enumerate_case(case, rule) for name, rule in RULES.items()}
    errors = [o.error for o in found.values()]
    if case.scheme == "top":
        errors.append(enumerate_case(case, walk).error)
    chain = all(not any(p) for p in case.shape.paths)
    s = case.sampling
    offs = {"top_k": 0, "top_p": 1, "min_p": 0}
    words = [
        f"T={s.temperature:g}",
        *(f"{k}={getattr(s, k):g}" for k, off in offs.items() if getattr(s, k) != off),
    ]
    return {
        "kind": f"{case.scheme} {'chain' if chain else 'tree'}",
        "vocab": case.vocab,
        "nodes": len(case.shape),
        "error": max(errors),
        "leaves": sum(o.leaves for o in found.values()),
        "settings": " ".join(words),
        **{name: o.accepted for name, o in found.items()},
    }


TREE = TreeShape.of([(0,), (1,), (0, 0)])
AT_A_PRICE = {
    "chain": Form.chain(2, Price(0.2, 0.4)),
    "drawn tree": Form("tree", 2, len(TREE), TREE, price=Price(0.15, 0.3)),
}


def engine(memo: Memo, on_progress: OnProgress) -> dict[str, Any]:
    """Exact distribution of the whole loop (prefill, drafting, verification, commit, stopping): two
    layers, fp64, 8 tokens.
    """
    toys: dict[str, tuple[Callable[[], Any], TreeShape | None]] = {
        "none": (NoDraft, None),
        "draft model, sampled chain": (lambda: DraftModel(toy_model(8, seed=5, layers=1), 2), None),
        **{
            f"tree, {scheme}": (lambda scheme=scheme: TableDrafter(TREE, scheme, 8), TREE)  # type: ignore[misc]
            for scheme in SCHEMES
        },
        "adaptive chain": (lambda: Adaptive(counted_chain(8), cost=0.27), TreeShape.chain(2)),
        **{
            f"{name} at a price": (lambda form=form: ConfidentTable(form, 8), form.static)  # type: ignore[misc]
            for name, form in AT_A_PRICE.items()
        },
    }
    distributions = {
        "T=1": (Sampling(1.0), None),
        "T=0.8 top_p=0.9": (Sampling(0.8, top_p=0.9), None),
        "T=1 repetition_penalty=1.3": (Sampling(1.0, repetition_penalty=1.3), None),
        "T=1 guidance=1.5": (Sampling(1.0), 1.5),
        "T=0": (Sampling(0.0), None),
    }

    def run(one: tuple[str, str, str]) -> dict[str, Any]:
        toy, distribution, rule = one
        (make, shape), (sampling, guidance) = toys[toy], distributions[distribution]
        found = engine_distribution(
            toy_model(), make(), [3, 1, 4], 3, sampling, rule, shape, guidance
        )
        return {"drafter": toy, "law": distribution, "verify": rule, **asdict(found)}

    work = [
        (t, distribution, rule) for t in toys for distribution in distributions for rule in RULES
    ]
    rows = memo.each("engine", work, run, named(on_progress, "engine"))
    return {
        "max_error": max(r["error"] for r in rows),
        "limit": 1e-9,
        "runs": len(rows),
        "vocab": 8,
        "length": 3,
        "branches": sum(r["branches"] for r in rows),
        "rows": rows,
    }


def negative_controls(memo: Memo, on_progress: OnProgress) -> dict[str, Any]:
    """Known wrong code, what its layer measures on it and on the correct code."""
    shown = ("name", "layer", "seen", "rejected", "measured", "correct_code", "limit")
    found = measured(controls(), memo, "controls", on_progress)
    rows = [{key: row[key] for key in shown} for row in found]
    return {"controls": len(rows), "rejected": sum(r["rejected"] for r in rows), "rows": rows}
