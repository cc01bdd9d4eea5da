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
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from outrider.conf.errors import UserError

POINTS = "outrider.heads"  # the group of entry points
GROUP = "head"  # the folder of conf/ with the keys of a kind
NAME = re.compile(r"[\w.-]{1,80}")  # of a kind or a file: it is printed, and typed


@dataclass(frozen=True)
class Packaged:
    """An entry point. kind: of head. package: who brings it, name and version."""

    kind: str
    package: str
    point: EntryPoint

    def wrong(self, why: str) -> UserError:
        """Return the error about a package that is no good, in characters that can be printed."""
        text = "".join(c if c.isprintable() else " " for c in f"{self.package} {why}")
        return UserError(f"head={self.kind}: package {text}; mend or uninstall it")

    def conf(self) -> Path | None:
        """Return the package's folder conf/, None where it has none. Imports nothing."""
        name = self.point.value.partition(":")[0].partition(".")[0].strip()
        try:
            spec = importlib.util.find_spec(name)
        except Exception:  # a name that is none, or what another's import hook raises
            return None
        folders = (spec and spec.submodule_search_locations) or []
        return next((path for path in (Path(f, "conf") for f in folders) if path.is_dir()), None)


def packaged() -> list[Packaged]:
    """Return every kind of head that an installed package brings, in the order of their names."""
    return list(_read(tuple(sys.path)))


@functools.lru_cache(4)
def _read(_: tuple[str, ...]) -> list[Packaged]:
    """Entry points, read once for every sys.path."""
    found = [
        Packaged(one.name, f"{one.dist.name} {one.dist.version}", one)
        for one in entry_points(group=POINTS)
        if one.dist and NAME.fullmatch(one.name)
    ]
    return sorted(found, key=lambda one: (one.kind, one.package))


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
    try:
        one = find(kind)
    except UserError as error:
        return str(error)
    return "" if one is None else str(one.wrong(f"has no conf/{GROUP}/{kind}.yaml beside its code"))
