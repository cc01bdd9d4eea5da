"""What a resumed run has in common with its beginning: keys that decide what is learned
must be the same, MAY_CHANGE may differ, REPLANNED may differ and hold from the resume on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.words import left
from outrider.decode.target import Target
from outrider.heads.saved import is_left
from outrider.train.data.batches import JoinedRows

# Keys that may differ when a run is resumed: they change where, when and how fast, not what is
# learned. Data are compared by the hash of their tokens, targets by their identity, so their
# names and folders may change too.
MAY_CHANGE = (
    *("out_dir", "epochs", "start", "save_every", "keep", "log_every", "bad_steps"),
    *("micro_batch", "micro_tokens", "profile", "trackers", "wandb", "wandb_project", "eval"),
    *("device", "shard_target", "shard_group", "compile"),
    *("target.path", "target.name", "target.revision", "target.kind", "target.attn"),
    *("data.path", "data.name", "data.split", "data.revision", "data.kind", "data.cache"),
    *("data.max_bad_fraction", "data.streaming", "data.workers", "data.features"),
    "data.follow_delete",
    *("head.activation_checkpointing", "head.chunk", "head.shape", "head.nodes"),
    *("head.depth", "head.width", "head.tree_draw"),
)
# Keys that change what is learned and may all the same differ when a run is resumed: from
# there on the order of the rows, or the schedule, is that of the new value.
REPLANNED = ("data.skip", "minutes", "optim.lr", "steps")
EARLIER = {"head.mask_token": -1}  # what runs without these keys did
OF_LAYERS = ("head.intermediate_size",)  # earlier runs had the target's


def may_change(key: str) -> bool:
    """Return whether a dotted key may change between a run and its resumption."""
    return any(key == known or key.startswith(known + ".") for known in MAY_CHANGE)


def meaning_hash(keys: dict[str, Any]) -> str:
    """Return the sha256 over the dotted keys that decide what is learned."""
    kept = {k: v for k, v in keys.items() if not may_change(k)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def meaning_of(keys: dict[str, Any], target: Target, rows: JoinedRows) -> dict[str, Any]:
    """Return what a run learns, from what, and what may change, as JSON. keys: dotted key ->
    value (config.flat)."""
    identity = target.identity.to_json() if target.identity else {}
    hashes = {f"target.{k}": v for k, v in identity.items() if k.endswith("sha256")}
    files = {f"data.sha256.{i}": file.sha256 for i, file in enumerate(rows.files)}
    if isinstance(keys["data.held_out"], str):
        files["data.held_out"] = "a file"  # known by its hash, wherever it is
    found = {**keys, **hashes, "data.sha256": rows.totals.sha256, **files}
    return json.loads(json.dumps(found))


def identity_of(out: Path, meaning: dict[str, Any]) -> str:
    """Return what identifies a run for a tracker: the folder, and what is learned from which
    target and data. Keys that may follow when a run is resumed do not count."""
    kept = {k: v for k, v in meaning.items() if not may_change(k) and k not in REPLANNED}
    place = str(out.expanduser().resolve())
    return hashlib.sha256(json.dumps([place, kept], sort_keys=True).encode()).hexdigest()


def check_meaning(
    saved: dict[str, Any],
    now: dict[str, Any],
    folder: Path,
    default: dict[str, Any],
    fixed: Sequence[str] = (),
) -> list[str]:
    """Return a line about every key that changed and may. Raises UserError naming every key
    whose change alters what is learned. fixed: keys of REPLANNED that must be the same.

    Of REPLANNED, `steps` may change to more alone (with the same epochs to any). A key that
    the checkpoint does not know came with a later version: at its default it changes
    nothing.
    """
    if gone := left("kinds", str(saved.get("head.kind"))):
        raise UserError(f"out_dir: {folder}: {gone}")
    saved = {k: v for k, v in saved.items() if k in now or not _is_gone(k, v)}
    saved = {k: v for k, v in EARLIER.items() if k in now} | saved
    new = {k for k in now if k not in saved and k in default and now[k] == default[k]}
    new |= {k for k in OF_LAYERS if k not in saved}
    changed = [k for k in {**saved, **now} if saved.get(k) != now.get(k) and k not in new]
    refused = [
        f"{k}: {_show(saved, k)} in the checkpoint, {_show(now, k)} now"
        for k in changed
        if not may_change(k) and (k in fixed or not _may_follow(k, saved, now))
    ]
    if refused:
        raise UserError(
            f"out_dir: {folder} holds a run that learns something else ({'; '.join(refused)}); "
            "restore these values or choose another out_dir"
        )
    return [f"{k}: {_show(saved, k)} -> {_show(now, k)}" for k in changed]


def _is_gone(key: str, value: Any) -> bool:
    """Return whether an earlier version's key changes nothing by having left."""
    group, _, name = key.partition(".")
    if group == "head":
        return is_left(name, value)
    return bool(may_change(key) or left("keys", key) or left("keys", group))


def _may_follow(key: str, saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether a run may go on with another value of this key."""
    if key == "steps" and not now.get("minutes"):
        epochs = now.get("epochs")  # then fewer rows, such as those of data.skip, make fewer steps
        same = bool(epochs) and epochs == saved.get("epochs")
        return same or bool(now[key] > saved.get(key, now[key]))
    return key in REPLANNED


def _show(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return "not set"
    text = "null" if config[key] is None else str(config[key])
    return text if len(text) <= 24 else text[:12]
