"""Who a target is: content hashes of its weights, tokenizer and chat template, so that a head,
a data file or a report can say which model it belongs to and refuse another one. Names and
paths are for people; only hashes compare."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.conf import disk
from outrider.conf.errors import UserError

HASHES = ("weights_sha256", "tokenizer_sha256", "template_sha256")


@dataclass(frozen=True)
class Identity:
    """Content identity of a target; the `*_sha256` fields are 64 hex digits."""

    name: str
    path: str
    weights_sha256: str
    tokenizer_sha256: str
    template_sha256: str

    def differences(self, other: Identity) -> list[str]:
        """Return one line for each hash in which `self` and `other` differ (name and path
        do not count); [] when same."""
        each = [(key, getattr(self, key), getattr(other, key)) for key in HASHES]
        return [
            f"{key} {mine[:12]} ({self.name}) is not {theirs[:12]} ({other.name})"
            for key, mine, theirs in each
            if mine != theirs
        ]

    def to_json(self) -> dict[str, str]:
        """Return the five fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Identity:
        """Return the inverse of `to_json`; further keys are ignored. Raises KeyError when a
        field is missing."""
        return cls(**{key: str(data[key]) for key in cls.__dataclass_fields__})


def cache_root() -> Path:
    """Folder for converted targets: $OUTRIDER_CACHE, else ~/.cache/outrider."""
    return Path(
        os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider"
    ).expanduser()


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, hex. Raises OSError when it cannot be read."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_remembered(files: Sequence[Path]) -> list[str]:
    """sha256 of each file, remembered in the cache folder, keyed by size, both times and
    inode: a changed file is hashed again. Raises OSError when one cannot be read."""
    memo = cache_root() / "hashes.json"
    known, found, new = _mapping(memo), [], {}
    for file in files:
        real = file.resolve()  # hub snapshots are links into a blob store
        about = real.stat()
        stat = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
        entry = known.get(str(real))
        if not isinstance(entry, dict) or entry.get("stat") != stat or "sha256" not in entry:
            entry = new[str(real)] = {"stat": stat, "sha256": sha256_file(real)}
        found.append(str(entry["sha256"]))
    if new:
        with contextlib.suppress(OSError):  # only a speed-up: the folder may be read-only
            disk.write_text(memo, json.dumps({**_mapping(memo), **new}))
    return found


def _mapping(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file, {} where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads of a model's folder, in name
    order: the one that holds all, else those that the index names, else all. Mistral's
    repositories hold the same weights once more, under names of their own
    (consolidated.safetensors)."""
    every = sorted(folder.glob("*.safetensors"))
    listed = _mapping(folder / INDEX).get("weight_map")
    named = {*map(str, listed.values())} if isinstance(listed, dict) else set()
    if (folder / WHOLE).is_file():
        named = {WHOLE}
    return [file for file in every if file.name in named] or every


def sha256_weights(folder: Path) -> str:
    """sha256 over the names and contents of the model's safetensors files (`weight_files`), in
    name order; the index file does not count. Raises UserError when the folder holds none."""
    files = weight_files(folder)
    if not files:
        raise UserError(
            f"target: {folder} holds no *.safetensors weights; save the model with save_pretrained"
        )
    names = [file.name for file in files]
    return sha256_joined(dict(zip(names, sha256_remembered(files), strict=True)))


def sha256_joined(digests: dict[str, str]) -> str:
    """sha256 over the names and hashes of files, in name order."""
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(f"{digests[name]}  {name}\n".encode())
    return total.hexdigest()


def sha256_state(state: dict[str, Any]) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor of a state dict, in name order.
    For models without files (target=tiny): hash before casting, so that the run's dtype does
    not change the identity."""
    import torch

    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def sha256_tokenizer(tokenizer: Any) -> str:
    """sha256 of what decides text <-> ids: the whole fast tokenizer (vocabulary, merges,
    splitting, added tokens), or the vocabulary of a slow one, and the special ids. Padding and
    truncation settings do not count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        core = json.loads(backend.to_str())
        for key in ("version", "padding", "truncation"):
            core.pop(key, None)
    else:
        core = tokenizer.get_vocab()
    special = {
        name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")
    }
    text = json.dumps([core, special], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_template(tokenizer: Any) -> str:
    """sha256 of the chat template's text (of the empty string when there is none)."""
    template = getattr(tokenizer, "chat_template", None) or ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
