"""One training shape and one decoding shape on this GPU: what they reach, beside the dry run.

Weights are random, in the shape of a published model with its whole vocabulary, and tokens are
random, so that nothing is downloaded. Training is the project's own step of an EAGLE-3 head.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.config import TargetConfig
from outrider.decode.models.identity import Identity
from outrider.decode.models.tiny import byte_tokenizer
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.scripts.common import files
from outrider.scripts.machine.config import DoctorConfig
from outrider.train.accelerator import start
from outrider.train.checkpoint import locked
from outrider.train.config import ValidateConfig
from outrider.train.data.batches import JoinedRows
from outrider.train.dry_run import memory, report
from outrider.train.dry_run.memory import Plan, plan_of
from outrider.train.dry_run.models import Model, model_of, numbers
from outrider.train.loop import train_step
from outrider.train.measure import peak_bytes, peak_flops, reset_peak
from outrider.train.run import Run
from outrider.train.runs import keys_of
from outrider.train.setup import begin
from outrider.train.signals import Stop

WARM = 3  # steps before the clock runs
SUPERVISED = 0.8  # share of a row, as the dry run assumes
PROMPT, ANSWER, DEPTH = 512, 64, 5  # tokens of a prompt and of its answer, levels of a draft
SHAPE = (  # four passes of four full rows a step, seven steps on its own outputs
    *("data.max_length=2048", "batch_size=16", "micro_batch=4"),
    *("head.steps=7", "head.draft_vocab=32000"),
)


def main(cfg: DoctorConfig, device: str) -> int:
    """Measure, print and write. Raises UserError where there is no GPU."""
    if not device.startswith("cuda"):
        raise UserError("gpu: torch sees no GPU here; run this on a machine with one")
    model = model_of(TargetConfig(kind="hub", name=cfg.model))
    keys = [*SHAPE, f"device={device}", f"dtype={cfg.dtype}", f"seed={cfg.seed}"]
    found = {**files.origin(device), **measured(model, keys, cfg.steps)}
    print(f"{found['model']}, random; EAGLE-3, and answers of one row")
    for part in ("training", "decoding"):
        for name, value in found[part].items():
            print(f"  {part} {name}: {value:,}", flush=True)
    if cfg.out:
        files.write_json(Path(cfg.out), found)
    return 0


def measured(model: Model, keys: Sequence[str], steps: int) -> dict[str, Any]:
    """Return both shapes on a target of random weights. keys: of the training run, its
    device among them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "none.jsonl").touch()
        own = [
            "target=tiny",
            f"data.path={folder}/none.jsonl",
            *("data.held_out=0", "data.cache=false", "eval.every=0", "eval.parity=0"),
            *("save_every=0", "log_every=1000000", "optim.lr=1e-4"),
            f"steps={WARM + steps}",
            *keys,
        ]
        cfg: Any = compose("eagle", keys_of("eagle"), [*own, f"out_dir={folder}/run"])
        asked = ["dry_run=true", "gpus=1", *own, "head=eagle3", f"supervised={SUPERVISED}"]
        plan = plan_of(compose("validate", ValidateConfig, asked), model, cfg.head)
        with _run(cfg, model) as run:
            training = _training(run, plan, steps)
            decoding = _decoding(run)
    return {"model": model.name, "keys": list(keys), "training": training, "decoding": decoding}


@contextlib.contextmanager
def _run(cfg: Any, model: Model) -> Iterator[Run]:
    """A training run of random rows on a target of random weights, begun and not announced."""
    accelerator = start(cfg.batch_size, cfg.dtype, cfg.device)
    target = random_target(model, cfg.dtype, accelerator.device)
    rows = random_rows(4 * cfg.batch_size, cfg.data.max_length, target.vocab_size)
    with Stop() as stop, locked(Path(cfg.out_dir)):
        with _quiet():
            run = begin(cfg, head_class(cfg.head.kind), accelerator, stop, (target, rows))
        try:
            yield run
        finally:
            run.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what a run says of itself."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield


