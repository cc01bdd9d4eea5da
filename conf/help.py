"""What `--help` says of a command: its words, its groups, its keys in two columns, no line of a
table wider than the terminal."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from outrider.conf.typed import default, docs, key_of, nested_schema

NARROWEST, WIDEST = 50, 100
COLUMN = 30  # of a key; what is longer has its words on the next line
WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
FOR_TESTS = "tiny: "  # how the words about a key begin that only a target for tests has


class HelpRow(NamedTuple):
    """A key and what is said of it. value: its default as one would type it; None: it must be
    given."""

    key: str
    value: str | None
    about: str


def layout(
    words: Sequence[str],
    schema: type,
    here: dict[str, Any],
    options: Mapping[str, set[str]],
    spoken: Callable[[str], str] = str,
) -> str:
    """Return the help of a command. words: paragraphs before the keys. here: what is composed of
    its choices. options: of its groups. spoken: how commands in the words are written."""
    rows = [
        row._replace(about=spoken(row.about))
        for row in _rows(schema, here)
        if not row.about.startswith(FOR_TESTS) or here["target"]["kind"] == "tiny"
    ]
    wide = max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    parts = [spoken(text.strip()) for text in words if text]
    if needed := _table([row for row in rows if row.value is None], wide):
        parts.append("\n".join(["Required (KEY=VALUE):", *needed]))
    if lines := [_group(group, options[group], wide) for group in sorted(options)]:
        parts.append("\n".join(["Groups (GROUP=OPTION):", *lines]))
    lines = ["Keys (KEY=VALUE, here with their defaults):"]
    for part in dict.fromkeys(["", *(_part(row) for row in rows)]):
        table = _table([r for r in rows if _part(r) == part and r.value is not None], wide)
        lines += ["", *table] if table and part else table
    return "\n\n".join([*parts, "\n".join(lines)])


def _part(row: HelpRow) -> str:
    """`optim` of `optim.lr`, "" of a key of the command's own."""
    return row.key.rpartition(".")[0].partition(".")[0]


def _rows(schema: type, here: dict[str, Any], prefix: str = "") -> list[HelpRow]:
    rows, about, hints = [], docs(schema), typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key, usual = key_of(field.name), default(field)
        if nested := nested_schema(hints[field.name]):
            rows += _rows(nested, _keys(usual) | _keys(here.get(key)), f"{prefix}{key}.")
            continue
        value = here.get(key, usual)  # the YAML files win over the schema
        needed = value is dataclasses.MISSING or value == "???"
        typed = None if needed else shown(value)
        rows.append(HelpRow(prefix + key, typed, about.get(field.name, "")))
    return rows


def _keys(group: Any) -> dict[str, Any]:
    """Return the keys of a group, given as a mapping, as a dataclass or not at all."""
    return group if isinstance(group, dict) else getattr(group, "__dict__", {})


def shown(value: Any) -> str:
    """Return a value as one would type it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{shown(v)}" for k, v in value.items()) + "}"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _group(group: str, names: set[str], wide: int) -> str:
    text = f"{group}={' | '.join(sorted(names))}"
    return textwrap.fill(text, wide, initial_indent="  ", subsequent_indent="      ")


def _table(rows: Sequence[HelpRow], wide: int) -> list[str]:
    names = [r.key if r.value is None else f"{r.key}={r.value}" for r in rows]
    column = max((len(name) for name in names if len(name) <= COLUMN), default=COLUMN)
    column = min(column, wide // 3)
    lines = []
    for name, row in zip(names, rows, strict=True):
        head, indent = f"  {name:{column}}  ", " " * (column + 4)
        if len(name) > column:
            lines.append(f"  {name}")
            head = indent
        about = textwrap.wrap(row.about, wide - len(indent), **WHOLE) or [""]
        lines += [f"{head}{about[0]}".rstrip(), *(indent + line for line in about[1:])]
    return lines
