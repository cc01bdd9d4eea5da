"""Pages from the templates beside this file. In HTML everything is escaped but the
drawings, which are ours.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from outrider.scripts.reports.table import DOUBT, WARNS, Table

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Drawing:
    """An inline SVG and what it shows, as its text alternative."""

    svg: str
    words: str = ""


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
    known = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(("html",)),
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known.globals |= {"WARNS": WARNS, "DOUBT": DOUBT}
    return known


def render(name: str, **values: Any) -> str:
    """A template's page as text. Raises jinja2.UndefinedError for a value that it lacks."""
    return _environment().get_template(name).render(**values)
