"""Training of every head here beside another checkout of this repository: tokens per CPU second
and peak memory.

    git worktree add ../before COMMIT
    python scripts/lab/train_pair.py before=../before chats=CHATS.jsonl

Of each head both run the same command on the same rows, with one thread, and take turns by CPU
seconds, or go on beside each other (`together=2`). Leaves docs/results/train-pair.json; `make
readme` puts its table into docs/race.md. Stopped, the same command goes on.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from outrider.conf.commit import commit
from outrider.conf.errors import resumable
from outrider.conf.paths import no_file
from outrider.conf.recipes import RECIPES
from outrider.conf.rules import AboveZero, NotEmpty, OneOrMore, Seed, one_of
from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import Steps, by_name, columns
from outrider.scripts.common.spelling import spelled
from outrider.scripts.lab.pages import trainers as page
from outrider.scripts.lab.trainers import turns
from outrider.scripts.lab.trainers.entries import OURS, Entry, without_folders
from outrider.train.config import ENTRIES

HEADS = {
    **RECIPES,
    "eagle1": ("eagle1", ["head=eagle1"]),
    "small_lm": ("small_lm", ["head.from_target_layers=2"]),
}
PLACES = ("before", "chats", "out", "report")


@dataclass(frozen=True)
class TrainPairConfig:
    """Keys of scripts/lab/train_pair.py."""

    # folder of the other checkout
    before: NotEmpty
    # conversations in JSONL
    chats: NotEmpty
    # folder of runs and logs
    out: NotEmpty
    # JSON to write
    report: NotEmpty
    # recipes; empty = all
    heads: list[Annotated[str, one_of(HEADS)]] = field(default_factory=list)
    # CPU seconds of each head and checkout
    seconds: AboveZero = 60.0
    # wall seconds of a turn
    turn: AboveZero = 5.0
    # programs that go on at a time, of one thread each
    together: OneOrMore = 1
    # rows of a step
    batch_size: OneOrMore = 4
    # of the order of the rows
    seed: Seed = 0

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        mark = str(Path(self.before).expanduser() / "train" / "eagle.py")
        return [
            *no_file("before", mark, "name a checkout: git worktree add ../before COMMIT"),
            *no_file("chats", self.chats, "give conversations in JSONL"),
        ]


class TrainPair:
    """A checkout beside this one."""

    def __init__(self, cfg: TrainPairConfig) -> None:
        self.cfg, self.out = cfg, Path(cfg.out).absolute()
        before = Path(cfg.before).expanduser().resolve()
        self.commits = {page.BEFORE: commit(root=before), OURS: commit()}
        key = {k: v for k, v in asdict(cfg).items() if k not in PLACES}
        self.memo = Memo(
            self.out / "done", {**key, **self.commits, "chats": files.sha256(Path(cfg.chats))}
        )
        self.entries = [
            Entry(page.BEFORE, OURS, Path(sys.executable), root=before),
            Entry(OURS, OURS, Path(sys.executable)),
        ]

    def command(self, name: str, entry: Entry, folder: Path) -> list[str]:
        """The command line that trains a head in a checkout."""
        kind, keys = HEADS[name]
        return [
            str(entry.python),
            str(entry.root / "train" / f"{ENTRIES[kind][0]}.py"),
            "target=smollm2",
            *keys,
            f"data.path={spelled(str(Path(self.cfg.chats).absolute()))}",
            f"out_dir={spelled(str(folder / 'run'))}",
            f"seed={self.cfg.seed}",
            f"batch_size={self.cfg.batch_size}",
            "steps=100000",
            "save_every=100000",
            "eval.every=0",
            "eval.parity=0",
            "log_every=1",
            "device=cpu",
        ]

    def paired(self, name: str, bar: Steps) -> list[dict[str, Any]]:
        """What both checkouts did with a head."""
        folders = [self.out / name / entry.name for entry in self.entries]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        commands = [
            self.command(name, entry, folder)
            for entry, folder in zip(self.entries, folders, strict=True)
        ]
        rules = turns.Rules(self.cfg.seconds, [], self.cfg.turn, self.cfg.together)
        found = turns.race(self.entries, commands, folders, rules, by_name(bar))
        print(page.pair_line(name, found), flush=True)
        return found

    def run(self, bar: Steps) -> dict[str, Any]:
        """All heads; the report."""
        names = self.cfg.heads or list(HEADS)
        found = self.memo.each("heads", names, lambda name: self.paired(name, bar))
        return {
            "format": 1,
            **files.origin("cpu"),
            "command": without_folders(files.command(), PLACES),
            "commits": self.commits,
            "settings": {k: v for k, v in asdict(self.cfg).items() if k not in PLACES},
            "heads": dict(zip(names, found, strict=True)),
        }


@entry("train_pair", TrainPairConfig)
@resumable()
def main(cfg: TrainPairConfig) -> int:
    """Train by turns, report."""
    with files.sole_folder(Path(cfg.out)), Steps(*columns(44)) as bar:
        report = TrainPair(cfg).run(bar)
    files.write_json(Path(cfg.report), report)
    page.pair_table(report).show()
    print(f"report: {cfg.report}")
    return 0


if __name__ == "__main__":
    main()
