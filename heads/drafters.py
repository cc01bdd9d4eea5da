"""From the name of a drafter to the drafter: names.parse reads it, `requested` adds what
scripts/tune.py left, `resolve_drafter` makes it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.ngram import DEPTH, NGram
from outrider.decode.target import Target
from outrider.decode.union import Union
from outrider.decode.wrapped import Adaptive
from outrider.heads import names, tuned
from outrider.heads.base import Head
from outrider.heads.checkpoint import read_card, trained_for
from outrider.heads.folders import find_head, head_folder, is_plain
from outrider.heads.names import DraftSpec
from outrider.heads.registry import load_head
from outrider.heads.small_lm.plain import plain_folder, plain_model


def resolve_drafter(spec: str, target: Target) -> Drafter:
    """A drafter by name (heads.names): "none", "ngram", a run folder, a head folder, or any
    smaller model with the target's tokenizer (a transformers folder or a Hugging Face
    repository). "A+B" joins the drafts of several (decode.union): where T > 0 the first
    that is no n-gram draws, the others give their most probable tokens.

    Where scripts/tune.py has left its choice in the head's folder, that is how the head
    drafts; "@chain:4" or "@tree:16" (levels, nodes; "ngram@4" too) ask for something else.
    Where T > 0 a head or model draws the candidates of its tree without replacement
    ("@sampled" behind it, or its tree, asks for it where head.tree_draw was fixed);
    "@fixed" takes the most probable ones instead. "@adaptive" behind any of them but "none"
    chooses the depth of the draft at every step, by the acceptance of the row so far
    (decode.wrapped). The drafter's name is `spec`. Raises UserError for anything else, for
    a tree on a target that takes chains only, for a head of another target, and for a model
    with another tokenizer.
    """
    draft = requested(spec)
    drafter = _union(draft, spec, target) if draft.parts else _single(draft, spec, target)
    if draft.adaptive:
        drafter = Adaptive(drafter)
    drafter.name = spec
    return drafter


def _single(draft: DraftSpec, spec: str, target: Target) -> Drafter:
    """The drafter of one source, before anything is wrapped around it."""
    if draft.source == names.NONE:
        return NoDraft()
    if draft.shape == "tree" and target.support != "tree":
        chain = draft.source if draft.source == names.NGRAM else f"{draft.source}@chain"
        raise UserError(f"drafters: {spec}: this target takes chains only; write {chain}")
    if draft.source == names.NGRAM:
        return NGram(draft.depth or DEPTH, _nodes(draft))
    return drafting_head(draft.source, target).drafter(target, draft)


def _nodes(draft: DraftSpec) -> int:
    """Nodes of an n-gram's tree, 0 for its chain."""
    return (draft.nodes or DEPTH) if draft.shape == "tree" else 0


def _union(draft: DraftSpec, spec: str, target: Target) -> Union:
    """The drafters of a union, n-grams last: they draw nothing and cost nothing."""
    if target.support != "tree":
        raise UserError(
            f"drafters: {spec}: this target takes chains only, and a union is a tree; write one "
            "of its drafters alone"
        )
    drafter_folders(draft)
    spelled = names.parse(spec).parts
    ordered = sorted(
        zip(draft.parts, spelled, strict=True), key=lambda pair: pair[0].source == names.NGRAM
    )
    parts: list[Drafter] = []
    for part, name in ordered:
        parts.append(_single(part, spec, target))
        parts[-1].name = str(name)
    return Union(parts)


def requested(spec: str) -> DraftSpec:
    """What a drafter's name asks for, with what scripts/tune.py has left for it.

    Raises UserError for a name that is none, and for a file of settings that is damaged or
    another head's.
    """
    draft = names.parse(spec)
    if not draft.parts:
        return _settled(draft)
    return replace(draft, parts=tuple(map(_settled, draft.parts)))


def _settled(draft: DraftSpec) -> DraftSpec:
    """`draft` of one source, and what scripts/tune.py has left for it."""
    folder = settings_folder(draft)
    left = None if folder is None else tuned.read(folder)
    return draft if left is None else left.draft(draft)


def drafting_head(source: str, target: Target) -> Head:
    """What drafts at `source`: the trained head there, or an ordinary model behind a head's
    calls.

    Raises UserError where there is neither, or where it is for another target.
    """
    if is_plain(source):
        return plain_model(source, target)
    folder = find_head(source)
    head = load_head(folder, target)
    if other := trained_for(read_card(folder), target):
        print(f"note: {source} was trained for {other}, a relative of this target", file=sys.stderr)
    return head


def settings_folder(draft: DraftSpec) -> Path | None:
    """The folder where scripts/tune.py leaves its choice: that of the head, or of an ordinary
    model on this disk. None for none, ngram and repositories. Raises UserError as
    `head_folder` does."""
    place = Path(draft.source).expanduser()
    return place if is_plain(draft.source) and place.is_dir() else head_folder(draft)


def drafter_folder(draft: DraftSpec) -> Path | None:
    """The folder with the files that a drafter is loaded from, also of a repository; None for
    none and ngram. Raises UserError where there is no such drafter."""
    return plain_folder(draft.source) if is_plain(draft.source) else head_folder(draft)


def drafter_folders(draft: DraftSpec) -> list[Path]:
    """`drafter_folder` of every drafter of a union, or of this one, where there is one.

    Raises UserError as that does, and for a union that names a drafter twice."""
    found: list[Path | None] = []
    for part in draft.each:
        folder = drafter_folder(part)
        place = None if folder is None else folder.resolve()
        if place in found:
            raise UserError(
                f"drafters: {draft}: {part.source} stands there twice; join different drafters"
            )
        found.append(place)
    return [place for place in found if place is not None]
