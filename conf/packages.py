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
from importlib.metadata import Distribution, EntryPoint, distributions
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
        """What it names; imports the package. Raises UserError, whatever is wrong there."""
        try:
            return self.point.load()
        except (Exception, SystemExit) as error:
            raise self.wrong(
                f"cannot be imported ({type(error).__name__}: {first_line(error)})"
            ) from error

    def wrong(self, why: str) -> UserError:
        """What to tell about a package that is no good."""
        message = plain(why, 4 * LONGEST)
        return UserError(
            f"head={plain(self.kind)}: package {self.package} {message}; mend or uninstall it"
        )

    def conf(self) -> Path | None:
        """The package's folder conf/, None where it has none. Imports nothing."""
        name = self.point.value.partition(":")[0].partition(".")[0].strip()
        try:
            spec = importlib.util.find_spec(name)
        except Exception:  # a name that is none, or what another's import hook raises
            return None
        folders = [] if spec is None else spec.submodule_search_locations or []
        return next((path for path in (Path(f, "conf") for f in folders) if path.is_dir()), None)


def packaged() -> list[Packaged]:
    """Every kind of head that an installed package brings, in the order of their names."""
    return list(_read(tuple(sys.path))[0])


def find(kind: str) -> Packaged | None:
    """The package that brings a kind of head, None where none does. Raises UserError where two
    do, or where it stands in entry points that cannot be read."""
    points, damaged = _read(tuple(sys.path))
    found = [one for one in points if one.kind == kind]
    if len(found) > 1:
        names = " and ".join(one.package for one in found)
        raise UserError(f"head={plain(kind)}: packages {names} both bring it; uninstall one")
    for package, text in damaged.items():
        if not found and kind in text:
            raise UserError(
                f"head={plain(kind)}: package {package} has entry points that cannot be read; mend "
                "or uninstall it"
            )
    return found[0] if found else None


def roots() -> list[Path]:
    """The packages' folders conf/, each once."""
    return list(dict.fromkeys(filter(None, (one.conf() for one in packaged()))))


def options(conf_dir: Path, group: str) -> dict[str, Path]:
    """The YAML files of a group by name: those in conf_dir, and of packages those behind them."""
    others = [path for root in reversed(roots()) for path in (root / group).glob("*.yaml")]
    found = {path.stem: path for path in others if NAME.fullmatch(path.stem)}
    return found | {path.stem: path for path in (conf_dir / group).glob("*.yaml")}


def missing(kind: str) -> str:
    """Why there is no option head=KIND where a package brings that kind; "" where none does."""
    one = find(kind)
    if one is None:
        return ""
    return str(one.wrong(f"has no conf/{GROUP}/{plain(kind)}.yaml beside its code"))


def plain(text: str, longest: int = LONGEST) -> str:
    """Another's text as part of a line: printable, and not too long."""
    return "".join(c if c.isprintable() else " " for c in text)[:longest].strip()


@functools.lru_cache(4)
def _read(_: tuple[str, ...]) -> tuple[tuple[Packaged, ...], dict[str, str]]:
    """(entry points, the text of damaged ones by package), read once for every sys.path."""
    found: dict[tuple[str, str], Packaged] = {}  # of two copies on the path the first is imported
    damaged: dict[str, str] = {}
    for distribution in distributions():
        package, text = _named(distribution), ""
        try:
            text = distribution.read_text("entry_points.txt") or ""
            points = distribution.entry_points.select(group=POINTS) if POINTS in text else ()
        except Exception:  # whoever wrote it: what somebody else's tools need is not ours to judge
            damaged |= {package: text} if POINTS in text else {}
            continue
        name = package.partition(" ")[0]
        for point in points:
            if NAME.fullmatch(point.name):
                found.setdefault((point.name, name), Packaged(point.name, package, point))
    return tuple(found[key] for key in sorted(found)), damaged


def _named(distribution: Distribution) -> str:
    """Name and version of a package, as far as its files say them."""
    try:
        name, version = distribution.metadata["Name"], distribution.version
    except Exception:
        name, version = None, None
    place = getattr(distribution, "_path", "without a name")
    return plain(f"{name} {version or ''}".strip() if name else str(place))
