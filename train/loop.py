"""The one training loop. It knows no head by name: whatever subclasses heads.base.Head can be
trained.

    accelerate launch train/medusa.py target=smollm2 data=jsonl data.path=FILE \\
        out_dir=runs/medusa steps=N

The target is frozen: it is neither in the optimizer nor wrapped for gradient exchange. The
head's forward is its loss and returns (sum, count); sums are divided once, by the count over
all micro-batches and ranks. Batch k, the learning rate and every random number of step k are
functions of (seed, k), so that a resumed run is the same run.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from conf.errors import UserError
from decode.models.load import load_target
from heads.base import Head
from heads.checkpoint import save_head
from train import rendezvous
from train import state as disk
from train.clock import PARTS, Clock, shares
from train.config import TrainConfig, defaults
from train.evaluation import evaluate, seen
from train.facts import (
    check_ranks,
    facts_of,
    fit_vocabulary,
    is_no_memory,
    meaning_of,
    no_memory,
    self_check,
)
from train.gate import gate
from train.lock import Lock, locked
from train.log import Log
from train.measure.memory import on_gpu, peak_bytes
from train.poison import stop_poisoned
from train.saving import RETRIES, Saver, agreed, asked_anywhere
from train.schedule import learning_rate
from train.sharding import shard_target
from train.signals import Stop, interruption
from train.state import State
from train.stored.features import Source
from train.texts.batches import Plan, Rows, hash_u63, load_rows
from train.zero3 import plain_launch


def fit(cfg: TrainConfig, kind: type[Head]) -> None:
    """Train a head of class `kind` as `cfg` says, resuming what lies in cfg.out_dir.

    Raises UserError for what the user can mend (also a non-finite loss, a full disk, too
    little memory) and Interrupted after a signal, when everything is saved.
    """
    patience = InitProcessGroupKwargs(
        timeout=timedelta(minutes=10), init_method=rendezvous.init_method()
    )
    with plain_launch(cfg):
        accelerator = Accelerator(cpu=cfg.device == "cpu", kwargs_handlers=[patience])
    check_ranks(cfg, accelerator.num_processes)
    hold = locked(Path(cfg.out_dir)) if accelerator.is_main_process else contextlib.nullcontext()
    try:
        with hold as lock, Stop() as stop:
            _fit(cfg, kind, accelerator, stop, lock)
    except BaseException as error:
        if (
            accelerator.num_processes > 1
        ):  # the exception keeps the wrapped model alive, which hangs when it outlives
            traceback.clear_frames(error.__traceback__)  # its process group
        if is_no_memory(error):
            raise UserError(no_memory(cfg, accelerator.num_processes)) from error
        raise
    finally:
        accelerator.end_training()


def _fit(
    cfg: TrainConfig, kind: type[Head], accelerator: Accelerator, stop: Stop, lock: Lock | None
) -> None:
    out, main, world = Path(cfg.out_dir), accelerator.is_main_process, accelerator.num_processes
    target = load_target(cfg.target, cfg.dtype, "cpu" if cfg.shard_target else accelerator.device)
    with accelerator.main_process_first():  # the others find the tokens in the cache
        rows = load_rows(
            cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
        )
    if main:
        rows.list_bad(out)
    plan = Plan(rows, cfg.batch_size, cfg.data.window, cfg.seed)
    torch.manual_seed(hash_u63(cfg.seed, "head"))
    counts = rows.counts(target.vocab_size)
    vocabulary = fit_vocabulary(cfg.head, counts)
    head = kind.for_target(target, cfg.head, counts)
    if cfg.dtype == "float64":
        head.double()
    sharding = shard_target(target, head, accelerator.device) if cfg.shard_target else ""
    trainable = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        head.parameter_groups(),
        lr=cfg.optim.lr,
        betas=(cfg.optim.beta1, cfg.optim.beta2),
        eps=cfg.optim.eps,
        weight_decay=cfg.optim.weight_decay,
        fused=True,
    )

    if cfg.data.packing:
        target.packs()  # remembered; the ranks of a sharded target must ask it together
    with (
        accelerator.main_process_first()
    ):  # the others find the hashes of feature files in the cache
        source = Source(cfg, head, target, rows)
    meaning = {**meaning_of(cfg, target, rows), **source.meaning}
    state, notes = _resume(cfg, out, head, optimizer, meaning, accelerator)
    log = Log(cfg, main, state.step)
    for note in notes:
        log.say(note)
    log.header(head, facts_of(cfg, target, rows, plan, head, world))
    log.say(self_check(rows, plan, target.tokenizer))
    for note in filter(None, (vocabulary, sharding, source.note)):
        log.say(note)
    model = accelerator.prepare(head) if world > 1 else head
    head.train()
    clock = Clock(accelerator.device)
    saver = Saver(cfg, accelerator, lock, log, stop, state.step or -1)
    asked, due_at = asked_anywhere(stop, accelerator), state.step or -1
    try:
        while True:
            last = state.step == cfg.steps
            wanted = cfg.eval.every and (last or state.step % cfg.eval.every == 0)
            if wanted and state.step and not asked and state.evaluated < state.step:
                asked = evaluate(cfg, out, state, head, target, rows, accelerator, log, stop)
            due = last or asked or (cfg.save_every and state.step % cfg.save_every == 0)
            if due and state.step and due_at != state.step:
                with clock.part("save"):
                    problem = saver.save(
                        state, head, optimizer, target.identity, wait=bool(last or asked)
                    )
                due_at = state.step
                if problem and (last or asked or saver.failures == RETRIES):
                    raise UserError(
                        f"out_dir: cannot save to {out} ({problem}); free space or mend "
                        "permissions, then "
                        "start the same command again"
                    )
            if asked:
                raise interruption(stop.asked or asked, state.step, saver.written == state.step)
            if last:
                break
            asked = _step(
                cfg,
                state,
                plan,
                rows,
                model,
                head,
                source,
                optimizer,
                trainable,
                accelerator,
                stop,
                log,
                clock,
            )
        if main and not disk.is_final(out / "head", cfg.steps):
            save_head(
                head,
                out / "head",
                target.identity,
                {"step": state.step, "best": state.best, "training": seen(state)},
            )
            if not (out / "best").exists():
                save_head(
                    head,
                    out / "best",
                    target.identity,
                    {"step": state.step, "training": seen(state)},
                )
        log.say(
            f"done: {out / 'head'}"
            + (
                f"; best accepted length {state.best['accepted_length']:.3f} at step "
                f"{int(state.best['step'])}"
                if state.best
                else ""
            )
        )
        log.metrics(
            state.step, {"event": "end", "peak_memory_bytes": peak_bytes(accelerator.device)}
        )
        gate(cfg, out, head, target, rows, accelerator, log, cfg.steps)
    finally:
        saver.close()
        log.close()


def _step(
    cfg: TrainConfig,
    state: State,
    plan: Plan,
    rows: Rows,
    model: Any,
    head: Head,
    source: Source,
    optimizer: torch.optim.Optimizer,
    trainable: list[Any],
    accelerator: Accelerator,
    stop: Stop,
    log: Log,
    clock: Clock,
) -> int:
    """One update. Returns the signal that some rank was asked to stop by, 0 if none."""
    start, cpu = time.perf_counter(), time.process_time()
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(hash_u63(cfg.seed, state.step, rank))
    head.begin_step(state.step, cfg.steps)
    micro = plan.micro_batches(state.step, rank, world, cfg.micro_batch)
    totals: dict[str, torch.Tensor] = {}
    sound: list[
        torch.Tensor
    ] = []  # whether a loss is finite, on the device: to ask there would wait for it each time
    for i, chosen in enumerate(micro):
        with clock.part("data"):
            batch = rows.batch(chosen, source.pack)
        with clock.part("target"):
            target = source(batch)
        with (
            clock.part("head"),
            contextlib.nullcontext() if i + 1 == len(micro) else accelerator.no_sync(model),
        ):
            batch = batch.to(accelerator.device)
            out = model(batch, target)
            accelerator.backward(out.sum)
        sound.append(out.sum.detach().isfinite())
        tokens = batch.mask.sum().to(torch.float64)
        for name, value in {
            "loss": torch.stack([out.sum.detach().double(), out.count.double()]),
            "tokens": torch.stack([tokens, torch.ones_like(tokens)]),
            **out.stats,
        }.items():
            totals[name] = totals[name] + value if name in totals else value
    # DDP has averaged the gradients over the ranks; what is wanted is their sum over the
    # global count.
    raw_norm = torch.nn.utils.get_total_norm([p.grad for p in trainable if p.grad is not None])
    device, finite = accelerator.device, torch.stack(sound)
    raw_norm = raw_norm.to(device)
    bad = ~(finite.all() & raw_norm.isfinite())
    names = sorted(totals)
    signalled = torch.tensor([float(stop.asked)], dtype=torch.float64, device=device)
    packed = torch.cat([bad.double()[None], signalled, *(totals[n] for n in names)])
    with clock.part("communication"):
        shared = accelerator.reduce(packed, "sum") if world > 1 else packed
        own = [raw_norm.double()[None], finite.double()]
        sums = torch.cat([shared, *own]).tolist()  # type: ignore[list-item]
    norm_here, *fine = sums[packed.numel() :]
    if sums[0]:
        poisoned = [row for part, good in zip(micro, fine, strict=True) if not good for row in part]
        stop_poisoned(
            cfg, state.step, rows, poisoned, [r for part in micro for r in part], head, accelerator
        )
    found = {n: sums[2 + 2 * i : 4 + 2 * i] for i, n in enumerate(names)}
    scale = world / max(found["loss"][1], 1.0)
    norm = norm_here * scale
    clip = min(1.0, cfg.optim.clip / (norm + 1e-6)) if cfg.optim.clip else 1.0
    torch._foreach_mul_([p.grad for p in trainable if p.grad is not None], scale * clip)
    rate = learning_rate(state.step, cfg.steps, cfg.optim)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]
    with clock.part("head"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.step += 1
    found["seconds"] = [time.perf_counter() - start, 1.0]
    found |= clock.per_step(model)
    state.add(
        tokens_seen=found["tokens"][0],
        supervised_seen=found["loss"][1],
        train_seconds=found["seconds"][0],
        cpu_seconds=time.process_time() - cpu,
    )
    for name, (total, count) in found.items():
        old = state.window.get(name, [0.0, 0.0])
        state.window[name] = [old[0] + total, old[1] + count]
    _report(cfg, state, norm, rate, log, accelerator.device)
    if world == 1:
        return stop.asked
    return int(sums[1]) and (
        stop.asked or signal.SIGTERM
    )  # a signal after the exchange is heard one step later


def _report(
    cfg: TrainConfig, state: State, norm: float, rate: float, log: Log, device: torch.device
) -> None:
    """The live line at every step, a line of metrics at every log_every-th."""
    sums = state.window
    mean = {k: (total / count if count else 0.0) for k, (total, count) in sums.items()}
    speed = sums["tokens"][0] / sums["seconds"][0]
    steps = sums["seconds"][1]
    accuracy = " ".join(f"{mean[k]:.2f}" for k in sorted(mean) if k.startswith("top1_"))
    left = (cfg.steps - state.step) * sums["seconds"][0] / steps
    log.live(
        state.step, f"loss {mean['loss']:.3f}  top-1 {accuracy or '-'}  {speed:,.0f} tokens/s", left
    )
    if state.step % cfg.log_every == 0 or state.step == cfg.steps:
        plain = {k: round(v, 6) for k, v in mean.items() if k not in ("tokens", "seconds", *PARTS)}
        speeds = {
            "tokens_per_second": round(speed, 1),
            "supervised_per_second": round(sums["loss"][1] / sums["seconds"][0], 1),
        }
        log.metrics(
            state.step,
            {
                **plain,
                "lr": rate,
                "grad_norm": round(norm, 6),
                **speeds,
                **shares(sums),
                **on_gpu(device),
                **seen(state),
            },
        )
        state.window = {}


def _resume(
    cfg: TrainConfig,
    out: Path,
    head: Head,
    optimizer: torch.optim.Optimizer,
    meaning: dict[str, Any],
    accelerator: Accelerator,
) -> tuple[State, list[str]]:
    """The state to start from, restored into head and optimizer, and what to tell the user."""
    found: tuple[str | None, list[str]] = (None, [])
    if accelerator.is_main_process:
        disk.tidy(out)
        checkpoint, problems = disk.newest(out)
        found = (str(checkpoint) if checkpoint else None, [f"passed over: {p}" for p in problems])
    path, notes = agreed(found, accelerator)
    if path is None:
        return State(meaning=meaning), notes
    state = disk.read(Path(path))
    changes = disk.check_meaning(state.meaning, meaning, out, defaults(cfg))
    disk.restore(Path(path), head, optimizer)
    state.meaning = meaning
    notes = [*notes, f"resuming {out} at step {state.step} of {cfg.steps}"]
    return state, notes + [f"changed, which is allowed: {line}" for line in changes]
