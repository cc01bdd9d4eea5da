"""Publish a head on the Hugging Face hub, from where `hub:OWNER/NAME` names it wherever a
head may stand.

    outrider export drafter=runs/eagle3 format=vllm out=exports/eagle3
    outrider push runs/eagle3 OWNER/NAME license=mit export=exports/eagle3
    outrider evaluate 'drafters=[none,hub:OWNER/NAME@tree]' out=reports/theirs

What goes up, in one commit: the model card; in head/ the head in our own form; at the top,
with export=, the head as an engine reads it, expected.json, and outrider.json with every
hash. All of it is safetensors (GGUF for llama.cpp) and JSON. The card says what an
evaluation of this very head has measured (report=), else "not measured"; no file names a
folder of this machine. A push that is interrupted leaves the repository as it was; the same
command goes on, and sends no large file twice. The token is huggingface_hub's: `hf auth
login`, or HF_TOKEN.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.conf.errors import UserError, resumable
from outrider.conf.paths import REPOSITORY
from outrider.conf.schema import entry
from outrider.decode.models.identity import sha256_file
from outrider.heads.checkpoint import CARD, check_weights, read_card, signed
from outrider.heads.folders import find_head
from outrider.heads.hub import HEAD, LIBRARY, explained
from outrider.heads.interop import MANIFEST, exported
from outrider.heads.names import HUB
from outrider.scripts.exporting.card import run_record
from outrider.scripts.exporting.config import PushConfig, keyed
from outrider.scripts.exporting.publication import Publication, measured, page

TEXTS, WEIGHTS = (".json", ".md", ".txt", ".jinja"), (".safetensors", ".gguf")
HARMLESS = {".gitattributes", ".gitignore", "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt"}
# An absolute path of this machine: no part of an address, of a relative path or of a fraction.
ABSOLUTE = re.compile(r"(?<![\w.:/@~-])(?:~|/[\w.@+-]+)(?:/[\w.@+-]+)+/?")


@entry("push", PushConfig)
@resumable()
def main(cfg: PushConfig) -> int:
    """Look, gather, upload."""
    from huggingface_hub import HfApi

    api, about = HfApi(library_name=LIBRARY), gathered(cfg)
    there, parent = look(api, cfg)
    old = [path for path in there if _ours(path) and path not in about.files]
    print(f"{cfg.repository}: {', '.join(sorted(about.files))}", flush=True)
    commit = push(api, cfg, about, old, parent)
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
    from huggingface_hub import constants, errors, get_token

    if constants.HF_HUB_OFFLINE or not get_token():
        missing = "HF_HUB_OFFLINE is set; unset it to push"
        if not constants.HF_HUB_OFFLINE:
            missing = "no token is set; `hf auth login`, or set HF_TOKEN to one with write right"
        raise UserError(f"repository: {missing}")
    with explained(f"repository: {cfg.repository}"):
        try:
            if cfg.private and not api.model_info(cfg.repository).private:
                raise UserError(
                    f"private: {cfg.repository} is there and public; make it private on its page, "
                    "or leave it out"
                )
            info = api.model_info(cfg.repository, revision=cfg.revision)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            return [], None
    files = [one.rfilename for one in info.siblings or ()]
    foreign = sorted(set(files) - HARMLESS)
    library = info.card_data.library_name if info.card_data else None
    if foreign and library != LIBRARY and not cfg.overwrite:
        raise UserError(
            f"repository: {cfg.repository} holds files that no push wrote "
            f"({', '.join(foreign[:3])}); give another name, or set overwrite=true"
        )
    return files, str(info.sha)


def push(
    api: Any, cfg: PushConfig, about: Publication, old: Sequence[str], parent: str | None
) -> str:
    """Make the repository and the branch where they are not there, and commit all files,
    without those in `old`, on top of `parent`. Returns the commit.

    Raises UserError where the hub refuses or is not reached; then the repository is as it
    was, but for being there."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    steps: list[Any] = [CommitOperationAdd(name, file) for name, file in about.files.items()]
    steps += [CommitOperationDelete(name) for name in old]
    with explained(f"repository: {cfg.repository}"):
        api.create_repo(cfg.repository, private=cfg.private or None, exist_ok=True)
        if cfg.revision != "main":
            api.create_branch(cfg.repository, branch=cfg.revision, exist_ok=True)
        done = api.create_commit(
            cfg.repository,
            steps,
            commit_message=f"Push {about.title}",
            revision=cfg.revision,
            parent_commit=parent,
        )
    return str(done.oid)


