"""What a push puts on the hub: the head in our own form in head/, an export of it at the top,
and the card (README.md), which says what was measured and how, and nothing that nobody has
tried. No file names a folder of this machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
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
from outrider.scripts.exporting.card import SHOWN, run_record, trained_depth
from outrider.scripts.exporting.config import PushConfig

TEXTS, WEIGHTS = (".json", ".md", ".txt", ".jinja"), (".safetensors", ".gguf")
# An absolute path of this machine: no part of an address, of a relative path or of a fraction.
ABSOLUTE = re.compile(r"(?<![\w.:/@~-])(?:~|/[\w.@+-]+)(?:/[\w.@+-]+)+/?")
Files = dict[str, bytes | Path]  # by their place in the repository, their content or where they lie


def gathered(cfg: PushConfig) -> Files:
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
    target = card["target"] or {}
    name = str(target.get("name", ""))
    base = cfg.base_model or (name if REPOSITORY.fullmatch(name) else "")
    places = {target.get("path", ""): base or "TARGET"}
    files, manifest = head_files(card, folder, places), dict[str, Any]()
    if cfg.export:
        more, manifest = export_files(cfg, card, places)
        files |= more
    rows, protocol = measured(Path(cfg.report).expanduser(), card) if cfg.report else ([], "")
    files["README.md"] = render(
        "published.md",
        metadata=metadata(cfg, card["kind"], base, manifest),
        title=title(card["kind"]),
        repository=cfg.repository,
        base_model=base,
        target=target,
        card=card,
        depth=trained_depth(card["head"]["config"]),
        manifest=manifest,
        rows=rows,
        protocol=protocol,
        training={k: scrubbed(record[k], places) for k in ("data", *SHOWN) if k in record},
    ).encode()
    return files


def metadata(cfg: PushConfig, kind: str, base: str, manifest: dict[str, Any]) -> str:
    """Return what the hub reads of a card."""
    from huggingface_hub import ModelCardData

    engine = [str(manifest["engine_format"])] if manifest else []
    data = ModelCardData(
        license=cfg.license,
        library_name=LIBRARY,
        pipeline_tag="text-generation",
        base_model=base or None,
        datasets=cfg.datasets or None,
        tags=["speculative-decoding", kind, *engine],
    )
    return str(data.to_yaml())


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


def measured(place: Path, card: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return what the report at `place` (or in that folder) says of this very head, the accepted
    length of every shape with its 95 % interval, and how it was asked.

    Raises UserError where it is no report, of another target, or tells nothing of that head.
    """
    path = place / "report.json" if place.is_dir() else place
    weights, target = card["weights"]["sha256"], card["target"] or {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        same = report["target"].get("weights_sha256") == target.get("weights_sha256")
        mine = [r for r in report["drafters"] if r.get("weights_sha256") == [weights] and same]
        rows = [_row(r) for r in mine if r["accepted_length"]["low"] is not None]
        protocol = _protocol(report["settings"])
    except OSError as error:
        raise UserError(f"report: {path}: {error.strerror}; give OUT of evaluate") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"report: {path} is no report of evaluate ({type(error).__name__}); give its OUT"
        ) from None
    if not rows:
        raise UserError(
            f"report: {path} measured no head with these weights ({weights[:12]}) on its target; "
            "evaluate this one, or leave report out"
        )
    return rows, protocol


def _row(row: dict[str, Any]) -> dict[str, Any]:
    chain = f"chain of {int(row['max_depth'])}"
    shape = chain if row["shape"] == "chain" else f"tree of {int(row['max_nodes'])} nodes"
    return {
        "shape": shape,
        **{k: float(row["accepted_length"][k]) for k in ("mean", "low", "high")},
    }


def _protocol(how: dict[str, Any]) -> str:
    """Return how the prompts were asked, in a line."""
    name = PurePath(str(how["prompts"]["path"])).name.removeprefix("suite=")
    heat, sha256 = float(how["temperature"]), str(how["prompts"]["sha256"])[:12]
    return (
        f"{int(how['num_prompts'])} prompts of {name} (sha256 {sha256}); "
        f"{f'temperature {heat:g}' if heat else 'greedy'}; at most {int(how['max_new_tokens'])} "
        f"new tokens; {str(how['dtype'])[:10]}, {int(how['batch_size'])} at a time; the bonus "
        "token counted, cycles cut by an end of answer left out; 95 % bootstrap intervals over "
        "prompts"
    )
