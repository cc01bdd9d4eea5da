"""The Hugging Face hub in this process: repositories as dictionaries, behind the calls of
huggingface_hub that are made."""

from __future__ import annotations

import contextlib
import hashlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, constants, errors
from huggingface_hub.utils import filter_repo_objects

from outrider.heads import hub

Files = dict[str, bytes]


@dataclass
class Repository:
    """commits: the files of each by its name, 40 hex digits. refs: branches to commits."""

    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)


class FakeHub:
    """What it holds, and what was asked for. refuse: is given the name of every call, and
    raises."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.repositories = folder, dict[str, Repository]()
        self.calls = list[str]()
        self.refuse: Callable[[str], None] = lambda call: None
        self.endpoint = "https://hub.test"

    def put(self, name: str, files: dict[str, Any], private: bool = False) -> str:
        """Commit files (bytes, or where they lie) as somebody who knows nothing of this
        package."""
        found = self.repositories.setdefault(name, Repository(private))
        before = found.commits.get(found.refs.get("main", ""), {})
        new = {path: c if isinstance(c, bytes) else c.read_bytes() for path, c in files.items()}
        return self._commit(name, "main", before | new)

    def _commit(self, name: str, revision: str, files: Files) -> str:
        found = self.repositories[name]
        commit = f"{len(found.commits) + 1:040x}"
        found.commits[commit], found.refs[revision] = files, commit
        return commit

    def held(self, name: str, revision: str = "main") -> Files:
        """Every file of a repository."""
        return self._at(name, revision)[1]

    def _at(self, name: str, revision: str | None) -> tuple[str, Files]:
        if name not in self.repositories:
            raise refusal(404, errors.RepositoryNotFoundError)
        found = self.repositories[name]
        commit = found.refs.get(revision or "main", revision or "main")
        if commit not in found.commits:
            raise refusal(404, errors.RevisionNotFoundError)
        return commit, found.commits[commit]

    def _asked(self, call: str) -> None:
        self.calls.append(call)
        self.refuse(call)

    def snapshot_download(
        self,
        name: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        library_name: str,
        ignore_patterns: list[str] | None = None,
    ) -> Any:
        """As the client's own."""
        self._asked("snapshot_download")
        commit, files = self._at(name, revision)
        place = self.folder / name.replace("/", "--") / "snapshots" / commit
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        for path in filter_repo_objects(files, **patterns):
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(files[path])
        return str(place)

    def model_info(
        self, name: str, revision: str | None = None, files_metadata: bool = False
    ) -> Any:
        """As the client's own."""
        self._asked("model_info")
        commit, files = self._at(name, revision)
        card = huggingface_hub.ModelCard(files.get("README.md", b"").decode())
        siblings = [types.SimpleNamespace(rfilename=path, lfs=None) for path in files]
        for one in siblings if files_metadata else ():
            if one.rfilename.endswith(".safetensors"):
                digest = hashlib.sha256(files[one.rfilename]).hexdigest()
                one.lfs = types.SimpleNamespace(sha256=digest)
        return types.SimpleNamespace(
            sha=commit,
            siblings=siblings,
            card_data=card.data,
            private=self.repositories[name].private,
        )

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> None:
        """As the client's own."""
        self._asked("create_repo")
        if name not in self.repositories:
            self.repositories[name] = Repository(bool(private))
            self.put(name, {".gitattributes": b""})

    def create_branch(self, name: str, branch: str, exist_ok: bool) -> None:
        """As the client's own."""
        refs = self.repositories[name].refs
        refs.setdefault(branch, refs["main"])

    def create_commit(
        self,
        name: str,
        steps: list[Any],
        commit_message: str = "",
        revision: str = "main",
        parent_commit: str | None = None,
    ) -> Any:
        """As the client's own."""
        self._asked("create_commit")
        found = self.repositories[name]
        if parent_commit not in (None, found.refs.get(revision)):
            raise refusal(412)
        files = dict(found.commits.get(found.refs.get(revision, ""), {}))
        for step in steps:
            if isinstance(step, CommitOperationAdd):
                with step.as_file() as content:
                    files[step.path_in_repo] = content.read()
            else:
                del files[step.path_in_repo]
        return types.SimpleNamespace(oid=self._commit(name, revision, files))


def refusal(status: int, kind: type[errors.HfHubHTTPError] = errors.HfHubHTTPError) -> Exception:
    """What the client raises for an answer of the hub."""
    response: Any = types.SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} was the answer", response=response)


@contextlib.contextmanager
def fake_hub(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with nothing in it, which this process takes for the real one."""
    found = FakeHub(folder / "hub")
    patch.setenv("HF_TOKEN", "a token")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    patch.setattr(huggingface_hub, "HfApi", lambda library_name: found)
    forget()
    yield found
    forget()


def forget() -> None:
    """The process has fetched nothing yet."""
    hub.head.cache_clear()
    hub.served.cache_clear()
