"""What a run of any engine shares: prompts and our own answers, heads and those that are not
there, exports, processes, the report.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from outrider.conf.errors import UserError, last_line
from outrider.conf.rules import OneOrMore
from outrider.decode.models.identity import sha256_weights
from outrider.decode.models.load import TargetConfig, load_target, source_folder
from outrider.decode.target import Target
from outrider.heads import find_head, head_in
from outrider.heads.checkpoint import read_card
from outrider.heads.interop import exported
from outrider.heads.names import NONE
from outrider.scripts.common import files
from outrider.scripts.common.prompts import load_prompts, question_ids, spread
from outrider.scripts.common.spelling import spelled, target_keys
from outrider.scripts.lab.serving import case as engine_case

# usual drafter -> the head that `make demo` trains of its kind
DEMO = {"runs/eagle3": "runs/demo/eagle3", "runs/eagle3_portable": "runs/demo/eagle3"}
SKIPPED = 3  # exit code: a drafter that was asked for is not there


@dataclass(frozen=True, kw_only=True)
class EngineKeys:
    """The keys that every engine's run has. usual: what is served where no drafter is named."""

    usual: ClassVar[tuple[str, ...]] = ("runs/eagle3_portable", "runs/draft")

    # run folders or head folders to export and serve; [] = the usual ones, or the demo's
    drafters: list[str]
    # JSON to write
    out: str
    # folder for exports and for the parts that are finished
    work: str
    # the target of all of them
    target: TargetConfig = field(default_factory=TargetConfig)
    # JSONL of prompts
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them
    num_prompts: OneOrMore = 50
    # most tokens per answer
    max_new_tokens: OneOrMore = 64
    # prompts that are decoded together on our side
    batch_size: OneOrMore = 25
    # the engine's context, of each slot
    context: OneOrMore = 1024
    # Python of the engine's environment
    engine: str


def served(cfg: EngineKeys) -> list[str]:
    """What cfg.drafters names, or the usual ones that are there: where one was never trained, the
    demo's head of that kind takes its place, or it is left out. Says on stderr which.

    Raises UserError where no head is left."""
    if cfg.drafters:
        return cfg.drafters
    found = []
    for name in cfg.usual:
        other = DEMO.get(name, "")
        if name == NONE or head_in(name):
            found.append(name)
        elif other and head_in(other):
            found.append(other)
            print(f"note: {name} is not there; {other} takes its place", file=sys.stderr)
        else:
            print(f"note: {name} is not there and left out", file=sys.stderr)
    if set(found) <= {NONE}:
        looked_for = ", ".join(name for name in cfg.usual if name != NONE)
        raise UserError(
            f"drafters: none of {looked_for} is there, nor a head of the demo; run `make demo`, or "
            "name a run folder: drafters=[FOLDER]"
        )
    return list(dict.fromkeys(found))


def environment(python: str, make: str) -> Path:
    """Python of an engine's environment. Raises UserError that says how to build it."""
    path = files.ROOT / python
    if not path.exists():
        raise UserError(f"engine: {python} is not there; `{make}` builds it")
    return path


@dataclass(frozen=True)
class Found:
    """A drafter that is there. spec: as it was asked for. name: its own among the drafters of
    the run. folder: of the head."""

    spec: str
    name: str
    folder: Path
    kind: str
    card_sha256: str


class Stage:
    """One run: the target, the prompts, our own answers, the drafters and what is missing. The
    target is loaded where it is first asked for: exports load it again, in a process of theirs,
    and a large one does not fit twice."""

    def __init__(self, cfg: EngineKeys) -> None:
        self.cfg = replace(cfg, drafters=served(cfg))
        self.work = Path(cfg.work).resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.prompts = spread(load_prompts(cfg.prompts), cfg.num_prompts)
        self.missing: list[dict[str, str]] = []

    @functools.cached_property
    def target(self) -> Target:
        """The target in float32."""
        return load_target(self.cfg.target, "float32", "cpu")

    @functools.cached_property
    def weights_sha256(self) -> str:
        """Of the target's weights; one of files is not loaded for it."""
        if self.cfg.target.kind != "tiny":
            return sha256_weights(source_folder(self.cfg.target))
        assert self.target.identity is not None
        return self.target.identity.weights_sha256

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """Token ids of the prompts' first turns."""
        return [question_ids(self.target.tokenizer, one.turns[0]) for one in self.prompts]

    @functools.cached_property
    def runs(self) -> engine_case.Runs:
        """Our own answers; the plain ones are made at the first look."""
        print("plain decoding: ours", flush=True)
        cfg = self.cfg
        return engine_case.Runs(
            self.target, self.ids, cfg.max_new_tokens, cfg.batch_size, self.work
        )

    def drafters(self, without: Sequence[str] = ()) -> Iterator[Found]:
        """Those that are there; the others are noted as missing. without: drafters that need
        no folder."""
        names: list[str] = []
        for spec in self.cfg.drafters:
            if spec in without:
                continue
            try:
                folder = find_head(spec)
                card = read_card(folder)
            except UserError as error:
                self.missing.append({"drafter": spec, "reason": str(error)})
                continue
            names.append(name_of(card))
            again = names.count(names[-1])
            name = names[-1] if again == 1 else f"{names[-1]}-{again}"
            yield Found(spec, name, folder, card["kind"], card["sha256"])

    def exported(self, name: str, found: Found, format: str, *more: str) -> Path:
        """The folder WORK/name with an export of a head; made again when the head has changed.
        more: further keys of scripts/export.py."""
        folder = self.work / name
        said = exported(folder)
        if said is None or said["source"]["card_sha256"] != found.card_sha256:
            drafter = f"drafter={spelled(str(found.folder))}"
            self.export(name, drafter, f"format={format}", *more)
        return folder

    def export(self, name: str, *keys: str) -> None:
        """scripts/export.py with these keys into WORK/name."""
        command = [
            sys.executable,
            str(files.ROOT / "scripts/export.py"),
            *target_keys(self.cfg.target),
            "overwrite=true",
            "device=cpu",
            *keys,
            f"out={spelled(str(self.work / name))}",
        ]
        call(command, self.work / f"{name}.export.log")

    def report(
        self,
        engine: dict[str, str],
        settings: dict[str, Any],
        cases: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """Write OUT and give it back. settings: those that only this engine has."""
        identity = self.target.identity
        found = {
            "format": 1,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": files.command(),
            "environment": files.environment(),
            "engine": engine,
            "settings": {
                "prompts": self.cfg.prompts,
                "num_prompts": len(self.ids),
                "max_new_tokens": self.cfg.max_new_tokens,
                "temperature": 0,
                **settings,
            },
            "target": None if identity is None else identity.to_json() | {"path": ""},
            "cases": list(cases),
            "missing": self.missing,
        }
        files.write_json(Path(self.cfg.out), found)
        return found

    def end(self) -> int:
        """The exit code; names on standard error what is missing."""
        for row in self.missing:
            print(f"not there: {row['drafter']} ({row['reason']})", file=sys.stderr)
        return SKIPPED if self.missing else 0


def name_of(card: dict[str, Any]) -> str:
    """What a head is called in tables, by its card."""
    kind = str(card["kind"])
    config = card["head"].get("config", {})
    if config.get("parallel"):
        return "p_eagle"
    return f"{kind}_causal" if config.get("causal") else kind


def call(command: list[str], log: Path) -> None:
    """Run a process; its output goes to `log`. Raises UserError with the last line when it
    fails.
    """
    with open(log, "w") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        said = last_line(log.read_text())
        raise UserError(
            f"{Path(command[1]).name}: failed with code {code} ({said}); all of it: {log}"
        )
