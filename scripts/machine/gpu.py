"""Training steps and answers of real shapes on this GPU: what they reach, where the time goes,
and what the dry run says of them.

Weights are random, in the shapes of published models with their whole vocabularies, and rows are
random tokens of drawn lengths, so that nothing is downloaded. Training is the project's own step.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function
from torch.utils.benchmark import Timer, timer
from transformers import AutoModelForCausalLM

from outrider.conf.errors import UserError, first_line
from outrider.conf.schema import compose
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.config import TargetConfig
from outrider.decode.models.identity import Identity
from outrider.decode.models.tiny import byte_tokenizer
from outrider.decode.probe import difference
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.heads.block import head as block
from outrider.heads.eagle import head as eagle
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.scripts.common import files
from outrider.scripts.machine.config import DoctorConfig
from outrider.train.accelerator import start
from outrider.train.checkpoint import locked
from outrider.train.compiled import Compiled
from outrider.train.config import ValidateConfig, entry_of
from outrider.train.data.batches import JoinedRows
from outrider.train.dry_run import memory, report
from outrider.train.dry_run.memory import Model, Plan, model_of, numbers, plan_of
from outrider.train.loop import train_step
from outrider.train.measure import peak_bytes, peak_flops
from outrider.train.run import Run
from outrider.train.setup import begin
from outrider.train.signals import Stop

WARM, PROFILED = 3, 2  # steps before the clock runs, and under the profiler
SUPERVISED, ROW, SPREAD = 0.8, 800, 0.9  # share of a row; its tokens on average, log-normal
PROMPT, ANSWER, DEPTH = 512, 64, 5  # tokens of a prompt and of its answer, levels of a draft
TREES, COPIED = (0, 5, 15), 1 << 30  # nodes of the passes that are timed; bytes of a copy
SHORT = 10.0  # microseconds of a launch
EAGLE3 = ("head=eagle3", "head.steps=7", "head.draft_vocab=32000", "micro_tokens=16384")
DFLASH = (
    *("head=dflash", "head.layers=5", "head.block=16", "head.anchors=512", "micro_tokens=8192"),
    *("head.draft_vocab=32000", "head.activation_checkpointing=true"),
)
SHAPES: dict[str, tuple[TargetConfig, Sequence[str]]] = {
    "qwen3-8b": (TargetConfig(kind="hub", name="Qwen/Qwen3-8B"), EAGLE3),
    "llama-3.2-1b": (TargetConfig(kind="hub", name="meta-llama/Llama-3.2-1B-Instruct"), EAGLE3),
    "qwen3-8b-dflash": (TargetConfig(kind="hub", name="Qwen/Qwen3-8B"), DFLASH),
    "smollm2": (TargetConfig(kind="smollm2"), (*EAGLE3, "head.steps=3")),
}


def main(cfg: DoctorConfig, device: str) -> int:
    """Measure, print and write, one shape after the other while there is time. Raises
    UserError where there is no GPU, or no such shape."""
    if not device.startswith("cuda"):
        raise UserError("gpu: torch sees no GPU here; run this on a machine with one")
    if cfg.shape and cfg.shape not in SHAPES:
        raise UserError(f"shape: {cfg.shape} is not known; choose one of {', '.join(SHAPES)}")
    begun, found = time.monotonic(), {**files.origin(device), "shapes": dict[str, Any]()}
    usual = ("data.max_length=4096", "batch_size=16", f"device={device}", f"dtype={cfg.dtype}")
    for name in [cfg.shape] if cfg.shape else SHAPES:
        if time.monotonic() - begun > 60 * cfg.minutes:
            print(f"{name}: left out, {cfg.minutes:g} minutes are over (minutes)", flush=True)
            continue
        target, keys = SHAPES[name]
        parts = found["shapes"].setdefault(name, {})
        try:
            for part, values in measured(model_of(target), [*usual, *keys], cfg.steps):
                parts[part] = values
                print(f"{name} {part}: {json.dumps(values, indent=2)}", flush=True)
                if cfg.out:
                    files.write_json(Path(cfg.out), found)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            print(f"{name}: not measured further ({first_line(error)})", flush=True)
    return 0


def measured(model: Model, keys: Sequence[str], steps: int) -> Iterator[tuple[str, Any]]:
    """Yield what is found of a target of random weights, part by part, as soon as it is known.
    keys: of the training run, head= and its device among them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "none.jsonl").touch()
        own = [
            *("target=tiny", f"data.path={folder}/none.jsonl", "data.held_out=0"),
            *("data.cache=false", "eval.every=0", "eval.parity=0", "save_every=0", "compile=none"),
            *("log_every=1000000", "optim.lr=1e-4", "steps=1000000", *keys),
        ]
        kind = next(key.partition("=")[2] for key in own if key.startswith("head="))
        cfg: Any = compose(*entry_of(kind), [*own, f"out_dir={folder}/run"])
        asked = ["dry_run=true", "gpus=1", *own, f"supervised={SUPERVISED}"]
        plan = plan_of(compose("validate", ValidateConfig, asked), model, cfg.head)
        yield "model", {"name": model.name, "keys": " ".join(keys), "trained": numbers(plan.head)}
        with _run(cfg, model) as run:
            training = _training(run, plan, steps)
            yield "training", training
            yield "profile", _profiled(run)
            yield "compiled", _compiled(run, steps, training["tokens_per_second"])
            yield "decoding", _decoding(run)


