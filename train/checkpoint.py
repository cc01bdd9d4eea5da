"""The state of a run on disk: checkpoints/step-N, complete or absent, each file known by its
sha256.

A checkpoint is a folder whose manifest verifies. It holds the head (so it can be decoded
with), the optimizer's moments and a few integers: the order of the data and the learning rate
are functions of the step.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.conf import left
from outrider.conf.errors import UserError, first_line
from outrider.decode.models.identity import Identity, sha256_file
from outrider.heads.base import Head
from outrider.heads.checkpoint import CARD, read_card, recover, staged, text_of, write_card
from outrider.heads.earlier import implied as of_layers
from outrider.heads.earlier import is_gone
from outrider.heads.warm import BEFORE
from outrider.train.config import REPLANNED, EvalConfig, is_logistics

WEIGHTS, OPTIMIZER, STATE, MANIFEST = (
    "head.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)
MARGIN = 1 << 20  # bytes that a save leaves free
# Terms that learn from an acceptance rate, and what says by whose probabilities over a draft
# vocabulary; no key, since it cannot be chosen. Runs of version 0.1 have no such line.
RATED, RATE = ("head.loss.tv", "head.loss.lk", "head.confidence"), "head.loss.rate"

PARALLEL = ("medusa", "hydra_heads")  # kinds
# Keys of runs of 0.2 that said how passes ran, not what is learned.
HOW = ("target.compile",)


@dataclass
class State:
    """Where a run stands. step: updates done. evaluated: step of the last evaluation. best:
    {step, accepted_length}.

    window: sums since the last line of metrics. meaning: what the run learns, see `meaning`.
    seen: what the updates so far took, tokens and supervised tokens of all ranks, wall seconds
    and CPU seconds of rank 0 without evaluations; behind heads.warm.BEFORE those of the head that
    it started from. skipped: rows left out so far since their
    loss or gradient was not finite; unsound: steps in a row that had such rows.
    """

    step: int = 0
    evaluated: int = -1
    best: dict[str, float] = field(default_factory=dict)
    window: dict[str, list[float]] = field(default_factory=dict)
    meaning: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    unsound: int = 0

    def stalled(self, cfg: EvalConfig) -> bool:
        """Whether an evaluation at this step was one too many without a longer accepted length
        (eval.patience)."""
        since, patient = self.step - self.best.get("step", self.step), cfg.patience * cfg.every
        return bool(patient) and self.evaluated == self.step and since >= patient

    def add(self, **amounts: float) -> None:
        """Count what an update took."""
        for name, amount in amounts.items():
            self.seen[name] = self.seen.get(name, 0.0) + amount

    def came_from(self, spent: Mapping[str, float]) -> None:
        """Remember what the head that this one started from had taken."""
        for name, amount in spent.items():
            self.seen.setdefault(f"{BEFORE}{name}", amount)

    def add_to_window(self, found: dict[str, list[float]]) -> None:
        """Count a step's statistics, name -> [sum, count], for the next line of metrics."""
        for name, (total, count) in found.items():
            old = self.window.get(name, [0.0, 0.0])
            self.window[name] = [old[0] + total, old[1] + count]


@dataclass
class Snapshot:
    """All that a checkpoint holds, in host memory. state: as JSON. head, moments: by name, on
    the CPU. saved: what the head's from_json needs. copied: when the copies from a GPU are
    done."""

    state: dict[str, Any]
    head: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    kind: str
    saved: dict[str, Any]
    identity: Identity | None
    copied: Any = None

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def bytes(self) -> int:
        return sum(
            t.numel() * t.element_size()
            for part in (self.head, self.moments)
            for t in part.values()
        )

    def ready(self) -> None:
        """Wait for copies that are still under way."""
        if self.copied is not None:
            self.copied.synchronize()


