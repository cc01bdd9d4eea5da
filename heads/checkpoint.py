"""A head on disk: its weights and head.json, with the identity of the target it was trained for.

Written to a staging folder, synced, then renamed: a reader sees a whole head or none. Every file is checked against
its sha256 on load. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from conf.errors import UserError
from decode.identity import Identity, sha256_file
from decode.target import Target

if TYPE_CHECKING:
    from heads.base import Head

FORMAT = 1
CARD = "head.json"
WEIGHTS = ("head.safetensors", "model.safetensors")  # the second: an ordinary transformers folder


def save_head(head: Head, folder: Path | str, identity: Identity | None, extra: dict[str, Any] | None = None) -> None:
    """Write `head` as a folder, replacing a head that is there. extra: JSON kept as it is (step, scores).

    Raises OSError or SafetensorError when the disk refuses; then nothing has changed.
    """
    with staged(Path(folder)) as stage:
        write_head(head, stage, identity, extra, finished=True)


def write_head(head: Head, folder: Path, identity: Identity | None, extra: dict[str, Any] | None = None,
               finished: bool = False) -> None:
    """Write the files of a head into an existing folder, without staging. finished: not a checkpoint (Head.write)."""
    name, saved = head.write(folder, finished)
    write_card(folder, name, head.kind, saved, identity, extra)


def write_card(folder: Path, name: str, kind: str, saved: dict[str, Any], identity: Identity | None,
               extra: dict[str, Any] | None) -> None:
    """Write head.json beside the weights file `name`. saved: what from_json needs."""
    path = folder / name
    card = {"format": FORMAT, "kind": kind, "head": saved,
            "target": identity.to_json() if identity else None, "extra": extra or {},
            "weights": {"file": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}}
    card["sha256"] = _card_sha256(card)
    (folder / CARD).write_text(text_of(card))


def read_card(folder: Path) -> dict[str, Any]:
    """The checked head.json of a folder. Raises UserError naming the file when it is missing or damaged."""
    path = folder / CARD
    try:
        text = path.read_text()
        card = json.loads(text)
        sound = isinstance(card, dict) and card["sha256"] == _card_sha256(card) and text == text_of(card)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a run folder or a head folder") from None
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}); restore it or train the head again") from None
    if not sound:
        raise UserError(f"{path}: damaged (sha256 differs from the one it states); restore it or train the head again")
    if card["format"] != FORMAT:
        raise UserError(f"{path}: format {card['format']}, this version reads {FORMAT}; use the version that wrote it")
    return card


def load_head(folder: Path | str, target: Target) -> Head:
    """The head in `folder` on the target's device, in the dtype it was trained in.

    Raises UserError when a file is missing or damaged, the kind is unknown, or the head was trained for another target,
    tokenizer or chat template (named by hash).
    """
    from heads import HEADS

    folder = Path(folder)
    card = read_card(folder)
    if card["kind"] not in HEADS:
        raise UserError(f"{folder / CARD}: unknown kind of head {card['kind']!r}; known: {', '.join(sorted(HEADS))}")
    if card["target"] and target.identity is not None:
        differences = HEADS[card["kind"]].differences(card, target.identity)
        if differences:
            raise UserError(f"{folder}: the head was trained for another target ({'; '.join(differences)}); "
                            "use the target it names or train a head for this one")
    kind = HEADS[card["kind"]]
    if kind.trains_target and target.borrowed and not target.tuning:
        raise UserError(f"{folder}: loading it tunes the target, and a head of the original target is in use already; "
                        "score the two in separate runs")
    wanted = card["weights"]
    if wanted["file"] not in WEIGHTS:
        raise UserError(f"{folder / CARD}: names {wanted['file']!r} as its weights; known: {', '.join(WEIGHTS)}")
    path = folder / wanted["file"]
    try:
        size = path.stat().st_size
        if size != wanted["bytes"] or sha256_file(path) != wanted["sha256"]:
            raise UserError(f"{path}: damaged (size or sha256 differs from {CARD}); restore it or train the head again")
        state = load_file(path, device=str(target.device))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; restore it or train the head again") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it or train the head again") from None
    try:
        head = kind.from_json(card["head"], target)
        head.load_state_dict(state)
    except (KeyError, TypeError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise UserError(f"{folder}: does not fit this version's {card['kind']} head ({line}); train it again") from None
    head.attach(target)
    target.borrowed |= not kind.trains_target
    return head.eval()


def text_of(card: dict[str, Any]) -> str:
    """The one way in which a card is written: a file that reads the same but looks different was changed."""
    return json.dumps(card, indent=1) + "\n"


def _card_sha256(card: dict[str, Any]) -> str:
    rest = {k: v for k, v in card.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def staged(final: Path) -> Iterator[Path]:
    """A staging folder beside `final` that takes its place when the block ends well, and vanishes when it does not.

    Files and folders are synced before the rename. If `final` exists, it is set aside first; `recover` mends the
    instant between the two renames.
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
    """Undo what a killed `staged` left behind: its staging folder, and a predecessor that was set aside."""
    shutil.rmtree(final.with_name(f".tmp-{final.name}"), ignore_errors=True)
    old = final.with_name(f".old-{final.name}")
    if old.exists():
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, final)


def sync(path: Path) -> None:
    """fsync a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
