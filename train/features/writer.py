"""Writing a folder of features: which hidden states, how many rows in each file, so that a
kill leaves no half file and the same command goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.conf import disk
from outrider.conf.errors import UserError
from outrider.decode.models.load import torch_dtype
from outrider.decode.target import Target
from outrider.heads.registry import head_class
from outrider.train.data.batches import JoinedRows, grouped
from outrider.train.features.config import CacheConfig
from outrider.train.features.store import (
    MANIFEST,
    computed_in,
    differences,
    identity_of,
    shard_path,
)


def taps_of(cfg: CacheConfig, target: Target) -> tuple[int, ...]:
    """Return every tap that the heads of `cfg` read, and the output of the final norm, from
    which all logits follow."""
    wanted = {target.num_layers, *cfg.taps}
    for name in cfg.heads:
        kind: Any = head_class(name, "heads")
        if hasattr(kind, "choose_taps"):
            wanted |= {*kind.choose_taps(target, kind.Config(kind=name))}
    if wrong := [tap for tap in wanted if not 0 <= tap <= target.num_layers]:
        raise UserError(
            f"taps: {wrong[0]} is not among the target's hidden states 0..{target.num_layers}"
        )
    return tuple(sorted(wanted))


def bounds_of(rows: JoinedRows, per_token: int, shard_bytes: int) -> list[int]:
    """First row of every shard, and the number of rows: whole rows, as many as fit, at least
    one."""
    bounds, start = [0], 0
    for row in range(rows.lines.numel()):
        if row > bounds[-1] and (int(rows.offsets[row + 1]) - start) * per_token > shard_bytes:
            bounds.append(row)
            start = int(rows.offsets[row])
    return [*bounds, rows.lines.numel()]


class FeatureWriter:
    """Writes one folder. All that decides its bytes is in manifest.json before the first
    shard does; it is complete when every shard is there."""

    def __init__(self, cfg: CacheConfig, target: Target, rows: JoinedRows) -> None:
        self.cfg, self.target, self.rows = cfg, target, rows
        self.folder = Path(cfg.out).expanduser()
        self.taps, self.store = taps_of(cfg, target), cfg.store or cfg.dtype
        self.per_token = len(self.taps) * target.hidden_size * torch_dtype(self.store).itemsize
        self.bounds = bounds_of(rows, self.per_token, cfg.shard_mb << 20)
        self.plan: dict[str, Any] = {
            "identity": identity_of(target, rows, computed_in(cfg.dtype, cfg.target.quantize)),
            "taps": list(self.taps),
            "stored": self.store,
            "width": target.hidden_size,
            "tokens": rows.ids.numel(),
            "bounds": self.bounds,
            "batch_tokens": cfg.batch_tokens,
        }

    @property
    def missing(self) -> list[int]:
        """The shards that are not there."""
        count = len(self.bounds) - 1
        return [i for i in range(count) if not shard_path(self.folder, i).is_file()]

    def full(self, ranks: int) -> bool:
        """Return whether no room is left for a file of every rank."""
        files = sum(p.stat().st_size > 0 for p in self.folder.glob("shard-*")) + ranks
        return bool(self.cfg.room_gb) and files * self.cfg.shard_mb > self.cfg.room_gb << 10

    def tokens(self, number: int) -> int:
        """Return tokens of a shard."""
        first, last = self.rows.offsets[self.bounds[number : number + 2]].tolist()
        return int(last - first)

    def prepare(self) -> str:
        """Compare with what is in the folder, check the free space; what will be written, in
        words. Writes nothing.

        Raises UserError for a folder with other features, or too little space.
        """
        path = self.folder / MANIFEST
        if path.is_file():
            try:
                old = dict(json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                raise UserError(
                    f"{path}: unreadable; remove the folder or choose another out"
                ) from None
            plans = [{**plan, **plan.get("identity", {})} for plan in (old, self.plan)]
            if wrong := differences(*({**plan, "identity": ""} for plan in plans)):
                raise UserError(
                    f"out: {self.folder} holds other features ({wrong}); choose another folder, "
                    "or remove this one"
                )
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(
                f"out: {self.folder} holds other files; choose an empty or a new folder"
            )
        whole = self.rows.ids.numel() * self.per_token
        need = sum(map(self.tokens, self.missing)) * self.per_token + (1 << 20)
        need = min(need, (self.cfg.room_gb << 30) or need)
        disk.check_space("out", self.folder, need, "store fewer taps, or give another folder")
        return (
            f"features: {self.rows.ids.numel():,} tokens x {len(self.taps)} hidden states "
            f"{list(self.taps)} x {self.target.hidden_size} x {self.store} = {whole:,} bytes in "
            f"{len(self.bounds) - 1} files, {len(self.missing)} of them to be written"
        )

    def begin(self) -> None:
        """Write the manifest, and remove what a kill left half; training stages empty files."""
        for stage in self.folder.glob(".tmp-shard-*"):
            with contextlib.suppress(FileNotFoundError):
                if stage.stat().st_size:
                    stage.unlink()
        disk.write_text(self.folder / MANIFEST, json.dumps(self.plan, indent=1) + "\n")

    def computed(self, shards: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield each row of some shards with its hidden states [T, taps, D], by passes of the
        target here; within a shard rows of similar length share one."""
        for number in shards:
            first, last = self.bounds[number : number + 2]
            some, lengths = torch.arange(first, last), self.rows.lengths
            for part in grouped(some, lengths, 0, self.cfg.batch_tokens):
                batch = self.rows.batch(part).to(self.target.device)
                found = self.target.features(batch.ids, batch.mask, self.taps).cpu()
                yield from ((row, found[b, : int(lengths[row])]) for b, row in enumerate(part))

    def shard(self, number: int, states: Iterator[tuple[int, Tensor]]) -> Iterator[int]:
        """Write a shard; yields tokens as they are done. states: its rows with their hidden
        states come next. Raises UserError for features that are not finite, naming the row, and
        where the disk refuses; then nothing of it remains."""
        first, last = self.bounds[number : number + 2]
        kind, start = torch_dtype(self.store), int(self.rows.offsets[first])
        size = self.tokens(number), self.target.hidden_size
        out = {f"tap.{t}": torch.empty(*size, dtype=kind) for t in self.taps}
        for row, found in itertools.islice(states, last - first):
            stored = found.to(kind)
            if not bool(stored.isfinite().all()):
                raise UserError(
                    f"{self.rows.where(row)}: features are not finite in {self.cfg.dtype}, "
                    f"stored in {self.store}; look at the row, or set dtype or store to a "
                    "wider type"
                )
            at = int(self.rows.offsets[row]) - start
            for i, tap in enumerate(self.taps):
                out[f"tap.{tap}"][at : at + len(stored)] = stored[:, i]
            yield len(stored)
        path = shard_path(self.folder, number)
        try:
            with disk.whole(path) as stage:
                save_file(out, stage)
        except SafetensorError as error:  # how the library reports a disk that refuses
            raise UserError(
                f"{path}: cannot be written ({error}); free space, then start the same command"
            ) from None