def gathered(cfg: PushConfig) -> Publication:
    """Put together everything that goes up. Raises UserError for what cannot be published."""
    if cfg.run.startswith(HUB):
        raise UserError(
            f"run: {cfg.run}: is on the hub already; give a run folder or a head folder"
        )
    try:
        folder = find_head(cfg.run)
    except UserError as error:
        raise UserError(f"run: {str(error).removeprefix('drafters: ')}") from None
    card, record = read_card(folder), run_record(folder)
    known = card["target"] or {}
    name = str(known.get("name", ""))
    base = cfg.base_model or (name if REPOSITORY.fullmatch(name) else "")
    about = Publication(cfg.repository, base, cfg.license, cfg.datasets, card)
    places = {known.get("path", ""): base or "TARGET", str(Path.home()): "~"}
    if cfg.report:
        measured(Path(cfg.report).expanduser(), about)
    for key, name in (("tokens_seen", "tokens"), ("supervised_seen", "tokens with a loss")):
        if isinstance(amount := card["extra"].get("training", {}).get(key), int | float):
            about.training[name] = f"{amount:,.0f}"
    about.training |= {k: scrubbed(record[k], places) for k in ("data", "start") if k in record}
    add_head(about, folder, lambda text: scrubbed(text, places))
    if cfg.export:
        add_export(about, Path(cfg.export).expanduser(), places)
    about.files["README.md"] = page(about).encode()
    return about


def add_head(about: Publication, folder: Path, clean: Callable[[str], str]) -> None:
    """Put a head folder into head/. clean: takes this machine's folders out of a text. Raises
    UserError where it is damaged."""
    card, name = about.card, str(about.card["weights"]["file"])
    check_weights(folder / name, card["weights"])
    head, extra = json.loads(clean(json.dumps([card["head"], card["extra"]])))
    target = card["target"] and {**card["target"], "path": ""}
    about.files[f"{HEAD}/{name}"] = folder / name
    text = signed({**card, "target": target, "head": head, "extra": extra})
    about.files[f"{HEAD}/{CARD}"] = text.encode()
    if name != "head.safetensors":  # an ordinary model, with what makes it one
        for path in sorted(folder.iterdir()):
            if path.suffix in TEXTS and path.name != CARD:
                about.files[f"{HEAD}/{path.name}"] = clean(path.read_text("utf-8")).encode()


def add_export(about: Publication, folder: Path, places: Mapping[str, str]) -> None:
    """Put an export of this head at the top, but for its page. places: see scrubbed. Raises
    UserError for another folder, and where a file is damaged or would not be read safely."""
    manifest = exported(folder) or {}
    if manifest.get("source", {}).get("card_sha256") != about.card["sha256"]:
        raise UserError(f"export: {folder} is no export of this head; export it again")
    gguf = manifest["engine_format"] == "gguf"  # llama.cpp reads a folder alone
    here = about.repository.partition("/")[2] if gguf else about.repository
    own = (str(manifest.get("folder", "")), str(folder), str(folder.resolve()))
    served = {
        f"{word} TARGET ": f"{word} {about.base_model or 'TARGET'} "
        for word in ("serve", "--model-path")
    }
    places = {**places, **dict.fromkeys(own, here), **served}
    listed = {}
    for name, said in sorted(manifest["files"].items()):
        path = folder / name
        if not path.is_file() or sha256_file(path) != said["sha256"]:
            raise UserError(f"export: {path}: changed since it was exported; export it again")
        if path.suffix not in TEXTS + WEIGHTS:
            raise UserError(f"export: {path}: neither weights nor text; give another folder")
        if path.suffix in WEIGHTS:
            about.files[name], listed[name] = path, said
        elif name != "README.md":
            data = scrubbed(path.read_text("utf-8"), places).encode()
            listed[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            about.files[name] = data
    text = json.dumps({**manifest, "files": listed, "folder": here}, indent=1, ensure_ascii=False)
    about.manifest = json.loads(scrubbed(text, places))
    about.files[MANIFEST] = (scrubbed(text, places) + "\n").encode()


def scrubbed(text: str, places: Mapping[str, str]) -> str:
    """Put into `text` what `places` says in place of its keys, and the last name in place
    of every other absolute path of this machine."""
    for place in sorted(filter(None, places), key=len, reverse=True):
        text = text.replace(place, places[place])

    def bare(found: re.Match[str]) -> str:
        root = Path(found[0]).expanduser().parts[:2]
        return Path(found[0]).name if Path(*root).is_dir() else found[0]

    return ABSOLUTE.sub(bare, text)


def command(argv: Sequence[str] | None = None) -> None:
    """`push.py RUN OWNER/NAME KEY=VALUE ...`; the first two may also be written as keys."""
    main(keyed(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    command()
