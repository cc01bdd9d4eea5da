"""Which folder a drafter's name means: a head's, a run's, an ordinary model's."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.conf.errors import UserError
from outrider.conf.paths import REPOSITORY
from outrider.heads import hub
from outrider.heads.names import CARD, HUB, NGRAM, NONE, DraftSpec

# Folders of this tool, also where they are not made yet
OURS = ("runs", "reports", "exports", "checkpoints")


def is_plain(path: str) -> bool:
    """Say whether `path` is an ordinary model folder, or reads like the name of a
    repository (and its first part is no folder here or of ours, which would rather be a
    misspelt path: the hub is not asked for those)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return (folder / "config.json").is_file() and not (folder / CARD).is_file()
    first = path.partition("/")[0]
    return bool(REPOSITORY.fullmatch(path)) and first not in OURS and not Path(first).exists()


def head_in(path: str, weights: bool = True) -> Path | None:
    """Find the head folder that `path` means: itself, or of a run folder head/ (final),
    else best/, else the newest checkpoint. None when there is none. A head on the hub is
    fetched, without `weights` its card alone: raises UserError where it cannot be."""
    if path.startswith(HUB):
        return hub.head(path, weights)
    folder = Path(path).expanduser()
    steps = [p for p in folder.glob("checkpoints/step-*") if re.fullmatch(r"step-\d+", p.name)]
    newest = sorted(steps, key=lambda p: int(p.name[5:]), reverse=True)
    places = (folder, folder / "head", folder / "best", *newest)
    return next((place for place in places if (place / CARD).is_file()), None)


def find_head(path: str) -> Path:
    """Do as `head_in`. Raises UserError when there is none."""
    try:
        place = head_in(path)
    except UserError as error:
        raise UserError(f"drafters: {error}") from None
    if place is not None:
        return place
    fix = "give a run folder or a head folder"
    if is_plain(path):
        why = f"an ordinary language model, not a head that was trained here; {fix}"
    elif Path(path).expanduser().is_dir():
        why = (
            f"the folder holds no head (no {CARD}, head/, best/ or checkpoints/); finish the "
            "training run, or give another folder"
        )
    elif path.partition("@")[0] in (NONE, NGRAM):
        why = f"has no weights; {fix}"
    else:
        why = f"neither none, ngram nor a folder; {fix}, or a model with the target's tokenizer"
    raise UserError(f"drafters: {path}: {why}")


def no_head(path: str) -> list[str]:
    """Say that no head is at `path`, for a run that starts from one; [] for "", and for the
    hub, which is not asked."""
    if not path or path.startswith(HUB) or head_in(path) is not None:
        return []
    return [
        f"{path}: no head there (no {CARD}, head/, best/ or checkpoints/); give a run folder or a "
        "head folder"
    ]


def head_folder(draft: DraftSpec) -> Path | None:
    """Find the folder of the head that `draft` asks for; None where it asks for no head: none,
    ngram, a plain model.

    Raises UserError for a folder that holds none of these."""
    if draft.source in (NONE, NGRAM):
        return None
    return None if is_plain(draft.source) else find_head(draft.source)
