"""What an entry point of training needs before and around its run: memory settings that
torch reads while it is imported, the processes that were asked for, and one line for a
user's mistake in place of a launcher's traceback.

Where torch sees fewer than two GPUs, `accelerate launch` starts the script as one child,
whatever number was asked for; that child then starts the others (`spread`). It answers any
exit code but 0 with a traceback of its own and can be told no code, so a shell sees 143
from a launcher of one child, and 1 from one of several (torchrun's). One process needs no
launcher: `python train/medusa.py ...` is the same run and ends with the code itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.conf.errors import UserError
from outrider.train.signals import agent, follow, launch_words, waiting_launcher

ALLOCATOR = "PYTORCH_ALLOC_CONF"  # the older names of it yield to this one
OLDER = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALIKE = 10.0  # seconds in which a mistake that all ranks make is met by the first of a machine
# What `--help` says of every training script.
SAME = """\
Several GPUs: `outrider train NAME ... --launch N`, which is `accelerate launch --num_processes N`.
The same command again resumes. Data: chats in JSONL, a `datasets` data set (data=hub), or plain
text (data=text); data.path=[FILE,FILE] takes several. Exit codes: 0 done, 1 training and decoding
disagree (parity gate), 2 a mistake to mend, 130 stopped by Ctrl-C and 75 by SIGTERM, SIGUSR1 or
SIGUSR2 (saved: start it again). One process ends with them; a launcher hands on 0 alone, and ends
with 143 (accelerate, one process or no GPUs), or of several with 142 (a mistake) or 1. Faults:
docs/train.md."""


def set_memory() -> None:
    """Say what torch shall do with memory where batches have ever new widths, unless the
    environment says it already. torch reads it while it is imported, so this comes first.
    On a GPU memory grows in place: what a narrower batch left would not do for a wider one.
    """
    if not any(name in os.environ for name in (ALLOCATOR, *OLDER)):
        os.environ[ALLOCATOR] = "expandable_segments:True"


def trainer(name: str, module: str) -> Any:
    """Return the command that trains with the keys of train/NAME.py. module: that file's
    __name__, whose docstring is its help. A mistake in a key is reported before torch is
    loaded."""
    set_memory()
    from outrider.conf.schema import entry
    from outrider.train.config import keys_of

    def main(cfg: Any) -> None:
        from outrider.train.loop import fit

        fit(cfg)

    main.__module__ = module
    return entry(name, keys_of(name), more=SAME)(main)


def run(command: Any) -> None:
    """Run an entry point (conf.schema.entry), in as many processes as were asked for."""
    with last_word():
        spread(command)
        command()


@contextlib.contextmanager
def last_word() -> Iterator[None]:
    """After a mistake or a stop that was explained in one line, the launcher says nothing
    more."""
    try:
        yield
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        if end.code in (1, 2, 75, 130) and (parent := waiting_launcher()):
            os.kill(parent, signal.SIGTERM)  # it only waits for this process
        elif end.code == 2 and (parent := agent()):
            if os.environ["LOCAL_RANK"] == "0":
                os.kill(parent, signal.SIGALRM)  # other signals make it print a traceback
            deadline = time.monotonic() + ALIKE
            while os.getppid() == parent and time.monotonic() < deadline:
                time.sleep(0.05)
        raise


def refuse(name: str, schema: type) -> None:
    """End the process with code 2 and the command's own line where its words have a mistake.
    name, schema: as for conf.schema.entry."""
    from outrider.conf.schema import refused

    with last_word():
        if not helped() and (code := refused(name, schema, sys.argv[1:])):
            raise SystemExit(code)


def helped() -> bool:
    """Return whether the command is asked what it does."""
    return bool({"-h", "--help"} & {*sys.argv})


def spread(command: Any) -> None:
    """Where `accelerate launch` was asked for several processes and started this one alone, be
    their launcher, accelerate's own for several GPUs, and end with them."""
    parent = waiting_launcher()
    # Accelerate sets it for several; who trains alone does not pay for reading its words again.
    if not parent or "MASTER_ADDR" not in os.environ or helped():
        return
    refuse(command.config_name, command.schema)  # a mistake is reported once
    args = asked(launch_words(parent) or ())
    if max(args.num_processes, args.num_machines) < 2:
        return
    from accelerate.commands.launch import multi_gpu_launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from outrider.train.accelerator import launched

    told = {f"ACCELERATE_{name.upper()}": value for name, value in launched().items() if value}
    os.environ.update(told)  # to the processes, whose parent has other words
    code = 0
    try:
        devices(here(args), args.cpu or args.use_cpu)
        follow()
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        multi_gpu_launcher(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except (ChildFailedError, SignalException):  # the processes have said why
        code = 1
    raise SystemExit(code)


def asked(words: Sequence[str]) -> Namespace:
    """Return what `accelerate launch WORDS` is asked for, its config file included, as
    accelerate itself understands it. Raises what accelerate raises, such as ValueError."""
    from accelerate.commands import launch

    args = launch.launch_command_parser().parse_args([*words])
    logging.disable(logging.WARNING)  # it tells what it took as usual, a second time
    try:
        return launch._validate_launch_command(args)[0]
    finally:
        logging.disable(logging.NOTSET)


def here(args: Namespace) -> int:
    """Return how many processes this machine runs, of what `asked` tells."""
    return max(int(args.num_processes // max(args.num_machines, 1)), 1)


def devices(count: int, cpu: bool = False, key: str = "num_processes") -> int:
    """Return how many accelerators `count` processes of this machine take, one each; 0:
    they run on its processors, as they are told to (cpu), or because torch sees no
    accelerator. Raises UserError, which names `key`, for more processes than accelerators."""
    import torch

    found = 0 if cpu or not torch.accelerator.is_available() else torch.accelerator.device_count()
    if 0 < found < count:
        raise UserError(
            f"{key}: {count} processes, and {found} devices; give {found}, or hide them "
            "(CUDA_VISIBLE_DEVICES=) to run on the processors"
        )
    return min(found, count)