def save(folder: Path, snapshot: Snapshot) -> Path:
    """Write checkpoints/step-N under `folder`. Raises OSError, RuntimeError or SafetensorError
    when the disk refuses; older checkpoints are untouched then."""
    final = folder / "checkpoints" / f"step-{snapshot.step}"
    final.parent.mkdir(parents=True, exist_ok=True)
    free, need = shutil.disk_usage(final.parent).free, snapshot.bytes + MARGIN
    if free < need:
        raise OSError(
            errno.ENOSPC, f"No space left on device: {free:,} bytes free, {need:,} needed"
        )
    with staged(final) as stage:
        save_file(snapshot.head, stage / WEIGHTS)
        state = snapshot.state
        write_card(
            stage,
            WEIGHTS,
            snapshot.kind,
            snapshot.saved,
            snapshot.identity,
            {"step": state["step"], "best": state["best"], "training": state["seen"]},
        )
        save_file(snapshot.moments, stage / OPTIMIZER)
        (stage / STATE).write_text(json.dumps(state, indent=1) + "\n")
        files = {
            p.name: {"bytes": p.stat().st_size, "sha256": sha256_file(p)}
            for p in sorted(stage.iterdir())
        }
        manifest = {"step": snapshot.step, "files": files}
        (stage / MANIFEST).write_text(text_of({**manifest, "sha256": _sha256(manifest)}))
    return final


def _sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(text_of(manifest).encode()).hexdigest()


