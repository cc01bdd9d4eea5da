"""The one training loop. It knows no head by name: whatever subclasses heads.base.Head can be
trained.

    accelerate launch train/eagle.py target=smollm2 data=jsonl data.path=FILE \\
        out_dir=runs/eagle3 steps=N

The target is frozen: it is neither in the optimizer nor wrapped for gradient exchange. The
head's forward is its loss and returns (sum, count); sums are divided once, by the count over
all micro-batches and ranks. Batch k, the learning rate and every random number of step k are
functions of (seed, k), so that a resumed run is the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from signal import SIGTERM

import torch
from accelerate import Accelerator

from outrider.heads.base import Head
from outrider.heads.batch import hash_u63
from outrider.heads.checkpoint import save_head
from outrider.heads.registry import head_class
from outrider.train.accelerator import ending, start
from outrider.train.checkpoint import is_final, locked
from outrider.train.config import TrainConfig, learning_rate, planned_steps
from outrider.train.data.passes import Made
from outrider.train.evaluation import evaluate, gate
from outrider.train.following import begin_round, forget
from outrider.train.log import check_installed
from outrider.train.measure import peak_bytes
from outrider.train.metrics import Shared, Sums, summary
from outrider.train.nonfinite import pass_over
from outrider.train.run import Run
from outrider.train.setup import begin, explained
from outrider.train.signals import Stop, interruption


def fit(cfg: TrainConfig, kind: type[Head] | None = None) -> None:
    """Train a head as `cfg` says, resuming what is in cfg.out_dir. kind: its class, None:
    that of cfg.head.kind.

    Raises UserError for what the user can mend (also a non-finite loss, a full disk, too
    little memory) and Interrupted after a signal, when all is saved, or where a peer is gone.
    """
    check_installed(cfg.trackers)
    accelerator = start(cfg.batch_size, cfg.dtype, cfg.device, cfg.shard_group)
    hold = locked(Path(cfg.out_dir)) if accelerator.is_main_process else nullcontext()
    try:
        with Stop() as stop, ending(accelerator, stop), hold:
            _fit(cfg, kind or head_class(cfg.head.kind), accelerator, stop)
    except Exception as error:
        if said := explained(error, accelerator.num_processes, cfg.out_dir):
            raise said from error
        raise


def _fit(cfg: TrainConfig, kind: type[Head], accelerator: Accelerator, stop: Stop) -> None:
    """The run in order of time."""
    with stop.at_once():
        run = begin(cfg, kind, accelerator, stop)
    try:
        requested = 0
        while True:
            # The save comes first: an evaluation that fails must cost no step.
            if run.due(cfg.save_every):
                run.save(wait=run.last)
            if run.due(cfg.eval.every) and cfg.eval.every and not requested:
                requested = evaluate(run)
            if requested:
                run.save(wait=True)
                raise interruption(stop.requested or requested, run.state.step)
            if run.last:
                run.save(wait=True)
                break
            requested = begin_round(run) or train_step(run)
        forget(run)
        _finish(run)
    finally:
        run.close()


# One step
# -------------------------------------------------------------------------------------------


def train_step(run: Run) -> int:
    """Make one update: the passes of this rank, one exchange with the others, AdamW.
    Returns the signal that some rank was asked to stop by, 0 if none."""
    before = _begin_step(run)
    sums = Sums()
    for micro in _micro_batches(run):
        batch = micro.batch.to(run.device)
        run.compiled.check(batch, micro.target)
        with _one_pass(run, micro):
            out = run.model(batch, micro.target)  # a head's forward is its loss
            run.accelerator.backward(out.sum)
        sums.add(batch, out)
    shared = run.exchange(sums)  # waits for the device, once
    if shared.finite:
        norm = _scale_gradients(run, shared)
        rate = _set_learning_rate(run, shared)
        with run.clock.part("head"):
            run.optimizer.step()
        _count_step(run, shared, before)
        _report(run, norm, rate)
    else:
        pass_over(run, sums)
    run.optimizer.zero_grad(set_to_none=True)
    if run.profile is not None:
        run.profile.step()
    # A signal after the exchange is handled at the next step.
    return (
        run.stop.requested
        if run.world == 1
        else int(shared.stop and (run.stop.requested or SIGTERM))
    )


def _begin_step(run: Run) -> tuple[float, float]:
    """Set what a step draws its random numbers from; wall and CPU seconds before it."""
    step = run.state.step
    before = time.perf_counter(), time.process_time()
    torch.manual_seed(hash_u63(run.cfg.seed, step, run.rank))
    run.head.begin_step(step)
    return before


def _micro_batches(run: Run) -> Iterator[Made]:
    """This rank's micro-batches of a step; the next is made while one is worked on."""
    last = False
    while not last:
        with run.clock.part("data"):
            made = next(run.feed)
        yield made
        last = made.last


