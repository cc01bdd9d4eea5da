"""Write the target's features of a data set once, so that training reads them instead of
running the target.

    accelerate launch scripts/cache_features.py target=smollm2 data.path=FILE \\
        out=runs/features heads=[eagle3]
    accelerate launch train/eagle.py target=smollm2 data.path=FILE \\
        data.features=runs/features out_dir=runs/eagle3 ...

Prints the bytes and checks the free space before it writes anything. Any number of processes
may write one folder, with or without a launcher, also on several machines that share it; each
takes shards that nobody has taken. Stopped, killed or damaged: the same command continues, and
writes again only what is missing or differs from its sha256. Target, data, dtype and taps must
then be the same. manifest.json is written last and makes the folder readable
(train/features/store.py). Exit codes: 0 done, 2 a mistake to mend, 130 and 75 stopped by
Ctrl-C or a signal (start it again).
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# train/ stands first and would shadow libraries
sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.train import launch
from outrider.train.features.config import CacheConfig

if __name__ == "__main__":
    launch.refuse("cache_features", CacheConfig)

from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.conf.errors import Interrupted
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.train.accelerator import on_processors
from outrider.train.data.load import load_rows
from outrider.train.features.store import MANIFEST
from outrider.train.features.writer import FeatureWriter
from outrider.train.signals import CODES, Stop
from outrider.train.waiting import main_first, meet


def write(writer: FeatureWriter, rank: int, world: int, console: Console) -> bool:
    """Write all shards that nobody else writes. Returns whether the cache is complete. Raises
    Interrupted on a signal after the shards written so far are safe."""
    bar = Progress(
        TextColumn("features"),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.total:,} tokens"),
        TimeRemainingColumn(),
        console=console,
        disable=rank > 0 or not console.is_terminal,
    )
    with Stop() as stop, bar:
        task = bar.add_task("", total=writer.rows.ids.numel())
        for turn in range(writer.count):
            number = (turn + rank * writer.count // world) % writer.count
            with writer.claim(number) as mine:
                if mine and not writer.done(number):
                    for tokens in writer.shard(number):
                        bar.advance(task, tokens)
                        if stop.requested:
                            raise Interrupted(
                                f"stopped; {writer.folder} keeps the files that are complete, the "
                                "same command continues",
                                CODES[signal.Signals(stop.requested)],
                            )
                    console.print(f"features: {writer.path(number).name} written", highlight=False)
                elif mine:
                    bar.advance(task, writer.tokens(number))
    return writer.finish() if world == 1 else False


@entry("cache_features", CacheConfig)
def main(cfg: CacheConfig) -> None:
    """Write or continue a cache."""
    state = PartialState(cpu=on_processors(cfg.device))
    rank, world, main_rank = state.process_index, state.num_processes, state.is_main_process
    console = Console(stderr=True, quiet=not main_rank, soft_wrap=True)
    target = load_target(cfg.target, cfg.dtype, cfg.device or (state.device if world > 1 else None))
    size = target.vocab_size, target.context_length
    with main_first("rows", cfg.data.wait):
        rows = load_rows(cfg.data, target.tokenizer, target.eos_ids, *size)
    meet("rows", cfg.data.wait)
    writer = FeatureWriter(cfg, target, rows)
    console.print(writer.prepare(), highlight=False)
    state.wait_for_everyone()
    if main_rank:
        writer.begin()
    state.wait_for_everyone()
    complete = write(writer, rank, world, console)
    state.wait_for_everyone()
    if main_rank:
        complete = complete or writer.finish()
        console.print(
            f"features: {writer.folder / MANIFEST}"
            if complete
            else "features: another process is still "
            f"writing to {writer.folder}; the one that ends last completes it",
            highlight=False,
        )
    if world > 1:
        state.destroy_process_group()


if __name__ == "__main__":
    launch.run(main)
