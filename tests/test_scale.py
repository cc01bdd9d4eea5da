"""One run, many layouts: micro-batches, processes, packing, stored features and a sharded target change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.schema import compose
from heads import HEADS
from tests.training import TINY, chats
from train import loop
from train.config import EagleRun, EvalConfig, MedusaRun
from train.loop import fit

ROOT = Path(__file__).resolve().parents[1]
SHAPE = {**TINY, "layers": 4}
STEPS, MANY = 6, 100
QUIET = ["eval.parity=0"] if hasattr(EvalConfig(), "parity") else []


def configured(data: Path, out: Path, *more: str) -> Any:
    """A run in float64 on a tiny target; EAGLE-3 when head=eagle3 is among the overrides."""
    eagle = "head=eagle3" in more
    args = ["target=tiny", *(f"target.{k}={v}" for k, v in SHAPE.items()), f"data.path={data}", f"out_dir={out}",
            "data.held_out=0.1", "data.cache=false", f"steps={STEPS}", "batch_size=8", "dtype=float64", "device=cpu",
            "head.draft_vocab=0", "eval.every=0", *QUIET, "save_every=0", "log_every=1", "optim.clip=1.0",
            "optim.lr=3e-3", *more]
    return compose("eagle" if eagle else "medusa", EagleRun if eagle else MedusaRun, args)


def losses(data: Path, out: Path, *more: str) -> dict[int, float]:
    """Losses of a run by step, unrounded."""
    cfg, found, original = configured(data, out, *more), {}, loop._report

    def report(cfg, state, *rest):
        found[state.step] = state.window["loss"][0] / state.window["loss"][1]
        original(cfg, state, *rest)

    loop._report = report
    try:
        fit(cfg, HEADS[cfg.head.kind])
    finally:
        loop._report = original
    return found


MANY_RUNS = """
import json, os, sys
from pathlib import Path
from accelerate import Accelerator, PartialState
from tests.test_scale import losses
data, out, runs = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
found = {}
Accelerator.end_training = lambda self: None  # the process group serves all runs
for name, more in runs.items():
    found[name] = losses(data, out / name, *more)
    assert PartialState().num_processes == 2
(out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
PartialState().destroy_process_group()
"""


def in_two_processes(data: Path, out: Path, runs: dict[str, list[str]]) -> dict[str, dict[int, float]]:
    """Losses of every run by two real processes over gloo; both ranks must tell the same."""
    out.mkdir(parents=True, exist_ok=True)
    script = out / "runs.py"
    script.write_text(MANY_RUNS)
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
         str(29500 + os.getpid() % 2000), str(script), str(data), str(out), json.dumps(runs)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((out / f"rank{r}.json").read_text()) for r in range(2))
    assert one == two
    return {name: {int(k): v for k, v in found.items()} for name, found in one.items()}


def assert_same(one: dict[int, float], other: dict[int, float], name: str = "", within: float = 1e-9) -> None:
    assert list(one) == list(other)
    worst = max(abs(one[k] - other[k]) for k in one)
    assert worst <= within, f"{name}losses differ by {worst:.3g}"
    print(f"{name}losses differ by {worst:.3g}")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return chats(tmp_path / "data.jsonl")


def layouts(data: Path, out: Path, steps: int) -> None:
    """Every layout of one EAGLE-3 run against the plain one."""
    head = ["head=eagle3", "head.steps=2", f"steps={steps}"]
    plain = losses(data, out / "plain", *head)
    assert plain[steps] < plain[1]
    assert_same(plain, losses(data, out / "one-by-one", *head, "micro_batch=1"))
    runs = {"ddp": [*head, "micro_batch=2"], "sharded": [*head, "shard_target=true"],
            "both": [*head, "shard_target=true", "micro_batch=1", "eval.every=3", "eval.prompts=2",
                     "eval.max_new_tokens=4"]}
    for name, found in in_two_processes(data, out / "two", runs).items():
        assert_same(plain, found, f"{name}: ")


def test_layouts_give_the_same_losses(data: Path, tmp_path: Path) -> None:
    layouts(data, tmp_path, STEPS)


@pytest.mark.slow
def test_layouts_give_the_same_losses_over_many_steps(data: Path, tmp_path: Path) -> None:
    layouts(data, tmp_path, MANY)


def test_one_process_cannot_shard(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shard_target: needs several processes"):
        losses(data, tmp_path / "run", "shard_target=true")
