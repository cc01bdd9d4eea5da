"""A head on disk: its weights and head.json, which says what rebuilds it and for which target.

Written to a staging folder, synced, then renamed: a reader sees a whole head or none. Every
file is checked against its sha256 on load, and head.json value by value: a card whose hash is
right may still be a stranger's. No pickle. The names of stored tensors and keys are not to be
changed: tests/golden holds heads that an earlier version wrote.
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
from typing import Annotated, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from outrider.conf.disk import sync
from outrider.conf.errors import UserError, first_line
from outrider.conf.jsonl import HALF, is_whole
from outrider.conf.rules import one_of
from outrider.conf.typed import from_json
from outrider.decode.models.identity import Identity, sha256_file
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.names import CARD as CARD
from outrider.heads.registry import head_class

FORMAT = 1
WEIGHTS = ("head.safetensors", "model.safetensors")  # a head's own; of an ordinary model
AGAIN = "restore it or train the head again"


@dataclass
class WeightsFile:
    """The weights file of a card: its name, size in bytes and hash."""

    file: Annotated[str, one_of(WEIGHTS)]
    bytes: int
    sha256: str


@dataclass
class Card:
    """The contents of head.json. head: by the kind's own types (heads.saved). extra: free."""

    format: int
    kind: str
    head: dict[str, Any]
    target: Identity | None
    weights: WeightsFile
    sha256: str
    extra: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> list[str]:
        texts = self.target.to_json() if self.target else {}
        return [f"target.{key}: holds {HALF}" for key, text in texts.items() if not is_whole(text)]


# -- writing


def save_head(
    head: Head, folder: Path | str, identity: Identity | None, extra: dict[str, Any] | None = None
) -> None:
    """Write `head` as a folder, replacing a head that is there. extra: JSON kept as it is
    (step, scores).

    Raises OSError or SafetensorError when the disk refuses; then nothing has changed."""
    with staged(Path(folder)) as stage:
        name, saved = head.write(stage, finished=True)
        write_card(stage, name, head.kind, saved, identity, extra)


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
    (folder / CARD).write_text(signed(card))


def signed(card: dict[str, Any]) -> str:
    """Return the text of head.json for a card, whose sha256 is made anew."""
    return text_of({**card, "sha256": _sha256(card)})


def text_of(card: dict[str, Any]) -> str:
    """Return the one text of a card: a file that reads the same but looks different was
    changed."""
    return json.dumps(card, indent=1) + "\n"


def _sha256(card: dict[str, Any]) -> str:
    rest = {k: v for k, v in card.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Open a staging folder beside `final` that takes its place when the block ends well, and
    vanishes when it does not.

    Files and folders are synced before the rename. If `final` exists, it is set aside first;
    `recover` mends the instant between the two renames."""
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
    set aside."""
    shutil.rmtree(final.with_name(f".tmp-{final.name}"), ignore_errors=True)
    old = final.with_name(f".old-{final.name}")
    if old.exists() and not final.exists():
        os.rename(old, final)
    shutil.rmtree(old, ignore_errors=True)


# -- reading


def read_card(folder: Path) -> dict[str, Any]:
    """Read the head.json of a folder, checked but for what is in `head` and `extra`.

    Raises UserError naming the file when it is missing or damaged, of another format, or holds
    a wrong value."""
    path = folder / CARD
    try:
        text = path.read_text()
        card = json.loads(text)
        if text != text_of(card) or card["sha256"] != _sha256(card):
            raise UserError(f"{path}: damaged (its sha256 is another one); {AGAIN}")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a run folder or a head folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}); {AGAIN}") from None
    if card.get("format") != FORMAT:
        raise UserError(
            f"{path}: format {card.get('format')!r:.40}, this version reads {FORMAT}; use the "
            "version that wrote it"
        )
    known, problems = from_json(card, Card)
    if problems:
        shown = "; ".join(line.partition("; set ")[0] for line in problems[:3])
        raise UserError(f"{path}: {shown}; {AGAIN}")
    return card | {"kind": known.kind}  # a number in its place is read as text


def load_head(folder: Path | str, target: Target, relative: bool = False) -> Head:
    """Load the head in `folder` onto the target's device, in the dtype it was trained in.
    relative: it may have been trained for another target with the same tokenizer.

    Raises UserError where a file is missing or damaged, a value of the card is wrong or does
    not go with the weights, or the head was trained for another target, tokenizer or chat
    template. Nothing of the card's sizes is made before they are those of the weights."""
    folder = Path(folder)
    card = read_card(folder)
    kind = head_class(card["kind"], str(folder / CARD))
    if card["target"] and target.identity is not None:
        differences = Identity.from_json(card["target"]).differences(target.identity)
        if relative or target.relatives:
            differences = [line for line in differences if line.startswith("tokenizer_sha256")]
        if differences:
            raise UserError(
                f"{folder}: the head was trained for another target ({'; '.join(differences)}); "
                "use the target it names, train a head for this one, or set "
                "target.allow_other=true where tokenizer and widths are the same"
            )
    path = folder / card["weights"]["file"]
    stored = _shapes(path, card["weights"])
    try:
        with torch.device("meta"):
            odd = kind.misfits(card["head"], target, stored)
        if odd:
            raise UserError(f"the card and {path.name} are of different heads ({odd[0]})")
        head = kind.from_json(card["head"], target).to(target.device)
        head.load_state_dict(load_file(path, device=str(target.device)))
        ids = head.ids()
        if ids is not None and not vocab.ascends(ids, target.vocab_size):
            last = target.vocab_size - 1
            raise UserError(f"its draft vocabulary is not different tokens of 0..{last} in order")
        head.check_loaded(target)
    except UserError as error:
        raise UserError(f"{folder / CARD}: {error}; {AGAIN}") from None
    except Exception as error:  # a stranger's values may fail anywhere in other people's code
        raise UserError(
            f"{folder}: does not fit this version's {card['kind']} head ({first_line(error)}); "
            "train it again"
        ) from error
    return head.eval()


def check_weights(path: Path, wanted: dict[str, Any]) -> None:
    """Check size and sha256 of a weights file. wanted: what the card says of it. Raises
    UserError where it is missing or another one."""
    try:
        same = path.stat().st_size == wanted["bytes"] and sha256_file(path) == wanted["sha256"]
    except OSError as error:
        said = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise UserError(f"{path}: {said}; {AGAIN}") from None
    if not same:
        raise UserError(f"{path}: damaged (size or sha256 differs from {CARD}); {AGAIN}")


def _shapes(path: Path, wanted: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes by name in a weights file, checked as check_weights does."""
    check_weights(path, wanted)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {AGAIN}") from None


def trained_for(card: dict[str, Any] | None, target: Target) -> str:
    """Return the other target that a head was trained for, by name and weights; "" where it
    is the head of this one, or of none (card: None)."""
    stored = card and card["target"]
    if not stored or target.identity is None:
        return ""
    theirs = Identity.from_json(stored)
    if theirs.weights_sha256 == target.identity.weights_sha256:
        return ""
    return f"{theirs.name} (weights {theirs.weights_sha256[:12]})"
