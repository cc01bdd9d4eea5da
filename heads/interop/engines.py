"""The table of serving engines (engines.yaml beside this file, with the day on which it was
checked): which drafters they load, by version, and on which targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

# Keys of EAGLE heads that ask an engine for more than the plain head -> the row of the table
NORMS = {
    "norm_before_fc": "eagle3.1",
    "norm_output": "eagle3.1",
    "norm_joined": "norm_joined",
    "norm_before_residual": "norm_before_residual",
}


@dataclass(frozen=True)
class Support:
    """How an engine loads a drafter. since, until: its first and last version, "" = as
    far back as was looked, and the newest. how: the engine's word for it. note: a
    condition. source: where it was read."""

    since: str = ""
    until: str = ""
    how: str = ""
    note: str = ""
    source: str = ""


@dataclass(frozen=True)
class Engine:
    """One engine. newest: its newest release when the table was checked. drafters: what it
    loads, or once loaded. folder: the form of export that is meant, where it reads several.
    targets: for a kind of head the classes of targets that carry one; a kind that is not
    there: all."""

    name: str
    drafters: Mapping[str, Support]
    newest: str
    folder: str = ""
    targets: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name and newest version."""
        return f"{self.name} {self.newest}"

    def loads(self, *parts: str) -> bool:
        """Return whether its newest version loads a drafter that has all these parts."""
        return all(part in self.drafters and not self.drafters[part].until for part in parts)

    def versions(self, *parts: str) -> str:
        """Name and the versions that load a drafter that has all these parts, as far as any
        version knows them."""
        found = [self.drafters[part] for part in parts if part in self.drafters]
        since = max((s.since for s in found if s.since), key=order, default="")
        until = min((s.until for s in found if s.until), key=order, default="")
        last = until or self.newest
        if not since or since == last:
            return f"{self.name} {'up to ' if until else ''}{last}"
        return f"{self.name} {since} to {last}"

    def gone(self, drafter: str) -> str:
        """Say that its newest version no longer loads a drafter; "" where it does, or no
        version did."""
        if drafter not in self.drafters or self.loads(drafter):
            return ""
        last = self.drafters[drafter].until
        return (
            f"{self.title}, the newest on {CHECKED}, loads no {drafter} heads; the last version "
            f"that does is {last}"
        )


def required(kind: str, cfg: Any) -> tuple[str, ...]:
    """Return what a head wants of an engine: its kind, and the parts of it that not every
    version knows. cfg: the head's configuration."""
    parts = {part for key, part in NORMS.items() if getattr(cfg, key, False)}
    if getattr(cfg, "sliding_window", None) is not None:
        parts.add("sliding_window")
    return ("p_eagle" if getattr(cfg, "parallel", False) else kind, *sorted(parts))


def order(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, by which versions are ordered: 0.5.9 comes before
    0.5.10."""
    return tuple(map(int, "".join(c if c.isdigit() else " " for c in version).split()))


def _engine(given: dict[str, Any]) -> Engine:
    drafters = {name: Support(**support) for name, support in given["drafters"].items()}
    targets = {kind: frozenset(names.split()) for kind, names in given.get("targets", {}).items()}
    return Engine(**{**given, "drafters": drafters, "targets": targets})


_TABLE = yaml.safe_load(Path(__file__).with_name("engines.yaml").read_text())
CHECKED = str(_TABLE["checked"])
ENGINES = {key: _engine(given) for key, given in _TABLE["engines"].items()}
VLLM, SPECULATORS = ENGINES["vllm"], ENGINES["speculators"]
SGLANG, LLAMACPP = ENGINES["sglang"], ENGINES["llamacpp"]