def retire(folder: Path, keep: int, step: int) -> None:
    """Remove all but the newest `keep` checkpoints, once one of those that stay has been read
    back and is sound; else the newest sound one stays too. A damaged one of a later step than
    `step`, which the run has passed over, does not count and goes first. A failure to remove
    is no failure of the run."""
    found = checkpoints(folder)
    kept = [p for p in found if step_of(p) <= step][: max(2, keep)]
    rest = [p for p in found if p not in kept and (step_of(p) <= step or damage(p))]
    if rest and all(damage(p) for p in kept):
        last = next((p for p in rest if damage(p) is None), None)
        rest = [p for p in rest if p != last]
    for old in rest:
        shutil.rmtree(old, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """N of step-N."""
    return int(checkpoint.name[5:])


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first, sound or not."""
    found = [
        p for p in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)
    ]
    return sorted(found, key=step_of, reverse=True)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None when its manifest verifies."""
    path = checkpoint / MANIFEST
    try:
        text = path.read_text()
        manifest = json.loads(text)
        files, stated = manifest["files"], manifest.pop("sha256", None)
        if set(manifest) != {"step", "files"} or manifest["step"] != step_of(checkpoint):
            return f"{path}: is not the manifest of {checkpoint.name}"
        if text != text_of({**manifest, "sha256": stated}) or stated != _sha256(manifest):
            return f"{path}: damaged (sha256 differs from the one it states)"
        for name, wanted in files.items():
            file = checkpoint / name
            if Path(name).name != name or file.is_symlink():
                return f"{path}: names a file outside its folder ({name!r})"
            if not file.is_file():
                return f"{file}: is missing"
            if file.stat().st_size != wanted["bytes"] or sha256_file(file) != wanted["sha256"]:
                return f"{file}: size or sha256 differs from {MANIFEST}"
        missing = {WEIGHTS, CARD, OPTIMIZER, STATE} - set(files)
        return f"{path}: does not list {', '.join(sorted(missing))}" if missing else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return (
            f"{path}: {'is missing' if isinstance(error, FileNotFoundError) else 'is unreadable'}"
        )


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, and what is wrong with those that were passed over."""
    problems: list[str] = []
    for checkpoint in checkpoints(folder):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    return None, problems


def tidy(folder: Path) -> None:
    """Remove what killed saves left behind."""
    for name in ("head", "best"):
        recover(folder / name)
    for stage in (*folder.glob("checkpoints/.tmp-*"), *folder.glob("checkpoints/.old-*")):
        shutil.rmtree(stage, ignore_errors=True)


def read(checkpoint: Path) -> State:
    """The integers of a sound checkpoint. Raises UserError when another version wrote it."""
    try:
        state = State(**json.loads((checkpoint / STATE).read_text()))
        card = json.loads((checkpoint / CARD).read_text())
        made = {f"head.{key}": value for key, value in of_layers(card["head"]).items()}
        state.meaning = {**made, **state.meaning}
        return state
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"{checkpoint / STATE}: this version cannot read it ({error}); use the version that "
            "wrote it, or choose another out_dir"
        ) from None


def restore(checkpoint: Path, head: Head, optimizer: torch.optim.Optimizer) -> None:
    """Load weights, calibration and moments into a head and optimizer of the same
    configuration.

    Raises UserError when they do not fit.
    """
    try:
        head.load_state_dict(load_file(checkpoint / WEIGHTS))
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in load_file(checkpoint / OPTIMIZER).items():
            index, _, name = key.partition(".")
            moments.setdefault(int(index), {})[name] = value
        optimizer.load_state_dict(
            {"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}
        )
        head.restore_json(json.loads((checkpoint / CARD).read_text())["head"])
    except (KeyError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise UserError(
            f"{checkpoint}: does not fit this run ({first_line(error)}); choose another out_dir"
        ) from None


def check_meaning(
    saved: dict[str, Any], now: dict[str, Any], folder: Path, default: dict[str, Any]
) -> list[str]:
    """Lines about the logistics that changed. Raises UserError naming every key whose change
    alters what is learned.

    Keys of REPLANNED may change as well, `steps` to more alone (with the same epochs to any);
    `replanned` has a line on each. A key that the checkpoint does not know came with a later
    version: at its default it changes nothing, but where version 0.1 did something else.
    """
    if gone := left.head(str(saved.get("head.kind")), f"out_dir: {folder}"):
        raise UserError(gone)
    if saved.get("head.kind") in PARALLEL and "head.loss.mask" not in saved:
        raise UserError(
            f"out_dir: {folder} holds a run of version 0.1, whose heads learned from other tokens; "
            "go on with that version, or choose another out_dir"
        )
    changed = _changed(saved, now, default)
    refused = [
        f"{k}: {_show(saved, k)} in the checkpoint, {_show(now, k)} now"
        for k in changed
        if not is_logistics(k) and not _may_follow(k, saved, now)
    ]
    if refused:
        raise UserError(
            f"out_dir: {folder} holds a run that learns something else ({'; '.join(refused)}); "
            "restore these values or choose another out_dir"
        )
    return [f"{k}: {_show(saved, k)} -> {_show(now, k)}" for k in changed if is_logistics(k)]


def replanned(saved: dict[str, Any], now: dict[str, Any], default: dict[str, Any]) -> list[str]:
    """Lines about the keys of REPLANNED that changed: from the step of the resume on, the run
    is that of the new values."""
    changed = _changed(saved, now, default)
    return [
        f"{k}: {_show(saved, k)} -> {_show(now, k)}; {REPLANNED[k]}"
        for k in changed
        if k in REPLANNED
    ]


def _changed(saved: dict[str, Any], now: dict[str, Any], default: dict[str, Any]) -> list[str]:
    """The keys that differ."""
    saved = {k: v for k, v in saved.items() if k in now or not _is_gone(k, v)}
    new = {k for k in now if k not in saved and k in default and now[k] == default[k]}
    return [k for k in {**saved, **now} if saved.get(k) != now.get(k) and k not in new]


def _is_gone(key: str, value: Any) -> bool:
    if key in HOW:
        return True
    group, _, name = key.partition(".")
    return group == "head" and is_gone(name, value)


def _may_follow(key: str, saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a run may go on with another value of this key."""
    if key == "steps":
        epochs = now.get("epochs")  # then fewer rows, such as those of data.skip, make fewer steps
        same = bool(epochs) and epochs == saved.get("epochs")
        return same or bool(now[key] > saved.get(key, now[key]))
    return key in REPLANNED


def _show(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return "not set"
    text = "null" if config[key] is None else str(config[key])
    return text if len(text) <= 24 else text[:12]


def is_final(folder: Path, step: int) -> bool:
    """Whether a head folder already holds the weights of `step`."""
    try:
        return read_card(folder)["extra"].get("step") == step
    except UserError:
        return False
