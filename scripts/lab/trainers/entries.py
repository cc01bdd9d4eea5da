"""Who takes part in the race of the trainers: how each is started on the same rows, what it leaves.

Every program appends a line with "step" and tokens to a file as it goes on, and saves its head now
and then. The settings that a peer's file reads (JSON):

    target, data, out    folders: the target, the exported rows, what it leaves
    ratio                share of the rows that are trained on, the first ones
    draft_vocab          size of the draft vocabulary, whose maps lie beside the rows
    tokens, rows         of a step: packed tokens (speculators), whole rows (the others)
    steps, step_decay    of the training-time test
    rate, warmup, betas  of AdamW: constant behind so many steps; clipped at 1, no weight decay
    dtype, seed, save_every
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.conf.jsonl import records
from outrider.scripts.common import files
from outrider.scripts.common.spelling import spelled

WARMUP = 10  # steps
PLANNED = 4000  # steps of ours; no entry comes to its end
BETAS = (0.9, 0.95)
STEPS, DECAY = 3, 0.8
OURS = "outrider"
PEERS = ("speculators", "automodel")


@dataclass(frozen=True)
class Work:
    """What all entries train on. target: folder of the model. data: JSONL; features: of them;
    rows: the same, exported for speculators. ratio: share of the rows before the held-out ones."""

    target: Path
    data: Path
    features: Path
    rows: Path
    ratio: float
    draft_vocab: int
    rows_a_step: int
    tokens_a_step: int
    save_every: int


@dataclass(frozen=True)
class Entry:
    """A program with its keys. name: in the table. python: that runs it. more: keys of ours
    that differ from the entry it is compared with; changed: said of them in a few words. root:
    the checkout that it runs in."""

    name: str
    program: str
    python: Path
    more: Sequence[str] = ()
    changed: str = ""
    root: Path = files.ROOT

    def command(self, work: Work, folder: Path, rate: float, seed: int) -> list[str]:
        """The command line that trains into `folder`."""
        if self.program == OURS:
            return [str(self.python), *ours(work, folder, rate, seed), *self.more]
        settings = {
            "target": str(work.target),
            "data": str(work.rows.resolve()),
            "out": str(folder.resolve()),
            "ratio": work.ratio,
            "draft_vocab": work.draft_vocab,
            "tokens": work.tokens_a_step,
            "rows": work.rows_a_step,
            "steps": STEPS,
            "step_decay": DECAY,
            "rate": rate,
            "warmup": WARMUP,
            "betas": list(BETAS),
            "dtype": "float32",
            "seed": seed,
            "save_every": work.save_every,
        }
        files.write_json(folder / "settings.json", settings)
        script = files.here(Path(f"scripts/lab/trainers/run_{self.program}.py"))
        return [str(self.python), str(script), str(folder / "settings.json")]

    def curve(self, folder: Path) -> list[tuple[int, int]]:
        """(step, tokens read by then) of every step so far."""
        if self.program != OURS:
            return [(int(r["step"]), int(r["tokens"])) for r in lines(folder / "curve.jsonl")]
        found = lines(folder / "run" / "metrics.jsonl")
        return [(int(r["step"]), int(r["tokens_seen"])) for r in found if "tokens_seen" in r]

    def heads(self, folder: Path) -> dict[int, Path]:
        """Saved heads by their step."""
        place = folder / "run" / "checkpoints" if self.program == OURS else folder / "heads"
        return {int(path.name.partition("-")[2]): path for path in place.glob("step-*")}

    def facts(self, folder: Path) -> dict[str, Any]:
        """Program, versions, what was changed of it, trained parameters."""
        if self.program != OURS:
            return dict(json.loads((folder / "facts.json").read_text()))
        found = lines(folder / "run" / "metrics.jsonl")
        start = next(line for line in found if line.get("event") == "start")
        sizes = [shape.split("x") for shape, _ in start["trainable"].values()]
        return {
            "program": f"outrider {start['commit']}",
            "versions": {name: start[name] for name in ("torch", "transformers")},
            "changes": [self.changed] if self.changed else [],
            "trained_parameters": sum(math.prod(map(int, size)) for size in sizes),
        }


def ours(work: Work, folder: Path, rate: float, seed: int) -> list[str]:
    """Keys of train/eagle.py."""
    return [
        str(files.here(Path("train/eagle.py"))),
        "target=smollm2",
        "head=eagle3",
        f"data.path={spelled(str(work.data))}",
        f"data.features={spelled(str(work.features))}",
        f"out_dir={spelled(str(folder / 'run'))}",
        f"seed={seed}",
        f"steps={PLANNED}",
        f"batch_size={work.rows_a_step}",
        f"head.draft_vocab={work.draft_vocab}",
        f"head.steps={STEPS}",
        f"head.step_decay={DECAY}",
        "head.norm_before_fc=true",
        "head.norm_output=true",
        f"optim.lr={rate}",
        f"optim.beta1={BETAS[0]}",
        f"optim.beta2={BETAS[1]}",
        "optim.schedule=constant",
        f"optim.warmup={WARMUP / PLANNED}",
        f"save_every={work.save_every}",
        "eval.every=0",
        "eval.parity=0",
        "log_every=1",
        "dtype=float32",
        "device=cpu",
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole records of a file that a program appends to; [] where it is not there."""
    return [*records(path)] if path.exists() else []


def entries(names: Sequence[str], peers: Path) -> list[Entry]:
    """The entries of these names. peers: python of the environment that the peers run in."""
    own = Path(sys.executable)
    known = {
        OURS: Entry(OURS, OURS, own),
        **{name: Entry(name, name, peers) for name in PEERS},
        **{name: variant(own) for name, variant in VARIANTS.items()},
    }
    return [known[name] for name in names]


def without_folders(command: str, keys: Sequence[str]) -> str:
    """A command with the names alone of the paths that these keys of it give."""
    words = [word.partition("=") for word in shlex.split(command)]
    return shlex.join(
        f"{key}{sign}{Path(value).name}" if key in keys else f"{key}{sign}{value}"
        for key, sign, value in words
    )


@dataclass(frozen=True)
class Variant:
    """Ours with some keys of a peer's."""

    name: str
    changed: str
    more: Sequence[str] = field(default_factory=tuple)

    def __call__(self, python: Path) -> Entry:
        """The entry."""
        return Entry(self.name, OURS, python, self.more, self.changed)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("weight_decay", "weight decay 0.01", ("optim.weight_decay=0.01",)),
        Variant("beta2", "second beta of AdamW 0.999", ("optim.beta2=0.999",)),
        Variant(
            "adamw",
            "weight decay 0.01, second beta 0.999",
            ("optim.weight_decay=0.01", "optim.beta2=0.999"),
        ),
        Variant("mask_all", "every position supervised", ("head.loss.mask=all",)),
        Variant("no_decay", "steps weigh the same", ("head.step_decay=1.0",)),
    )
}
NAMES = (OURS, *PEERS, *VARIANTS)
