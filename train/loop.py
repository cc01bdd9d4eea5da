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

import time
from contextlib import nullcontext
from pathlib import Path
from signal import SIGTERM

import torch
from accelerate import Accelerator
from torch import Tensor

from conf.errors import UserError
from heads.base import Head
from heads.batch import hash_u63
from heads.checkpoint import save_head
from train import state as disk
from train.begin import begin
from train.config import TrainConfig
from train.evaluation import evaluate, seen
from train.facts import is_no_memory, no_memory
from train.gate import gate
from train.launch_keys import ending, start
from train.lock import Lock, locked
from train.measure.memory import peak_bytes
from train.passes import Totals, add, one_pass
from train.poison import without_poisoned
from train.report import report
from train.run import Run
from train.saving import RETRIES, asked_anywhere
from train.schedule import learning_rate
from train.signals import Stop, interruption
from train.trackers import check_installed


def fit(cfg: TrainConfig, kind: type[Head]) -> None:
    """Train a head of class `kind` as `cfg` says, resuming what lies in cfg.out_dir.

    Raises UserError for what the user can mend (also a non-finite loss, a full disk, too
    little memory) and Interrupted after a signal, when everything is saved.
    """
    check_installed(cfg)
    accelerator = start(cfg)
    hold = locked(Path(cfg.out_dir)) if accelerator.is_main_process else nullcontext()
    try:
        with Stop() as stop, ending(accelerator, stop), hold as lock:
            _fit(cfg, kind, accelerator, stop, lock)
    except Exception as error:
        if is_no_memory(error):
            raise UserError(no_memory(cfg, accelerator.num_processes)) from error
        raise


# In order of time
# -------------------------------------------------------------------------------------------


def _fit(
    cfg: TrainConfig, kind: type[Head], accelerator: Accelerator, stop: Stop, lock: Lock | None
) -> None:
    """The run in order of time."""
    run = begin(cfg, kind, accelerator, stop, lock)
    try:
        asked = asked_anywhere(stop, accelerator)
        while True:
            # The save comes first: an evaluation that fails must cost no step.
            if run.due(cfg.save_every):
                _save(run, wait=run.last)
            if run.due(cfg.eval.every) and cfg.eval.every and not asked:
                asked = evaluate(run)
            if asked:
                _leave(run, asked)
            if run.last:
                _save(run, wait=True)
                break
            asked = _step(run)
        _finish(run)
    finally:
        run.close()


# Between two steps
# -------------------------------------------------------------------------------------------


def _save(run: Run, wait: bool) -> None:
    """Save this step, unless that is done. wait: until it is on disk. Raises UserError when a
    save that is waited for, or too many in a row, did not reach the disk.
    """
    if not run.state.step:
        return
    with run.clock.part("save"):
        if run.saver.begun != run.state.step:
            problem = run.saver.save(
                run.state, run.head, run.optimizer, run.target.identity, wait=wait
            )
        else:
            problem = run.saver.settle() if wait else ""
    if problem and (wait or run.saver.failures == RETRIES):
        raise UserError(
            f"out_dir: cannot save to {run.out} ({problem}); free space or mend permissions, "
            "then start the same command again"
        )


def _leave(run: Run, asked: int) -> None:
    """Save and raise Interrupted: some rank was asked to stop by signal `asked`."""
    _save(run, wait=True)
    raise interruption(run.stop.asked or asked, run.state.step, run.saver.written == run.state.step)


# One step
# -------------------------------------------------------------------------------------------


def _step(run: Run) -> int:
    """One update. Returns the signal that some rank was asked to stop by, 0 if none."""
    cfg, state = run.cfg, run.state
    run.profile.before(state.step + 1)
    start, cpu = time.perf_counter(), time.process_time()
    torch.manual_seed(hash_u63(cfg.seed, state.step, run.rank))
    run.head.begin_step(state.step, cfg.steps)

    totals, sound, micro = _passes(run)
    found, shared_norm, fine, signalled = _exchange(run, totals, sound)
    if fine:
        state.unsound = 0
    else:
        totals = without_poisoned(run, micro, sound, totals)
        found, shared_norm, _, signalled = _exchange(run, totals, torch.ones_like(sound))

    # DDP has averaged the gradients over the ranks; what is wanted is their sum over the
    # global count.
    scale = run.world / max(found["loss"][1], 1.0)
    norm = shared_norm * scale
    clip = min(1.0, cfg.optim.clip / (norm + 1e-6)) if cfg.optim.clip else 1.0
    torch._foreach_mul_(run.gradients, scale * clip)
    rate = learning_rate(state.step, cfg.steps, cfg.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]
    with run.clock.part("head"):
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
    state.step += 1

    found["seconds"] = [time.perf_counter() - start, 1.0]
    found |= run.clock.per_step(run.model)
    state.add(
        tokens_seen=found["tokens"][0],
        supervised_seen=found["loss"][1],
        train_seconds=found["seconds"][0],
        cpu_seconds=time.process_time() - cpu,
    )
    state.add_to_window(found)
    report(run, norm, rate)
    run.profile.after(state.step)
    # A signal after the exchange is heard one step later.
    return run.stop.asked if run.world == 1 else int(signalled and (run.stop.asked or SIGTERM))


def _passes(run: Run) -> tuple[Totals, Tensor, list[list[int]]]:
    """Forward and backward passes of this rank's micro-batches; gradients add up. Returns the
    sums [2] (total, count) of every statistic by name, and which losses are finite, [M] bool:
    both on the device; and the rows of each pass.
    """
    totals: Totals = {}
    sound: list[Tensor] = []
    micro: list[list[int]] = []
    feed, made = run.feed.take(run.state.step), None
    while made is None or not made.last:
        with run.clock.part("data"):
            made = next(feed)
        micro.append(made.rows)
        apart = nullcontext() if made.last else run.accelerator.no_sync(run.model)
        with apart, run.flops.counted(totals):
            sums, finite = one_pass(run, made.batch, made.target)
            add(totals, sums)
        sound.append(finite)
    return totals, torch.stack(sound), micro


def _exchange(
    run: Run, totals: Totals, sound: Tensor
) -> tuple[dict[str, list[float]], float, bool, bool]:
    """What the ranks tell each other after their passes, in one exchange and one wait for the
    device: (statistics over all ranks, rank 0's norm of the gradients, whether every loss and
    norm is finite, whether a rank was asked to stop).
    """
    norm = torch.nn.utils.get_total_norm(run.gradients).to(run.device, torch.float64)
    bad = ~(sound.all() & norm.isfinite())
    names = sorted(totals)
    # All ranks clip by one number: unlike devices sum the same gradients to unlike norms.
    first = norm if run.main else torch.zeros_like(norm)
    told = torch.stack([bad.double(), first, norm.new_tensor(run.stop.asked)])
    packed = torch.cat([told, *(totals[n] for n in names)])
    with run.clock.part("communication"):
        shared = run.accelerator.reduce(packed, "sum") if run.world > 1 else packed
        poisoned, shared_norm, asked, *sums = shared.tolist()  # type: ignore[union-attr]
    found = {name: sums[2 * i : 2 * i + 2] for i, name in enumerate(names)}
    return found, shared_norm, not poisoned, bool(asked)


# After the last step
# -------------------------------------------------------------------------------------------


def _finish(run: Run) -> None:
    """Write head/, say how it went, and hold training against decoding."""
    state, identity = run.state, run.target.identity
    if run.main and not disk.is_final(run.out / "head", state.step):
        about = {"step": state.step, "training": seen(state)}
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
