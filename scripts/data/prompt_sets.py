"""Public sets of prompts by name: conf/prompt_set/NAME.yaml says where one is, under which
licence, and which column holds what is asked; `prompts=FILE.yaml` takes a description of one's
own. OUT.prompts.jsonl beside the data keeps what is asked, OUT.prompts.json what was left out.

Prompts stand in an order that follows from their text alone, so that the first N of them are a
fair sample, the same ones on every machine, and a larger N goes on where a smaller one ended.
Left out are prompts that came before, and those of the benchmarks that scores are taken on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.conf import packages
from outrider.conf.disk import whole
from outrider.conf.errors import UserError
from outrider.conf.rules import NotEmpty, ZeroOrMore
from outrider.conf.schema import CONF
from outrider.conf.typed import nearest
from outrider.scripts.common.files import json_line, write_json
from outrider.scripts.common.prompts import DEMO, load_prompts, requested, spoken
from outrider.scripts.common.published import Published, described, rows_of
from outrider.scripts.data.ledger import say
from outrider.scripts.data.questions import asked_of, fingerprint
from outrider.scripts.data.suites import every_suite, load_suite

GROUP = "prompt_set"  # not `prompts`: Hydra takes a key with a folder's name for a choice of it
SHOWN = ("name", "dataset", "config", "files", "split", "revision", "licence", "tried")


@dataclass(frozen=True)
class PromptSet(Published):
    """A public set of prompts to have answered."""

    word, place = "prompts", "prompts_path"

    # column with a question, a list of them, or a list of messages (role and content, or from and
    # value), of which the answers are dropped
    column: NotEmpty = "messages"
    # only rows that have these values: {column: value}
    keep: dict[str, Any] = field(default_factory=dict)
    # characters of a row's turns at most; 0 = any
    longest: ZeroOrMore = 12000

    @property
    def described(self) -> dict[str, Any]:
        """What says which set it is, for records: not where it was had."""
        return {key: getattr(self, key) for key in SHOWN}


def known() -> dict[str, Path]:
    """Return the descriptions that are here, by name."""
    return dict(sorted(packages.options(CONF, GROUP).items()))


def is_file(prompts: str) -> bool:
    """Return whether `prompts` is meant as a file of prompts rather than as a set's name."""
    path = Path(prompts).expanduser()
    return path.suffix != ".yaml" and (path.is_file() or path.name != prompts or "." in prompts)


def prompt_set(prompts: str) -> PromptSet:
    """Return the set of that name, or that a YAML file describes. Raises UserError:
    neither, or a description that is none."""
    path = known().get(prompts, Path(prompts).expanduser())
    if path.suffix != ".yaml":
        raise UserError(
            f"prompts: {prompts!r} is neither a file nor a set's name; {nearest(prompts, known())}"
        )
    return described(path, PromptSet)


def prompts_of(which: PromptSet, out: Path, unseen: Sequence[str]) -> Path:
    """Return the file with the prompts of a set; made where it is not there yet.

    out: the data that it is for. unseen: names of suites and files whose prompts are left
    out, beside those that come with this project. Raises UserError for a set, a suite or a
    file that is none, and a set without a prompt."""
    path = out.with_name(out.name + ".prompts.jsonl")
    record = path.with_suffix(".json")
    wanted = {"set": which.described, "unseen": list(unseen)}
    if path.is_file() and record.is_file():
        found = json.loads(record.read_text(encoding="utf-8"))
        if {key: found.get(key) for key in wanted} == wanted:
            return path
    say(f"reading {which.name} from {which.path or 'the hub'}; licence: {which.licence}")
    questions = _unseen(unseen, hub=not which.path)
    rows = rows_of(which, (which.column, which.more, *which.keep))
    lines, left = dict[int, str](), Counter[str]()
    for number, row in enumerate(rows, 1):
        try:
            messages = _messages(which, row)
            turns = [m["content"] for m in messages if m["role"] == "user"]
            if where := questions.get(_key(turns[:1])):
                raise ValueError(f"in {where}")
            if (key := _key(turns)) in lines:
                raise ValueError("asked already")
            lines[key] = json_line({"id": f"{which.name}:{number}", "messages": messages})
        except ValueError as why:
            left[str(why).partition(";")[0]] += 1
    reasons = ", ".join(f"{n:,} {why}" for why, n in left.items()) or "none"
    if not lines:
        raise UserError(f"prompts: {which.name}: no row can be asked ({reasons}); take another")
    with whole(path) as stage, stage.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines[key] for key in sorted(lines))
    compared = sorted({*questions.values()})
    told = {"read": len(rows), "prompts": len(lines), "left_out": dict(left)}
    write_json(record, {**wanted, **told, "compared_with": compared, "path": which.path})
    say(f"{which.name}: {len(lines):,} prompts of {len(rows):,} rows; left out: {reasons}")
    say(f"{which.name}: compared word for word with those of {', '.join(compared)}")
    return path


def _unseen(names: Sequence[str], hub: bool) -> dict[int, str]:
    """Return the questions of benchmarks that must not be asked: key -> where it is. A suite
    that cannot be had is said; beside a copy on this disk none is asked of the hub."""
    questions = dict[int, str]()
    by_name = {suite.name: suite for suite in every_suite()}
    for name in dict.fromkeys([DEMO.stem, *names]):
        try:
            if name in by_name and not hub:
                raise UserError(f"{name}, which is on the hub; unseen takes a file of its prompts")
            if name in by_name:
                prompts = load_suite(by_name[name])[0]
            else:
                prompts = load_prompts(DEMO if name == DEMO.stem else Path(name))
        except UserError as error:
            if name not in by_name:
                raise UserError(
                    f"unseen: {name!r} is neither a suite ({', '.join(by_name)}) nor a file of "
                    f"prompts ({error})"
                ) from None
            say(f"warning: not compared with {str(error).removeprefix('suite: ')}")
            continue
        questions |= {_key(prompt.turns[:1]): name for prompt in prompts}
    return questions


def _key(turns: Sequence[str]) -> int:
    """Return what equal questions share, and where one is in the file."""
    text = "\0".join(map(fingerprint, turns)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _messages(which: PromptSet, row: dict[str, Any]) -> list[dict[str, str]]:
    """System and user turns of a row. Raises ValueError in a user's words where it cannot be
    asked."""
    if any(row[column] != value for column, value in which.keep.items()):
        raise ValueError("by " + ", ".join(which.keep))
    value = row[which.column]
    if isinstance(value, str):
        messages = requested(*spoken({"prompt": which.below(value, row)}))
    else:
        texts = isinstance(value, list) and value and isinstance(value[0], str)
        key, turns = spoken({"turns" if texts else "messages": value})
        if next((role for role, _ in turns if role != "system"), "user") != "user":
            raise ValueError("begins with an answer")
        messages = asked_of(key, turns)
    if which.longest and sum(len(m["content"]) for m in messages) > which.longest:
        raise ValueError(f"above {which.longest:,} characters")
    return messages
