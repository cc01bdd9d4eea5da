"""A head on disk: its weights and head.json, with the identity of the target it was trained
for.

Written to a staging folder, synced, then renamed: a reader sees a whole head or none. Every
file is checked against its sha256 on load, and head.json value by value: a card whose hash is
right may still be a stranger's. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from outrider.conf.disk import sync
from outrider.conf.errors import UserError, first_line
from outrider.conf.jsonl import HALF, is_whole
from outrider.conf.left import LAST
from outrider.conf.typed import from_json
from outrider.decode.models.identity import Identity, sha256_file
from outrider.decode.target import Target
from outrider.heads import earlier, vocab
from outrider.heads.base import Head
from outrider.heads.folders import other_target
from outrider.heads.names import CARD as CARD

H = TypeVar("H", bound=Head)
FORMAT = 1
# A head's own; an ordinary transformers folder's.
WEIGHTS = ("head.safetensors", "model.safetensors")
AGAIN = "restore it or train the head again"


@dataclass
class WeightsFile:
    """The weights file of a card: its name, size in bytes and hash."""

    file: str
    bytes: int
    sha256: str

    def validate(self) -> list[str]:
        """Problems as "key: value; rule"."""
        if self.file in WEIGHTS:
            return []
        if self.file == earlier.ADAPTER:
            return [f"file: {self.file}, a LoRA on another head; {LAST} is the last that reads it"]
        return [f"file: names {self.file[:80]!r}; known: {', '.join(WEIGHTS)}"]


@dataclass
class Card:
    """What stands in head.json. head: by the kind's own types (heads.saved.Saved). extra:
    free."""

    format: int
    kind: str
    head: dict[str, Any]
    target: Identity | None
    weights: WeightsFile
    sha256: str
    extra: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule"."""
        texts = self.target.to_json() if self.target else {}
        return [f"target.{key}: holds {HALF}" for key, text in texts.items() if not is_whole(text)]


def save_head(
    head: Head, folder: Path | str, identity: Identity | None, extra: dict[str, Any] | None = None
) -> None:
    """Write `head` as a folder, replacing a head that is there. extra: JSON kept as it is
    (step, scores).

    Raises OSError or SafetensorError when the disk refuses; then nothing has changed.
    """
    with staged(Path(folder)) as stage:
        write_head(head, stage, identity, extra, finished=True)


def write_head(
    head: Head,
    folder: Path,
    identity: Identity | None,
    extra: dict[str, Any] | None = None,
    finished: bool = False,
) -> None:
    """Write the files of a head into an existing folder, without staging. finished: not a
    checkpoint (Head.write).
    """
    name, saved = head.write(folder, finished)
    write_card(folder, name, head.kind, saved, identity, extra)


def write_card(
    folder: Path,
    name: str,
    kind: str,
    saved: dict[str, Any],
    identity: Identity | None,
    extra: dict[str, Any] | None,
) -> None:
    """Write head.json beside the weights file `name`. saved: what from_json needs."""
    path = folder / name
    card = {
        "format": FORMAT,
        "kind": kind,
        "head": saved,
        "target": identity.to_json() if identity else None,
        "extra": extra or {},
        "weights": {"file": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)},
    }
    card["sha256"] = _card_sha256(card)
    (folder / CARD).write_text(text_of(card))


def read_card(folder: Path) -> dict[str, Any]:
    """The head.json of a folder, checked but for what is in `head` and `extra`.

    Raises UserError naming the file when it is missing or damaged, of another format, or holds
    a wrong value.
    """
    path = folder / CARD
    try:
        text = path.read_text()
        card = json.loads(text)
        sound = (
            isinstance(card, dict)
            and card["sha256"] == _card_sha256(card)
            and text == text_of(card)
        )
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a run folder or a head folder") from None
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}); {AGAIN}") from None
    if not sound:
        raise UserError(f"{path}: damaged (sha256 differs from the one it states); {AGAIN}")
    if card.get("format") != FORMAT:
        shown = repr(card.get("format"))[:40]
        raise UserError(
            f"{path}: format {shown}, this version reads {FORMAT}; use the version that wrote it"
        )
    known, problems = from_json(card, Card)
    if problems:
        raise UserError(
            f"{path}: {'; '.join(p.partition('; set ')[0] for p in problems[:3])}; {AGAIN}"
        )
    return card | {"kind": known.kind}  # a number in its place is read as text