@contextmanager
def _one_pass(run: Run, micro: Made) -> Iterator[None]:
    """Gradients add up inside; DDP averages them over the ranks in a step's last pass."""
    alone = nullcontext() if micro.last else run.accelerator.no_sync(run.model)
    with alone, run.flops.counted(micro.batch.mask), run.clock.part("head"), run.compiled.used():
        yield


def _scale_gradients(run: Run, shared: Shared) -> float:
    """Divide the summed gradients by the supervised tokens of all ranks, and clip them. DDP
    has averaged them; what is wanted is their sum. Returns their norm before it is
    clipped."""
    scale = run.world / max(shared.stats["loss"][1], 1.0)
    norm, most = shared.norm * scale, run.cfg.optim.clip
    clip = min(1.0, most / (norm + 1e-6)) if most else 1.0
    torch._foreach_mul_(run.gradients, scale * clip)
    return norm


def _set_learning_rate(run: Run, shared: Shared) -> float:
    """Return the learning rate of the step, given to the optimizer."""
    cfg, step = run.cfg, run.state.step
    run.state.spent = shared.seconds
    steps = planned_steps(step, shared.seconds, cfg.steps, cfg.minutes)
    rate = learning_rate(step, steps, cfg.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    return rate


def _count_step(run: Run, shared: Shared, before: tuple[float, float]) -> None:
    """Count the update that was made. before: wall and CPU seconds when it began."""
    state, stats = run.state, shared.stats
    state.step, state.skipped_in_a_row = state.step + 1, 0
    stats["seconds"] = [time.perf_counter() - before[0], 1.0]
    state.add(
        tokens_seen=stats["tokens"][0],
        supervised_seen=stats["loss"][1],
        train_seconds=stats["seconds"][0],
        cpu_seconds=time.process_time() - before[1],
    )
    state.add_to_window(stats | run.clock.per_step())


def _report(run: Run, norm: float, rate: float) -> None:
    """A line of metrics at every log_every-th step."""
    state, sums = run.state, run.state.window
    if not run.due(run.cfg.log_every):
        return
    found, (seconds, steps) = summary(sums), sums["seconds"]
    line = {
        **found,
        "lr": rate,
        "grad_norm": round(norm, 6),
        **run.flops.rates(sums["tokens"][0] / seconds, run.world),
        "peak_memory_bytes": peak_bytes(run.device),
        **state.took(),
        **({"skipped_steps": state.skipped} if state.skipped else {}),
    }
    run.log.progress(state.step, run.planned, found, seconds / steps)
    run.log.metrics(state.step, line)
    state.window = {}


# After the last step
# -------------------------------------------------------------------------------------------


def _finish(run: Run) -> None:
    """Write head/, say how it went, and hold training against decoding."""
    state, identity = run.state, run.target.identity
    if run.main and not is_final(run.out / "head", state.step):
        about = {"step": state.step, "training": state.took()}
        save_head(run.head, run.out / "head", identity, {**about, "best": state.best})
        if not (run.out / "best").exists():
            save_head(run.head, run.out / "best", identity, about)
    best = ""
    if state.best:
        best = (
            f"; best accepted length {state.best['accepted_length']:.3f} at step "
            f"{int(state.best['step'])}"
        )
    run.log.say(f"done: {run.out / 'head'}, step {state.step}{best}")
    run.log.metrics(state.step, {"event": "end", "peak_memory_bytes": peak_bytes(run.device)})
    gate(run)
