"""A new GPU's first ten minutes: what was predicted of it, run and measured.

    python scripts/doctor.py first_gpu

Steps, each a part of the JSON: attention kernels beside plain operations, a short training run,
its peak of memory beside the predictions, decoding beside float32. "confirmed" there names the
predictions that this machine bears out; nothing is confirmed on a CPU, where the same steps show
that they run.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.conf.errors import UserError, first_line, last_line
from outrider.conf.jsonl import records
from outrider.conf.schema import compose, entry
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import load_head
from outrider.scripts.common import files
from outrider.scripts.extra.config import FirstConfig
from outrider.scripts.machine import kernels, look
from outrider.train.begin import measured
from outrider.train.measure import memory
from outrider.train.runs import EagleRun
from outrider.train.texts.batches import load_rows

NEAR = 0.05  # a prediction within that share of what was measured is confirmed
TIES = 3.0  # times the rounding of a logit: below that two tokens are as good
TARGETS = {
    "cpu": ("hidden=64", "layers=2", "heads=4", "kv_heads=2", "vocab=320", "context=1024"),
    # Llama-3.2-1B's width, depth and heads; a vocabulary that a byte tokenizer still makes fast
    "cuda": ("hidden=2048", "layers=16", "heads=32", "kv_heads=8", "vocab=32768", "context=4096"),
}
SIZES = {  # length of a row in tokens, rows of a step, rows of a pass, EAGLE's steps, rows
    "cpu": (256, 4, 2, 3, 48),
    "cuda": (2048, 16, 4, 7, 400),
}
SENTENCE = "the rider goes ahead of a slow horse and looks back along"
WORDS = SENTENCE.split()


@entry("first_gpu", FirstConfig)
def main(cfg: FirstConfig) -> int:
    """All steps, then OUT; 1 when a step found something wrong; one that fails does not stop
    the others.

    Raises UserError for a GPU that is not there and keys that train/eagle.py refuses.
    """
    device, out = look.usable(cfg.device), Path(cfg.out)
    work = Path(cfg.work)
    keys = training_keys(cfg, device, work)
    run_cfg: Any = compose("eagle", EagleRun, keys)
    shutil.rmtree(work / "run", ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    if "data.path=" not in " ".join(cfg.keys):
        made_up_chats(work / "data.jsonl", *SIZES[_kind(device)][::4])
    found: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": files.command(),
        "environment": files.environment(device),
        "device": device,
        "keys": keys,
    }
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("kernels", lambda: kernels_step(device, cfg.dtype)),
        ("prediction", lambda: prediction_step(run_cfg)),
        ("training", lambda: training_step(keys, work / "run")),
        ("memory", lambda: memory_step(found)),
        ("decoding", lambda: decoding_step(run_cfg, work / "run", device, cfg)),
    ]
    threads = torch.get_num_threads()
    if device == "cpu":  # so small that further threads would only wait for each other
        torch.set_num_threads(1)
    try:
        for name, step in steps:
            found[name] = _timed(step)
            _say(name, found[name])
            _free()
    finally:
        torch.set_num_threads(threads)
    found["confirmed"] = confirmed(found)
    files.write_json(out, found)
    failed = [name for name, _ in steps if not found[name]["passed"]]
    print(f"confirmed: {', '.join(found['confirmed']) or 'nothing, this is no GPU'}")
    print(f"{out}: {', '.join(failed) + ' failed' if failed else 'every step passed'}", flush=True)
    return 1 if failed else 0


def _timed(step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a step found and its seconds; of one that fails, why."""
    start = time.perf_counter()
    try:
        found = step()
    except (UserError, RuntimeError, OSError, ValueError, KeyError) as error:
        found = {"passed": False, "problem": first_line(error)}
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def _kind(device: str) -> str:
    """Of TARGETS and SIZES."""
    return "cuda" if device.startswith("cuda") else "cpu"


