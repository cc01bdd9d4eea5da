"""What a pass of the target costs here beside another checkout: the same tokens in two processes,
by turns, and every bit of the logits compared.

    git worktree add ../before COMMIT && python scripts/lab/pass_pair.py ../before
    python scripts/lab/pass_pair.py . bfloat16,float32   # the other's numbers, and those here

Writes docs/results/pass-pair.json, or pass-numbers.json, in CPU seconds of one thread. Layers
that are not compiled yet are compiled first, which is not counted.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = os.environ.get("CHECKOUT", str(Path(__file__).resolve().parents[2]))

import torch

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree

TOKENS, CONTEXT, TAPS = (1, 2, 4, 8, 16), 200, (2, 15, 27)
DECODED, ROUNDS, REPEATS = 16, 9, 3


class Passes:
    """SmolLM2 behind CONTEXT tokens."""

    def __init__(self, dtype: str) -> None:
        self.target = load_target(TargetConfig(kind="smollm2"), dtype, "cpu")
        self.target.expected_passes = 1 << 20  # so that it pays to compile
        rng = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, 40000, (CONTEXT + 32,), generator=rng)
        self.cache = self.target.new_cache(1, CONTEXT, 32)
        self.target.prefill(self.cache, [self.ids[:CONTEXT]])

    def score(self, tokens: int) -> tuple[float, str]:
        """Seconds of a pass over `tokens` tokens, the last one and a chain behind it, and a digest
        of what it gave."""
        text = self.ids[CONTEXT : CONTEXT + tokens]
        draft = DraftTree.chain(text[None, 1:], torch.tensor([tokens - 1]))
        begin = time.thread_time()
        step = self.target.score(self.cache, text[:1], draft, TAPS)
        seconds = time.thread_time() - begin
        self.cache.truncate([CONTEXT])
        assert step.feats is not None
        found = torch.cat([step.logits.flatten(), step.feats.flatten()])
        return seconds, hashlib.sha256(found.view(torch.int16).numpy().tobytes()).hexdigest()

    def decode(self) -> tuple[float, str]:
        """Seconds of a step of plain decoding, T = 0, and a digest of the tokens."""
        request = Request(self.ids[:20].tolist(), DECODED)
        run = generate(
            self.target, NoDraft(), [request], Sampling(0.0), eos_ids=(), clock=time.thread_time
        )
        tokens = run.generations[0].token_ids
        seconds = (run.timing.total_s - run.timing.prefill_s) / (len(tokens) - 1)
        return seconds, hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


@torch.inference_mode()
def serve() -> None:
    """Answer each line on stdin, a number of tokens (0: decode, -1: peak memory in bytes)."""
    torch.set_num_threads(1)
    passes = Passes(os.environ["DTYPE"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        if (tokens := int(line)) < 0:
            print(json.dumps(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), flush=True)
        elif tokens:
            found = [passes.score(tokens) for _ in range(REPEATS)]
            print(json.dumps([min(found)[0], *sorted({one[1] for one in found})]), flush=True)
        else:
            print(json.dumps(passes.decode()), flush=True)


def compared(other: str, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """Every case, in these dtypes there and here: medians of both and the ratio there / here of
    ROUNDS rounds; low and high leave out one round on either side."""

    def start(checkout: str, dtype: str) -> Any:
        env = {**os.environ, "CHECKOUT": checkout, "PYTHONPATH": checkout, "DTYPE": dtype}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=env
        )

    def said(process: Any, tokens: int | None = None) -> Any:
        if tokens is not None:
            process.stdin.write(f"{tokens}\n")
            process.stdin.flush()
        return json.loads(process.stdout.readline())

    here = str(Path(__file__).resolve().parents[2])
    both = [start(checkout, dtype) for checkout, dtype in zip((other, here), dtypes, strict=True)]
    for process in both:
        said(process)
    found: list[dict[str, Any]] = []
    for tokens in (*TOKENS, 0):
        taken: list[list[Any]] = [[], []]
        for turn in range(ROUNDS + 1):  # the first one warms caches
            for k in (0, 1) if turn % 2 else (1, 0):
                taken[k].append(said(both[k], tokens))
        pairs = list(zip(*(side[1:] for side in taken), strict=True))
        ratios = sorted(there[0] / here[0] for there, here in pairs)
        before, now = (1000 * statistics.median(one[0] for one in side[1:]) for side in taken)
        row = {"case": f"{tokens} tokens" if tokens else "a step of plain decoding"}
        row |= {"there_ms": before, "here_ms": now, "ratio": statistics.median(ratios)}
        row |= {"low": ratios[1], "high": ratios[-2]}
        found.append({**row, "same_bits": all(a[1:] == b[1:] for a, b in pairs)})
        print(json.dumps(found[-1]), flush=True)
    memory = [said(process, -1) for process in both]
    return [*found, {"case": "peak memory, bytes", "there": memory[0], "here": memory[1]}]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        serve()
    else:
        from outrider.scripts.common import files

        numbers = sys.argv[2].split(",") if len(sys.argv) > 2 else ["bfloat16"] * 2
        name = "pass-numbers" if len(sys.argv) > 2 else "pass-pair"
        rows = compared(os.path.abspath(sys.argv[1]), numbers)
        files.write_json(
            files.ROOT / f"docs/results/{name}.json",
            {**files.origin(), "dtypes": numbers, "rows": rows},
        )
