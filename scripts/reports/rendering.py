"""Pages from the templates beside this file, and the tables that they lay out. In HTML everything
is escaped but the drawings, which are ours.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from scripts.reports.block import Columns

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Table:
    """Cells of text; what stands in brackets is set small.

    prose: columns whose text may run over several lines. best: the row that is marked. dots: a
    colour for every row, or none.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: Sequence[str] = ()
    best: int | None = None
    dots: Sequence[str] = ()


@dataclass(frozen=True)
class Drawing:
    """An inline SVG and what it shows, as its text alternative."""

    svg: str
    words: str = ""


def table_of(columns: Columns, rows: Sequence[dict[str, Any]], prose: Sequence[str] = ()) -> Table:
    """The table of named columns, each a function row -> text."""
    return Table(
        [name for name, _ in columns],
        [[cell(row) for _, cell in columns] for row in rows],
        prose,
    )


def listed(values: dict[str, Any]) -> Table:
    """Names and values, without those that say nothing."""
    return Table(
        (),
        [
            [name, value if isinstance(value, str) else json.dumps(value)]
            for name, value in values.items()
            if value not in (None, [], "")
        ],
    )


def about_target(report: dict[str, Any]) -> Table:
    """The target of a report, its hashes shortened, without a folder of this machine."""
    return listed(
        {
            key: value[:16] if key.endswith("sha256") else value
            for key, value in report["target"].items()
            if key != "path"
        }
    )


def about_environment(report: dict[str, Any]) -> Table:
    """The machine of a report and the versions there."""
    known = {**report["environment"], **report["environment"]["versions"]}
    known.pop("versions")
    return listed(known)


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(("html",)),
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(name: str, **values: Any) -> str:
    """A template's page as text. Raises jinja2.UndefinedError for a value that it lacks."""
    return _environment().get_template(name).render(**values)
