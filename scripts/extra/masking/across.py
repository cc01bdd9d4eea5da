"""Masking in all cores: what is found and what is written do not depend on how many there are.

Where something was found in a part of the log is kept in a file (places alone, no value), so that
a run that was stopped goes on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.conf.disk import write_text
from outrider.scripts.common.progress import OnProgress, silent
from outrider.scripts.extra.masking.masker import Chat, Hit, Known, Masker, hits, texts
from outrider.scripts.extra.masking.rules import Rule, rules
from outrider.train.texts.workers import ordered

PART = 1 << 18  # letters of a part, about


@dataclass(frozen=True)
class HowMasked:
    """The rules, such that a process can make them, and how many processes do."""

    regions: tuple[str, ...]
    hook: str = ""
    workers: int = 1

    def rules(self) -> list[Rule]:
        """See rules.rules, which also says what it raises."""
        return rules(self.regions, self.hook)


def find(
    values: Sequence[Any], how: HowMasked, kept: Kept, on_progress: OnProgress = silent
) -> Masker:
    """A masker that knows what the rules find in any of `values`. kept: what an earlier run
    had found, which grows."""
    masker = Masker(how.rules())
    parts = list(_parts(values))
    before = [kept.of(part) for part in parts]
    todo = (part for part, found in zip(parts, before, strict=True) if found is None)
    fresh = ordered(_found, todo, how, how.workers)
    done, total = 0, sum(map(_letters, parts))
    for part, found in zip(parts, before, strict=True):
        if found is None:
            found = next(fresh)
            if len(parts) > 1:
                kept.add(part, found)
        for text, places in zip(part, found, strict=True):
            masker.take(text, places)
        done += _letters(part)
        on_progress(done // 1000, total // 1000)
    return masker


def mask(
    values: Sequence[Any], known: Known, workers: int, on_progress: OnProgress = silent
) -> Iterator[Any]:
    """Every value with stand-ins; each is a chat of its own."""
    sizes = [sum(map(len, texts(value))) for value in values]
    groups: list[list[Any]] = []
    size = PART
    for value, more in zip(values, sizes, strict=True):
        if size >= PART:
            groups.append([])
            size = 0
        groups[-1].append(value)
        size += more
    done, left = 0, iter(sizes)
    for made in ordered(_masked, groups, known, workers):
        yield from made
        done += sum(itertools.islice(left, len(made)))
        on_progress(done // 1000, sum(sizes) // 1000)


class Kept:
    """Where something was found, by the part of the log, in a JSONL file. key: what else
    decides it; a file of another key counts for nothing. A file that cannot be written costs
    no more than this."""

    def __init__(self, path: Path | None = None, key: str = "") -> None:
        self.path, self.key = path, key
        self.known: dict[str, list[list[Hit]]] = {}
        if path is not None:
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            lines = []
        rows: list[Any] = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:
                break  # a kill cut it short
        if rows[:1] != [self.key]:
            rows = [self.key]
        with contextlib.suppress(OSError):
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        for digest, found in rows[1:]:
            self.known[digest] = [[(a, b, i) for a, b, i in text] for text in found]

    def of(self, part: Sequence[str]) -> list[list[Hit]] | None:
        """What was found in the texts of a part; None where nobody has looked."""
        return self.known.get(_digest(part))

    def add(self, part: Sequence[str], found: list[list[Hit]]) -> None:
        """Keep what was found."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                _append(self.path, json.dumps([_digest(part), found]) + "\n")


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def _parts(values: Sequence[Any]) -> Iterator[list[str]]:
    """The texts of the values, by parts."""
    part: list[str] = []
    size = 0
    for text in (text for value in values for text in texts(value)):
        if size > PART:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def _letters(part: Sequence[str]) -> int:
    return sum(map(len, part))


def _digest(part: Sequence[str]) -> str:
    joined = "\0".join(part).encode("utf-8", "surrogatepass")
    return hashlib.sha256(joined).hexdigest()


# -- in a worker


_rules = functools.cache(HowMasked.rules)


def _found(how: HowMasked, part: list[str]) -> list[list[Hit]]:
    made = _rules(how)
    return [hits(made, text) for text in part]


def _masked(known: Known, values: list[Any]) -> list[Any]:
    return [Chat(known).mask(value) for value in values]
