"""How drafters are named: SOURCE[@chain[:K]|@tree[:N]][@adaptive], read in this one place.

SOURCE is none, ngram, a folder (of a run, a head or a model), a head on the hub
(hub:OWNER/NAME[@REVISION], heads.hub) or the Hugging Face repository of an ordinary model.
K are levels, N nodes. A folder may have "@" in its path: of all readings, the longest
source that exists counts.

A+B joins the drafts of two drafters or more into one tree (decode.union). @adaptive may
stand behind any of them and applies to all together. A "+" within a path that exists
belongs to the path.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from outrider.conf.errors import UserError
from outrider.conf.words import left

NONE, NGRAM = "none", "ngram"
ADAPTIVE = "adaptive"
OPTION = re.compile(rf"(chain|tree)(?::([1-9]\d{{0,2}}))?|{ADAPTIVE}")
JOIN = "+"
HUB = "hub:"  # before the repository of a head
CARD = "head.json"  # of a head's folder, what it is


@dataclass(frozen=True)
class DraftSpec:
    """What is asked of a drafter: by its name, and by what tuning has left in its folder.

    source: "none", "ngram", a path, a head on the hub or a repository. shape: "chain", "tree",
    "" = the drafter's own. depth: levels. nodes: nodes of a tree. width: nodes that a dynamic
    tree expands per level. None: as the drafter itself has it. parts: the drafters of a union,
    whose names joined are its source; () for a single one."""

    source: str = ""
    shape: str = ""
    depth: int | None = None
    nodes: int | None = None
    adaptive: bool = False
    width: int | None = None
    parts: tuple[DraftSpec, ...] = ()

    @property
    def each(self) -> tuple[DraftSpec, ...]:
        """Return the drafters of a union, or this one."""
        return self.parts or (self,)

    def __str__(self) -> str:
        """Return the name that `parse` reads as this draft; what no name can say is left
        out."""
        size = self.depth if self.shape == "chain" else self.nodes
        shape = f"@{self.shape}" if self.shape else ""
        sized = f":{size}" if shape and size else ""
        return f"{self.source}{shape}{sized}{f'@{ADAPTIVE}' if self.adaptive else ''}"


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def members(spec: str) -> list[str]:
    """Return the names of the drafters that `spec` joins, one where it joins none; nothing is
    checked and nothing raised."""
    words = spec.split(JOIN)
    found = []
    while words:
        count = len(words)
        while count > 1:
            source, _ = split(JOIN.join(words[:count]))
            if source.count(JOIN) == count - 1 and _exists(source):
                break
            count -= 1
        found.append(JOIN.join(words[:count]))
        words = words[count:]
    return found


def split(spec: str) -> tuple[str, list[str]]:
    """Return (source, options behind it) of a drafter's name; nothing is checked and nothing
    raised.

    Where no part of the name exists, the known options at its end are options. So is one word
    that is none, for the sake of the error about it, unless a "/" follows its "@"."""
    words = spec.split("@")
    places = [n for n in range(len(words), 0, -1) if _exists("@".join(words[:n]))]
    if words[0] in (NONE, NGRAM):
        count = 1
    elif words[0].startswith(HUB):  # no revision has a ":" in it, and most options have a name
        second = words[1] if len(words) > 1 else ""
        count = 2 if second and not OPTION.fullmatch(second) and ":" not in second else 1
    elif places:
        count = places[0]
    else:
        count = len(words)
        while count > 1 and OPTION.fullmatch(words[count - 1]):
            count -= 1
        count = 1 if count == 2 and "/" not in words[1] else count
    return "@".join(words[:count]), words[count:]


def parse(spec: str) -> DraftSpec:
    """Read what `spec` asks for.

    Raises UserError, one line with the fix, for an option that is unknown, is in another's
    place or cannot be had of this source, and for a union of what cannot be joined."""
    names = members(spec)
    if len(names) > 1:
        return _union(names, spec)
    source, options = split(spec)
    if not source:
        raise UserError(f"drafters: {spec!r}: names no drafter; write none, ngram or a folder")
    draft = DraftSpec(source)
    for option in options:
        found = OPTION.fullmatch(option)
        placed = not draft.adaptive and (option == ADAPTIVE or not draft.shape)
        if not found or source == NONE or not placed:
            raise UserError(f"drafters: {spec}: {_refused(source, option)}")
        size = int(found[2]) if found[2] else None
        if option == ADAPTIVE:
            draft = replace(draft, adaptive=True)
        elif found[1] == "chain":
            draft = replace(draft, shape="chain", depth=size)
        else:
            draft = replace(draft, shape="tree", nodes=size)
    return draft


def _refused(source: str, option: str) -> str:
    """Say why an option cannot stand behind `source`, and what can."""
    if gone := left("drafts", option):
        return f"@{gone}"
    if source == NONE:
        return f"none drafts nothing that @{option} could change; write none"
    fix = (
        f"write {source}, behind it @chain or @tree, @chain:4 (levels) or @tree:16 (nodes), and "
        "last @adaptive"
    )
    if OPTION.fullmatch(option):
        return f"@{option} is one too many there; {fix}"
    return f"unknown shape {option!r}; {fix}"


def _union(names: list[str], spec: str) -> DraftSpec:
    """Read what a union of drafters of these names asks for. Raises UserError."""
    if not all(names):
        raise UserError(
            f"drafters: {spec}: names no drafter on one side of a +; write A+B, or give a folder "
            "that exists"
        )
    parts = [parse(name) for name in names]
    if any(part.source == NONE for part in parts):
        rest = JOIN.join(str(part) for part in parts if part.source != NONE)
        raise UserError(f"drafters: {spec}: none drafts nothing to join; write {rest}")
    own = tuple(replace(part, adaptive=False) for part in parts)
    adaptive = any(part.adaptive for part in parts)
    return DraftSpec(JOIN.join(map(str, own)), adaptive=adaptive, parts=own)
