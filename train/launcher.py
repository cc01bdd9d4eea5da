"""What an entry point needs before and around its run. Before torch is there: what it shall do
with memory, which no launch file can say. Around: good manners under `accelerate launch`, one line
for a user's mistake, not one line and the launcher's traceback.

With one process, accelerate starts the script as a child, dies of a SIGTERM without passing it
on, and answers any exit code but 0 with a traceback of its own. Under any other parent (a
shell, torchrun) nothing here does anything.

Our exit code cannot be handed on that way: the launcher knows 0, or its traceback and 1, and a
child can end its parent by a signal alone. So a shell sees 143 from a launcher of one process,
and 1 from one of several (torchrun's). One process needs no launcher: `python train/medusa.py
...` is the same run and ends with the code itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

ALLOCATOR = "PYTORCH_ALLOC_CONF"  # the older names of it yield to this one
OLDER = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# How many prepared matrix products are kept: by oneDNN, and by torch on top of it.
PREPARED = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
SHAPES = 64  # EAGLE-3 on SmolLM2 held 1.9 GB with it at step 181, 2.8 at step 24 with their 1,024
# What `--help` says of every training script.
SAME = """\
Several GPUs: `outrider train NAME ... --launch N`, which is `accelerate launch --num_processes N`.
The same command again resumes. Data: chats in JSONL, a `datasets` data set (data=hub), or plain
text (data=text); data.path=[FILE,FILE] takes several. Exit codes: 0 done, 1 training and decoding
disagree (parity gate), 2 a mistake to mend, 130 stopped by Ctrl-C and 75 by SIGTERM, SIGUSR1 or
SIGUSR2 (saved: start it again). `python` ends with them, `accelerate launch` cannot
(train/launcher.py). What happens at each fault: docs/reliability.md."""


def set_memory() -> None:
    """Say what torch shall do with memory where batches have ever new widths, unless the
    environment says it already. torch reads it while it is imported, so this comes first.

    On a GPU memory grows in place: what a narrower batch left would not do for a wider one. On a
    CPU few prepared matrix products are kept: two libraries keep a thousand each, one for every
    shape, with memory of its own in the midst of what a step frees, and a run would grow to its
    end.
    """
    if not any(name in os.environ for name in (ALLOCATOR, *OLDER)):
        os.environ[ALLOCATOR] = "expandable_segments:True"
    for name in PREPARED:
        os.environ.setdefault(name, str(SHAPES))


def run(command: Callable[[], None]) -> None:
    """Run an entry point; after a mistake or a stop that was explained in one line, the
    launcher says nothing more.
    """
    try:
        command()
    except SystemExit as end:
        if end.code in (1, 2, 75, 130) and (parent := waiting_launcher()):
            sys.stdout.flush()
            sys.stderr.flush()
            # It only waits for this process, and has nothing to add.
            os.kill(parent, signal.SIGTERM)
        raise


def refuse(name: str, schema: type) -> None:
    """End the process with code 2 and the command's own line where its words have a mistake.
    Called by a file before its imports load torch. name, schema: as for conf.schema.entry."""
    from outrider.conf.schema import refused

    def ended() -> None:
        if not {"-h", "--help"} & {*sys.argv} and (code := refused(name, schema, sys.argv[1:])):
            raise SystemExit(code)

    run(ended)


def follow() -> None:
    """Get a SIGTERM when the launcher dies of one."""
    if waiting_launcher():
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def waiting_launcher() -> int:
    """Process id of an `accelerate launch` that started this process and no other; 0 if there
    is none.
    """
    if sys.platform != "linux" or "RANK" in os.environ:
        return 0
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return 0
    named = any(
        os.path.basename(word) in (b"accelerate", b"accelerate-launch") for word in words[:3]
    )
    return parent if named else 0
