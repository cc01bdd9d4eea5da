"""What stands for what in the rehearsal (stand_ins.yaml), and the commands that come of it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from outrider.scripts.common import files
from outrider.scripts.lab.rehearsing.page import BEGIN, PageStep

FILE = Path(__file__).with_name("stand_ins.yaml")
PLACES = re.compile(r"\b(runs|exports|reports)/")  # folders of the page
KEY = re.compile(r"[\w.]+=")
SERVERS = ("llama-server",)

Kind = Literal["run", "serve", "left out"]


@dataclass(frozen=True)
class Line:
    """A command of the page and what is run for it. written: as it stands there. words: what is
    run. why: of one that is left out."""

    number: str
    title: str
    written: str
    kind: Kind
    words: tuple[str, ...] = ()
    why: str = ""

    @property
    def key(self) -> dict[str, Any]:
        """What a finished command depends on."""
        return {"number": self.number, "words": list(self.words)}


@dataclass(frozen=True)
class StandIns:
    """stand_ins.yaml. order: of the parts of the page. prepare: part -> commands for what it
    takes as given. left_out: beginning of a command -> why it is not run. replace: words of the
    page -> what stands for them. keys: step -> keys that are set in its commands. exit_codes:
    step -> codes with which its commands have done their work, beside 0."""

    order: tuple[str, ...]
    prepare: dict[str, list[str]]
    left_out: dict[str, str]
    replace: dict[str, str]
    keys: dict[str, dict[str, str]]
    exit_codes: dict[str, list[int]]


def load(path: Path = FILE) -> StandIns:
    """What the file says."""
    found: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(path), resolve=False)  # type: ignore[assignment]
    keys = {
        step: {key: _spelled(value) for key, value in given.items()}
        for step, given in found["keys"].items()
    }
    return StandIns(
        tuple(found["order"]),
        found["prepare"],
        found["left_out"],
        found["replace"],
        keys,
        found["exit_codes"],
    )


def _spelled(value: Any) -> str:
    """As it stands on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def plan(steps: list[PageStep], given: StandIns, work: Path) -> list[Line]:
    """All commands in the order in which they are run: what the page says before its first
    step, then its parts in `given.order`, each behind what it takes as given.

    work: the folder that takes the place of runs/, exports/ and reports/."""
    wanted = [step for step in steps if step.number == BEGIN]
    for part in given.order:
        wanted.append(PageStep(part, "what the page takes as given", tuple(given.prepare[part])))
        wanted += [step for step in steps if step.number[0] == part]
    return [line(step, written, given, work) for step in wanted for written in step.lines]


def line(step: PageStep, written: str, given: StandIns, work: Path) -> Line:
    """A command of the page and what is run for it."""
    why = next((why for start, why in given.left_out.items() if written.startswith(start)), None)
    if why is not None:
        return Line(step.number, step.title, written, "left out", why=why)
    text = written
    for said, other in given.replace.items():
        text = text.replace(said, other)
    text = PLACES.sub(lambda found: f"{work}/{found[0]}", text)
    words = shlex.split(text)
    kind: Kind = "serve" if words[0] in SERVERS else "run"
    if kind == "run":
        words = _with_keys(words, given.keys.get(step.number, {}), work)
    return Line(step.number, step.title, written, kind, tuple(words))


def _with_keys(words: list[str], keys: dict[str, str], work: Path) -> list[str]:
    """The words with these keys: in the place of those that they have, or behind them."""
    found = dict(keys)
    out = []
    for word in words:
        key = word.partition("=")[0]
        out.append(f"{key}={found.pop(key)}" if KEY.match(word) and key in found else word)
    more = [f"{key}={value}" for key, value in found.items()]
    return [*out, *(PLACES.sub(lambda seen: f"{work}/{seen[0]}", word) for word in more)]


def command(words: tuple[str, ...], python: str) -> list[str]:
    """The process of a command: `outrider` and `accelerate` are those of this clone."""
    if words[0] == "outrider":
        code = "from outrider.scripts.cli import main; main()"
        return [python, "-c", code, *words[1:]]
    if words[:2] == ("accelerate", "launch"):
        return [python, "-m", "accelerate.commands.launch", *words[2:]]
    return [python if words[0] == "python" else words[0], *words[1:]]


def places(work: Path) -> Path:
    """WORK as it stands in commands: relative to the clone where it lies there."""
    work = work.expanduser().resolve()
    return work.relative_to(files.ROOT) if work.is_relative_to(files.ROOT) else work