@contextlib.contextmanager
def _run(cfg: Any, model: Model) -> Iterator[Run]:
    """A training run of random rows on a target of random weights, begun and not announced."""
    accelerator = start(cfg.batch_size, cfg.dtype, cfg.device)
    target = random_target(model, cfg.dtype, accelerator.device)
    rows = random_rows(8 * cfg.batch_size, cfg.data.max_length, target.vocab_size)
    with Stop() as stop, locked(Path(cfg.out_dir)):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            run = begin(cfg, head_class(cfg.head.kind), accelerator, stop, (target, rows))
        try:
            yield run
        finally:
            run.close()


def random_target(model: Model, dtype: str, device: torch.device) -> Target:
    """Return a target of this shape, made where it runs."""
    torch.manual_seed(0)
    with torch.device(device):
        made: Any = AutoModelForCausalLM.from_config(
            model.built.config, dtype=getattr(torch, dtype)
        )
    name = f"random weights in the shape of {model.name}"
    return Target(made.eval(), byte_tokenizer(), identity=Identity(name, "", *3 * ("0" * 64,)))


def random_rows(count: int, most: int, vocab: int) -> JoinedRows:
    """Rows of random tokens, the last part of each supervised, of ROW tokens on average."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, generator=generator) * SPREAD + math.log(ROW) - SPREAD**2 / 2
    sizes = drawn.exp().long().clamp(min(16, most), most)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    ids = torch.randint(3, vocab, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
    at = torch.arange(len(ids)) - offsets[:-1].repeat_interleave(sizes)
    loss = at >= (sizes * (1 - SUPERVISED)).long().repeat_interleave(sizes)
    held = torch.zeros(count, dtype=torch.bool)
    return JoinedRows("random rows", ids, loss, offsets, torch.arange(count), held, [])


def _steps(run: Run, count: int) -> tuple[float, float]:
    """Return (tokens, seconds by the clock on the wall) of some steps."""
    before, begun = run.state.seen.get("tokens_seen", 0.0), timer()
    for _ in range(count):
        train_step(run)
    seconds = timer() - begun
    return run.state.seen["tokens_seen"] - before, seconds


def _rate(run: Run, steps: int) -> float:
    """Return tokens/s of some steps, after some that do not count."""
    _steps(run, WARM)
    tokens, seconds = _steps(run, steps)
    return tokens / seconds


def _training(run: Run, plan: Plan, steps: int) -> dict[str, Any]:
    """Return the speed of training beside that of the target's own products and the dry run's,
    and the peak of memory."""
    device, row = run.device, len(run.rows.ids) / (len(run.rows.offsets) - 1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    rate, each = _rate(run, steps), report.flops_a_token(plan, round(row))
    product, parts = _product(run.target), memory.parts(plan)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak, step = peak_flops(name, run.cfg.dtype) or product, run.cfg.batch_size * row
    return {
        "draft_vocab": plan.typed.draft_vocab,
        "tokens_per_second": rate,
        "flops_a_token": each,
        "flops_a_token_counted": 1e12 * run.flops.rates(1.0, 1).get("tflops_per_device", 0.0),
        "product_tflops": product / 1e12,
        "share_of_product": each * rate / product,
        "share_of_peak": each * rate / peak,
        "seconds_a_step": step / rate,
        "predicted_seconds_a_step": step * each / (report.shares_of_peak(each)[1] * peak),
        "peak_memory_bytes": peak_bytes(device),
        "predicted_peak_memory_bytes": sum(parts.values()) - parts["reserve"],
    }


def _product(target: Target) -> float:
    """Return the FLOP/s of a product as the target's MLPs have it: the most there is to reach."""
    rows, width, inner = 8192, target.hidden_size, int(target.config.intermediate_size)
    x, w = (torch.rand(n, width).to(target.device, target.dtype) for n in (rows, inner))
    return 2 * rows * width * inner / _mean(lambda: x @ w.T, 20)