def training_keys(cfg: FirstConfig, device: str, work: Path) -> list[str]:
    """The command line of the run, after train/eagle.py; the user's keys come last."""
    kind = _kind(device)
    length, batch, micro, steps, _ = SIZES[kind]
    own = any(key.partition("=")[0].lstrip("+") in ("target", "experiment") for key in cfg.keys)
    # A spread as that of trained weights: the smaller the wider the model is.
    spread = f"target.init_std={0.2 if kind == 'cpu' else 0.04}"
    tiny = [] if own else ["target=tiny", *(f"target.{k}" for k in TARGETS[kind]), spread]
    return [
        *tiny,
        f"data.path={work / 'data.jsonl'}",
        f"data.max_length={length}",
        "data.held_out=0.1",
        "data.cache=false",
        f"batch_size={batch}",
        f"micro_batch={micro}",
        f"head.steps={steps}",
        "eval.every=0",
        "eval.parity=2",
        "save_every=0",
        "log_every=1",
        f"optim.lr={1e-3 if kind == 'cpu' else 2e-4}",
        *cfg.keys,
        f"out_dir={work / 'run'}",
        f"steps={cfg.steps}",
        f"profile=[{cfg.steps - 1},{cfg.steps}]",
        f"device={device}",
        f"dtype={cfg.dtype}",
        f"seed={cfg.seed}",
    ]


