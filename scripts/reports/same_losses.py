"""The losses of an older commit beside today's: the same runs on both, step by step, in float64.

    python -m scripts.reports.same_losses COMMIT

Checks COMMIT out into a temporary folder and trains a tiny target's EAGLE-3 and Medusa heads
there and here: in one process, with two passes a step, on two processes (DDP), packed, and with
the target sharded over two processes. Keys whose defaults moved since are given as they were.
Writes docs/results/same-losses.json.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.common import files

RESULT = files.ROOT / "docs/results/same-losses.json"
STEPS, BAR = 100, 1e-9
# Eight layers: the taps 2, 4 and 5 are three different ones.
KEYS = [
    "target=tiny",
    *(f"target.{k}={v}" for k, v in {"layers": 8, "hidden": 32, "heads": 2}.items()),
    "target.kv_heads=1",
    "target.vocab=260",
    "data.held_out=0.1",
    "data.window=16",
    "data.cache=false",
    f"steps={STEPS}",
    "batch_size=8",
    "dtype=float64",
    "device=cpu",
    "head.draft_vocab=0",
    "eval.every=0",
    "eval.parity=0",
    "save_every=0",
    "log_every=1",
    "optim.lr=3e-3",
]
HEADS = {"eagle3": ("eagle", "EagleRun"), "medusa": ("medusa", "MedusaRun")}
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "two passes a step": (1, ["micro_batch=4"]),
    "packed": (1, ["data.packing=true"]),
    "two processes": (2, ["micro_batch=2"]),
    "target sharded over two": (2, ["micro_batch=2", "shard_target=true"]),
}
# Runs in the tree of either commit: only what both have is used.
CHILD = """
import importlib, json, os, sys
sys.path.insert(0, os.getcwd())
from conf.schema import compose
from heads import HEADS
from train import config, loop
command, schema, out, *keys = sys.argv[1:]
cfg = compose(command, getattr(config, schema), keys)
name = "report" if hasattr(loop, "report") else "_report"
found, told = {}, getattr(loop, name)
def report(first, *rest):
    state = first.state if hasattr(first, "state") else rest[0]
    found[state.step] = state.window["loss"][0] / state.window["loss"][1]
    told(first, *rest)
setattr(loop, name, report)
loop.fit(cfg, HEADS[cfg.head.kind])
assert os.path.dirname(os.path.dirname(os.path.abspath(loop.__file__))) == os.getcwd()
open(f"{out}.{os.environ.get('RANK', 0)}.json", "w").write(json.dumps(found))
"""


def chats(path: Path) -> Path:
    """48 conversations of different lengths."""
    words = ["the", "rider", "goes", "ahead", "of", "a", "slow", "horse"]
    words += ["and", "looks", "back", "along", "the", "road"]
    with path.open("w") as file:
        for i in range(48):
            answer = " ".join(words[(i * 7 + j) % len(words)] for j in range(3 + i % 9))
            turns = [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def losses(tree: Path, kind: str, layout: str, data: Path, out: Path) -> list[float]:
    """The losses of STEPS steps by the code in `tree`, unrounded; every rank's are the same."""
    ranks, more = LAYOUTS[layout]
    out.mkdir(parents=True)
    child = out / "child.py"
    child.write_text(CHILD)
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc_per_node={ranks}"] if launch else []
    keys = [*KEYS, f"head={kind}", f"data.path={data}", f"out_dir={out / 'run'}", *more]
    keys += ["head.steps=3"] if kind == "eagle3" else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    env |= {} if ranks == 1 else {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *launch, str(child), *HEADS[kind], str(out / "losses"), *keys],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{layout}, {kind}, {tree}: {done.stderr[-2000:]}")
    told = [json.loads((out / f"losses.{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one == told[0] for one in told) and len(told[0]) == STEPS
    return list(told[0].values())


def compare(before: Path, after: Path, work: Path) -> list[dict[str, Any]]:
    """Every head in every layout by both trees."""
    data, found = chats(work / "chats.jsonl"), []
    for kind in HEADS:
        for place, layout in enumerate(LAYOUTS):
            old, new = (
                losses(tree, kind, layout, data, work / f"{name}-{kind}-{place}")
                for name, tree in (("before", before), ("after", after))
            )
            apart = [abs(a - b) for a, b in zip(old, new, strict=True)]
            found.append(
                {
                    "head": kind,
                    "layout": layout,
                    "first_loss": [old[0], new[0]],
                    "last_loss": [old[-1], new[-1]],
                    "first_step_apart": apart[0],
                    "largest_apart": max(apart),
                    "same": max(apart) <= BAR,
                }
            )
            print(f"{kind}, {layout}: {max(apart):.2g} apart at most", flush=True)
    return found


def main(commit: str) -> int:
    """Compare, write; exit code 1 where a layout's losses differ by more than BAR."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=files.ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            found = compare(tree, files.ROOT, Path(folder))
        finally:
            git("worktree", "remove", "--force", str(tree))
    report = {
        "command": f"python -m scripts.reports.same_losses {commit}",
        "before": git("rev-parse", "--short", commit),
        "after": git("rev-parse", "--short", "HEAD"),
        "machine": platform.processor() or platform.machine(),
        "steps": STEPS,
        "dtype": "float64",
        "bar": BAR,
        "keys": KEYS,
        "layouts": {name: {"processes": n, "keys": keys} for name, (n, keys) in LAYOUTS.items()},
        "runs": found,
    }
    files.write_json(RESULT, report)
    return 0 if all(run["same"] for run in found) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("give one commit: python -m scripts.reports.same_losses COMMIT")
    raise SystemExit(main(sys.argv[1]))