def load_as(kind: type[H], folder: Path | str, target: Target, relative: bool = False) -> H:
    """The head of class `kind` in `folder`, on the target's device, in the dtype it was
    trained in. relative: it may have been trained for another target with the same
    tokenizer.

    Raises UserError when a file is missing or damaged, a value of the card is wrong or does
    not go with the weights, or the head was trained for another target, tokenizer or chat
    template (named by hash). Nothing of the card's sizes is made before they are those of the
    weights.
    """
    folder = Path(folder)
    card = read_card(folder)
    if card["kind"] != kind.kind:
        raise UserError(
            f"{folder / CARD}: a {card['kind'][:80]} head, where a {kind.kind} head is read"
        )
    _belongs(card, folder, target, relative)
    path = folder / card["weights"]["file"]
    stored = _stored(path, card["weights"])
    try:
        head = _rebuilt(kind, card["head"], target, path, stored)
    except UserError as error:
        raise UserError(f"{folder / CARD}: {error}; {AGAIN}") from None
    except (KeyError, TypeError, RuntimeError) as error:
        raise UserError(
            f"{folder}: does not fit this version's {card['kind']} head ({first_line(error)}); "
            "train it again"
        ) from None
    try:
        head.check_loaded(target)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    return head.eval()


def _belongs(card: dict[str, Any], folder: Path, target: Target, relative: bool) -> None:
    """Raise UserError unless the head of this card may draft for the target. relative: see
    load_as."""
    if card["target"] and target.identity is not None:
        differences = Identity.from_json(card["target"]).differences(target.identity)
        if relative or target.relatives:
            differences = [line for line in differences if line.startswith("tokenizer_sha256")]
        if differences:
            raise UserError(other_target(folder, "; ".join(differences)))


def _stored(path: Path, wanted: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes by name in a weights file. wanted: what the card says of it. Raises UserError for
    a file that is missing or another one."""
    try:
        size = path.stat().st_size
        if size != wanted["bytes"] or sha256_file(path) != wanted["sha256"]:
            raise UserError(
                f"{path}: damaged (size or sha256 differs from {CARD}); restore it or "
                "train the head again"
            )
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {AGAIN}") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {AGAIN}") from None


def _rebuilt(
    kind: type[H],
    saved: dict[str, Any],
    target: Target,
    path: Path,
    stored: dict[str, tuple[int, ...]],
) -> H:
    """The head that a card has under `head`, with the weights at `path`, whose shapes are
    `stored`. Raises UserError where the two do not go together."""
    with torch.device("meta"):
        odd = kind.misfits(saved, target, stored)
    if odd:
        raise UserError(f"the card and {path.name} are of different heads ({odd[0]})")
    head = kind.from_json(saved, target).to(target.device)
    head.load_state_dict(load_file(path, device=str(target.device)))
    ids = head.ids()
    if ids is not None and not vocab.ascends(ids, target.vocab_size):
        last = target.vocab_size - 1
        raise UserError(f"its draft vocabulary is not different tokens of 0..{last} in order")
    return head


def trained_for(card: dict[str, Any] | None, target: Target) -> str:
    """The other target that a head was trained for, by name and weights; "" where it is the
    head of this one, or of none (card: None)."""
    stored = card and card["target"]
    if not stored or target.identity is None or card is None:
        return ""
    theirs, mine = Identity.from_json(stored), target.identity
    if theirs.weights_sha256 == mine.weights_sha256:
        return ""
    return f"{theirs.name} (weights {theirs.weights_sha256[:12]})"


def text_of(card: dict[str, Any]) -> str:
    """The one way in which a card is written: a file that reads the same but looks different
    was changed.
    """
    return json.dumps(card, indent=1) + "\n"


def rewritten(card: dict[str, Any], **changed: Any) -> str:
    """The text of head.json for a card of `read_card`, some of whose values are other ones
    now."""
    known = {**card, **changed}
    return text_of(known | {"sha256": _card_sha256(known)})


def _card_sha256(card: dict[str, Any]) -> str:
    rest = {k: v for k, v in card.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def staged(final: Path) -> Iterator[Path]:
    """A staging folder beside `final` that takes its place when the block ends well, and
    vanishes when it does not.

    Files and folders are synced before the rename. If `final` exists, it is set aside first;
    `recover` mends the instant between the two renames.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    stage, old = final.with_name(f".tmp-{final.name}"), final.with_name(f".old-{final.name}")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    try:
        yield stage
        for file in sorted(stage.rglob("*")):
            sync(file)
        sync(stage)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(stage, final)
        sync(final.parent)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        recover(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def recover(final: Path) -> None:
    """Undo what a killed `staged` left behind: its staging folder, and a predecessor that was
    set aside.
    """
    shutil.rmtree(final.with_name(f".tmp-{final.name}"), ignore_errors=True)
    old = final.with_name(f".old-{final.name}")
    if old.exists():
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, final)
