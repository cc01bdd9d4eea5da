"""What a repository will hold: the files of an engine at its top, where there are any, and in
head/ the head in our own form, which `hub:` reads. Safetensors, GGUF, JSON and Markdown,
never a pickle; every file is checked against the hash that stands for it, and no text names a
folder of this machine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.models.identity import sha256_file
from outrider.heads.checkpoint import CARD, read_card, rewritten
from outrider.heads.hub import HEAD
from outrider.heads.interop import MANIFEST, exported
from outrider.scripts.common.files import write_bytes
from outrider.scripts.publishing.places import without_places

TEXTS = (".json", ".md", ".txt", ".jinja")
WEIGHTS = (".safetensors", ".gguf")
PAGE = "README.md"


@dataclass
class Form:
    """files: by their place in the repository, their content or where it lies here. sha256: of
    those that lie here. card: head.json of the head, {} for an export alone. manifest:
    outrider.json of the export, {} for a head alone."""

    files: dict[str, bytes | Path] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of head."""
        return str(self.card.get("kind") or self.manifest.get("kind"))

    @property
    def target(self) -> dict[str, str]:
        """Name and hashes of the target that it is for, without its folder."""
        known = self.card.get("target") or self.manifest.get("target") or {}
        return {k: str(v) for k, v in known.items() if k != "path"}

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(
            len(c) if isinstance(c, bytes) else c.stat().st_size for c in self.files.values()
        )

    def add_head(self, folder: Path, known: dict[str, str]) -> None:
        """Put a head folder into head/. known: see without_places.

        Raises UserError where it is damaged.
        """
        card = read_card(folder)
        name = str(card["weights"]["file"])
        self._add_weights(folder / name, f"{HEAD}/{name}", str(card["weights"]["sha256"]))
        free = {key: card[key] for key in ("head", "extra")}
        target = card["target"] and {**card["target"], "path": ""}
        text = rewritten(card, target=target, **_scrubbed(free, known))
        self.card = json.loads(text)
        self.files[f"{HEAD}/{CARD}"] = text.encode()
        if name != "head.safetensors":  # an ordinary model, with what makes it one
            beside = (p for p in sorted(folder.iterdir()) if p.suffix in TEXTS and p.name != CARD)
            for path in beside:
                text = path.read_text(encoding="utf-8")
                self.files[f"{HEAD}/{path.name}"] = without_places(text, known).encode()

    def add_export(self, folder: Path, known: dict[str, str]) -> None:
        """Put an exported folder at the top, but for its page. known: see without_places.

        Raises UserError where it is none, or a file is damaged or would not be read safely."""
        manifest = exported(folder)
        if manifest is None or not isinstance(manifest.get("files"), dict):
            raise UserError(f"export: {folder} is no export (no {MANIFEST}); give another folder")
        for name, said in sorted(manifest["files"].items()):
            path = folder / name
            if path.suffix in WEIGHTS:
                self._add_weights(path, name, str(said["sha256"]))
            elif path.suffix not in TEXTS:
                raise UserError(f"export: {path}: neither weights nor text; give another folder")
            elif name != PAGE:
                text = _text(path, str(said["sha256"]))
                self.files[name] = without_places(text, known).encode()
        self.manifest = _scrubbed({k: v for k, v in manifest.items() if k != "folder"}, known)
        if isinstance(self.manifest.get("target"), dict):
            self.manifest["target"]["path"] = ""

    def finish(self, page: str) -> None:
        """Put the card of the repository and the manifest, which names all files at the top."""
        self.files[PAGE] = page.encode()
        top = {name: content for name, content in self.files.items() if "/" not in name}
        listed = {}
        for name, content in sorted(top.items()):
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            listed[name] = {"bytes": size, "sha256": self.sha256.get(name) or _sha256(content)}
        about = self.manifest or {"format": 1, "kind": self.kind, "target": self.card["target"]}
        if self.card and self.manifest:
            about["source"] = {
                "card_sha256": self.card["sha256"],
                "weights_sha256": self.card["weights"]["sha256"],
            }
        text = json.dumps({**about, "files": listed}, indent=1, ensure_ascii=False)
        self.files[MANIFEST] = (text + "\n").encode()

    def write(self, folder: Path) -> None:
        """Write everything into an existing folder. Raises OSError where the disk refuses."""
        for name, content in self.files.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            write_bytes(folder / name, data)

    def _add_weights(self, path: Path, name: str, sha256: str) -> None:
        try:
            found = sha256_file(path)
        except OSError as error:
            raise UserError(f"run: {path}: {error.strerror}; give a sound head") from None
        if found != sha256:
            raise UserError(f"run: {path}: damaged (its sha256 is another one); restore it")
        self.files[name], self.sha256[name] = path, sha256


def _sha256(content: bytes | Path) -> str:
    return (
        hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else sha256_file(content)
    )


def _text(path: Path, sha256: str) -> str:
    """A file of an export. Raises UserError where it was changed since."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"export: {path}: {error.strerror}; export the head again") from None
    if _sha256(data) != sha256:
        raise UserError(f"export: {path}: changed since it was exported; export the head again")
    return data.decode()


def _scrubbed(value: Any, known: dict[str, str]) -> Any:
    """A JSON value whose texts name no folder of this machine."""
    if isinstance(value, str):
        return without_places(value, known)
    if isinstance(value, dict):
        return {_scrubbed(k, known): _scrubbed(v, known) for k, v in value.items()}
    if isinstance(value, list):
        return [_scrubbed(one, known) for one in value]
    return value
