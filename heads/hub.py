"""Heads on the Hugging Face hub: `hub:OWNER/NAME[@REVISION]` names one wherever a folder may.

What is fetched is a stranger's: JSON, safetensors and a page of text, never a pickle. Whoever
reads it checks it as on any disk (heads.checkpoint, heads.interop.reading). huggingface_hub
fetches it into its own cache and goes by its own variables: HF_TOKEN, HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE. A revision is looked up once in a process, and `commits` says which one it was.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError, first_line
from outrider.conf.paths import REPOSITORY
from outrider.heads.names import CARD, HUB, OPTIONS, parse

HEAD = "head"  # the folder of a repository in which a head lies beside an engine's files
OWN = [f"{HEAD}/*.json", f"{HEAD}/*.safetensors", CARD, "head.safetensors"]
SERVED = ["*.json", "*.safetensors", "*.md"]
SOUND = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")  # of a file's name
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
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
def head(name: str) -> Path:
    """Fetch the head at hub:OWNER/NAME[@REVISION], where it is not here yet; its folder.

    Raises UserError where it cannot be fetched or holds no head in our own form."""
    place, held = _fetched(name, OWN, ["*/*/*"])
    for folder in (place / HEAD, place):
        if (folder / CARD).is_file():
            return folder
    raise UserError(f"{name}: {_instead(name, held)}")


@functools.cache
def served(name: str) -> Path:
    """Fetch what an engine serves at hub:OWNER/NAME[@REVISION], a published head for
    scripts/import_head.py; its folder. Raises UserError where it cannot be fetched or holds no
    safetensors."""
    place, held = _fetched(name, SERVED, ["*/*"])
    if not any(place.glob("*.safetensors")):
        raise UserError(f"{name}: {_instead(name, held)}")
    return place


def commits(spec: str) -> dict[str, str]:
    """Return the commits of the heads on the hub that a drafter's name asks for, by their
    names; they have been fetched. {} for a drafter of this disk."""
    sources = [part.source for part in parse(spec).each if part.source.startswith(HUB)]
    return {source: commit_of(head(source)) for source in sources}


def commit_of(folder: Path) -> str:
    """Return the commit that a fetched folder is of, 40 hex digits; "" for one of this
    disk."""
    found = re.search(r"/snapshots/([0-9a-f]{40})(/|$)", folder.as_posix())
    return found[1] if found else ""


def _fetched(name: str, wanted: list[str], deeper: list[str]) -> tuple[Path, list[str]]:
    """Fetch the files of a repository that match `wanted` (fnmatch, whose "*" matches "/"
    too) and not `deeper`: their folder, and the names of all. Without a network the copy in
    the cache is taken. Raises UserError for a name that could leave its folder."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    repository, revision = split(name)
    keys: dict[str, Any] = {"revision": revision, "library_name": LIBRARY}
    with explained(name, revision):
        try:
            info = HfApi(library_name=LIBRARY).model_info(repository, revision=revision)
        except errors.HfHubHTTPError:
            raise
        except Exception as error:  # those of a network share no class
            keys |= {"allow_patterns": wanted, "ignore_patterns": deeper}
            try:
                place = snapshot_download(repository, local_files_only=True, **keys)
            except errors.LocalEntryNotFoundError:
                raise error from None
            if not constants.HF_HUB_OFFLINE:
                note = f"note: {name}: the hub does not answer; the copy in the cache is taken"
                print(note, file=sys.stderr)
            return Path(place), []
        held = [one.rfilename for one in info.siblings or ()]
        files = list(filter_repo_objects(held, allow_patterns=wanted, ignore_patterns=deeper))
        if odd := [path for path in files if not SOUND.fullmatch(path)]:
            raise UserError(f"{name}: holds the odd name {odd[0]!r:.80}; do not trust it")
        return Path(snapshot_download(repository, allow_patterns=files, **keys)), held


def _instead(name: str, held: list[str]) -> str:
    """Say what a repository without a head of ours holds, and what to do with it."""
    repository, _ = split(name)
    if any(path.endswith(".safetensors") and "/" not in path for path in held):
        return (
            f"holds no head in this package's own form ({HEAD}/{CARD}); bring it in with "
            f"outrider import from={name} out=runs/imported, or, if it is an ordinary model, "
            f"name it {repository}"
        )
    if pickles := sorted(path for path in held if path.endswith(PICKLES)):
        return (
            f"holds its weights as a pickle alone ({pickles[0]}), which is not fetched; ask "
            f"its owner for safetensors, or hf download {repository} --local-dir FOLDER and "
            "outrider import from=FOLDER, which opens it as weights and nothing else"
        )
    return f"holds no head ({HEAD}/{CARD}); give another repository"


@contextlib.contextmanager
def explained(about: str, revision: str | None = None) -> Iterator[None]:
    """Turn what the client raises in the block into a UserError of one line: `about`, the
    reason, the fix. revision: that was asked for."""
    from huggingface_hub import utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the client's errors and those of its network share no class
        raise UserError(f"{about}: {_reason(error, revision)}") from error


def _reason(error: Exception, revision: str | None) -> str:
    """Say what went wrong between here and the hub, and the fix."""
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of an upload: what happened to one of the files
    token = "" if get_token() else "; no token is set: `hf auth login`, or HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated; accept its terms on its page, with the token's user{token}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such repository, or a private one of others; check it{token}"
    if isinstance(error, errors.RevisionNotFoundError):
        close = difflib.get_close_matches(revision or "", OPTIONS, 1)
        near = f"did you mean @{close[0]}? or " if close else ""
        return f"no revision {revision or 'main'!r}; {near}give a branch, tag or commit"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status:
        return REFUSED.get(status, f"the hub answered {status} ({first_line(error)}); try later")
    if constants.HF_HUB_OFFLINE:
        return "is not in the cache, and HF_HUB_OFFLINE is set; unset it, or give a folder"
    cause = error.__cause__ or error
    return (
        f"cannot be reached ({type(cause).__name__}: {first_line(cause)}); check the network, "
        "HF_ENDPOINT and the room in HF_HOME, then try again"
    )
