"""The files of a feature cache: which hidden states, how many rows in each, written so that a
kill leaves no half file.

Used by train/cache_features.py; train/features/store.py reads what this writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.conf import disk
from outrider.conf.errors import UserError
from outrider.decode.models.identity import sha256_remembered
from outrider.decode.models.load import torch_dtype
from outrider.decode.target import Target
from outrider.heads import head_class
from outrider.train.data.batches import JoinedRows
from outrider.train.features import store
from outrider.train.features.store import MANIFEST, PLAN, Shard, card_sha256, identity_of


def taps_of(cfg: Any, target: Target) -> tuple[int, ...]:
    """Every tap that the heads of `cfg` read, and the output of the final norm, from which all
    logits follow."""
    wanted = {target.num_layers, *cfg.taps}
    for name in cfg.heads:
        kind: Any = head_class(name, "heads")
        own = (
            set(kind.choose_taps(target, kind.Config(kind=name)))
            if hasattr(kind, "choose_taps")
            else set()
        )
        wanted |= own
    for tap in wanted:
        if not 0 <= tap <= target.num_layers:
            raise UserError(
                f"taps: {tap} is not among the target's hidden states 0..{target.num_layers}"
            )
    return tuple(sorted(wanted))


def bounds_of(rows: JoinedRows, per_token: int, shard_bytes: int) -> list[int]:
    """First row of every shard, and the number of rows: whole rows, as many as fit, at least
    one.
    """
    bounds, start = [0], 0
    for row in range(rows.lines.numel()):
        if row > bounds[-1] and (int(rows.offsets[row + 1]) - start) * per_token > shard_bytes:
            bounds.append(row)
            start = int(rows.offsets[row])
    return [*bounds, rows.lines.numel()]


class FeatureWriter:
    """Writes one folder. All that decides its bytes stands in plan.json before the first shard
    does.
    """

    def __init__(self, cfg: Any, target: Target, rows: JoinedRows) -> None:
        """cfg: keys of scripts/cache_features.py."""
        self.cfg, self.target, self.rows = cfg, target, rows
        self.folder = Path(cfg.out).expanduser()
        self.taps, self.store = taps_of(cfg, target), cfg.store or cfg.dtype
        size = torch_dtype(self.store).itemsize
        self.per_token = len(self.taps) * target.hidden_size * size
        self.bounds = bounds_of(rows, self.per_token, cfg.shard_mb << 20)
        self.plan = {
            "identity": identity_of(target, rows, store.computed_in(cfg)),
            "taps": list(self.taps),
            "stored": self.store,
            "width": target.hidden_size,
            "rows": rows.lines.numel(),
            "tokens": rows.ids.numel(),
            "bounds": self.bounds,
            "batch_tokens": cfg.batch_tokens,
        }
        self.count = len(self.bounds) - 1

    def tokens(self, number: int) -> int:
        """Tokens of a shard."""
        return int(
            self.rows.offsets[self.bounds[number + 1]] - self.rows.offsets[self.bounds[number]]
        )

    def path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"

    def entry(self, number: int) -> Shard | None:
        """What was written about a shard when it was complete."""
        try:
            card = json.loads(self.path(number).with_suffix(".json").read_text())
            return Shard(
                self.path(number), (card["rows"][0], card["rows"][1]), card["bytes"], card["sha256"]
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None

    def done(self, number: int) -> bool:
        """Whether a shard is there, whole and unchanged."""
        shard = self.entry(number)
        good = shard is not None and shard.rows == (self.bounds[number], self.bounds[number + 1])
        return bool(good and shard and not store.damage([shard]))

    def prepare(self) -> str:
        """Compare with what lies in the folder, check the free space; what will be written, in
        words. Writes nothing.

        Raises UserError for a folder with other features, or too little space.
        """
        whole = self.rows.ids.numel() * self.per_token
        text = (
            f"features: {self.rows.ids.numel():,} tokens x {len(self.taps)} hidden states "
            f"{list(self.taps)} x {self.target.hidden_size} x {self.store} = {whole:,} bytes in "
            f"{self.count} files"
        )
        path = self.folder / PLAN
        if path.is_file():
            try:
                old = json.loads(path.read_text())
            except (OSError, ValueError):
                raise UserError(
                    f"{path}: unreadable; remove the folder or choose another out"
                ) from None
            mine, theirs = _flat(self.plan), _flat(old)
            differ = [
                f"{k} {str(theirs.get(k))[:24]} there, {str(mine.get(k))[:24]} asked for"
                for k in sorted({*mine, *theirs})
                if mine.get(k) != theirs.get(k)
            ]
            if differ:
                raise UserError(
                    f"out: {self.folder} holds other features ({'; '.join(differ)}); choose "
                    "another folder, or remove this one"
                )
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(
                f"out: {self.folder} holds other files; choose an empty or a new folder"
            )
        there = sum(
            self.path(i).stat().st_size
            for i in range(self.count)
            if self.entry(i) and self.path(i).is_file()
        )
        need = whole - there + (1 << 20)
        disk.check_space("out", self.folder, need, "store fewer taps, or give another folder")
        return f"{text}, {there:,} there already"

    def begin(self) -> None:
        """Write the plan."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / PLAN).is_file():
            disk.write_text(self.folder / PLAN, json.dumps(self.plan, indent=1) + "\n")

    @contextlib.contextmanager
    def claim(self, number: int) -> Iterator[bool]:
        """Hold a shard; False when another process has it. A dead process holds nothing."""
        path = self.folder / f".claim-{number:05d}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            yield False
            return
        try:
            yield True
        finally:
            os.close(handle)

    def shard(self, number: int) -> Iterator[int]:
        """Compute and write a shard; yields tokens as they are done. Raises UserError for
        features that are not finite, naming the row, and OSError when the disk refuses; then
        nothing of it remains."""
        first, last = self.bounds[number], self.bounds[number + 1]
        kind, offsets = torch_dtype(self.store), self.rows.offsets
        count = self.tokens(number)
        out = {
            f"tap.{t}": torch.empty(count, self.target.hidden_size, dtype=kind) for t in self.taps
        }
        order = first + self.rows.lengths[first:last].argsort(stable=True)
        for part in self._batches(order):
            batch = self.rows.batch(part).to(self.target.device)
            wide = self.target.features(batch.ids, batch.mask, self.taps)
            found = wide.to(device="cpu", dtype=kind)
            for b, row in enumerate(part):
                start, size = int(offsets[row] - offsets[first]), int(self.rows.lengths[row])
                if not bool(found[b, :size].isfinite().all()):
                    raise UserError(
                        f"{self.rows.where(row)}: features are not finite in "
                        f"{self.cfg.dtype}, stored in "
                        f"{self.store}; look at the row, or set dtype or store to a wider type"
                    )
                for i, tap in enumerate(self.taps):
                    out[f"tap.{tap}"][start : start + size] = found[b, :size, i]
            yield int(self.rows.lengths[part].sum())
        self._keep(number, out)

    def _keep(self, number: int, out: dict[str, Tensor]) -> None:
        """Write a shard's tensors, then its card. Raises UserError when the disk refuses."""
        first, last = self.bounds[number], self.bounds[number + 1]
        path = self.path(number)
        path.with_suffix(".json").unlink(missing_ok=True)
        try:
            with disk.whole(path) as stage:
                save_file(out, stage)
        except SafetensorError as error:  # how the library reports a disk that refuses
            raise UserError(
                f"{path}: cannot be written ({error}); free space, then start the same command"
            ) from None
        card = {
            "rows": [first, last],
            "bytes": path.stat().st_size,
            "sha256": sha256_remembered([path])[0],
        }
        disk.write_text(path.with_suffix(".json"), json.dumps(card) + "\n")

    def _batches(self, order: Tensor) -> Iterator[list[int]]:
        """Rows sorted by length, as many as batch_tokens hold with their padding."""
        part: list[int] = []
        for row in order.tolist():
            if part and int(self.rows.lengths[row]) * (len(part) + 1) > self.cfg.batch_tokens:
                yield part
                part = []
            part.append(row)
        if part:
            yield part

    def finish(self) -> bool:
        """Write the manifest once every shard is sound; False while one is missing."""
        if not all(self.done(i) for i in range(self.count)):
            return False
        found = [self.entry(i) for i in range(self.count)]
        card = {k: v for k, v in self.plan.items() if k not in ("bounds", "batch_tokens")}
        card["shards"] = {
            s.path.name: {"rows": list(s.rows), "bytes": s.bytes, "sha256": s.sha256}
            for s in found
            if s
        }
        card["sha256"] = card_sha256(card)
        disk.write_text(self.folder / MANIFEST, json.dumps(card, indent=1) + "\n")
        for claim in self.folder.glob(".claim-*"):
            claim.unlink(missing_ok=True)
        return True


def _flat(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with its identity beside the other keys."""
    return {**{k: v for k, v in plan.items() if k != "identity"}, **plan.get("identity", {})}
