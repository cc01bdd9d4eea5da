"""The upload: what is there is looked at first, then everything goes up in one commit, so
that a reader sees the repository before it or after it. Large files that were sent before an
interruption are not sent again: the hub knows them by their hash.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.heads import hub
from outrider.heads.hub import HEAD, HubName
from outrider.heads.interop import MANIFEST
from outrider.scripts.publishing.form import PAGE, Form

HARMLESS = (".gitattributes", ".gitignore", PAGE, "LICENSE", "LICENSE.md", "LICENSE.txt")


@dataclass
class Remote:
    """A repository as it is. files: their sizes by name; {} where there is no repository yet.
    ours: those that an earlier push wrote. commit: of its branch, "" where there is none."""

    name: HubName
    exists: bool = False
    private: bool = False
    files: dict[str, int] = field(default_factory=dict)
    ours: tuple[str, ...] = ()
    commit: str = ""


def client() -> Any:
    """The client of the hub."""
    from huggingface_hub import HfApi

    return HfApi(library_name=hub.LIBRARY)


def allowed(repository: str) -> None:
    """Raises UserError where this machine may not write to the repository, as far as the hub
    tells before: offline, without a token, with one that reads only, under another owner's
    name."""
    from huggingface_hub import constants, get_token

    name, owner = HubName(repository), repository.partition("/")[0]
    if constants.HF_HUB_OFFLINE:
        raise UserError("repository: HF_HUB_OFFLINE is set; unset it to push")
    if not get_token():
        raise UserError(
            "repository: no token is set; `hf auth login`, or set HF_TOKEN to one with write right"
        )
    with hub.explained(name, "repository"):
        user = client().whoami()
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise UserError(
            f"repository: the token of {user['name']} may read only; set HF_TOKEN to one with "
            "write right"
        )
    owners = [user["name"], *(org["name"] for org in user.get("orgs") or ())]
    if token.get("role") == "write" and owner not in owners:  # others name what they may write
        raise UserError(
            f"repository: {repository}: the token is of {user['name']}, who may write under "
            f"{', '.join(owners)}; write one of these before the /"
        )


def look(repository: str, revision: str) -> Remote:
    """What is there. Raises UserError where the hub does not tell."""
    from huggingface_hub import errors, hf_hub_download

    remote, api = Remote(HubName(repository, revision)), client()
    with hub.explained(remote.name, "repository"):
        try:
            remote.private = bool(api.model_info(repository).private)
            remote.exists = True
            info = api.model_info(repository, revision=revision, files_metadata=True)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            return remote
        remote.commit = str(info.sha)
        remote.files = {one.rfilename: int(one.size or 0) for one in info.siblings or ()}
        if MANIFEST in remote.files:
            with hub.bars(shown=False):
                place = Path(hf_hub_download(repository, MANIFEST, revision=remote.commit))
            remote.ours = _written(place, remote.files)
    return remote


def _written(manifest: Path, files: dict[str, int]) -> tuple[str, ...]:
    """Those of the files that an earlier push says it wrote."""
    try:
        top = set(json.loads(manifest.read_text())["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    return tuple(p for p in files if p in top or p == MANIFEST or p.startswith(f"{HEAD}/"))


def check(remote: Remote, private: bool, overwrite: bool) -> None:
    """Raises UserError where pushing would do what nobody wants."""
    name = remote.name.repository
    if remote.exists and private and not remote.private:
        raise UserError(
            f"private: {name} is there and public; make it private on its page, or leave it out"
        )
    foreign = sorted(set(remote.files) - {*remote.ours, *HARMLESS})
    if foreign and MANIFEST not in remote.files and not overwrite:
        raise UserError(
            f"repository: {name} holds files that no push wrote ({', '.join(foreign[:3])}); give "
            "another name, or set overwrite=true"
        )


def push(remote: Remote, form: Form, private: bool, message: str) -> str:
    """Make the repository and the branch where they are not there, and commit the whole form;
    files of an earlier push that are not in it go. Returns the commit.

    Raises UserError where the hub refuses or is not reached, or holds something else
    afterwards; then the repository is as it was, but for being there."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api, name = client(), remote.name
    repository, revision = name.repository, name.revision
    with hub.explained(name, "repository"), hub.bars(shown=sys.stderr.isatty()):
        api.create_repo(repository, private=private or None, exist_ok=True)
        if revision != "main":
            api.create_branch(repository, branch=revision, exist_ok=True)
        if not remote.commit:
            remote = look(repository, revision)
        steps: list[Any] = [
            CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
            for path, content in form.files.items()
        ]
        gone = [path for path in remote.ours if path not in form.files]
        steps += [CommitOperationDelete(path) for path in gone]
        done = api.create_commit(
            repository,
            steps,
            commit_message=message,
            revision=revision,
            parent_commit=remote.commit or None,
        )
        _compare(api.list_repo_tree(repository, recursive=True, revision=done.oid), form, name)
    return str(done.oid)


def _compare(listed: Sequence[Any], form: Form, name: HubName) -> None:
    """Raises UserError where the hub holds something else than what was sent."""
    there = {one.path: one for one in listed if hasattr(one, "size")}
    for path, content in form.files.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        found = there.get(path)
        lfs = getattr(found, "lfs", None)
        same = found is not None and found.size == size
        if not same or (
            lfs is not None and path in form.sha256 and lfs.sha256 != form.sha256[path]
        ):
            raise UserError(
                f"repository: {name.repository}: {path} there is not what was sent (was the run "
                "still being written?); push again"
            )
