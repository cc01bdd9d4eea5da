"""Heads on the Hugging Face hub: `hub:OWNER/NAME[@REVISION]` names one wherever a folder may.

What is fetched is a stranger's: JSON, safetensors and a page of text, never a pickle. Whoever
reads it checks it as on any disk (heads.checkpoint, heads.interop.reading). huggingface_hub
fetches it into its own cache and goes by its own variables: HF_TOKEN, HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE. A revision is looked up once in a process, and `commits` says which one it was.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError, first_line
from outrider.conf.paths import REPOSITORY
from outrider.heads.names import CARD, HUB, parse

HEAD = "head"  # the folder of a repository that holds a head beside an engine's files
OWN = [f"{HEAD}/*.json", f"{HEAD}/*.safetensors", CARD, "head.safetensors"]
SERVED = ["*.json", "*.safetensors", "*.md"]
LIBRARY = "outrider"
REFUSED = {
    401: "the token is not valid; set HF_TOKEN to another one, or `hf auth login`",
    403: "the token may not do this; give one with write right to that owner's repositories",
    412: "somebody else has pushed in the meantime; look at it, then push again",
}


def split(name: str) -> tuple[str, str | None]:
    """(OWNER/NAME, revision or None) of hub:OWNER/NAME[@REVISION]. Raises UserError for
    anything else."""
    repository, _, revision = name.removeprefix(HUB).partition("@")
    if "/" not in repository:
        raise UserError(f"{name}: names no owner; write {HUB}OWNER/{repository or 'NAME'}")
    if not REPOSITORY.fullmatch(repository):
        raise UserError(f"{name}: is no name of a repository; write {HUB}OWNER/NAME")
    return repository, revision or None


@functools.cache
def head(name: str, weights: bool = True) -> Path:
    """Fetch the head at hub:OWNER/NAME[@REVISION], where it is not here yet, or without
    `weights` its head.json alone; its folder.

    Raises UserError where it cannot be fetched or holds no head in our own form."""
    place = _fetched(name, OWN if weights else [f"{HEAD}/{CARD}", CARD], ["*/*/*"])
    for folder in (place / HEAD, place):
        if (folder / CARD).is_file():
            return folder
    raise UserError(
        f"{name}: holds no head in this package's own form ({HEAD}/{CARD}); bring a published one "
        f"in with outrider import from={name} out=runs/imported, or name an ordinary model by its "
        f"repository alone: {split(name)[0]}"
    )


@functools.cache
def served(name: str) -> Path:
    """Fetch what an engine serves at hub:OWNER/NAME[@REVISION], a published head for
    scripts/import_head.py; its folder. Raises UserError where it cannot be fetched or holds no
    safetensors."""
    place = _fetched(name, SERVED, ["*/*"])
    if not any(place.glob("*.safetensors")):
        raise UserError(
            f"{name}: holds no safetensors, and a pickle is not fetched; ask its owner for them, "
            f"or hf download {split(name)[0]} --local-dir FOLDER and outrider import from=FOLDER, "
            "which opens it as weights and nothing else"
        )
    return place


def commits(spec: str) -> dict[str, str]:
    """Return the commits of the heads on the hub that a drafter's name asks for, by their
    names; they have been fetched. {} for a drafter of this disk."""
    sources = [part.source for part in parse(spec).each if part.source.startswith(HUB)]
    return {source: commit_of(head(source, True)) for source in sources}


def commit_of(folder: Path) -> str:
    """Return the commit that a fetched folder is of, 40 hex digits; "" for one of this
    disk."""
    found = re.search(r"/snapshots/([0-9a-f]{40})(/|$)", folder.as_posix())
    return found[1] if found else ""


def _fetched(name: str, wanted: list[str], deeper: list[str]) -> Path:
    """Fetch the files of a repository that match `wanted` (fnmatch, whose "*" matches "/" too)
    and not `deeper`: their folder. Without a network the client takes the copy in its cache."""
    from huggingface_hub import snapshot_download

    repository, revision = split(name)
    keys: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": deeper}
    with explained(name):
        place = snapshot_download(repository, revision=revision, library_name=LIBRARY, **keys)
    return Path(place)


@contextlib.contextmanager
def explained(about: str) -> Iterator[None]:
    """Turn what the client raises in the block into a UserError of one line: `about`, the
    reason, the fix."""
    from huggingface_hub import utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the client's errors and those of its network share no class
        raise UserError(f"{about}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Say what went wrong between here and the hub, and the fix."""
    from huggingface_hub import constants, errors, get_token

    around = (RuntimeError, errors.LocalEntryNotFoundError)
    if isinstance(error, around) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of an upload: what happened to one of the files
    token = "" if get_token() else "; no token is set: `hf auth login`, or HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated; accept its terms on its page, with the token's user{token}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such repository, or a private one of others; check it{token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no such revision; give a branch, tag or commit"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status:
        return REFUSED.get(status, f"the hub answered {status} ({first_line(error)}); try later")
    if constants.HF_HUB_OFFLINE:
        return "is not in the cache, and HF_HUB_OFFLINE is set; unset it, or give a folder"
    return (
        f"cannot be reached ({type(error).__name__}: {first_line(error)}); check the network, "
        "HF_ENDPOINT and the room in HF_HOME, then try again"
    )
