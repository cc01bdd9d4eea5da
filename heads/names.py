"""How drafters are named: SOURCE[@SHAPE][@DRAW][@adaptive], read in this one place.

SOURCE is none, ngram, a folder (of a run, a head or a model), a head on the hub
(hub:OWNER/NAME[@REVISION], heads.hub) or the Hugging Face repository of an ordinary model.
SHAPE is chain or tree, chain:K (levels) or tree:N (nodes); ngram is a chain or a tree too, and
its chain is asked for by a bare K. DRAW is sampled or fixed: how a tree's candidates are taken
where T > 0. A folder may have "@" in its path: of all readings, the longest source that exists
counts.

A+B joins the drafts of two drafters or more into one tree (decode.union):
SOURCE[@SHAPE][@DRAW]+SOURCE[@SHAPE][@DRAW]..[@adaptive]. @adaptive may stand behind any of
them and applies to all together. A "+" within a path that exists belongs to the path.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.conf import left
from outrider.conf.errors import UserError

NONE, NGRAM = "none", "ngram"
SHAPES = ("chain", "tree")
DRAWS = ("sampled", "fixed")
ADAPTIVE = "adaptive"
DEFAULT_DRAW = "default"

OPTIONS = (*SHAPES, *DRAWS, ADAPTIVE)
SIZED_SHAPE = re.compile(r"(chain|tree)(?::([1-9]\d{0,2}))?")
NGRAM_DEPTH = re.compile(r"[1-9]\d?")
JOIN = "+"
HUB = "hub:"  # before the repository of a head
CARD = "head.json"  # of a head's folder, what it is


@dataclass(frozen=True)
class DraftSpec:
    """What is asked of a drafter: by its name, and by what tuning has left beside it.

    source: "none", "ngram", a path, a head on the hub or a repository. shape: "chain",
    "tree", "" = the drafter's own. depth: levels. nodes: nodes of a tree. draw: "sampled",
    "fixed", "default" = the drafter's own. width: nodes that a dynamic tree expands per
    level. paths: ranks of a static tree's nodes. None: as the drafter itself has it. parts:
    the drafters of a union, whose names joined are its source; () for a single one.
    """

    source: str = ""
    shape: str = ""
    depth: int | None = None
    nodes: int | None = None
    draw: str = DEFAULT_DRAW
    adaptive: bool = False
    width: int | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    parts: tuple[DraftSpec, ...] = ()

    @property
    def each(self) -> tuple[DraftSpec, ...]:
        """The drafters of a union, or this one."""
        return self.parts or (self,)

    def __str__(self) -> str:
        """The name that `parse` reads as this draft; what no name can say is left out."""
        size = self.depth if self.shape == "chain" else self.nodes
        shape = self.shape if size is None else f"{self.shape}:{size}"
        if self.source == NGRAM and self.shape != "tree":
            shape = "" if self.depth is None else str(self.depth)
        options = (
            shape,
            "" if self.draw == DEFAULT_DRAW else self.draw,
            ADAPTIVE if self.adaptive else "",
        )
        return "@".join([self.source, *(option for option in options if option)])


def on_disk(path: str) -> bool:
    """Whether something lies at `path`; False for what is no path at all."""
    return os.path.exists(os.path.expanduser(path))


def members(spec: str, exists: Callable[[str], bool] = on_disk) -> list[str]:
    """The names of the drafters that `spec` joins, one where it joins none; nothing is checked
    and nothing raised."""
    words = spec.split(JOIN)
    found = []
    while words:
        count = len(words)
        while count > 1:
            source, _ = split(JOIN.join(words[:count]), exists)
            if source.count(JOIN) == count - 1 and exists(source):
                break
            count -= 1
        found.append(JOIN.join(words[:count]))
        words = words[count:]
    return found


def split(spec: str, exists: Callable[[str], bool] = on_disk) -> tuple[str, list[str]]:
    """(source, options behind it) of a drafter's name; nothing is checked and nothing raised.

    Where no part of the name exists, the known options at its end are options. So is one word
    that is none, for the sake of the error about it, unless a "/" follows its "@".
    """
    words = spec.split("@")
    if words[0] in (NONE, NGRAM):
        return words[0], words[1:]
    if words[0].startswith(HUB):  # no revision has a ":" in it, and most options have a name
        second = words[1] if len(words) > 1 else ""
        count = 2 if second and not _is_option(second) and ":" not in second else 1
        return "@".join(words[:count]), words[count:]
    for count in range(len(words), 0, -1):
        source = "@".join(words[:count])
        if source and exists(source):
            return source, words[count:]
    count = len(words)
    while count > 1 and _is_option(words[count - 1]):
        count -= 1
    if count == 2 and "/" not in words[1]:
        count = 1
    return "@".join(words[:count]), words[count:]


def parse(spec: str, exists: Callable[[str], bool] = on_disk) -> DraftSpec:
    """What `spec` asks for. exists: tells paths that lie on this disk.

    Raises UserError, one line with the fix, for an unknown option, one that this kind of
    drafter does not have, two that exclude each other, for options out of order, and for a
    union of what cannot be joined.
    """
    names = members(spec, exists)
    if len(names) > 1:
        return _union(names, spec, exists)
    source, options = split(spec, exists)
    if not source:
        raise UserError(f"drafters: {spec!r}: names no drafter; write none, ngram or a folder")
    draft, place = DraftSpec(source), -1
    out_of_order = False
    for option in options:
        changed, at = _with(draft, option, spec)
        if changed == draft:
            once = "@".join([source, *dict.fromkeys(options)])
            raise UserError(f"drafters: {spec}: @{option} stands there twice; write {once}")
        out_of_order |= at < place
        draft, place = changed, at
    if out_of_order:
        raise UserError(f"drafters: {spec}: the order is shape, draw, @adaptive; write {draft}")
    return _checked(draft, spec)


def _union(names: list[str], spec: str, exists: Callable[[str], bool]) -> DraftSpec:
    """What a union of drafters of these names asks for. Raises UserError."""
    if not all(names):
        raise UserError(
            f"drafters: {spec}: names no drafter on one side of a +; write A+B, or give a folder "
            "that exists"
        )
    parts = [parse(name, exists) for name in names]
    for part, name in zip(parts, names, strict=True):
        if part.source == NONE:
            rest = JOIN.join(n for n in names if n != name)
            raise UserError(f"drafters: {spec}: none drafts nothing to join; write {rest}")
    adaptive = any(part.adaptive for part in parts)
    own = tuple(replace(part, adaptive=False) for part in parts)
    source = JOIN.join(map(str, own))
    return DraftSpec(source, adaptive=adaptive, parts=own)


def _is_option(word: str) -> bool:
    return word in (*DRAWS, ADAPTIVE) or bool(SIZED_SHAPE.fullmatch(word))


def _with(draft: DraftSpec, option: str, spec: str) -> tuple[DraftSpec, int]:
    """(draft with one more option, place of that option in the order). Raises UserError."""
    source = draft.source
    taken = ""
    if source == NGRAM and NGRAM_DEPTH.fullmatch(option):
        if not draft.shape and draft.depth in (None, int(option)):
            return replace(draft, depth=int(option)), 0
        taken = _size(draft)
    elif found := SIZED_SHAPE.fullmatch(option):
        if source == NGRAM and found[1] == "chain":
            raise UserError(
                f"drafters: {spec}: ngram is a chain where no tree is asked for; write ngram, or "
                "ngram@K with K from 1 to 99"
            )
        if source == NONE:
            raise UserError(f"drafters: {spec}: {source} has no shape to choose; write {source}")
        size = int(found[2]) if found[2] else None
        if found[1] == "chain":
            shaped = replace(draft, shape="chain", depth=size, nodes=None)
        else:
            shaped = replace(draft, shape="tree", depth=None, nodes=size)
        if (not draft.shape and draft.depth is None) or shaped == draft:
            return shaped, 0
        taken = _size(draft)
    elif option in DRAWS:
        if draft.draw in (DEFAULT_DRAW, option):
            return replace(draft, draw=option), 1
        taken = draft.draw
    elif option == ADAPTIVE:
        return replace(draft, adaptive=True), 2
    elif option in left.DRAFTS:
        raise UserError(f"drafters: {spec}: {left.line(f'@{option}', left.DRAFTS[option])}")
    elif source in (NONE, NGRAM):
        near = _near(option, spec) if source == NGRAM else ""
        more = ", ngram@tree, or ngram@K with K from 1 to 99" if source == NGRAM else ""
        raise UserError(
            f"drafters: {spec}: {source} has no shape {option!r}; {near}write {source}{more}"
        )
    else:
        raise UserError(
            f"drafters: {spec}: unknown shape {option!r}; {_near(option, spec)}write "
            f"{source}@chain or {source}@tree, chain:4 (levels) or "
            "tree:16 (nodes), each with @adaptive behind it for an adaptive draft length"
        )
    raise UserError(
        f"drafters: {spec}: @{taken} and @{option} exclude each other; keep one of them"
    )


def _near(option: str, spec: str) -> str:
    """ "did you mean SPEC@OPTION? or " with the known option that `option` is a slip of; ""
    where none is near."""
    word, colon, size = option.partition(":")
    for close in difflib.get_close_matches(word, OPTIONS, 1):
        if _is_option(known := close + colon + size):
            words = spec.split("@")
            words[len(words) - 1 - words[::-1].index(option)] = known
            return f"did you mean {'@'.join(words)}? or "
    return ""


def _size(draft: DraftSpec) -> str:
    """The shape of `draft` as its name has it."""
    return str(DraftSpec(draft.source, draft.shape, draft.depth, draft.nodes))[
        len(draft.source) + 1 :
    ]


def _checked(draft: DraftSpec, spec: str) -> DraftSpec:
    """`draft`, where its options go together; a draw without a shape means a tree."""
    plain = str(replace(draft, draw=DEFAULT_DRAW))
    if draft.source == NONE and draft.adaptive:
        raise UserError(f"drafters: {spec}: there is no draft length to adapt; write {NONE}")
    if draft.draw == DEFAULT_DRAW:
        return draft
    if draft.source in (NONE, NGRAM):
        raise UserError(
            f"drafters: {spec}: {draft.source} has no distribution to draw from; write {plain}"
        )
    if draft.shape == "chain":
        raise UserError(f"drafters: {spec}: a chain is drawn where T > 0 anyway; write {plain}")
    return replace(draft, shape="tree")
