"""What the tests of a server's answers (server_tests.py) come to: a three-valued verdict, in a
line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.scripts.certificate.server_places import JudgedAnswer, Places, places
from outrider.scripts.certificate.server_tests import (
    TEMPERATURE,
    exponent,
    run_tests,
    together,
)
from outrider.scripts.certificate.uniformity import Test, overall

ALPHA = 1e-3
FEWEST = 400  # judged tokens below which nothing is decided in favour of a server
APART = 1e-2  # p of the fewest answers at a time above which they show nothing
WIDEST = 1.0  # so is nothing where a temperature off by more than this share might pass


@dataclass(frozen=True)
class Measured:
    """A temperature: asked for, and most likely. error: share by which it could be off and surely
    be found. p: of this temperature's own tests."""

    requested: float
    likely: float
    error: float
    p: float


def judged(
    answers: Sequence[JudgedAnswer], best: int, alpha: float = ALPHA, seed: int = 0
) -> dict[str, Any]:
    """verdict ("passed", "rejected", "undecided"), line, and what they rest on, as JSON."""
    known = places(answers, best)
    found = run_tests(answers, known, seed) if len(known.most) else []
    heats, p = measured(known, found, alpha), together(found)
    levels = {
        int(n): overall([t for t in found if t.stratum == f"{n} at a time"])
        for n in np.unique(known.level)
    }
    rejected = p < alpha
    few = len(known.own) < FEWEST or min((h.error for h in heats), default=0) > WIDEST
    verdict = "rejected" if rejected else "undecided" if few else "passed"
    fewest, *others = [*levels.values()] or [1.0]
    differs = rejected and fewest > APART and min(others, default=1.0) < alpha
    batch = "yes" if differs else "no sign of it" if others else "not tested"
    return {
        "verdict": verdict,
        "line": _line(verdict, known, found, heats, p, levels if differs else {}),
        "temperature": [vars(heat) for heat in heats],
        "temperature_honoured": all(heat.p >= alpha for heat in heats) if heats else None,
        "depends_on_the_batch": batch,
        "p": p,
        "p_by_level": levels,
        "alpha": alpha,
        "tokens": len(known.most),
        "judged": len(known.own),
        "beyond": int(known.beyond.sum()),
        "ignored": sorted(known.ignored),
        "tests": [vars(test) for test in found],
    }


def measured(known: Places, found: Sequence[Test], alpha: float) -> list[Measured]:
    """Return every temperature that was asked for."""
    out = []
    heats = list(dict.fromkeys(known.temperature.tolist()))  # as they were asked for
    needed = math.sqrt(2 * math.log(9 * max(len(found), 1) / alpha)) + 2.33
    for heat in heats:
        mask = known.temperature == heat
        b, spread = exponent(known.logs[mask], known.own[mask])
        error = needed / math.sqrt(spread) if spread > 0 else math.inf
        stratum = f"temperature {heat:g}" if len(heats) > 1 else "all tokens"
        some = [t.p for t in found if t.stratum == stratum and t.name == TEMPERATURE]
        out.append(Measured(heat, heat / b, error, min(1.0, len(found) * min(some, default=1.0))))
    return out


def _line(
    verdict: str,
    known: Places,
    found: Sequence[Test],
    heats: Sequence[Measured],
    p: float,
    apart: dict[int, float],
) -> str:
    """Return the verdict in words. apart: p by requests at a time, where it depends on these."""
    requested = " and ".join(f"{heat.requested:g}" for heat in heats) or "nothing"
    levels = ", ".join(f"{n:g}" for n in np.unique(known.level)) or "none"
    lead = f"{len(known.most):,} tokens at temperature {requested}, {levels} at a time"
    likely = " and ".join(f"{heat.likely:.2f}" for heat in heats)
    if verdict == "rejected":
        worst = found[0]
        batch = "".join(f"; {n} at a time p = {of:.2g}" for n, of in apart.items())
        return (
            f"NOT as asked: {worst.name}, {worst.stratum}, p = {worst.p:.2g}{batch}; answers are "
            f"likest those of temperature {likely} ({lead})"
        )
    if verdict == "undecided" and len(known.own) >= FEWEST:
        return f"undecided: {lead}; they leave no choice: a temperature twice as high might pass"
    if verdict == "undecided":
        return f"undecided: {lead}, {len(known.own)} of them judged; {FEWEST} are needed"
    error = max(heat.error for heat in heats)
    return (
        f"as asked: {lead}; measured temperature {likely}, p = {p:.2g}; a temperature off by "
        f"{error:.0%} would be found"
    )
