"""The prompts of a public set as a file to ask from: OUT.prompts.jsonl beside the data, and
OUT.prompts.json, which says what was left out and why.

They stand in an order that follows from their text alone, so that the first N of them are a
fair sample, the same ones on every machine, and a larger N goes on where a smaller one
ended. Left out are prompts that came before, and those of the benchmarks that scores are
taken on: who trains on a benchmark's questions measures how well they were learned by
heart.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.common.files import sha256, write_json
from outrider.scripts.common.prompts import DEMO, Prompt, load_prompts, requested, spoken
from outrider.scripts.common.published import copies, rows_of
from outrider.scripts.data.ledger import json_line, say
from outrider.scripts.data.prompt_sets import PromptSet
from outrider.scripts.data.questions import asked_of
from outrider.scripts.data.suites import SuiteConfig, every_suite, load_suite
from outrider.scripts.data.write import fingerprint

EVERY = 200_000  # rows between two words of progress


@dataclass(frozen=True)
class Unseen:
    """Questions that must not be asked. questions: their keys, each with where it stands.
    checked: name -> how many. missing: why a benchmark could not be compared with."""

    questions: dict[int, str]
    checked: dict[str, int]
    missing: list[str]


def prompts_of(which: PromptSet, out: Path, unseen: Sequence[str]) -> Path:
    """The file with the prompts of a set; made where it is not there yet.

    out: the data that it is for. unseen: names of suites and files whose prompts are left
    out, beside those that come with this project. Raises UserError for a set, a suite or a
    file that is none, and a set without a prompt."""
    path = out.with_name(out.name + ".prompts.jsonl")
    record = path.with_suffix(".json")
    wanted = {"set": which.described, "unseen": list(unseen)}
    if path.is_file() and record.is_file():
        known = json.loads(record.read_text(encoding="utf-8"))
        if {key: known.get(key) for key in wanted} == wanted and known["sha256"] == sha256(path):
            return path
    say(f"reading {which.name} from {which.path or 'the hub'}; licence: {which.licence}")
    apart = _unseen(which, unseen)
    left = Counter[str]()
    path.parent.mkdir(parents=True, exist_ok=True)
    read, kept = _write(which, path, apart, left)
    found = {**wanted, "read": read, "prompts": kept, "left_out": dict(left.most_common())}
    found |= {"compared_with": apart.checked, "not_compared_with": apart.missing}
    write_json(record, {**found, "path": which.path, "sha256": sha256(path)})
    for line in notes(which, found):
        say(line)
    return path


def notes(which: PromptSet, found: dict[str, Any]) -> list[str]:
    """What whoever trains on such prompts should know."""
    left = ", ".join(f"{n:,} {why}" for why, n in found["left_out"].items()) or "none"
    lines = [
        f"{which.name}: {found['prompts']:,} prompts of {found['read']:,} rows; left out: {left}",
        f"{which.name}: compared with the prompts of {', '.join(found['compared_with'])}, word for "
        "word; nobody looks for others, nor for questions that say the same in other words",
        *(f"warning: not compared with {line}" for line in found["not_compared_with"]),
    ]
    if which.rows and not 0.9 < found["read"] / which.rows < 1.1:
        lines.append(f"{which.name}: the published set has about {which.rows:,} rows")
    if not which.tried:
        lines.append(f"{which.name}: its description had not been tried on the real set yet")
    return lines


def _unseen(which: PromptSet, names: Sequence[str]) -> Unseen:
    """The questions of benchmarks. Suites lie where the set lies, on the hub or beside a
    copy."""
    apart = Unseen({}, {}, [])
    known = {suite.name: suite for suite in every_suite()}
    for name in dict.fromkeys([DEMO.stem, *names]):
        try:
            if name in known:
                prompts = load_suite(_beside(known[name], which.path)).prompts
            else:
                file = DEMO if name == DEMO.stem else Path(name)
                prompts = load_prompts(file)
        except UserError as error:
            if name not in known:
                raise UserError(
                    f"unseen: {name!r} is neither a suite ({', '.join(known)}) nor a file of "
                    f"prompts ({error})"
                ) from None
            apart.missing.append(str(error).removeprefix("suite: "))
            continue
        _add(apart, name, prompts)
    return apart


def _beside(suite: SuiteConfig, path: str) -> SuiteConfig:
    """A suite where the set of prompts is. Raises UserError where it is not."""
    if not path:
        return suite
    place = Path(path).expanduser()
    folder = place if place.is_dir() else place.parent
    found = [path for root in (folder, folder.parent) for path in copies(suite, root)]
    if not found:
        raise UserError(f"{suite.name}: {folder} has no copy of it")
    return replace(suite, path=str(found[0]))


def _add(apart: Unseen, name: str, prompts: Iterable[Prompt]) -> None:
    keys = [_key(prompt.turns[:1]) for prompt in prompts]
    apart.questions.update(dict.fromkeys(keys, name))
    apart.checked[name] = len(keys)


def _key(turns: Sequence[str]) -> int:
    """What equal questions share, and where one stands in the file."""
    text = "\0".join(map(fingerprint, turns)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _write(which: PromptSet, path: Path, apart: Unseen, left: Counter[str]) -> tuple[int, int]:
    """Write the prompts; how many rows were read and how many are kept. In the set's order
    first, then in their own: neither the texts nor a copy of the set have to fit into memory.
    Raises UserError where none is kept; nothing is left behind then."""
    draft, whole = (path.with_name(f".{path.name}.{name}") for name in ("draft", "whole"))
    starts, keys, seen, number = array("q"), array("Q"), set[int](), 0
    try:
        with draft.open("w+b") as file:
            for number, row in enumerate(_columns(which), 1):
                if number % EVERY == 0:
                    say(f"{which.name}: {number:,} rows read, {len(keys):,} prompts")
                messages = _messages(which, row, number, left)
                if messages is None:
                    continue
                turns = [m["content"] for m in messages if m["role"] == "user"]
                if why := _why_not(turns, apart, seen):
                    left[why] += 1
                    continue
                keys.append(_key(turns))
                starts.append(file.tell())
                seen.add(keys[-1])
                line = json_line({"id": f"{which.name}:{number}", "messages": messages})
                file.write(line.encode())
            if not keys:
                why = ", ".join(left) or "it is empty"
                raise UserError(f"prompts: {which.name}: no row can be asked ({why}); take another")
            with whole.open("wb") as sorted_file:
                for n in sorted(range(len(keys)), key=keys.__getitem__):
                    file.seek(starts[n])
                    sorted_file.write(file.readline())
        os.replace(whole, path)
    finally:
        draft.unlink(missing_ok=True)
        whole.unlink(missing_ok=True)
    return number, len(keys)


def _why_not(turns: Sequence[str], apart: Unseen, seen: set[int]) -> str:
    """Why a prompt is not asked; "" where it is."""
    if where := apart.questions.get(_key(turns[:1])):
        return f"in {where}"
    return "asked already" if _key(turns) in seen else ""


def _columns(which: PromptSet) -> Any:
    """The rows with the columns that are needed. Raises UserError where one is missing."""
    rows = rows_of(which)
    wanted = [which.column, *filter(None, [which.more]), *which.keep]
    for column in wanted:
        if column not in rows.column_names:
            known = ", ".join(rows.column_names[:8]) or "none"
            raise UserError(
                f"prompts: {which.name} has no column {column!r} (its columns: {known}); another "
                f"version of the set? {which.place}=FILE takes a copy on this disk"
            )
    return rows.select_columns(list(dict.fromkeys(wanted)))


def _messages(
    which: PromptSet, row: dict[str, Any], number: int, left: Counter[str]
) -> list[dict[str, str]] | None:
    """What is asked of a row, its system's text before it; None, counted in `left`, where it
    cannot be asked."""
    if any(row[column] != value for column, value in which.keep.items()):
        left["by " + ", ".join(which.keep)] += 1
        return None
    try:
        messages = _turns_of(row[which.column], row[which.more] if which.more else "")
    except ValueError as error:
        left[str(error).partition(";")[0]] += 1
        return None
    if which.longest and sum(len(m["content"]) for m in messages) > which.longest:
        left[f"above {which.longest:,} characters"] += 1
        return None
    return messages


def _turns_of(value: Any, more: Any) -> list[dict[str, str]]:
    """System and user turns of a column's value. Raises ValueError in a user's words."""
    if isinstance(value, str):
        text = f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
        return requested(*spoken({"prompt": text}))
    texts = isinstance(value, list) and value and isinstance(value[0], str)
    key, turns = spoken({"turns" if texts else "messages": value})
    if next((role for role, _ in turns if role != "system"), "user") != "user":
        raise ValueError("begins with an answer")
    return asked_of(key, turns)