@contextlib.contextmanager
def _named(run: Run) -> Iterator[None]:
    """The parts of a step have names in a trace."""
    places = (
        *((run.target, "features", "target"), (run.head, "forward", "head")),
        *((eagle, "chunked_loss", "loss"), (block, "chunked_loss", "loss")),
        *((run.accelerator, "backward", "backward"), (run.optimizer, "step", "optimizer")),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, label in places:
            plain = getattr(owner, name)

            def inside(*args: Any, plain: Any = plain, label: str = label, **named: Any) -> Any:
                with record_function(f"part:{label}"):
                    return plain(*args, **named)

            own = name in vars(owner)
            stack.callback(*((setattr, owner, name, plain) if own else (delattr, owner, name)))
            setattr(owner, name, inside)
        yield


def _profiled(run: Run) -> dict[str, Any]:
    """Return milliseconds a step by part and by kernel, on a CPU by operation; launches, and
    those shorter than SHORT; where the host waited."""
    with _named(run), profile() as made:
        _, seconds = _steps(run, PROFILED)
    by_part, by_kernel, waits = Counter[str](), Counter[str](), Counter[str]()
    launches, short, events = 0, 0, made.events() or ()
    loop = {event.thread for event in events if event.name.startswith("part:")}
    for event in events:
        part, at = "", event
        while at is not None and not part:
            part, at = at.name.partition("part:")[2], at.cpu_parent
        # a GPU's gradients are computed in a thread of their own
        part = part or ("loop" if event.thread in loop else "backward")
        if "Synchronize" in event.name:
            waits[f"{event.name} in {part}"] += event.cpu_time_total
        work = [(k.name, k.duration) for k in event.kernels if not k.name.startswith("part:")]
        if run.device.type == "cpu":
            work = [(event.name, event.self_cpu_time_total)]
        for name, spent in work:
            by_part[part] += spent
            by_kernel[name[:80]] += spent
            launches, short = launches + 1, short + (spent < SHORT)

    def ms(table: Counter[str], most: int = 20) -> dict[str, float]:
        return {name: us / 1000 / PROFILED for name, us in table.most_common(most)}

    return {
        "ms_a_step": 1000 * seconds / PROFILED,
        "busy": sum(by_part.values()) / 1e6 / seconds,
        "launches_a_step": launches / PROFILED,
        "short_launches": short / max(launches, 1),
        "ms_by_part": ms(by_part),
        "ms_by_kernel": ms(by_kernel),
        "ms_waited": ms(waits, 8),
    }


def _compiled(run: Run, steps: int, plain: float) -> dict[str, Any]:
    """Return what compiled passes bring, of target and head together, and how far the loss of
    one goes from the plain one's."""
    said, batch = list[str](), run.make(0, run.passes(0)[0])[0].to(run.device)
    losses = [float(run.head(batch, run.target).sum.detach())]
    run.compiled = Compiled(run.head, run.target, run.device, said.append)
    run.compiled.check(batch, run.target)
    with run.compiled.used():
        losses.append(float(run.head(batch, run.target).sum.detach()))
    rate, change = _rate(run, steps), abs(losses[1] / losses[0] - 1)
    return {"tokens_per_second": rate, "speedup": rate / plain, "loss_change": change, "said": said}


def _decoding(run: Run) -> dict[str, Any]:
    """Return answers of one row, plain and with a chain that random weights nearly never have
    right, so that a cycle's cost is seen and no gain; and passes over TREES nodes beside the time
    that reading the weights takes. All by modules, and by CUDA graphs."""
    run.head.eval()
    target, draft = run.target, DraftSpec(shape="chain", depth=DEPTH)
    prompt = run.rows.ids[:PROMPT].long()
    asked = [Request(prompt.tolist(), ANSWER)]
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    copied = torch.empty(min(weights, COPIED), dtype=torch.uint8, device=run.device)
    read = weights / 2 / copied.numel() * _mean(copied.clone, 5)  # a copy reads and writes
    found: dict[str, Any] = {"prompt": PROMPT, "answer": ANSWER, "ms_to_read_weights": 1000 * read}
    scored = {}
    for kind, target.captures in (("modules", False), ("graphs", True)):
        ways: dict[str, Drafter] = {"plain": NoDraft(), "drafted": run.head.drafter(target, draft)}
        here = found[kind] = dict[str, Any]()
        for name, drafter in ways.items():
            once = partial(generate, target, drafter, asked, Sampling(), eos_ids=())
            cycles, seconds = len(once().generations[0].cycles), _mean(once, 3)
            here[f"{name}_tokens_per_second"] = ANSWER / seconds
            here[f"{name}_ms_a_pass"] = 1000 * seconds / cycles
        cache = target.new_cache(1, PROMPT + ANSWER, max(TREES))
        last = prompt[-1:].to(run.device)
        target.prefill(cache, [prompt[:-1].to(run.device)])
        for nodes in TREES:
            score = partial(target.score, cache, last, DraftTree.chain(last.expand(1, nodes)))
            here[f"pass_of_{nodes}_ms"] = 1000 * _mean(score, 20)
            scored[kind, nodes] = score().logits
        target.release(cache)
        here["captured"] = target.capturing
    pairs = [(scored["modules", nodes], scored["graphs", nodes]) for nodes in TREES]
    found["logits_differ_by"] = max(difference(b, a) for a, b in pairs)
    return found


def _mean(way: Callable[[], Any], times: int) -> float:
    """Return seconds of a call, after two that are not counted; a GPU is waited for."""
    return float(Timer("way()", globals={"way": way}).timeit(times).mean)
