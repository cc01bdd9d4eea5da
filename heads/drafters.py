"""From the name of a drafter to the drafter: names.parse reads it, `settled` adds what
scripts/tune.py left, `resolve_drafter` makes it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.conf.errors import UserError
from outrider.decode.adaptive import Adaptive
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.models.config import TargetConfig
from outrider.decode.models.load import published_weights
from outrider.decode.ngram import DEPTH, NGram
from outrider.decode.target import Target
from outrider.decode.union import Union
from outrider.heads import names, tuned
from outrider.heads.base import Head
from outrider.heads.checkpoint import load_head, read_card, trained_for
from outrider.heads.folders import find_head, head_folder, head_in, is_plain
from outrider.heads.names import DraftSpec
from outrider.heads.small_lm.plain import plain_folder, plain_model


def resolve_drafter(spec: str, target: Target) -> Drafter:
    """Make a drafter by name (heads.names): "none", "ngram", a run folder, a head folder,
    or any smaller model with the target's tokenizer (a transformers folder or a Hugging
    Face repository). "A+B" joins the drafts of several (decode.union): where T > 0 the
    first that is no n-gram draws, the others give their most probable tokens.

    Where scripts/tune.py has left its choice in the head's folder, that is how the head
    drafts. The drafter's name is `spec`. Raises UserError for anything else, for a head of
    another target, and for a model with another tokenizer."""
    draft = names.parse(spec)
    if len(draft.each) > 1:
        drafter_folders(draft)  # that none is named twice
        # N-grams last: they draw nothing and cost nothing.
        ordered = sorted(draft.parts, key=lambda part: part.source == names.NGRAM)
        drafter: Drafter = Union([_single(part, str(part), target) for part in ordered])
    else:
        drafter = _single(draft, spec, target)
    if draft.adaptive:
        drafter = Adaptive(drafter)
    drafter.name = spec
    return drafter


def refuse_other(specs: Sequence[str], cfg: TargetConfig) -> None:
    """Refuse heads that were trained for another target than `cfg` names, before any weights
    are fetched: the target's, or those of a head on the hub. What is no head, or of a target
    whose hash is not known yet, is judged when it is loaded. Raises UserError."""
    wanted: str | None = None
    for spec in specs:
        cards = list[dict[str, str] | None]()
        with contextlib.suppress(UserError):  # said by whoever loads it
            places = [head_in(part.source, weights=False) for part in names.parse(spec).each]
            cards = [read_card(place)["target"] for place in places if place is not None]
        for stored in filter(None, cards):
            wanted = published_weights(cfg) if wanted is None else wanted
            if wanted and stored["weights_sha256"] != wanted and not cfg.allow_other:
                raise UserError(
                    f"drafters: {spec}: the head was trained for another target "
                    f"({stored['name']}, weights {stored['weights_sha256'][:12]}, not "
                    f"{wanted[:12]}); use that one, or train a head for this one"
                )


def _single(draft: DraftSpec, name: str, target: Target) -> Drafter:
    """Make the drafter of one source, with what scripts/tune.py has left for it."""
    if draft.source == names.NONE:
        return NoDraft()
    if draft.source == names.NGRAM:
        nodes = (draft.nodes or DEPTH) if draft.shape == "tree" else 0
        drafter: Drafter = NGram(draft.depth or DEPTH, nodes)
    else:
        drafter = drafting_head(draft.source, target).drafter(target, settled(draft))
    drafter.name = name
    return drafter


def settled(draft: DraftSpec) -> DraftSpec:
    """Return `draft` of one source with what scripts/tune.py has left for it.

    Raises UserError for a file of settings that is damaged or another head's."""
    folder = settings_folder(draft)
    left = None if folder is None else tuned.read(folder)
    return draft if left is None else left.draft(draft)


def drafting_head(source: str, target: Target) -> Head:
    """Load what drafts at `source`: the trained head there, or an ordinary model behind a
    head's calls.

    Raises UserError where there is neither, or where it is for another target."""
    if is_plain(source):
        return plain_model(source, target)
    folder = find_head(source)
    head = load_head(folder, target)
    if other := trained_for(read_card(folder), target):
        print(f"note: {source} was trained for {other}, a relative of it", file=sys.stderr)
    return head


def settings_folder(draft: DraftSpec) -> Path | None:
    """Return the folder where scripts/tune.py leaves its choice: the head's, or that of an
    ordinary model on this disk. None for none, ngram and repositories. Raises UserError as
    `head_folder` does."""
    place = Path(draft.source).expanduser()
    return place if is_plain(draft.source) and place.is_dir() else head_folder(draft)


def drafter_folder(draft: DraftSpec) -> Path | None:
    """Return the folder that a drafter is loaded from, also of a repository; None for
    none and ngram. Raises UserError where there is no such drafter."""
    return plain_folder(draft.source) if is_plain(draft.source) else head_folder(draft)


def drafter_folders(draft: DraftSpec) -> list[Path]:
    """Return `drafter_folder` of every drafter of a union, or of this one, where there is one.

    Raises UserError as that does, and for a union that names a drafter twice."""
    found: list[Path | None] = []
    for part in draft.each:
        folder = drafter_folder(part)
        place = None if folder is None else folder.resolve()
        if place in found:
            raise UserError(
                f"drafters: {draft}: {part.source} is given twice; join different drafters"
            )
        found.append(place)
    return [place for place in found if place is not None]
