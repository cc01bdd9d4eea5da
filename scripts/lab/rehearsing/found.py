"""What a command of the rehearsal left: the figures that must come out the same whether it was
killed or not (`same`), and those of the clock (`clock`). torch, which is slow to import, is left to
the readers that need it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.conf.jsonl import records
from outrider.scripts.common import files

Found = dict[str, dict[str, Any]]


def found(words: Sequence[str]) -> Found:
    """Of a finished command line; {} of one that leaves nothing to look at."""
    verb = next((word for word in words[1:] if word in READERS), "")
    if not verb and any(word.startswith("train/") for word in words):
        verb = "train"
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    return READERS[verb](keys) if verb else {}


def _validated(keys: dict[str, str]) -> Found:
    run = _json(keys["out"])
    parts = ("target", "gpus", "gpu", "total", "synthesis")
    memory = {key: run["memory"][key] for key in ("peak", "of")}
    return {"same": {key: run[key] for key in parts} | memory | {"epochs": run["data"]["epochs"]}}


def _synthesized(keys: dict[str, str]) -> Found:
    out = Path(keys["out"])
    parts = sorted(out.glob("*.jsonl")) if out.is_dir() else [out]
    rows = {path.name: sum(1 for _ in records(path)) for path in parts}
    return {"same": {"rows": rows, "sha256": {p.name: files.sha256(p) for p in parts}}}


def _trained(keys: dict[str, str]) -> Found:
    from outrider.heads.folders import find_head

    card = _card(find_head(keys["out_dir"]))
    return {"same": {"weights_sha256": card["weights"]["sha256"], "steps": _step(card)}}


def _card(folder: Path) -> dict[str, Any]:
    from outrider.heads.checkpoint import read_card

    return read_card(folder)


def _step(card: dict[str, Any]) -> Any:
    return (card.get("extra") or {}).get("step")


def _evaluated(keys: dict[str, str]) -> Found:
    rows = _json(f"{keys['out']}/report.json")["drafters"]
    lengths = {row["label"]: row["accepted_length"]["mean"] for row in rows}
    pace = {row["label"]: row["tokens_per_second"] for row in rows}
    return {"same": {"accepted_length": lengths}, "clock": {"tokens_per_second": pace}}


def _certified(keys: dict[str, str]) -> Found:
    paper = _json(f"{keys['out']}/certificate.json")
    return {"same": {key: paper[key] for key in ("verdict", "reasons")}}


def _exported(keys: dict[str, str]) -> Found:
    from outrider.heads.interop import exported

    said = exported(Path(keys["out"])) or {}
    hashes = {name: about["sha256"] for name, about in said["files"].items() if _stays(name)}
    return {"same": {"check": said["check"], "sha256": hashes}}


def _stays(name: str) -> bool:
    """Whether a file is the same however often it is written: a card tells dates."""
    return not name.endswith(".md")


def _checked(keys: dict[str, str]) -> Found:
    said = _json(keys["out"])
    return {"same": {key: said[key] for key in ("answers", "equal", "acceptance", "served")}}


def _imported(keys: dict[str, str]) -> Found:
    return {"same": {"weights_sha256": _card(Path(keys["out"]))["weights"]["sha256"]}}


def _fitted(keys: dict[str, str]) -> Found:
    report = _json(f"{keys['out']}/fit.json")
    return {"clock": {"kept": report["kept"], "gain": report["gain"], "budget": report["budget"]}}


def _json(path: str) -> Any:
    return json.loads(Path(path).read_text())


READERS: dict[str, Callable[[dict[str, str]], Found]] = {
    "validate": _validated,
    "synthesize": _synthesized,
    "train": _trained,
    "evaluate": _evaluated,
    "certify": _certified,
    "export": _exported,
    "check": _checked,
    "import": _imported,
    "fit": _fitted,
}
