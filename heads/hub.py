"""Heads on the Hugging Face hub: `hub:OWNER/NAME[@REVISION]` names one wherever a folder may.

What is fetched is a stranger's: JSON, safetensors and a page of text, by names that stay
within one folder, never a pickle. Whoever reads it checks it as on any disk
(heads.checkpoint, heads.interop.reading). huggingface_hub keeps it in its own cache and goes
by its own variables: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. A revision is looked up
once in a process, and `commits` says which one it was.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from outrider.conf.disk import check_space, size
from outrider.conf.errors import UserError, first_line
from outrider.heads.names import HUB, OPTIONS, parse

CARD = "head.json"
HEAD = "head"  # the folder of a repository in which a head lies beside an engine's files
# What is fetched: a head in our own form, or what an engine serves. fnmatch: "*" matches "/"
# too.
OWN = (f"{HEAD}/*.json", f"{HEAD}/*.safetensors", CARD, "head.safetensors")
SERVED = ("*.json", "*.safetensors", "*.md")
DEEPER = {OWN: ("*/*/*",), SERVED: ("*/*",)}
SOUND = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")  # of a file's name
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LIBRARY = "outrider"


@dataclass(frozen=True)
class HubName:
    """repository: OWNER/NAME. revision: a branch, tag or commit; "" = main."""

    repository: str
    revision: str = ""

    @classmethod
    def read(cls, name: str) -> HubName:
        """hub:OWNER/NAME[@REVISION]. Raises UserError for anything else."""
        repository, _, revision = name.removeprefix(HUB).partition("@")
        if "/" not in repository:
            raise UserError(f"{name}: names no owner; write {HUB}OWNER/{repository or 'NAME'}")
        if not REPOSITORY.fullmatch(repository):
            raise UserError(f"{name}: is no name of a repository; write {HUB}OWNER/NAME")
        return cls(repository, revision)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.repository}{revision}"


@functools.cache
def head(name: str) -> Path:
    """The folder of the head at hub:OWNER/NAME[@REVISION], fetched where it is not here yet.

    Raises UserError where it cannot be fetched or holds no head in our own form.
    """
    known = HubName.read(name)
    folder = _own(known)
    if folder is None:
        _no_head(known)
    return folder


@functools.cache
def served(name: str) -> Path:
    """The folder of what an engine serves at hub:OWNER/NAME[@REVISION]: a published head for
    scripts/import_head.py. Raises UserError where it cannot be fetched or holds no
    safetensors."""
    known = HubName.read(name)
    place = _snapshot(known, SERVED)
    if not any(place.glob("*.safetensors")):
        _refuse_pickles(known, _listed(known))
        raise UserError(f"{name}: holds no weights as safetensors; give another repository")
    return place


def commits(spec: str) -> dict[str, str]:
    """The commits of the heads on the hub that a drafter's name asks for, by their names; they
    have been fetched. {} for a drafter of this disk."""
    sources = [part.source for part in parse(spec).each if part.source.startswith(HUB)]
    return {source: commit_of(head(source)) for source in sources}


def origin(source: str) -> dict[str, str]:
    """Where a head comes from, for a record: its path, and the commit of one on the hub."""
    return {
        "path": source,
        **({"commit": commit_of(head(source))} if source.startswith(HUB) else {}),
    }


def commit_of(folder: Path) -> str:
    """The commit that a fetched folder is of, 40 hex digits; "" for a folder of this disk."""
    found = re.search(r"/snapshots/([0-9a-f]{40})(/|$)", folder.as_posix())
    return found[1] if found else ""


def _own(known: HubName) -> Path | None:
    """Where the head of a repository lies, None where it holds none in our own form."""
    place = _snapshot(known, OWN)
    return next((p for p in (place / HEAD, place) if (p / CARD).is_file()), None)


def _snapshot(known: HubName, wanted: tuple[str, ...]) -> Path:
    """The folder with the files of a repository that match `wanted`, in the client's cache."""
    from huggingface_hub import constants, snapshot_download

    keys: dict[str, Any] = {
        "revision": known.revision or None,
        "ignore_patterns": list(DEEPER[wanted]),
        "library_name": LIBRARY,
    }
    with explained(known), bars(shown=False):
        allowed: Sequence[str] = wanted
        if not constants.HF_HUB_OFFLINE:
            allowed = _announced(known, wanted, keys)
        with bars(shown=sys.stderr.isatty()):
            found = snapshot_download(known.repository, allow_patterns=list(allowed), **keys)
    if allowed is wanted and not constants.HF_HUB_OFFLINE and os.environ.get("RANK", "0") == "0":
        print(
            f"note: {known}: the hub does not answer; the copy in the cache is taken",
            file=sys.stderr,
        )
    return Path(found)