def random_target(model: Model, dtype: str, device: torch.device) -> Target:
    """Return a target of this shape, made where it runs."""
    torch.manual_seed(0)
    with torch.device(device):
        made: Any = AutoModelForCausalLM.from_config(
            model.built.config, dtype=getattr(torch, dtype)
        )
    name = f"random weights in the shape of {model.name}"
    return Target(made.eval(), byte_tokenizer(), identity=Identity(name, "", *3 * ("0" * 64,)))


def random_rows(count: int, length: int, vocab: int) -> JoinedRows:
    """Full rows of random tokens, the last part of each supervised."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab, (count * length,), generator=generator, dtype=torch.int32)
    loss = (torch.arange(length) >= round(length * (1 - SUPERVISED))).repeat(count)
    lines, held = torch.arange(count), torch.zeros(count, dtype=torch.bool)
    offsets = torch.arange(count + 1) * length
    return JoinedRows("random rows", ids, loss, offsets, lines, held, [])


def _training(run: Run, plan: Plan, steps: int) -> dict[str, Any]:
    """Return tokens/s of some steps by the clock on the wall, and the peak of memory."""
    device = run.device
    with _quiet():
        for _ in range(WARM):
            train_step(run)
        reset_peak(device)
        before = run.state.seen["tokens_seen"]
        seconds = _seconds(lambda: [train_step(run) for _ in range(steps)], device)
        rate = (run.state.seen["tokens_seen"] - before) / seconds
    each = report.flops_a_token(plan, plan.length)
    parts = memory.parts(plan)
    held = sum(parts.values()) - parts["reserve"]
    found = {
        "draft_vocab": plan.typed.draft_vocab,
        "trained_parameters": numbers(plan.head),
        "tokens_per_second": round(rate, 1),
        "flops_a_token": each,
        "tflops": round(each * rate / 1e12, 2),
        "peak_memory_bytes": peak_bytes(device),
        "predicted_peak_memory_bytes": held,
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if peak := peak_flops(name, run.cfg.dtype):
        predicted = report.shares_of_peak(each)[1] * peak / each
        found |= {"mfu": round(each * rate / peak, 4), "predicted_tokens_per_second": predicted}
    return found


def _decoding(run: Run) -> dict[str, Any]:
    """Return answers of one row: plain, and with a chain that random weights nearly never
    have right, so that a cycle's cost is seen and no gain."""
    run.head.eval()
    target, draft = run.target, DraftSpec(shape="chain", depth=DEPTH)
    asked = [Request(run.rows.ids[:PROMPT].tolist(), ANSWER)]
    found: dict[str, Any] = {"prompt": PROMPT, "answer": ANSWER}
    ways: dict[str, Drafter] = {"plain": NoDraft(), "drafted": run.head.drafter(target, draft)}
    for name, drafter in ways.items():
        cycles: list[int] = []

        def once(drafter: Drafter = drafter, cycles: list[int] = cycles) -> None:
            made = generate(target, drafter, asked, Sampling(), eos_ids=())
            cycles.append(len(made.generations[0].cycles))

        seconds = _median(once, run.device, rounds=3)
        found[f"{name}_tokens_per_second"] = round(ANSWER / seconds, 2)
        found[f"{name}_ms_a_pass"] = round(1000 * seconds / max(cycles), 3)
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    found["plain_bytes_read_per_second"] = weights / (found["plain_ms_a_pass"] / 1000)
    return found


def _seconds(way: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, the device waited for at both ends."""
    _wait(device)
    begun = time.perf_counter()
    way()
    _wait(device)
    return time.perf_counter() - begun


def _median(way: Callable[[], Any], device: torch.device, rounds: int = 9) -> float:
    """Return seconds of a call, after one that is not counted."""
    _seconds(way, device)
    return statistics.median(_seconds(way, device) for _ in range(rounds))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
