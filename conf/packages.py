"""Heads that installed packages bring: found by their entry points, imported when somebody asks
for one by name, and at no other time.

A package names the class of a kind of head,

    [project.entry-points."outrider.heads"]
    rnn = "outrider_rnn:RNN"

and has its usual keys in conf/head/rnn.yaml beside its code, where a `conf` folder may also hold
recipes (conf/experiment/NAME.yaml). Our own files and kinds come before those of packages.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError, first_line

POINTS = "outrider.heads"  # the group of entry points
GROUP = "head"  # the folder of conf/ with the keys of a kind
NAME = re.compile(r"[\w.-]{1,80}")  # of a kind or a file: it is printed, and typed
LONGEST = 80  # characters of another's text in a message


@dataclass(frozen=True)
class Packaged:
    """An entry point. kind: of head. package: who brings it, name and version."""

    kind: str
    package: str
    point: EntryPoint

    def load(self) -> Any:
        """Import what it names. Raises UserError, whatever is wrong there."""
        try:
            return self.point.load()
        except (Exception, SystemExit) as error:
            why = f"cannot be imported ({type(error).__name__}: {first_line(error)})"
            raise self.wrong(why) from error

    def wrong(self, why: str) -> UserError:
        """Return the error about a package that is no good."""
        text = _plain(why, 4 * LONGEST)
        return UserError(f"head={self.kind}: package {self.package} {text}; mend or uninstall it")

    def conf(self) -> Path | None:
        """Return the package's folder conf/, None where it has none. Imports nothing."""
        name = self.point.value.partition(":")[0].partition(".")[0].strip()
        try:
            spec = importlib.util.find_spec(name)
        except Exception:  # a name that is none, or what another's import hook raises
            return None
        folders = [] if spec is None else spec.submodule_search_locations or []
        return next((path for path in (Path(f, "conf") for f in folders) if path.is_dir()), None)


def packaged() -> list[Packaged]:
    """Return every kind of head that an installed package brings, in the order of their names."""
    return list(_read(tuple(sys.path)))


def find(kind: str) -> Packaged | None:
    """Return the package that brings a kind of head, None where none does. Raises UserError where
    two do."""
    found = [one for one in packaged() if one.kind == kind]
    if len(found) > 1:
        names = " and ".join(one.package for one in found)
        raise UserError(f"head={kind}: packages {names} both bring it; uninstall one")
    return found[0] if found else None


def roots() -> list[Path]:
    """Return the packages' folders conf/, each once."""
    return list(dict.fromkeys(filter(None, (one.conf() for one in packaged()))))


def options(conf_dir: Path, group: str) -> dict[str, Path]:
    """Return the YAML files of a group by name: those in conf_dir, and of packages those behind
    them."""
    others = [path for root in reversed(roots()) for path in (root / group).glob("*.yaml")]
    found = {path.stem: path for path in others if NAME.fullmatch(path.stem)}
    return found | {path.stem: path for path in (conf_dir / group).glob("*.yaml")}


def missing(kind: str) -> str:
    """Return why there is no option head=KIND where a package brings that kind; "" where none
    does."""
    one = find(kind)
    return "" if one is None else str(one.wrong(f"has no conf/{GROUP}/{kind}.yaml beside its code"))


def _plain(text: str, longest: int = LONGEST) -> str:
    """Another's text as part of a line: printable, and not too long."""
    return "".join(c if c.isprintable() else " " for c in text)[:longest].strip()


@functools.lru_cache(4)
def _read(_: tuple[str, ...]) -> tuple[Packaged, ...]:
    """Entry points, read once for every sys.path; of two copies on it the first is imported."""
    found: dict[tuple[str, str], Packaged] = {}
    for distribution in distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
            points = distribution.entry_points.select(group=POINTS)
        except Exception:  # damaged metadata of somebody else's tool
            continue
        for point in points:
            if NAME.fullmatch(point.name):
                package = _plain(f"{name} {version}")
                found.setdefault((point.name, str(name)), Packaged(point.name, package, point))
    return tuple(found[key] for key in sorted(found))
