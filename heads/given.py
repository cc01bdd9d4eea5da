"""A draft vocabulary that another head has: of a folder written here, or of an export in the
form of vLLM, speculators or SpecForge (d2t and t2d, or Medusa's token_map).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.models.identity import sha256_file
from outrider.heads import hub, vocab, words
from outrider.heads.checkpoint import read_card
from outrider.heads.folders import head_in
from outrider.heads.interop.layout import check_draft_map
from outrider.heads.interop.reading import Foreign, read_folder
from outrider.heads.names import HUB

KEY = "head.draft_vocab_from"
MOST_ADAPTERS = 16  # one on the other


def vocabulary_in(path: str, size: int) -> Tensor:
    """The draft vocabulary of the head in a folder: [Vd] int64, ascending ids below `size`.

    Raises UserError where there is no head, it drafts from all tokens, its file is damaged, or
    its tokens are not different ones of the target's `size`, in order.
    """
    folder = _hub_folder(path) if path.startswith(HUB) else Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{KEY}: {folder} is no folder; give that of a head, a run or an export")
    own = head_in(str(folder))
    ids = _own(own, size) if own is not None else _foreign(read_folder(folder), size)
    if ids is None:
        raise UserError(
            f"{KEY}: the head in {own or folder} drafts from all tokens; leave the key out and set "
            "head.draft_vocab=0"
        )
    if not vocab.ascends(ids, size):
        raise UserError(
            f"{KEY}: the tokens of {own or folder} are not different ones of the target's "
            f"{size:,}, in order; give a head for this target"
        )
    return ids


def _hub_folder(name: str) -> Path:
    """Where a repository's head lies, in our own form or an engine's."""
    try:
        return hub.either(name)
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from None


def _own(folder: Path, size: int) -> Tensor | None:
    """Of a head that was trained here; None without a draft vocabulary. size: the target's."""
    card = read_card(folder)
    exchanges: list[dict[str, Any]] = []
    for _ in range(MOST_ADAPTERS):  # the frozen head below has the vocabulary, but for these
        if "lora" not in card["head"]:
            break
        base = card["head"]["lora"]["base"]
        exchanges.append(base)
        folder = Path(str(base["path"]))
        card = read_card(folder)
    ids = _of_card(folder, card)
    for base in reversed(exchanges):
        if ids is not None:
            swap = base.get("words", []), base.get("gone", [])
            ids = words.exchanged(ids, *swap, size)
    return ids


def _of_card(folder: Path, card: dict[str, Any]) -> Tensor | None:
    """Of a head with all its weights."""
    if listed := card["head"].get("draft_ids"):
        return torch.tensor(listed, dtype=torch.int64)
    path = folder / card["weights"]["file"]
    try:
        if sha256_file(path) != card["weights"]["sha256"]:
            raise UserError(f"{path}: damaged (sha256 differs from its card); give a sound head")
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return vocab.from_d2t(file.get_tensor("d2t").long()) if "d2t" in names else None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a sound head") from None


def _foreign(head: Foreign, size: int) -> Tensor | None:
    """Of an export; None without a draft vocabulary."""
    found = {name.rpartition(".")[2]: value for name, value in head.tensors.items()}
    maps: dict[str, Tensor] = {
        name: found[name] for name in ("d2t", "t2d", "token_map") if name in found
    }
    for name, value in maps.items():
        if value.dim() != 1 or not value.numel() or value.is_floating_point():
            raise UserError(f"{KEY}: {head.folder}: {name} is no list of tokens; give another head")
    marks = maps.get("t2d")
    if marks is not None and marks.numel() != size:
        raise UserError(
            f"{KEY}: {head.folder}: t2d has {marks.numel():,} tokens, the target {size:,}; give a "
            "head for this target"
        )
    if "d2t" in maps:
        both = {name: value.long() for name, value in maps.items()}
        if marks is not None:
            both["t2d"] = marks.bool()
        check_draft_map(head, both, size)
        return vocab.from_d2t(both["d2t"])
    if marks is not None:
        return marks.bool().nonzero()[:, 0]
    return maps["token_map"].long() if "token_map" in maps else None
