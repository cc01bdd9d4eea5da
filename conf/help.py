"""What `--help` says of a command: its words, its groups, its keys in two columns, no line of a
table wider than the terminal."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.conf.typed import default, key_of, nested_schema
from outrider.conf.words import USUAL

NARROWEST, WIDEST, COLUMN = 50, 100, 32  # columns of a terminal, and of a key
SHORT, FIRST = 20, 10  # keys that are all shown, and those that are of more
FOR_TESTS = "tiny: "  # how the words about a key begin that only a target for tests has
FIELD = re.compile(r"    (\w+): [^#]*(?:# (?!type: ignore|noqa)(.*))?")
Row = tuple[str, str, str]  # dotted key, KEY=VALUE as one would type it, what is said of it


def layout(
    words: Sequence[str],
    schema: type,
    here: dict[str, Any],
    options: Mapping[str, Iterable[str]],
    every: bool = True,
) -> str:
    """Return the help of a command. words: paragraphs before the keys. here: what is composed of
    its choices. options: of its groups. every: all keys, else the FIRST ones where there are
    many."""
    tests = here.get("target", {}).get("kind") == "tiny"
    rows = [row for row in _rows(schema, here) if tests or not row[2].startswith(FOR_TESTS)]
    needed = [row for row in rows if "=" not in row[1]]
    groups = [(name, f"{name}=", " | ".join(sorted(known))) for name, known in options.items()]
    others = {row[0]: row for row in rows if row not in needed}
    few = [others[key] for key in USUAL if key in others][:FIRST]
    parts = [text.strip() for text in words if text]
    parts += [f"Required (KEY=VALUE):\n{_table(needed)}"] if needed else []
    parts += [f"Groups (GROUP=OPTION):\n{_table(groups)}"] if groups else []
    title = "Keys (KEY=VALUE, here with their defaults)"
    if not every and len(others) > SHORT:
        parts.append(f"{title}:\n{_table(few)}")
        return "\n\n".join([*parts, f"--help all shows {len(others) - len(few)} more."])
    sections: dict[str, list[Row]] = {"": []}
    for row in others.values():
        sections.setdefault(row[0].rpartition(".")[0], []).append(row)
    for name, some in sections.items():
        parts += [f"{title}{name and f', {name}'}:\n{_table(some)}"] if some else []
    return "\n\n".join(parts)


def _rows(schema: type, here: dict[str, Any], prefix: str = "") -> list[Row]:
    rows, about, hints = list[Row](), docs(schema), typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key = key_of(field.name)
        usual: Any = default(field)
        value = here.get(key, usual)  # the YAML files win over the schema
        if nested := nested_schema(hints[field.name]):
            parts = (getattr(one, "__dict__", one) for one in (usual, value))
            known = {k: v for part in parts if isinstance(part, dict) for k, v in part.items()}
            rows += _rows(nested, known, f"{prefix}{key}.")
            continue
        needed = value is dataclasses.MISSING or value == "???"
        typed = prefix + key if needed else f"{prefix}{key}={shown(value)}"
        rows.append((prefix + key, typed, about.get(field.name, "")))
    return rows


def shown(value: Any) -> str:
    """Return a value as one would type it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{shown(v)}" for k, v in value.items()) + "}"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _table(rows: Iterable[Row]) -> str:
    """Return two columns; a key that is longer than the first pushes its words on."""
    wide = max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    column = min(COLUMN, wide // 3)
    keys: Any = {"break_long_words": False, "break_on_hyphens": False}
    keys |= {"initial_indent": "  ", "subsequent_indent": " " * (column + 4)}
    lines = (textwrap.fill(f"{typed:{column}}  {about}", wide, **keys) for _, typed, about in rows)
    return "\n".join(line.rstrip() for line in lines)


def docs(schema: type) -> dict[str, str]:
    """Return the doc line of every field by name: the comment on its line or right above it."""
    found: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, schema.__mro__):
        try:
            lines = textwrap.dedent(inspect.getsource(base)).splitlines()
        except OSError:  # made at run time
            continue
        above: list[str] = []
        for line in lines:
            field = FIELD.match(line)
            if field and (said := field[2] or " ".join(above)):
                found.setdefault(field[1], said)
            comment = line.startswith("    #")
            above = [*above, line.strip().lstrip("# ")] if comment else []
    return found
