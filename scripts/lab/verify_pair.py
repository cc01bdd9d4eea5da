"""What verification alone costs here beside another checkout: the same drafts in two processes, by
turns, in CPU seconds of one thread.

    git worktree add ../before b78a049 && python scripts/lab/verify_pair.py ../before

Writes docs/results/verify-pair.json. Shape letters: B rows, N nodes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = os.environ.get("CHECKOUT", str(Path(__file__).resolve().parents[2]))

import torch

from outrider.decode import sampling as other
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree, Proposal, TreeShape
from outrider.decode.verify import verify

# The other checkout may be of version 0.1, which called it by another name.
Distribution = getattr(other, "Distribution", None) or other.Law  # type: ignore[attr-defined]
VOCAB, NARROW, ROUNDS, REPEATS = 49152, 8192, 11, 6
WIDE = [
    (0,),
    (1,),
    (2,),
    (3,),
    (0, 0),
    (0, 1),
    (0, 2),
    (1, 0),
    (1, 1),
    (2, 0),
    (0, 0, 0),
    (0, 0, 1),
]
WIDE += [(0, 1, 0), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)]
MORE = [
    (3, 0),
    (2, 1),
    (0, 2, 0),
    (1, 0, 0, 0),
    (0, 0, 1, 0),
    (0, 1, 0, 0),
    (0,) * 5,
    (0, 0, 0, 0, 1),
]
SHAPES = {"chain of 4": TreeShape.chain(4), "16 nodes": TreeShape.of(WIDE)}
SHAPES["24 nodes"] = TreeShape.of(WIDE + MORE)
# how: is drawn, draft vocabulary, sampling, rule
HOW: dict[str, tuple[bool, int, Sampling, str]] = {
    "T = 0": (False, VOCAB, Sampling(0.0), "traversal"),
    "T = 1, deterministic": (False, VOCAB, Sampling(1.0), "traversal"),
    "T = 1, drawn": (True, VOCAB, Sampling(1.0), "traversal"),
    "T = 1, drawn from 8k tokens": (True, NARROW, Sampling(1.0), "traversal"),
    "T = 1, top-p 0.9, drawn": (True, VOCAB, Sampling(1.0, top_p=0.9), "traversal"),
    "T = 1, drawn, rejection": (True, VOCAB, Sampling(1.0), "rejection"),
}


def drafted(shape: TreeShape, rows: int, drawn: bool, known: int) -> tuple[torch.Tensor, DraftTree]:
    """Logits [B, N + 1, VOCAB] of a target, and a draft by somebody who sees them through noise."""
    g = torch.Generator().manual_seed(0)
    n, parents = len(shape), shape.parents(torch.device("cpu"))[0]
    logits = 3 * torch.randn(rows, n + 1, VOCAB, generator=g)
    ids = torch.randperm(VOCAB, generator=g)[:known].sort().values
    probs = (logits + torch.randn(logits.shape, generator=g))[..., ids].softmax(-1)
    left, tokens = probs.clone(), torch.zeros(rows, n, dtype=torch.int64)
    for node, above in enumerate(parents.tolist()):
        some = left[:, above + 1]
        place = torch.multinomial(some, 1, generator=g) if drawn else some.argmax(-1, keepdim=True)
        some.scatter_(1, place, 0.0)
        tokens[:, node] = ids[place[:, 0]]
    if not drawn:
        return logits, DraftTree.static(shape, tokens)
    proposal = Proposal(probs, (parents + 1).expand(rows, n), None if known == VOCAB else ids)
    return logits, DraftTree.static(shape, tokens, None, torch.ones_like(tokens).bool(), proposal)


def serve() -> None:
    """Answer each case on stdin, [shape, rows, how], with the CPU seconds of every repetition."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, rows, how = json.loads(line)
        drawn, known, sampling, rule = HOW[how]
        logits, tree = drafted(SHAPES[name], rows, drawn, known)
        seconds = []
        for cycle in range(ROUNDS * REPEATS + 3):  # the first ones warm caches
            distribution, rng = (
                Distribution(sampling, logits, tree),
                Rng(0, torch.arange(rows), torch.full((rows,), cycle)),
            )
            rng.reserve(len(SHAPES[name]))
            with torch.inference_mode():
                begin = time.thread_time()
                verify(tree, distribution, rng, rule)
                seconds.append(time.thread_time() - begin)
            if cycle >= 2 and (cycle - 2) % REPEATS == 0:
                print(json.dumps(seconds[-REPEATS:]), flush=True)
                sys.stdin.readline()


def compared(other: str) -> list[dict[str, Any]]:
    """Every case: medians of both, and the ratio here / there of ROUNDS rounds."""

    def start(checkout: str) -> Any:
        env = {**os.environ, "CHECKOUT": checkout, "PYTHONPATH": checkout}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=env
        )

    both, found = [start(other), start(str(Path(__file__).resolve().parents[2]))], []
    for name, rows, how in [(s, b, h) for s in SHAPES for b in (1, 4) for h in HOW]:
        for one in both:
            one.stdin.write(json.dumps([name, rows, how]) + "\n")
        taken: list[list[float]] = [[], []]
        for turn in range(ROUNDS + 1):
            for k in (0, 1) if turn % 2 else (1, 0):
                both[k].stdin.write("\n" if turn else "")
                both[k].stdin.flush()
                taken[k].append(statistics.median(json.loads(both[k].stdout.readline())))
        for one in both:
            one.stdin.write("\n")
            one.stdin.flush()
        ratios = sorted(b / a for a, b in zip(taken[0][1:], taken[1][1:], strict=True))
        there, here = (1000 * statistics.median(t[1:]) for t in taken)
        row = {"shape": name, "rows": rows, "how": how, "there_ms": there, "here_ms": here}
        found.append(
            {**row, "ratio": statistics.median(ratios), "low": ratios[1], "high": ratios[-2]}
        )
        print(
            f"{name:10} {rows} {how:28} {there:7.3f} {here:7.3f} {found[-1]['ratio']:.3f}",
            flush=True,
        )
    return found


if __name__ == "__main__":
    if len(sys.argv) < 2:
        serve()
    else:
        from outrider.scripts.common import files

        report = {**files.origin(), "rows": compared(os.path.abspath(sys.argv[1]))}
        Path("docs/results/verify-pair.json").write_text(json.dumps(report, indent=1) + "\n")
