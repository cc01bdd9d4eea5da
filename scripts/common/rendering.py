"""Pages from the templates beside this file. In HTML everything is escaped but the drawings,
which are ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=select_autoescape(("html",)),
    keep_trailing_newline=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(name: str, **values: Any) -> str:
    """Return a template's page as text. Raises jinja2.UndefinedError for a value that it lacks."""
    return PAGES.get_template(name).render(**values)
