"""One EAGLE-3 head for a target, from no data at all to a file that llama.cpp serves, by the
commands that users give.

    make qwen25                  # Qwen2.5-Coder-1.5B; many hours of two cores
    make qwen25 MINUTES=50       # the same in pieces: the same command goes on

The target writes chats of its own, answers made-up questions for unit tests, and reads all
of them once; a head learns from its features by `recipe`, is exported, tuned, scored beside
plain decoding and n-grams, certified, and fitted to a domain that it has not read, SQL.
Leaves OUT/chats.jsonl and so on, OUT/eagle3, OUT/gguf, OUT/fit and REPORTS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from outrider.conf.rules import Filled, NotEmpty, NotNegative, OneOrMore
from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.common.pipeline import Command, Pipeline
from outrider.scripts.common.spelling import spelled

# name of a part of the data -> keys of what is asked
PARTS = {"chats": [], "unit_tests": ["domain=unit_tests"]}
FITTED = "sql"  # the domain that `fit` learns
LATER = 1 / 6  # share of its rows that `fit` is scored on


@dataclass(frozen=True)
class TargetHeadConfig:
    """Keys of scripts/lab/target_head.py."""

    # of conf/experiment, with its target
    recipe: NotEmpty
    # of conf/target
    kind: NotEmpty
    # folder of data, features, heads and exports
    out: NotEmpty
    # folder of the reports
    reports: NotEmpty
    # of each part of the data
    conversations: OneOrMore = 480
    # of the domain that is fitted
    fitted: OneOrMore = 360
    # of them decoded together, and a block of the file, which is lost where it is stopped
    batch: OneOrMore = 32
    # longest answer in them, tokens
    answer_tokens: OneOrMore = 200
    # JSONL of prompts that no part of the data holds
    prompts: NotEmpty = "scripts/prompts/demo.jsonl"
    # how many of them
    num_prompts: OneOrMore = 24
    # of which categories
    categories: Filled[str] = field(default_factory=lambda: ["code"])
    # most tokens of an answer to one
    tokens: OneOrMore = 64
    # that share the training on CPUs, as `accelerate launch` starts them
    processes: OneOrMore = 1
    # of work before it stops; 0 = to the end
    minutes: NotNegative = 0.0
    # further keys of every command, such as target.layers=2
    more: list[str] = field(default_factory=list)
    # further keys by the name of a script, such as {fit: ['minutes=1']}
    also: dict[str, list[str]] = field(default_factory=dict)


class Steps:
    """The commands of a job, each with the keys that it was given beside its own."""

    def __init__(self, cfg: TargetHeadConfig) -> None:
        self.cfg, self.out, self.reports = cfg, Path(cfg.out), Path(cfg.reports)
        self.head = self.out / "eagle3"
        self.card = self.head / "head" / "head.json"
        self.manifest = self.out / "features" / "manifest.json"

    def command(
        self, title: str, script: str, keys: list[str], reads: list[Path], leaves: Path
    ) -> Command:
        """A step with the target's keys and those that are given for all and for its
        script."""
        more = [*self.cfg.more, *self.cfg.also.get(Path(script).stem, [])]
        argv = [script, f"target={self.cfg.kind}", *keys, *more]
        return Command(title, argv, reads, leaves)

    def parts(self) -> dict[str, Path]:
        """The files of the data."""
        return {name: self.out / f"{name}.jsonl" for name in PARTS}

    def data(self) -> list[str]:
        """Keys that say what is read."""
        paths = ",".join(spelled(str(path)) for path in self.parts().values())
        return [f"data.path=[{paths}]", "data.max_length=512"]

    def all(self) -> Iterator[Command]:
        """Every step in its order."""
        count = self.cfg.conversations
        for name, path in self.parts().items():
            yield self.answers(name, path, PARTS[name], count)
        yield from (self.features(), self.training(), self.export(), *self.scores())
        path = self.out / f"{FITTED}.jsonl"
        yield self.answers(FITTED, path, [f"domain={FITTED}"], self.cfg.fitted)
        yield self.fit(*cut(path))

    def answers(self, name: str, path: Path, asked: list[str], count: int) -> Command:
        """The target answers the questions of a part."""
        keys = [f"out={spelled(str(path))}", *asked, "seed=0", f"batch={self.cfg.batch}"]
        keys += [f"num_conversations={count}"]
        keys += [f"max_new_tokens={self.cfg.answer_tokens}"]
        title = f"the target writes {name.replace('_', ' ')}"
        return self.command(title, "scripts/synthesize.py", keys, [], path)

    def features(self) -> Command:
        """The target reads them once."""
        keys = [*self.data(), "heads=[eagle3]", f"out={spelled(str(self.manifest.parent))}"]
        keys += ["batch_tokens=1024", "shard_mb=32"]  # a pass and a file in a minute or two
        reads = list(self.parts().values())
        title = "the target reads them"
        return self.command(title, "scripts/cache_features.py", keys, reads, self.manifest)

    def training(self) -> Command:
        """The head learns by the recipe."""
        keys = [f"experiment={self.cfg.recipe}", *self.data(), "seed=0"]
        keys += [f"data.features={spelled(str(self.manifest.parent))}"]
        keys += [f"out_dir={spelled(str(self.head))}"]
        title = "an EAGLE-3 head learns from them"
        keys += ["device=cpu"] if self.cfg.processes > 1 else []  # else they look for GPUs
        found = self.command(title, "train/eagle.py", keys, [self.manifest], self.card)
        return replace(found, processes=self.cfg.processes)

    def asked(self) -> list[str]:
        """Keys of what is asked of the heads."""
        cfg = self.cfg
        return [f"prompts={spelled(cfg.prompts)}", f"max_new_tokens={cfg.tokens}"]

    def scores(self) -> list[Command]:
        """What the head brings: tuned, beside others at T = 0 and T = 1, and certified."""
        cfg, head, reads = self.cfg, spelled(str(self.head)), [self.card]
        tuned = self.reports / "tune"
        keys = [f"drafter={head}", f"out={spelled(str(tuned))}", *self.asked()]
        found = [self.command("tuned", "scripts/tune.py", keys, reads, tuned / "tune.json")]
        drafters = f"drafters=[none,ngram,{head}@chain,{head}@tree,{head}@chain+ngram,hf_generate]"
        for temperature in (0, 1):
            out = self.reports / f"t{temperature}"
            keys = [drafters, f"out={spelled(str(out))}", *self.asked(), "parity=2"]
            keys += [f"temperature={temperature}", f"num_prompts={cfg.num_prompts}"]
            keys += [f"categories=[{','.join(cfg.categories)}]"]
            title = f"scores at T = {temperature}"
            leaves = out / "report.json"
            found.append(self.command(title, "scripts/evaluate.py", keys, reads, leaves))
        out = self.reports / "certificate"
        keys = [f"drafter={head}@tree", "temperature=1", "tokens=2000", "cases=100"]
        keys += [f"out={spelled(str(out))}", f"prompts={spelled(cfg.prompts)}"]
        leaves = out / "certificate.json"
        found.append(self.command("certified", "scripts/certify.py", keys, reads, leaves))
        return found

    def export(self) -> Command:
        """The file for llama.cpp."""
        gguf = self.out / "gguf"
        keys = [f"drafter={spelled(str(self.head))}", "format=gguf", "overwrite=true"]
        keys += [f"out={spelled(str(gguf))}", f"prompts={spelled(self.cfg.prompts)}"]
        leaves, title = gguf / "outrider.json", "exported for llama.cpp"
        return self.command(title, "scripts/export.py", keys, [self.card], leaves)

    def fit(self, train: Path, later: Path) -> Command:
        """The head learns a domain further."""
        out = self.out / "fit"
        keys = [f"start={spelled(str(self.head))}", f"out={spelled(str(out))}"]
        keys += [f"train={spelled(str(train))}", f"later={spelled(str(later))}"]
        keys += ["minutes=20", "shape=tree", "data.max_length=512"]
        reads = [self.card, train, later]
        return self.command(f"fitted to {FITTED}", "scripts/fit.py", keys, reads, out / "fit.json")


def cut(path: Path) -> tuple[Path, Path]:
    """The rows of a domain to learn from and, the last of them, to be scored on."""
    rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    first = len(rows) - max(1, round(len(rows) * LATER))
    parts = path.with_stem(f"{path.stem}_train"), path.with_stem(f"{path.stem}_later")
    for part, text in zip(parts, (rows[:first], rows[first:]), strict=True):
        files.write_text(part, "".join(text))
    return parts


@entry("target_head", TargetHeadConfig)
def main(cfg: TargetHeadConfig) -> None:
    """Run the steps that are not done yet."""
    os.chdir(files.ROOT)
    steps = Steps(cfg)
    with files.sole_folder(steps.out):
        Pipeline(cfg.recipe, steps.out, cfg.minutes).run(steps.all())


if __name__ == "__main__":
    main()
