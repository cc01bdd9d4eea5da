"""Whether a sound engine's p-values are uniform, over 200 seeds of 5,000 tokens.

    python scripts/lab/proofs/sound.py   # goes on where it was stopped

The bench of placed.py under the engine's own rule. Writes docs/results/sound-seeds.json when all
seeds are there, and the row "sound_engine" of the reliability figures.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else this folder comes first
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import numpy as np

from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.lab.pages import reliability
from outrider.scripts.lab.proofs.placed import Bench
from outrider.scripts.proofs import uniformity
from outrider.scripts.proofs.uniformity import Test

OUT = files.ROOT / "docs/results/sound-seeds.json"
SEEDS, TOKENS, ALPHA, MOST = 200, 5_000, 1e-3, 2
# the others are bets, which may be rarer than they say, or the smallest of many
UNIFORM = "Kolmogorov-Smirnov, by probability", "chi-square, by probability", "correlation, by id"


def p_values(tests: Sequence[Test]) -> dict[str, float]:
    """Of all tests together ("") and of each that must be uniform."""
    every = {f"{t.name} of {t.stratum}": t.p for t in tests if t.name in UNIFORM}
    return {"": uniformity.overall(tests)} | every


def summary(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """How many of the samples are rejected, and whether the p-values of each test that all of
    them have are uniform over the samples: odd names those that are not, least is the smallest p
    of that question."""
    by_test = defaultdict[str, list[float]](list)
    for row in samples:
        for name, p in row.items():
            by_test[name].append(p)
    together = by_test.pop("")
    full = {name: np.array(p) for name, p in by_test.items() if len(p) == len(samples)}
    every = {name: uniformity.kolmogorov(p)[1] for name, p in full.items()}
    pooled = np.concatenate([*full.values()])
    return {
        "rejected": sum(p < ALPHA for p in together),
        "smallest": min(together),
        "tests": len(every),
        "share_at_most": {
            str(level): round(float((pooled <= level).mean()), 4) for level in (0.5, 0.1, 0.01)
        },
        "least": min(every.values()),
        "odd": [name for name, p in every.items() if p < 1e-3 / len(every)],
    }


def main() -> None:
    """Seed after seed."""
    code = files.code_sha256(("decode", "scripts/proofs"))
    memo = Memo(files.ROOT / "runs/sound-seeds", {"code": code, "tokens": TOKENS})
    bench, known = Bench(), memo.lines("seeds")
    for seed in range(len(known), SEEDS):
        known.append(p_values(bench.sample("traversal", TOKENS, seed).tests()))
        memo.add("seeds", known[-1])
        print(seed, known[-1][""], flush=True)
    found = summary(known)
    together = [round(row[""], 6) for row in known]
    files.write_json(
        OUT, {"alpha": ALPHA, "tokens": TOKENS, **found, "p": together} | files.origin()
    )
    uniform = f"{found['tests'] - len(found['odd'])}/{found['tests']} tests uniform"
    reliability.record(
        "sound_engine",
        what=f"p-values of the sound engine, {SEEDS} seeds of {TOKENS:,} tokens",
        result=f"{found['rejected']} rejected at {ALPHA:g}; {uniform}",
        met=found["rejected"] <= MOST and not found["odd"],
        **found,
    )
    print(found)


if __name__ == "__main__":
    main()
