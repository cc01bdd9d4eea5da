"""The own files that a test depends on, read from syntax trees, and one hash of them all.

Counted are imports, inside functions and for typing alone too, and what a file names as text: a
module (`-m outrider.scripts.score`, "scripts.lab.bench:main"), a file (ROOT / "train" / "eagle.py") and the
imports in a program given as text. Files that are no Python count where a file of tests names
them, the YAML of conf for whoever imports conf, the network guard, `conftest.py` and the pinned
versions for all. Not seen is what is looked up at run time, as `outrider` finds its verbs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

ALWAYS = ("tests/conftest.py", "tests/guard/sitecustomize.py", "constraints.txt")
MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)


class Closures:
    """Of the files below one repository as they are now; what was read is kept."""

    def __init__(self, root: Path) -> None:
        """root: the repository's folder, against which modules and names of files are resolved."""
        self.root = root
        self.named = functools.cache(self._named)
        self.of = functools.cache(self._of)
        self._digest = functools.cache(lambda file: hashlib.sha256(file.read_bytes()).digest())

    def hash(self, test_file: str) -> str:
        """Of the names and bytes of all files in `of`: 16 hexadecimal digits."""
        whole = hashlib.sha256()
        for file in sorted(self.of(test_file)):
            whole.update(str(file.relative_to(self.root)).encode() + b"\0" + self._digest(file))
        return whole.hexdigest()[:16]

    def _of(self, test_file: str) -> frozenset[Path]:
        """All files that a test file depends on, itself included. test_file: below the root."""
        waiting = [self.root / name for name in (test_file, *ALWAYS)]
        seen: set[Path] = set()
        while waiting:
            file = waiting.pop()
            if file not in seen and file.is_file():
                seen.add(file)
                waiting += self.named(file) if file.suffix == ".py" else ()
        if any(file.is_relative_to(self.root / "conf") and file.suffix == ".py" for file in seen):
            seen.update((self.root / "conf").rglob("*.yaml"))
        return frozenset(seen)

    def _named(self, file: Path) -> frozenset[Path]:
        """The own files that a Python file itself imports or names."""
        data = file.is_relative_to(self.root / "tests")
        found: set[Path] = set()
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found.update(self._module(alias.name))
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found.update(self._module(f"{node.module}.{alias.name}"))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                found.update(self._text("/".join(_parts(node)), data))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(self._text(node.value, data))
        return frozenset(found)

    def _module(self, name: str) -> Iterator[Path]:
        """The files that importing a.b.c runs; those of others, and what a module defines, are
        none."""
        place = self.root
        for part in name.removeprefix("outrider.").split("."):
            place = place / part
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            if file.is_file():
                yield file
            if not place.is_dir():
                return

    def _text(self, text: str, data: bool) -> Iterator[Path]:
        """What a text names. data: files that are no Python too."""
        if "\n" in text:
            for name in IMPORT.findall(text):
                yield from self._module(name)
        elif MODULE.fullmatch(name := text.partition(":")[0]) and not name.endswith(".py"):
            yield from self._module(name)
        elif "/" in text and len(text) < 200 and (data or text.endswith(".py")):
            file = self.root / text.strip("/")
            hidden = any(part.startswith(".") for part in text.split("/"))  # .., .venv
            if not hidden and "\0" not in text and file.is_file():
                yield file


def _parts(node: ast.expr) -> list[str]:
    """The constants of ROOT / "a" / "b", in order."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _parts(node.left) + _parts(node.right)
    return [str(node.value)] if isinstance(node, ast.Constant) else []
