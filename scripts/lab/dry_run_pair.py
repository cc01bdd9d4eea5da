"""The dry run's time of a step beside that of a real run of two ranks on this CPU, by turns.

    python scripts/lab/dry_run_pair.py [out=FILE] [turns=N]

First two processes at a time measure this CPU (products, streams of memory, one small
operation, an exchange) with sizes of their own; from these figures, the target's config and
the lengths of the data the dry run predicts a step. Then `accelerate launch` makes that run
with two ranks. Nothing of the run's own time enters the prediction. Figures and steps are
taken twice: by the clock, which on a machine that does other work says little, and in CPU
time, where a step lasts as long as that of the rank which spends most. Writes
docs/results/dry-run-pair.json.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from outrider.conf.schema import compose
from outrider.scripts.cli import Verb, launched
from outrider.scripts.common import files
from outrider.scripts.extra.cluster.config import DryRunConfig
from outrider.scripts.extra.cluster.plan import plan

ROOT = Path(__file__).resolve().parents[2]
RANKS, ROWS, BATCH, EPOCHS = 2, 128, 16, 2
CLOCKS = ("wall", "cpu")
KEYS = [
    *("target=smollm2", "head=eagle3", "head.norm_before_fc=true", "head.norm_output=true"),
    *(f"batch_size={BATCH}", "micro_tokens=2048", "data.max_length=512", "data.held_out=0"),
    *("head.draft_vocab=8192", "eval.every=0", "eval.parity=0", "save_every=0", "log_every=1"),
]
WHILE = 0.4  # seconds of every figure
SHAPES = ((512, 512, 512), (1024, 1024, 1024), (2048, 512, 2048))
ELEMENTS = 1 << 20
EXCHANGED = 4 << 20  # float32 numbers
TEXT = "a the of to and in is it you that for on with as this be are can your have will from"


def rate(once: Callable[[], Any], work: float, times: int = 0) -> tuple[float, float]:
    """Units of work a second of the clock and of this process's CPU time, `work` each time.
    times: how often, 0: for a while."""
    once()
    count, began, spent = 0, time.perf_counter(), time.process_time()
    took = lambda: time.perf_counter() - began
    while took() < WHILE and not times or count < (times or 3):
        once()
        count += 1
    return work * count / took(), work * count / max(time.process_time() - spent, 1e-9)


def facts(out: Path) -> None:
    """In each of the processes at the same time: what this CPU reaches, as a file for gpu=."""
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    state, kind = PartialState(cpu=True), torch.bfloat16
    torch.set_num_threads(1)
    pairs = [(torch.randn(m, k).to(kind), torch.randn(n, k).to(kind)) for m, k, n in SHAPES]
    work = sum(2.0 * m * k * n for m, k, n in SHAPES)
    state.wait_for_everyone()
    flops = rate(lambda: [torch.nn.functional.linear(a, b) for a, b in pairs], work)

    x, y = (torch.randn(ELEMENTS).to(kind) for _ in range(2))
    rows, size = x.view(-1, 8192), 2.0 * ELEMENTS
    streams: list[tuple[Callable[[], Any], float]] = [
        *((lambda: x + y, 3 * size), (lambda: x * y, 3 * size), (lambda: x.clone(), 2 * size)),
        *((lambda: torch.nn.functional.silu(x), 2 * size), (lambda: x.exp(), 2 * size)),
        *((lambda: x.float(), 3 * size), (lambda: rows.sum(-1), size)),
        (lambda: rows.softmax(-1), 2 * size),
    ]
    state.wait_for_everyone()
    paces = [rate(once, moved) for once, moved in streams]
    few = torch.ones(4)
    launch = rate(lambda: few + few, 1)
    gradient = torch.ones(EXCHANGED)
    state.wait_for_everyone()
    moved = 2 * (RANKS - 1) / RANKS * 4 * EXCHANGED
    link = rate(lambda: dist.all_reduce(gradient), moved, 12)
    mine = []
    for clock in range(len(CLOCKS)):
        stream = statistics.harmonic_mean([pace[clock] for pace in paces])
        mine.append([flops[clock], stream, 1 / launch[clock], link[clock]])
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, mine)
    if state.is_main_process:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / RANKS
        for clock, name in enumerate(CLOCKS):
            each = zip(*(one[clock] for one in found), strict=True)
            mean = map(statistics.mean, each)
            named = dict(zip(("flops", "bandwidth", "launch", "link"), mean, strict=True))
            files.write_json(
                out / f"{name}.json", {"name": "cpu-measured", "memory": memory, **named}
            )
    state.destroy_process_group()


def write_chats(path: Path) -> None:
    """Chats of log-normal lengths."""
    draw, words = random.Random(0), TEXT.split()
    rows = []
    for _ in range(ROWS):
        count = int(180 * math.exp(draw.gauss(-0.18, 0.6)))
        question, answer = (" ".join(draw.choices(words, k=k)) for k in (12, max(4, count)))
        turns = [("user", question), ("assistant", answer)]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    files.write_jsonl(path, rows)


def run(file: Path, words: list[str], log: Path) -> None:
    """Two ranks on this CPU. Raises SystemExit with the end of what they said."""
    command = launched(Verb(file, ""), RANKS, words)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as said:
        code = subprocess.run(command, stdout=said, stderr=said, env=environment).returncode
    if code:
        raise SystemExit(f"{file.name} ended with {code}:\n{log.read_text()[-2000:]}")


def noted(folder: Path, words: list[str]) -> None:
    """A rank of the run, which notes the seconds of its steps."""
    from outrider.train import loop
    from outrider.train.eagle import main as train

    plain, mine = loop._count_step, folder / f"rank{os.environ['RANK']}"

    def counted(run: Any, shared: Any, before: tuple[float, float]) -> None:
        took = time.perf_counter() - before[0], time.process_time() - before[1]
        with mine.open("a") as file:
            file.write(json.dumps(took) + "\n")
        plain(run, shared, before)

    loop._count_step = counted
    train(words)


def measured(folder: Path) -> dict[str, Any]:
    """Of the steps of the last pass over the data: seconds by the clock, CPU seconds of the
    rank that spends most, and by how much that is more than the mean of the ranks."""
    ranks = []
    for file in sorted(folder.glob("rank*")):
        steps = [json.loads(line) for line in file.read_text().splitlines()]
        ranks.append(steps[-(ROWS // BATCH) :])
    assert len(ranks) == RANKS and len(ranks[0]) == ROWS // BATCH
    together = list(zip(*ranks, strict=True))
    wall = statistics.mean(max(wall for wall, _ in step) for step in together)
    most = statistics.mean(max(cpu for _, cpu in step) for step in together)
    mean = statistics.mean(cpu for step in together for _, cpu in step)
    found = {"wall": wall, "cpu": most, "slowest_rank": most / mean, "ranks": ranks}
    for file in folder.glob("rank*"):
        file.unlink()
    return found


def turn(folder: Path, number: int) -> dict[str, Any]:
    """Measure, predict, run."""
    data, out = folder / "chats.jsonl", folder / f"run{number}"
    run(Path(__file__).resolve(), ["facts", str(folder)], folder / "facts.log")
    keys = [*KEYS, f"data.path={data}", f"steps={EPOCHS * (ROWS // BATCH)}"]
    speeds = [
        plan(compose("validate", DryRunConfig, [*keys, "gpus=2", f"gpu={folder / name}.json"]))[
            "speed"
        ]
        for name in CLOCKS
    ]
    run(Path(__file__).resolve(), ["run", str(folder), *keys, f"out_dir={out}"], folder / "log")
    real = measured(folder)
    ratio = {
        name: speed["step_seconds"] / real[name] for name, speed in zip(CLOCKS, speeds, strict=True)
    }
    figures = ", ".join(
        f"{name} predicted {speed['step_seconds']:.3f} s, measured {real[name]:.3f} s "
        f"({ratio[name] - 1:+.1%})"
        for name, speed in zip(CLOCKS, speeds, strict=True)
    )
    print(f"turn {number}: {figures}", flush=True)
    shown = ("step_seconds", "parts", "padding", "slowest_rank", "passes_a_rank")
    return {
        "facts": {name: json.loads((folder / f"{name}.json").read_text()) for name in CLOCKS},
        "predicted": {n: {k: s[k] for k in shown} for n, s in zip(CLOCKS, speeds, strict=True)},
        "measured": real,
        "ratio": ratio,
    }


def main() -> None:
    """So many turns more; the JSON is written after each, and goes on where it stopped."""
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    out = Path(given.get("out", ROOT / "docs/results/dry-run-pair.json"))
    known = json.loads(out.read_text()) if out.is_file() else {}
    turns: list[dict[str, Any]] = known["turns"] if known.get("keys") == KEYS else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chats(folder / "chats.jsonl")
        for number in range(len(turns) + 1, len(turns) + int(given.get("turns", 3)) + 1):
            turns.append(turn(folder, number) | {"load": os.getloadavg()})
            ratio = {k: statistics.median(one["ratio"][k] for one in turns) for k in CLOCKS}
            about = {"keys": KEYS, "ranks": RANKS, "rows": ROWS, "epochs": EPOCHS}
            files.write_json(out, {**files.origin(), **about, "ratio": ratio, "turns": turns})
    print(f"predicted over measured, median of {len(turns)} turns: {ratio}; {out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["facts"]:
        facts(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["run"]:
        noted(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
