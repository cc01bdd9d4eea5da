"""Trainers beside each other: the same rows, the same shape of head, the same CPU seconds.

    make race DATA=CHATS.jsonl PROMPTS=UNSEEN.jsonl
    python scripts/lab/trainer_race.py chats=CHATS.jsonl features=runs/features \\
        prompts=UNSEEN.jsonl

Entries: ours, speculators (its whole training program), Automodel (its trainer module). They
take turns by CPU seconds. First every entry with each of `rates`, then with its best one for
every seed, then ours with single keys of the others (`variants`). All heads are scored by one
scorer here: cross-entropy and best token on held-out rows at equal CPU seconds, accepted length
on unseen prompts; those of the first seed also by speculators' own validation. Leaves REPORT;
`make readme` puts its tables into docs/race.md. Stopped, the same command goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from outrider.conf.errors import UserError, resumable
from outrider.conf.paths import no_file, no_folder
from outrider.conf.rules import AboveZero, Filled, NotEmpty, OneOrMore, ZeroOrMore, one_of
from outrider.conf.schema import entry
from outrider.decode.models.load import TargetConfig, load_target
from outrider.scripts.common import files
from outrider.scripts.common.absent import no_prompts
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress, Steps, by_name, columns
from outrider.scripts.common.prompts import load_prompts, spread
from outrider.scripts.common.spelling import spelled
from outrider.scripts.lab.pages import trainers as page
from outrider.scripts.lab.trainers import turns
from outrider.scripts.lab.trainers.entries import (
    NAMES,
    OURS,
    VARIANTS,
    Entry,
    Work,
    entries,
    without_folders,
)
from outrider.scripts.lab.trainers.scored import SHAPES, Scorer, loaded
from outrider.scripts.serving.export_features import ratio
from outrider.train.config import DataConfig
from outrider.train.stored.features import FeatureStore, identity_of, read_manifest
from outrider.train.texts.batches import JoinedRows, load_rows

# keys that change nothing of what is trained, of the variants alone, of the decoded answers alone
FREE = ("report", "together", "turn", "peers")
VARIED = ("variants", "variant_seeds", "variant_minutes")
PLACES = ("chats", "features", "prompts", "out", "report", "peers")
DECODED = ("prompts", "num_prompts", "answer_tokens")


@dataclass(frozen=True)
class TrainerRaceConfig:
    """Keys of scripts/lab/trainer_race.py."""

    # conversations in JSONL
    chats: NotEmpty
    # what scripts/cache_features.py stored of them for heads=[eagle3]
    features: NotEmpty
    # JSONL of prompts that nothing was trained on
    prompts: NotEmpty
    # folder of heads and logs
    out: NotEmpty
    # JSON to write
    report: NotEmpty
    # who takes part
    entries: Filled[Annotated[str, one_of(NAMES)]]
    # of the race
    seeds: Filled[ZeroOrMore]
    # CPU minutes of each entry and seed
    minutes: AboveZero
    # in so many equal parts of which the head is kept and scored
    marks: OneOrMore
    # learning rates that every entry tries, at the first seed
    rates: Filled[AboveZero]
    # CPU minutes of each try
    sweep_minutes: AboveZero
    # ours with keys of the others
    variants: list[Annotated[str, one_of(tuple(VARIANTS))]] = field(default_factory=list)
    # of the variants
    variant_seeds: Filled[ZeroOrMore] = field(default_factory=lambda: [0, 1])
    # CPU minutes of each variant and seed
    variant_minutes: AboveZero = 3.0
    # wall seconds of a turn
    turn: AboveZero = 15.0
    # programs that go on at a time, of one thread each
    together: OneOrMore = 1
    # tokens that the heads predict
    draft_vocab: OneOrMore = 3072
    # of a step of ours and Automodel's
    rows: OneOrMore = 4
    # of a step of speculators, packed: about as many as in those rows
    tokens: OneOrMore = 1024
    # steps between saved heads
    save_every: OneOrMore = 10
    # held-out rows that are scored
    held: OneOrMore = 40
    # unseen prompts
    num_prompts: OneOrMore = 24
    # most tokens of an answer
    answer_tokens: OneOrMore = 48
    # python of the environment with the peers
    peers: NotEmpty = ".venv-race/bin/python"

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        return [
            *no_file("chats", self.chats, "give conversations in JSONL"),
            *no_folder("features", self.features, "scripts/cache_features.py writes one"),
            *no_prompts(self.prompts),
            *no_file("peers", self.peers, "make .venv-race/.installed, or name another python"),
        ]

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        if OURS in self.entries:
            return []
        return [f"entries: the others are compared with {OURS}; name it too"]


class TrainerRace:
    """The race: what has been run so far stands in OUT."""

    def __init__(self, cfg: TrainerRaceConfig, on_progress: OnProgress) -> None:
        self.cfg, self.on_progress = cfg, on_progress
        self.out = Path(cfg.out)
        self.target = load_target(TargetConfig(kind="smollm2"), "float32", "cpu")
        self.rows_read = self._rows()
        self.work = self._work()
        self.scorer = self._scorer()
        self.entries = entries(cfg.entries, Path(cfg.peers).absolute())
        keys = {k: v for k, v in asdict(cfg).items() if k not in FREE}
        raced = {k: v for k, v in keys.items() if k not in (*VARIED, *DECODED)}
        self.memo = Memo(self.out / "done", raced)  # what is asked for later leaves the race alone
        self.varied_memo = Memo(self.out / "varied", raced | {k: keys[k] for k in VARIED})
        plain = {k: v for k, v in keys.items() if k not in VARIED}
        self.scores = Memo(self.out / "scores", plain)
        self.varied_scores = Memo(self.out / "varied_scores", keys)

    def _rows(self) -> JoinedRows:
        target = self.target
        return load_rows(
            DataConfig(path=self.cfg.chats),
            target.tokenizer,
            target.eos_ids,
            target.vocab_size,
            target.context_length,
        )

    def _work(self) -> Work:
        """What all train on, its rows exported once."""
        cfg, rows = self.cfg, self.out / "rows"
        if not rows.exists():
            command = [sys.executable, "scripts/export.py", "target=smollm2"]
            command += [f"features={spelled(cfg.features)}", f"data.path={spelled(cfg.chats)}"]
            command += [f"draft_vocab={cfg.draft_vocab}", f"out={spelled(str(rows.resolve()))}"]
            if subprocess.run(command, cwd=files.ROOT, check=False).returncode:
                raise UserError(f"features: {cfg.features}: could not be exported; see above")
        assert self.target.identity is not None
        return Work(
            Path(self.target.identity.path),
            Path(cfg.chats).absolute(),
            Path(cfg.features).absolute(),
            rows.absolute(),
            ratio(self.rows_read),
            cfg.draft_vocab,
            cfg.rows,
            cfg.tokens,
            cfg.save_every,
        )

    def _scorer(self) -> Scorer:
        cfg, folder = self.cfg, Path(self.cfg.features)
        card, _ = read_manifest(folder)
        identity = identity_of(self.target, self.rows_read, str(card["identity"]["dtype"]))
        store = FeatureStore.open(folder, identity, card["taps"], self.rows_read)
        prompts = spread(load_prompts(cfg.prompts), cfg.num_prompts)
        return Scorer(self.target, self.rows_read, store, prompts, cfg.answer_tokens, cfg.held)

    def run(self) -> dict[str, Any]:
        """All of it; the report."""
        cfg = self.cfg
        sweep = self.memo.each("sweep", cfg.rates, self.swept)
        best = self.best_rates(sweep)
        race = self.memo.each("race", cfg.seeds, lambda seed: self.raced(seed, best))
        variants = []
        if cfg.variants:
            variants = self.varied_memo.each(
                "variants", cfg.variant_seeds, lambda seed: self.varied(seed, best[OURS])
            )
        heads = kept("race", cfg.seeds, race)
        decoded = self.scores.each("decoded", heads, lambda head: self.decoded(*head))
        heads = kept("variants", cfg.variant_seeds, variants)
        decoded += self.varied_scores.each("decoded", heads, lambda head: self.decoded(*head))
        theirs = self.scores.each("theirs", [0], lambda _: self.their_scores(race[0]))
        profiles = self.scores.each("profile", [0], lambda _: self.profiled())
        return {
            "format": 1,
            "commit": files.commit(),
            "processor": files.processor(),
            **files.origin("cpu"),
            "command": without_folders(files.command(), PLACES),
            "settings": {k: v for k, v in asdict(cfg).items() if k not in PLACES},
            "data": {
                "rows": self.rows_read.held.numel(),
                "held_out": int(self.rows_read.held.sum()),
                "tokens": self.rows_read.ids.numel(),
            },
            "best_rates": best,
            "sweep": sweep,
            "race": race,
            "variants": variants,
            "decoded": decoded,
            "their_validation": theirs[0],
            "their_profile": profiles[0],
        }

    def swept(self, rate: float) -> list[dict[str, Any]]:
        """Every entry with a learning rate."""
        seconds = 60 * self.cfg.sweep_minutes
        rates = dict.fromkeys((e.name for e in self.entries), rate)
        return self.group(f"sweep-{rate:g}", self.entries, rates, self.cfg.seeds[0], seconds, 1)

    def best_rates(self, sweep: Sequence[list[dict[str, Any]]]) -> dict[str, float]:
        """Of each entry the rate whose head is best on the held-out rows, at the first step of the
        test; the first rate for one that did not get there."""
        best: dict[str, float] = {}
        for each in self.entries:
            found = [
                (page.first_loss(row), rate)
                for rate, rows in zip(self.cfg.rates, sweep, strict=True)
                for row in rows
                if row["entry"] == each.name and row["marks"]
            ]
            best[each.name] = min(found)[1] if found else self.cfg.rates[0]
        return best

    def raced(self, seed: int, rates: dict[str, float]) -> list[dict[str, Any]]:
        """Every entry with its best rate."""
        seconds = 60 * self.cfg.minutes
        return self.group(f"race-{seed}", self.entries, rates, seed, seconds, self.cfg.marks)

    def varied(self, seed: int, rate: float) -> list[dict[str, Any]]:
        """Ours, and ours with single keys of others, at our rate."""
        names = [OURS, *self.cfg.variants]
        some = entries(names, Path(self.cfg.peers))
        seconds = 60 * self.cfg.variant_minutes
        return self.group(
            f"variants-{seed}", some, dict.fromkeys(names, rate), seed, seconds, self.cfg.marks
        )

    def group(
        self,
        name: str,
        some: Sequence[Entry],
        rates: dict[str, float],
        seed: int,
        seconds: float,
        marks: int,
    ) -> list[dict[str, Any]]:
        """Entries that take turns, and the score of every head that was kept."""
        folders = [self.out / name / each.name for each in some]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        commands = [
            each.command(self.work, folder, rates[each.name], seed)
            for each, folder in zip(some, folders, strict=True)
        ]
        when = [seconds * (i + 1) / marks for i in range(marks)]
        rules = turns.Rules(seconds, when, self.cfg.turn, self.cfg.together)
        print(f"{name}: {', '.join(each.name for each in some)}", flush=True)
        found = turns.race(some, commands, folders, rules, self.on_progress)
        for row, folder in zip(found, folders, strict=True):
            row["rate"], row["seed"] = rates[row["entry"]], seed
            for mark in row["marks"]:
                place = folder / "marks" / f"{mark['core_seconds']:g}"
                mark["held_out"] = self.scorer.held_out(loaded(place, self.target))
            print(page.line(row), flush=True)
        return found

    def last_head(self, group: str, seed: int, name: str) -> Path:
        """The last head that was kept of an entry."""
        marks = self.out / f"{group}-{seed}" / name / "marks"
        return max(marks.iterdir(), key=lambda path: float(path.name))

    def decoded(self, group: str, seed: int, name: str) -> dict[str, Any]:
        """Accepted tokens of every cycle on the unseen prompts, by shape."""
        head = loaded(self.last_head(group, seed, name), self.target)
        self.on_progress(0, 0, f"decoding: {group} {name} {seed}")
        cycles = {shape: self.scorer.decoded(head, shape) for shape in SHAPES}
        return {"group": group, "seed": seed, "entry": name, "cycles": cycles}

    def their_scores(self, first: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What speculators' validation says of the last head of every entry at the first seed,
        exported in its format; [] where speculators does not take part."""
        if "speculators" not in self.cfg.entries:
            return []
        names = [row["entry"] for row in first if row["marks"]]
        found = self.asked("validated", {"validate": [self.exported(name) for name in names]})
        if "error" in found:
            return [found]
        values = found["validated"]
        return [{"entry": n, **value} for n, value in zip(names, values, strict=True)]

    def profiled(self) -> dict[str, Any]:
        """The share of speculators' step that attention takes; {} where it does not take part."""
        if "speculators" not in self.cfg.entries:
            return {}
        found = self.asked("profile", {"profile": True})
        return dict(found.get("profile", found))

    def asked(self, name: str, more: dict[str, Any]) -> dict[str, Any]:
        """What speculators' program leaves in NAME.json with these settings, by its name; else its
        last words as "error"."""
        folder = self.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        peer = next(each for each in self.entries if each.name == "speculators")
        command = peer.command(self.work, folder, self.cfg.rates[0], 0)
        settings = json.loads((folder / "settings.json").read_text())
        files.write_json(folder / "settings.json", settings | more)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(folder / "log", "ab") as log:
            subprocess.run(
                command, cwd=files.ROOT, env=environment, stdout=log, stderr=log, check=False
            )
        found = folder / f"{name}.json"
        if not found.exists():
            return {"error": turns.last_line(folder / "log")}
        return {name: json.loads(found.read_text())}

    def exported(self, name: str) -> str:
        """The last head of an entry in speculators' format; its own checkpoint as it is."""
        source = self.last_head("race", self.cfg.seeds[0], name)
        if name == "speculators":
            return str(source.resolve())
        out = self.out / "exports" / name
        shutil.rmtree(out, ignore_errors=True)
        if not (source / "head.json").is_file():
            own = self.out / "imports" / name
            shutil.rmtree(own, ignore_errors=True)
            keys = [f"from={spelled(str(source))}", f"out={spelled(str(own))}", "probe=false"]
            self.run_script("import_head", keys)
            source = own
        keys = [f"drafter={spelled(str(source))}", "format=speculators"]
        self.run_script("export", [*keys, f"out={spelled(str(out))}"])
        return str(out.resolve())

    def run_script(self, name: str, keys: Sequence[str]) -> None:
        """A product script on this target. Raises UserError where it fails."""
        command = [sys.executable, f"scripts/{name}.py", "target=smollm2", *keys]
        if subprocess.run(command, cwd=files.ROOT, check=False).returncode:
            raise UserError(f"{name}: failed on {keys[0]}; see above")


def kept(
    group: str, seeds: Sequence[int], rows: Sequence[list[dict[str, Any]]]
) -> list[tuple[str, int, str]]:
    """(group, seed, entry) of what left a head."""
    return [
        (group, seed, row["entry"])
        for seed, found in zip(seeds, rows, strict=False)
        for row in found
        if row["marks"]
    ]


@entry("trainer_race", TrainerRaceConfig)
@resumable()
def main(cfg: TrainerRaceConfig) -> int:
    """Race, score, report."""
    with files.sole_folder(Path(cfg.out)), Steps(*columns(44)) as bar:
        report = TrainerRace(cfg, by_name(bar)).run()
    files.write_json(Path(cfg.report), report)
    for table in page.tables(report):
        table.show()
    print(f"report: {cfg.report}")
    return 0


if __name__ == "__main__":
    main()