def _announced(known: HubName, wanted: tuple[str, ...], keys: dict[str, Any]) -> Sequence[str]:
    """Says how much there is to fetch; the names of those files. Where the hub does not
    answer: the patterns themselves, by which the cache is looked through.

    Raises UserError for names that leave their folder and for more than the disk holds."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        found: Any = snapshot_download(
            known.repository, allow_patterns=list(wanted), dry_run=True, **keys
        )
    except DryRunError:
        return wanted
    odd = [one.filename for one in found if not SOUND.fullmatch(one.filename)]
    if odd:
        raise UserError(f"{known}: holds a file of the odd name {odd[0]!r:.80}; do not trust it")
    missing = sum(one.file_size for one in found if one.will_download)
    if missing:
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        check_space(str(known), cache, missing, "set HF_HOME to another folder")
        if os.environ.get("RANK", "0") == "0":
            at = found[0].commit_hash[:7]
            print(f"{known}: fetching {size(missing)} at commit {at}", file=sys.stderr, flush=True)
    return [one.filename for one in found]


def _no_head(known: HubName) -> NoReturn:
    """Raises UserError that says what to do with what the repository holds instead."""
    held = [path for path in _listed(known) if "/" not in path]
    if any(path.endswith(".safetensors") for path in held):
        raise UserError(
            f"{known}: holds no head in this package's own form ({HEAD}/{CARD}); bring it in with "
            f"outrider import from={known} out=runs/imported, or, if it is an ordinary model, name "
            f"it {known.repository}"
        )
    _refuse_pickles(known, held)
    raise UserError(f"{known}: holds no head ({HEAD}/{CARD}); give another repository")


def _refuse_pickles(known: HubName, held: Sequence[str]) -> None:
    """Raises UserError where weights lie there as a pickle. held: the repository's files."""
    if pickles := sorted(path for path in held if path.endswith(PICKLES)):
        raise UserError(
            f"{known}: holds its weights as a pickle alone ({pickles[0]}), which is not fetched; "
            f"ask its owner for safetensors, or hf download {known.repository} --local-dir FOLDER "
            "and outrider import from=FOLDER, which opens it as weights and nothing else"
        )


def _listed(known: HubName) -> list[str]:
    """The names of all files of a repository; [] where it cannot be asked."""
    from huggingface_hub import HfApi

    try:
        api = HfApi(library_name=LIBRARY)
        return api.list_repo_files(known.repository, revision=known.revision or None)
    except Exception:  # it was reached a moment ago, or lies in the cache of a machine offline
        return []


@contextlib.contextmanager
def bars(shown: bool) -> Iterator[None]:
    """The client's progress bars, shown or not, as long as the block runs; its warnings, which
    tell what is told here, are not."""
    from huggingface_hub import utils

    hidden, level = utils.are_progress_bars_disabled(), utils.logging.get_verbosity()
    (utils.enable_progress_bars if shown else utils.disable_progress_bars)()
    utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        (utils.disable_progress_bars if hidden else utils.enable_progress_bars)()
        utils.logging.set_verbosity(level)


@contextlib.contextmanager
def explained(known: HubName, key: str = "") -> Iterator[None]:
    """What the client raises in the block, as a UserError of one line about `known`. key: that
    it begins with; "" where whoever asked puts one there."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the client's errors and those of its network share no class
        about = f"{key}: {known.repository}" if key else str(known)
        raise UserError(f"{about}: {reason(error, known)}") from error


def reason(error: BaseException, known: HubName) -> str:
    """What went wrong between here and the hub, and the fix."""
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__  # of an upload: what happened to one of the files
    token = "" if get_token() else "; no token is set: `hf auth login`, or HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left in the hub cache; free some or set HF_HOME"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated; accept its terms on its page on the hub, with the token's user{token}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such repository, or a private one that is not shown to you; check it{token}"
    if isinstance(error, errors.RevisionNotFoundError):
        close = difflib.get_close_matches(known.revision, OPTIONS, 1)
        near = f"did you mean @{close[0]}? or " if close else ""
        return f"no revision {known.revision or 'main'!r}; {near}give a branch, tag or commit"
    if status == 401:
        return "the token is not valid; set HF_TOKEN to another one, or `hf auth login`"
    if status == 403:
        return "the token may not do this; give one with write right to that owner's repositories"
    if status == 412:
        return "somebody else has pushed in the meantime; look at it, then push again"
    if status:
        return f"the hub answered {status} ({first_line(error)}); try again later"
    if constants.HF_HUB_OFFLINE:
        return "is not in the cache, and HF_HUB_OFFLINE is set; unset it, or give a folder"
    cause = error.__cause__ or error
    unreached = isinstance(cause, ConnectionError | TimeoutError | errors.LocalEntryNotFoundError)
    if not unreached and not type(cause).__module__.startswith("http"):
        return f"{first_line(error)} ({type(error).__name__}, of huggingface_hub)"
    return (
        f"cannot be reached ({type(cause).__name__}: {first_line(cause)}); check the network and "
        "HF_ENDPOINT, then try again"
    )
