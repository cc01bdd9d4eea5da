"""How `--help` is laid out: the words of a command, its groups, its keys in two columns, no line
wider than the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NARROWEST, WIDEST = 50, 100
COLUMN = 30  # of a key; what is longer has its words on the next line
TOKEN = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
COMMAND = re.compile(r"\s*(outrider|python|accelerate|make|echo)\s")
FOR_TESTS = "tiny: "  # how the words about a key begin that only a target for tests has


@dataclass(frozen=True)
class HelpRow:
    """A key and what is said of it. value: its default as one would type it; None: it must be
    given."""

    key: str
    value: str | None
    about: str

    @property
    def group(self) -> str:
        """`optim` of `optim.lr`, "" of a key of the command's own."""
        return self.key.rpartition(".")[0].partition(".")[0]


def width() -> int:
    """Columns to write in: the terminal's, between 50 and 100; 100 where there is none."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))


def prose(text: str, columns: int) -> str:
    """Paragraphs and commands as they are written, those that are too wide wrapped anew."""
    parts = re.split(r"(\n(?:[ \t]*\n)+)", text)
    return "".join(part if not part.strip() else _part(part, columns) for part in parts)


def _part(text: str, columns: int) -> str:
    """A run of lines without an empty one: indented lines are commands or formulas."""
    found: list[list[str]] = []
    for line in text.split("\n"):
        kind = line[:1].isspace()
        if not found or found[-1][0][:1].isspace() != kind:
            found.append([])
        found[-1].append(line)
    return "\n".join(_lines(lines, columns) for lines in found)


def _lines(lines: list[str], columns: int) -> str:
    if all(len(line) <= columns for line in lines):
        return "\n".join(lines)
    if not lines[0][:1].isspace():
        return _filled(" ".join(lines), columns)
    return "\n".join(_command(line, columns) for line in re.split(r"(?<!\\)\n", "\n".join(lines)))


def _command(text: str, columns: int) -> str:
    """A command line that goes on behind a backslash, or a line of another kind."""
    if len(text) <= columns and "\n" not in text:
        return text
    if text.lstrip().startswith("#"):
        indent = text[: len(text) - len(text.lstrip())]
        return _filled(text.strip()[1:].strip(), columns, f"{indent}# ", f"{indent}# ")
    if not COMMAND.match(text):  # a formula
        return text
    indent = text[: len(text) - len(text.lstrip())]
    rows = [indent.removesuffix(" ")]
    for token in TOKEN.findall(text.replace("\\\n", " ")):
        if len(rows[-1]) + len(token) + 3 > columns and rows[-1].strip():
            rows.append(f"{indent}   ")
        rows[-1] += f" {token}"
    return " \\\n".join(rows)


def _filled(text: str, columns: int, first: str = "", later: str = "") -> str:
    return textwrap.fill(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _groups(options: Mapping[str, Sequence[str]], columns: int) -> list[str]:
    """A line GROUP=A|B for each group, broken behind a bar where it is too wide."""
    lines: list[str] = []
    for group, names in options.items():
        row = f"  {group}="
        for i, name in enumerate(names):
            piece = f"{name}|" if i + 1 < len(names) else name
            if len(row) + len(piece) > columns and row.strip():
                lines.append(row)
                row = "      "
            row += piece
        lines.append(row)
    return lines


def tables(
    rows: Sequence[HelpRow], options: Mapping[str, Sequence[str]], target: str, columns: int
) -> list[str]:
    """The keys that must be given, the groups with their options, the command's own keys, then
    each group's. target: the kind that was chosen; keys of the one for tests are only counted
    where it is another."""
    hidden = [r for r in rows if r.about.startswith(FOR_TESTS) and target != "tiny"]
    shown = [row for row in rows if row not in hidden]
    needed = [row for row in shown if row.value is None]
    lines = []
    if needed:
        lines += ["Required (KEY=VALUE):", *_table(needed, columns), ""]
    if options:
        lines += ["Groups (GROUP=OPTION):", *_groups(options, columns), ""]
    lines += ["Keys (KEY=VALUE, here with their defaults):"]
    for group in dict.fromkeys(["", *(row.group for row in shown)]):
        part = [row for row in shown if row.group == group and row.value is not None]
        lines += ["", *_table(part, columns)] if part and group else _table(part, columns)
        if group == "target" and hidden:
            lines += [f"  (target=tiny, for tests, has {len(hidden)} more: target=tiny --help)"]
    return lines


def _table(rows: Sequence[HelpRow], columns: int) -> list[str]:
    names = [r.key if r.value is None else f"{r.key}={r.value}" for r in rows]
    wide = max((len(name) for name in names if len(name) <= COLUMN), default=COLUMN)
    wide = min(wide, columns // 3)
    lines = []
    for name, row in zip(names, rows, strict=True):
        head, indent = f"  {name:{wide}}  ", " " * (wide + 4)
        if len(name) > wide:
            lines.append(f"  {name}")
            head = indent
        lines += (_filled(row.about, columns, head, indent) or head).rstrip().split("\n")
    return lines
