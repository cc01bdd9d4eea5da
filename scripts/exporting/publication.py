"""What a push puts on the hub: the head in our own form in head/, an export of it at the top,
and the card (README.md), which says what training measured. No file names a folder of this
machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.paths import REPOSITORY
from outrider.decode.models.identity import sha256_file
from outrider.heads.checkpoint import CARD, check_weights, read_card, signed
from outrider.heads.folders import find_head
from outrider.heads.hub import HEAD, LIBRARY
from outrider.heads.interop import MANIFEST, exported
from outrider.heads.names import HUB
from outrider.heads.registry import title
from outrider.scripts.common.rendering import render
from outrider.scripts.exporting.card import SHOWN, acceptance, run_record, trained_depth
from outrider.scripts.exporting.config import PushConfig

TEXTS, WEIGHTS = (".json", ".md", ".txt", ".jinja"), (".safetensors", ".gguf")
# An absolute path of this machine: no part of an address, of a relative path or of a fraction.
ABSOLUTE = re.compile(r"(?<![\w.:/@~-])(?:~|/[\w.@+-]+)(?:/[\w.@+-]+)+/?")
Files = dict[str, bytes | Path]  # by their place in the repository, their content or where they lie


def gathered(cfg: PushConfig) -> Files:
    """Put together everything that goes up. Raises UserError for what cannot be published."""
    from huggingface_hub import ModelCardData

    if cfg.run.startswith(HUB):
        raise UserError(
            f"run: {cfg.run}: is on the hub already; give a run folder or a head folder"
        )
    try:
        folder = find_head(cfg.run)
    except UserError as error:
        raise UserError(f"run: {str(error).removeprefix('drafters: ')}") from None
    card, record = read_card(folder), run_record(folder)
    target = card["target"] or {}
    name = str(target.get("name", ""))
    base = cfg.base_model or (name if REPOSITORY.fullmatch(name) else "")
    places = {target.get("path", ""): base or "TARGET"}
    files, manifest = head_files(card, folder, places), dict[str, Any]()
    if cfg.export:
        more, manifest = export_files(cfg, card, places)
        files |= more
    metadata = ModelCardData(
        license=cfg.license,
        library_name=LIBRARY,
        pipeline_tag="text-generation",
        base_model=base or None,
        datasets=cfg.datasets or None,
        tags=[*filter(None, ("speculative-decoding", card["kind"], manifest.get("engine_format")))],
    )
    files["README.md"] = render(
        "published.md",
        metadata=metadata.to_yaml(),
        title=title(card["kind"]),
        repository=cfg.repository,
        base_model=base,
        target=target,
        card=card,
        depth=trained_depth(card["head"]["config"]),
        manifest=manifest,
        acceptance=acceptance(card["extra"].get("best")),
        training={k: scrubbed(record[k], places) for k in ("data", *SHOWN) if k in record},
    ).encode()
    return files


def head_files(card: dict[str, Any], folder: Path, places: Mapping[str, str]) -> Files:
    """Return a head folder as head/. Raises UserError where it is damaged."""
    name = str(card["weights"]["file"])
    check_weights(folder / name, card["weights"])
    head, extra = json.loads(scrubbed(json.dumps([card["head"], card["extra"]]), places))
    target = card["target"] and {**card["target"], "path": ""}
    text = signed({**card, "target": target, "head": head, "extra": extra})
    files: Files = {f"{HEAD}/{name}": folder / name, f"{HEAD}/{CARD}": text.encode()}
    if name != "head.safetensors":  # an ordinary model, with what makes it one
        for path in sorted(folder.iterdir()):
            if path.suffix in TEXTS and path.name != CARD:
                files[f"{HEAD}/{path.name}"] = scrubbed(path.read_text("utf-8"), places).encode()
    return files


def export_files(
    cfg: PushConfig, card: dict[str, Any], places: Mapping[str, str]
) -> tuple[Files, dict[str, Any]]:
    """Return an export of this head, but for its page, and its manifest. Raises UserError for
    another folder, and where a file is damaged or would not be read safely."""
    folder = Path(cfg.export).expanduser()
    manifest = exported(folder) or {}
    if manifest.get("source", {}).get("card_sha256") != card["sha256"]:
        raise UserError(f"export: {folder} is no export of this head; export it again")
    gguf = manifest["engine_format"] == "gguf"  # llama.cpp reads a folder alone
    here = cfg.repository.partition("/")[2] if gguf else cfg.repository
    places, files = {**places, str(manifest.get("folder", "")): here}, Files()
    for name, said in sorted(manifest["files"].items()):
        path = folder / name
        if not path.is_file() or sha256_file(path) != said["sha256"]:
            raise UserError(f"export: {path}: changed since it was exported; export it again")
        if path.suffix not in TEXTS + WEIGHTS:
            raise UserError(f"export: {path}: neither weights nor text; give another folder")
        if path.suffix in WEIGHTS:
            files[name] = path
        elif name != "README.md":
            files[name] = data = scrubbed(path.read_text("utf-8"), places).encode()
            said |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"] = {name: manifest["files"][name] for name in files}
    text = scrubbed(json.dumps(manifest, indent=1, ensure_ascii=False), places)
    files[MANIFEST] = (text + "\n").encode()
    return files, json.loads(text)


def scrubbed(text: str, places: Mapping[str, str]) -> str:
    """Put into `text` what `places` says in place of its keys, and the last name in place
    of every other absolute path of this machine."""
    for place in sorted(filter(None, places), key=len, reverse=True):
        text = text.replace(place, places[place])

    def bare(found: re.Match[str]) -> str:
        root = Path(found[0]).expanduser().parts[:2]
        return Path(found[0]).name if Path(*root).is_dir() else found[0]

    return ABSOLUTE.sub(bare, text)
