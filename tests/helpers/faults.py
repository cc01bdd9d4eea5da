"""What the reliability tests share: small runs in forked children, that can be killed,
signalled and restarted.

Importing torch costs seconds, a fork milliseconds: the parent has imported everything and
never trains itself, a child is a whole process with its own signals, locks, file limits and
process group. `ranks` forks the workers of a run, `launcher` forks torchrun's own agent, which
forks the workers and starts them again. A few cases of every campaign go through the real
command line instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from outrider.conf.schema import guarded
from outrider.heads.batch import Batch, LossOut
from outrider.heads.registry import head_class
from outrider.train import loop
from outrider.train.data.passes import Limits as Limits
from outrider.train.loop import fit
from tests.helpers.training import run_config

ROOT = Path(__file__).resolve().parents[2]
Action = Callable[[], Any]


class Shaky(head_class("medusa")):  # type: ignore[misc]
    """Medusa heads whose loss is scaled by a number from the global generator, as dropout
    would: a resumed run is the same run only if its random numbers are the same as well."""

    def forward(self, batch: Batch, target: Any) -> LossOut:
        out = super().forward(batch, target)
        return LossOut(out.sum * (0.5 + torch.rand(())), out.count, out.stats)


def train(data: Path, out: Path, *more: str) -> None:
    """A small run, as tests/helpers/training.py configures it, with random numbers in its loss."""
    fit(run_config(data, out, *more), Shaky)


class Marks:
    """What a child tells its parent while it runs: a byte for each mark. Made before the fork,
    read in the parent.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self.times: list[float] = []  # when the parent saw them

    def mark(self) -> None:
        os.write(self._write, b".")

    def seen(self) -> int:
        """How many marks there are so far."""
        with contextlib.suppress(BlockingIOError):
            self.times += [time.monotonic()] * len(os.read(self._read, 4096))
        return len(self.times)

    def steps(self, action: Action) -> Action:
        """The same action, with a mark before every step."""

        def marked() -> Any:
            step = loop.train_step

            def summary(*args: Any) -> int:
                self.mark()
                return step(*args)

            loop.train_step = summary
            return action()

        return marked

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def at_call(number: int, event: Action, action: Action) -> Action:
    """The same action, with `event` inside the forward pass of micro-batch `number`, counted
    over all steps.
    """

    def interrupted() -> Any:
        forward, calls = Shaky.forward, 0

        def counted(self: Any, batch: Batch, target: Any) -> LossOut:
            nonlocal calls
            calls += 1
            if calls == number:
                event()
            return forward(self, batch, target)

        Shaky.forward = counted  # type: ignore[method-assign]
        return action()

    return interrupted


def fork(action: Action, said: Path | None = None, **env: str) -> int:
    """Run `action` in a child; its process id. It ends with the exit code of a training
    command. said: its words.
    """
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.setpgid(0, 0)  # so that `wait` can end all of it
        os.environ.update(env)
        handle = os.open(said or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = sys.stderr = os.fdopen(
            handle, "w", buffering=1
        )  # pytest has others in their place
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        torch.set_num_threads(1)
        code = guarded(lambda: action() or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ranks(world: int, action: Action, said: Path | None = None) -> list[int]:
    """Fork the ranks of a run over gloo; their process ids."""
    if world == 1:
        return [fork(action, said)]
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
    }
    return [
        fork(
            action,
            said and said.with_name(f"{said.name}.{rank}"),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            **shared,
        )
        for rank in range(world)
    ]


def launcher(action: Action, restarts: int, said: Path | None = None, world: int = 2) -> int:
    """Fork torchrun's agent with `world` workers that it forks itself; its process id. It ends
    with 0 or 1.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def agent() -> None:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{free_port()}",
            max_restarts=restarts,
            monitor_interval=0.05,
            start_method="fork",
        )
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/scaling.md
        elastic_launch(config, worker)()

    def worker() -> None:
        code = guarded(lambda: action() or 0)
        if code:
            sys.stderr.flush()
            os._exit(code)

    return fork(agent, said)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(child: int, limit: float = 300.0) -> int:
    """The exit code of a child, negative for a signal. One that hangs is killed after `limit`
    seconds: TimeoutError.
    """
    deadline = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"process {child} was still running after {limit:.0f} s")
        time.sleep(0.005)


def finish(world: int, action: Action, said: Path | None = None, limit: float = 300.0) -> list[int]:
    """Exit codes of a run's ranks. Those that hang are killed after `limit` seconds:
    TimeoutError."""
    children = ranks(world, action, said)
    codes, late = [], None
    for child in children:
        try:
            codes.append(wait(child, limit if late is None else 1.0))
        except TimeoutError as error:
            late = error
    if late is not None:
        raise late
    return codes


def digest(folder: Path) -> str:
    """sha256 over the weights of a head folder, or over weights and moments of a checkpoint."""
    total = hashlib.sha256()
    for name in ("head.safetensors", "optimizer.safetensors"):
        if (folder / name).exists():
            total.update((folder / name).read_bytes())
    return total.hexdigest()


def outcome(out: Path, steps: int) -> tuple[str, str]:
    """Hashes of what a finished run leaves: its head, and the last checkpoint."""
    return digest(out / "head"), digest(out / f"checkpoints/step-{steps}")
