"""The real client of the Hugging Face hub before a stand-in of it on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants

from outrider.heads import hub
from tests.helpers.hub_stand_in import HubStandIn
from tests.helpers.hub_stand_in import hub as stand_in


@contextlib.contextmanager
def hub_on_loopback(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A hub with nothing in it, which this process and those that it starts take for the real
    one, as the user "me", with an empty cache."""
    with stand_in(folder / "hub") as server:
        patch.setenv("HF_HOME", str(folder / "home"))
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.setenv("HF_TOKEN", "write-me")
        # What the client read from these variables when it was imported.
        at(server.url, patch)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "home/hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "home/token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        forget()
        yield server
    forget()


def at(url: str, patch: pytest.MonkeyPatch) -> None:
    """The hub is there."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    patch.setenv("HF_ENDPOINT", url)
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)


def forget() -> None:
    """The process has fetched nothing yet."""
    hub.head.cache_clear()
    hub.served.cache_clear()


def put(server: HubStandIn, repository: str, files: dict[str, Any], **keys: Any) -> str:
    """Commit files (bytes, or where they lie) as somebody who knows nothing of this package."""
    api = HfApi(endpoint=server.url, token=f"write-{repository.partition('/')[0]}")
    api.create_repo(repository, exist_ok=True, **keys)
    steps = [CommitOperationAdd(path, content) for path, content in files.items()]
    return str(api.create_commit(repository, steps, commit_message="files").oid)


def held(server: HubStandIn, repository: str, revision: str = "main") -> dict[str, bytes]:
    """Every file of a repository, as the server has it on its disk."""
    found = server.store.read(repository)
    assert found is not None
    files = found["commits"][found["refs"][revision]]["files"]
    return {path: server.store.file(one["sha256"]).read_bytes() for path, one in files.items()}