def made_up_chats(path: Path, length: int, rows: int) -> None:
    """A chat file whose rows are about `length` bytes, so that passes are full."""
    with path.open("w") as file:
        for i in range(rows):
            words = (WORDS[(i * 7 + j * (1 + i % 5)) % len(WORDS)] for j in range(length // 4))
            answer = " ".join(words)[: length - 90 - 7 * (i % 9)]
            turns = [
                {"role": "user", "content": f"question {i}: where does the road go?"},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


# The steps
# -------------------------------------------------------------------------------------------


def kernels_step(device: str, dtype: str) -> dict[str, Any]:
    """Every attention kernel beside plain operations in float64."""
    large = device.startswith("cuda")
    rows = [c for kind in {"float32", dtype} for c in kernels.compared(device, kind, large)]
    return {
        "passed": all(row.passed for row in rows),
        "path": kernels.attention_path(device, dtype),
        "compared": [row.to_json() for row in rows],
    }


def prediction_step(cfg: Any) -> dict[str, Any]:
    """The peak of the run, from two small passes, before there is one."""
    cfg, target, head, plan = measured(cfg)
    peak = memory.predict(cfg, target, head, plan.rows, plan)
    return {
        "passed": True,
        "by": "two small passes (scripts/validate.py)",
        "peak_bytes": peak.bytes,
        "held_bytes": peak.held + peak.moments,
        "pass_bytes": peak.step,
        "rows": peak.rows,
        "width": peak.width,
    }


def training_step(keys: Sequence[str], out: Path) -> dict[str, Any]:
    """The run in a process of its own, and what its lines of metrics say of the second half."""
    command = [sys.executable, "train/eagle.py", *keys]
    env = {**os.environ}
    if "device=cpu" in keys:
        env.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        command, cwd=files.ROOT, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"train/eagle.py: exit code {done.returncode}: {last_line(done.stderr)}")
    lines = records(out / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    late = steps[len(steps) // 2 : -2] or steps[-1:]  # those of the profiler are slow
    wanted = ("share_", "tokens_per_second", "tflops", "mfu", "supervised_per")
    found = {
        key: round(sum(line[key] for line in late) / len(late), 6)
        for key in late[0]
        if key.startswith(wanted)
    }
    traces = [p.name for p in sorted(out.glob("profile/*"))]
    parity = out / "parity.json"
    return {
        "passed": bool(traces) and steps[-1]["loss"] < steps[0]["loss"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "peak_memory_bytes": max(line.get("peak_memory_bytes", 0) for line in lines),
        "step_peak_memory_bytes": steps[-1]["peak_memory_bytes"],
        **found,
        "traces": traces,
        "parity": json.loads(parity.read_text()).get("passed") if parity.is_file() else None,
    }


def memory_step(found: dict[str, Any]) -> dict[str, Any]:
    """The measured peak beside what was predicted of it."""
    measured = found["training"]["step_peak_memory_bytes"]
    guess = found["prediction"].get("peak_bytes")
    ratio = guess / measured if guess else None
    return {
        "passed": ratio is not None,
        "measured_bytes": measured,
        "predicted_bytes": guess,
        "predicted_over_measured": ratio and round(ratio, 4),
        "within": NEAR,
        "near": ratio is not None and abs(ratio - 1) <= NEAR,
    }


def decoding_step(cfg: Any, out: Path, device: str, requested: Any) -> dict[str, Any]:
    """Greedy answers with the trained head, beside plain decoding and beside float32."""
    target = load_target(cfg.target, cfg.dtype, device)
    head = load_head(out / "head", target)
    rows = load_rows(
        cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
    )
    prompts = [rows.prompt(row)[-128:] for row in range(min(requested.prompts, rows.lines.numel()))]
    asks = [Request(prompt, requested.max_new_tokens) for prompt in prompts]
    tokens_of: dict[str, list[list[int]]] = {}
    speed = {}
    for name, drafter in (("plain", NoDraft()), ("drafted", head.drafter(target))):
        start = time.perf_counter()
        answers = generate(target, drafter, asks, Sampling(), eos_ids=()).generations
        tokens_of[name] = [answer.token_ids for answer in answers]
        speed[name] = sum(map(len, tokens_of[name])) / (time.perf_counter() - start)
    own = [_logits(target, p, a) for p, a in zip(prompts, tokens_of["drafted"], strict=True)]
    del target, head
    _free()
    exact = load_target(cfg.target, "float32", device)
    want = [_logits(exact, p, a) for p, a in zip(prompts, tokens_of["drafted"], strict=True)]
    rounding = max(float((a - b).abs().max()) for a, b in zip(own, want, strict=True))
    gaps, best = [], 0
    for logits, answer in zip(want, tokens_of["drafted"], strict=True):
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        gap = logits.max(1).values - chosen
        gaps.append(float(gap.max()))
        best += int((gap == 0).sum())
    tokens = sum(map(len, tokens_of["drafted"]))
    limit = TIES * rounding
    return {
        "passed": max(gaps) <= limit,
        "prompts": len(prompts),
        "tokens": tokens,
        "answers_equal_to_plain": sum(
            a == b for a, b in zip(tokens_of["plain"], tokens_of["drafted"], strict=True)
        ),
        "best_in_float32": round(best / tokens, 4),
        "largest_gap": max(gaps),
        "rounding_of_a_logit": rounding,
        "limit": limit,
        "tokens_per_second": {name: round(value, 2) for name, value in speed.items()},
    }


@torch.no_grad()
def _logits(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """[len(answer), V] float32 on the CPU: one plain pass over prompt and answer."""
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    with target.as_loaded() as model:
        found = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return found.float().cpu()


# What it comes to
# -------------------------------------------------------------------------------------------


def confirmed(found: dict[str, Any]) -> list[str]:
    """Which predictions this machine bears out; none on a CPU."""
    if not found["device"].startswith("cuda"):
        return []
    names = [name for name in ("kernels", "training", "decoding") if found[name]["passed"]]
    return names + (["memory"] if found["memory"].get("near") else [])


def _say(name: str, part: dict[str, Any]) -> None:
    """A step in a few lines."""
    print(f"[{'ok' if part['passed'] else 'FAILED'}] {name}, {part['seconds']} s", flush=True)
    for key, value in part.items():
        if key in ("passed", "seconds", "compared"):
            continue
        print(f"     {key}: {value}")
    for row in part.get("compared", ()):
        tokens_of = row["missing"] or (
            f"error {row['error']:.2g} (limit {row['limit']:.2g}), {row['ms']:.3g} ms, plain "
            f"{row['dense_ms']:.3g} ms"
        )
        print(f"     {row['name']} {row['dtype']} {row['shape']}: {tokens_of}")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
