"""Publish a head on the Hugging Face hub, from where `hub:OWNER/NAME` names it wherever a
head may stand.

    outrider export drafter=runs/eagle3 format=vllm out=exports/eagle3
    outrider push runs/eagle3 OWNER/NAME license=mit export=exports/eagle3
    outrider evaluate 'drafters=[none,hub:OWNER/NAME@tree]' out=reports/theirs

What goes up, in one commit: the model card; in head/ the head in our own form; at the top,
with export=, the head as an engine reads it, expected.json, and outrider.json with every
hash. All of it is safetensors (GGUF for llama.cpp) and JSON; no file names a folder of this
machine. A push that is interrupted leaves the repository as it was; the same
command goes on, and sends no large file twice. The token is huggingface_hub's: `hf auth
login`, or HF_TOKEN.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from outrider.conf.errors import UserError, resumable
from outrider.conf.schema import entry
from outrider.heads.hub import HEAD, LIBRARY, explained
from outrider.heads.names import HUB
from outrider.scripts.exporting.config import PushConfig, keyed
from outrider.scripts.exporting.publication import WEIGHTS, Files, gathered

HARMLESS = {".gitattributes", ".gitignore", "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt"}


@entry("push", PushConfig)
@resumable()
def main(cfg: PushConfig) -> int:
    """Look, gather, upload."""
    from huggingface_hub import HfApi

    api, files = HfApi(library_name=LIBRARY), gathered(cfg)
    there, parent = look(api, cfg)
    old = [path for path in there if _ours(path) and path not in files]
    print(f"{cfg.repository}: {', '.join(sorted(files))}", flush=True)
    commit = push(api, cfg, files, old, parent)
    print(f"{api.endpoint}/{cfg.repository}: pushed, commit {commit[:12]}")
    branch = "" if cfg.revision == "main" else f"@{cfg.revision}"
    print(f"drafter: {HUB}{cfg.repository}{branch}")
    return 0


def _ours(path: str) -> bool:
    """Say whether a push writes files like that one of a repository."""
    top = "/" not in path and path.endswith((*WEIGHTS, ".json", ".jinja"))
    return top or path.startswith(f"{HEAD}/")


def look(api: Any, cfg: PushConfig) -> tuple[list[str], str | None]:
    """Ask for the files of the branch and its commit; [] and None where there is no branch
    yet.

    Raises UserError where the hub does not tell, and where pushing would do what nobody wants.
    """
    from huggingface_hub import errors

    with explained(f"repository: {cfg.repository}"):
        try:
            public = not api.model_info(cfg.repository).private
            info = api.model_info(cfg.repository, revision=cfg.revision)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            return [], None
    if cfg.private and public:
        raise UserError(
            f"private: {cfg.repository} is there and public; make it private on its page, or "
            "leave it out"
        )
    files = [one.rfilename for one in info.siblings or ()]
    foreign = sorted(set(files) - HARMLESS)
    library = info.card_data.library_name if info.card_data else None
    if foreign and library != LIBRARY and not cfg.overwrite:
        raise UserError(
            f"repository: {cfg.repository} holds files that no push wrote "
            f"({', '.join(foreign[:3])}); give another name, or set overwrite=true"
        )
    return files, str(info.sha)


def push(api: Any, cfg: PushConfig, files: Files, old: Sequence[str], parent: str | None) -> str:
    """Make the repository and the branch where they are not there, and commit all files,
    without those in `old`, on top of `parent`. Returns the commit.

    Raises UserError where the hub refuses or is not reached; then the repository is as it
    was, but for being there."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    steps: list[Any] = [CommitOperationAdd(name, file) for name, file in files.items()]
    steps += [CommitOperationDelete(name) for name in old]
    with explained(f"repository: {cfg.repository}"):
        api.create_repo(cfg.repository, private=cfg.private or None, exist_ok=True)
        if cfg.revision != "main":
            api.create_branch(cfg.repository, branch=cfg.revision, exist_ok=True)
        how = {"revision": cfg.revision, "parent_commit": parent}
        done = api.create_commit(cfg.repository, steps, commit_message="Push a head", **how)
    return str(done.oid)


def command(argv: Sequence[str] | None = None) -> None:
    """`push.py RUN OWNER/NAME KEY=VALUE ...`; the first two may also be written as keys."""
    main(keyed(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    command()
