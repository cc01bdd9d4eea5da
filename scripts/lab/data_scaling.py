"""What is better for a head: more conversations, or more passes over those that are there?

    python scripts/lab/data_scaling.py path=CHATS.jsonl prompts=UNSEEN.jsonl minutes=50

Trains a head for each of `shares` of the conversations with each of `passes`, every one to the
end of its own learning rate, and fits curves.effective: a token that is read again is worth less
than a new one. Then it says what all of the conversations will give, with the most passes, and
freezes that: date, 90 % interval and sha256 stand in OUT/predicted.json before that head is
trained. Then it trains it. Leaves REPORT with prediction and measurement, whether it hit or
missed. Stopped, the same command goes on.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from outrider.conf.errors import UserError
from outrider.conf.recipes import RECIPES
from outrider.conf.rules import Filled, Inside, NotEmpty, NotNegative, OneOrMore, one_of
from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.common.pipeline import Command, Pipeline
from outrider.scripts.common.spelling import spelled
from outrider.scripts.extra.forecasting import curves
from outrider.scripts.extra.forecasting.run import digest
from outrider.train.config import ENTRIES

READ = ("target", "data.", "dtype=", "device=")  # keys that say what is read, and how
SCORED = ("target", "dtype=", "device=")


@dataclass(frozen=True)
class DataScalingConfig:
    """Keys of scripts/lab/data_scaling.py."""

    # conversations in JSONL, the prediction's; the shares are its first rows
    path: NotEmpty
    # JSONL of prompts that nothing was trained on
    prompts: NotEmpty
    # folder of data, features, heads and scores
    out: NotEmpty = "runs/data_scaling"
    # JSON to write
    report: NotEmpty = "docs/results/data-scaling.json"
    # of every head
    recipe: Annotated[str, one_of(RECIPES)] = "eagle3_portable"
    # of the conversations
    shares: Filled[Inside] = field(default_factory=lambda: [0.125, 0.5])
    # over each of them
    passes: Filled[OneOrMore] = field(default_factory=lambda: [1, 2, 4])
    # most tokens of an answer that is scored
    tokens: OneOrMore = 64
    # of work before it stops; 0 = to the end
    minutes: NotNegative = 0.0
    # further keys of every command, such as target=tiny
    more: list[str] = field(default_factory=list)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        if len(set(self.shares)) > 1 and len(set(self.passes)) > 1:
            return []
        return ["shares, passes: two different ones of each are needed at least; give more"]


@dataclass(frozen=True)
class Run:
    """A head that is trained: on a share of the conversations, with so many passes."""

    share: float
    passes: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.share:g}x{self.passes}"


class Steps:
    """The commands of every head, and what they leave."""

    def __init__(self, cfg: DataScalingConfig) -> None:
        self.cfg, self.out = cfg, Path(cfg.out)
        self.grid = [Run(share, n) for share, n in itertools.product(cfg.shares, cfg.passes)]
        self.last = Run(1.0, max(cfg.passes))

    def data(self, share: float) -> Path:
        """The first rows of the conversations, written now unless they are there."""
        path = self.out / f"data-{share:g}.jsonl"
        lines = Path(self.cfg.path).expanduser().read_text(encoding="utf-8").splitlines(True)
        text = "".join(lines[: max(1, round(share * len(lines)))])
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            files.write_text(path, text)
        return path

    def read(self, share: float) -> list[str]:
        """Keys of what is read."""
        return [
            "target=smollm2",
            f"data.path={spelled(str(self.data(share)))}",
            "data.max_length=320",
        ]

    def commands(self, run: Run) -> list[Command]:
        """Features, training and score of a head."""
        cfg, kind = self.cfg, RECIPES[self.cfg.recipe][0]
        store, head = self.out / f"features-{run.share:g}", self.out / run.name
        manifest, score = store / "manifest.json", self.out / f"score-{run.name}"
        keys = [*self.read(run.share), f"heads=[{kind}]", f"out={spelled(str(store))}"]
        keys += [key for key in cfg.more if key.startswith(READ)]
        features = Command(
            f"the target reads {run.share:g} of them",
            ["scripts/cache_features.py", *keys],
            [self.data(run.share)],
            manifest,
        )
        keys = [
            *self.read(run.share),
            *RECIPES[cfg.recipe][1],
            f"data.features={spelled(str(store))}",
        ]
        keys += ["steps=0", f"epochs={run.passes}", "batch_size=16", "head.draft_vocab=4096"]
        keys += ["eval.every=0", "eval.parity=2", f"out_dir={spelled(str(head))}", *cfg.more]
        title = f"{run.name}: {run.passes} passes over {run.share:g} of them"
        card = head / "head" / "head.json"
        training = Command(title, [f"train/{ENTRIES[kind][0]}.py", *keys], [manifest], card)
        keys = ["target=smollm2", f"drafters=[none,{spelled(str(head))}@chain]", "parity=0"]
        keys += [f"prompts={spelled(cfg.prompts)}", f"max_new_tokens={cfg.tokens}", "batch_size=8"]
        keys += [f"out={spelled(str(score))}"]
        keys += [key for key in cfg.more if key.startswith(SCORED)]
        report = score / "report.json"
        scored = Command("its score", ["scripts/evaluate.py", *keys], [card], report)
        return [features, training, scored]

    def point(self, run: Run) -> dict[str, Any]:
        """What a head read and what it brought."""
        report = json.loads((self.out / f"score-{run.name}" / "report.json").read_text())
        row = report["drafters"][1]
        read = float(row["training"]["tokens_seen"])
        point = {"share": run.share, "passes": run.passes, "unique_tokens": read / run.passes}
        point |= {"tokens_seen": read, "depth": row["max_depth"], **row["accepted_length"]}
        return {**point, "weights_sha256": row["weights_sha256"]}


def foretold(points: Sequence[dict[str, Any]], cfg: DataScalingConfig, last: Run) -> dict[str, Any]:
    """The prediction for all conversations, from those that were measured."""
    largest = max(points, key=lambda point: point["share"])
    unique = largest["unique_tokens"] * last.share / largest["share"]
    fitted = curves.fit_reuse(points)
    length = curves.foretell(points, unique, last.passes)
    value = {
        "format": 1,
        **files.origin(),
        "data_sha256": files.sha256(Path(cfg.path)),
        "prompts_sha256": files.sha256(Path(cfg.prompts)),
        "recipe": cfg.recipe,
        "points": list(points),
        **fitted,
        "prediction": {
            "share": last.share,
            "passes": last.passes,
            "unique_tokens": unique,
            "mean": length.mean,
            "low": length.low,
            "high": length.high,
        },
    }
    return {**value, "sha256": digest(value)}


def kept(path: Path, points: Sequence[dict[str, Any]], make: Any) -> dict[str, Any]:
    """The prediction as it was frozen, or frozen now. Raises UserError where it was changed, or
    is about other heads."""
    if not path.exists():
        files.write_json(path, make())
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if value.get("sha256") != digest(value):
        raise UserError(f"out: {path} was changed since it was frozen; begin in another folder")
    if value["points"] != list(points):
        raise UserError(f"out: {path} is about other heads; begin in another folder")
    return value


@entry("data_scaling", DataScalingConfig)
def main(cfg: DataScalingConfig) -> None:
    """Train, foretell, freeze, train the last one, compare."""
    os.chdir(files.ROOT)
    steps = Steps(cfg)
    with files.sole_folder(steps.out):
        pipeline = Pipeline("data_scaling", steps.out, cfg.minutes)
        pipeline.run(command for run in steps.grid for command in steps.commands(run))
        points = [steps.point(run) for run in steps.grid]
        frozen = steps.out / "predicted.json"
        said = kept(frozen, points, lambda: foretold(points, cfg, steps.last))
        wanted = said["prediction"]
        print(f"foretold: {wanted['mean']:.3f} [{wanted['low']:.3f}, {wanted['high']:.3f}]")
        pipeline.run(steps.commands(steps.last))
        found = steps.point(steps.last)
        inside = wanted["low"] <= found["mean"] <= wanted["high"]
        files.write_json(Path(cfg.report), {**said, "measured": found, "inside": inside})
        print(f"measured: {found['mean']:.3f}, {'inside' if inside else 'outside'}")


if __name__ == "__main__":
    main()
