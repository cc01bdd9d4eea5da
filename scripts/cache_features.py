"""Write the target's features of a data set once; training with data.features=FOLDER then runs
no target.

    outrider cache_features target=smollm2 data.path=FILE out=runs/features heads=[eagle3] \\
        [--launch PROCESSES]
    outrider train eagle3 target=smollm2 data.path=FILE data.features=runs/features \\
        out_dir=runs/eagle3 ... [--launch PROCESSES]

With base_url= a serving engine captures the states (scripts/data/captured.py) and no layer of the
target is loaded here but the lowest ones, which check it.

Bytes and free space are printed before anything is written; the processes of a launch share the
work. Stopped or killed: the same command writes what is missing; target, data, dtype and taps
must then be the same. Exit codes: 0 done, 2 a mistake to mend, 130 and 75 stopped by Ctrl-C or
a signal (start it again).
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# scripts/ is first on sys.path and would shadow libraries
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.train import launch
from outrider.train.data.config import CacheConfig

if __name__ == "__main__":
    launch.refuse("cache_features", CacheConfig)

from accelerate import PartialState
from rich.console import Console
from torch import Tensor

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.scripts.common.progress import Steps
from outrider.scripts.data.captured import FIRST, CapturedStates
from outrider.train.accelerator import PAUSE, barrier, main_first, on_processors
from outrider.train.data.load import load_rows
from outrider.train.features import FeatureWriter
from outrider.train.signals import CODES, Stop


def write(
    writer: FeatureWriter,
    shards: list[int],
    states: Iterator[tuple[int, Tensor]],
    console: Console,
    ranks: int,
) -> None:
    """Write some shards, while there is room for them. states: of their rows. Raises Interrupted
    on a signal; the shards so far are safe."""

    def heed() -> None:
        if stop.requested:
            raise Interrupted(
                f"stopped; {writer.folder} keeps the files that are complete, the same "
                "command continues",
                CODES[signal.Signals(stop.requested)],
            )

    with Stop() as stop, Steps(console=console, quiet=console.quiet) as bar:
        task = bar.add_task("tokens", total=sum(map(writer.tokens, shards)))
        for number in shards:
            if writer.full(ranks):
                console.print("features: room_gb is full; waiting until training deletes files")
            while writer.full(ranks):
                time.sleep(PAUSE)
                heed()
            for tokens in writer.shard(number, states):
                bar.advance(task, tokens)
                heed()
            console.print(f"features: shard {number} written", highlight=False)


@entry("cache_features", CacheConfig)
def main(cfg: CacheConfig) -> None:
    """Write or continue a folder of features."""
    state = PartialState(cpu=on_processors(cfg.device))
    rank, world = state.process_index, state.num_processes
    if 0 < cfg.room_gb << 10 < (need := world * cfg.shard_mb):
        raise UserError(
            f"room_gb: {cfg.room_gb} has no room for a file of each process ({world} x shard_mb="
            f"{cfg.shard_mb}); give at least room_gb={-(-need // 1024)}, or a smaller shard_mb"
        )
    console = Console(stderr=True, quiet=rank > 0, soft_wrap=True)
    device = cfg.device or (state.device if world > 1 else None)
    target = load_target(cfg.target, cfg.dtype, device, layers=FIRST if cfg.base_url else None)
    size = target.vocab_size, target.context_length
    with main_first("rows"):
        rows = load_rows(cfg.data, target.tokenizer, target.eos_ids, *size)
    barrier("rows")
    writer = FeatureWriter(cfg, target, rows)
    console.print(writer.prepare(), highlight=False)
    state.wait_for_everyone()
    if rank == 0:
        writer.begin()
    state.wait_for_everyone()
    shards = [number for number in writer.missing if number % world == rank]
    if cfg.base_url:
        place, bounds = Path(cfg.captured).expanduser(), writer.bounds
        order = [row for i in shards for row in range(*bounds[i : i + 2])]
        with CapturedStates(cfg.base_url, place, cfg.concurrency, target, writer.taps) as server:
            texts = (rows.ids[slice(*rows.offsets[r : r + 2].tolist())].tolist() for r in order)
            write(writer, shards, zip(order, server.states(texts), strict=True), console, world)
    else:
        write(writer, shards, writer.computed(shards), console, world)
    barrier("written")
    state.wait_for_everyone()  # the first to leave may hold the store at which the others meet
    console.print(f"features: {writer.folder}", highlight=False)
    if world > 1:
        state.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)
