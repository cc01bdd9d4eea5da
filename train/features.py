"""The target's features on disk, in place of a forward pass: what scripts/cache_features.py
writes, so that a kill leaves no half file and the same command goes on, and training reads.

A folder of shards (safetensors: one tensor [tokens, D] per tap, rows end to end) and
manifest.json, which says what is stored: target, tokenizer, chat template, tokens, taps,
dtypes, and the rows of each shard. A training run with data.features=FOLDER reads its
features there; embeddings and LM head remain the target's own.

Shape letters: B rows, T positions, F taps, D width of the features.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from outrider.conf import disk
from outrider.conf.errors import UserError
from outrider.decode.models.load import torch_dtype
from outrider.decode.models.shards import without_layers
from outrider.decode.target import Target
from outrider.heads.base import Batch
from outrider.heads.registry import head_class
from outrider.train.data.batches import JoinedRows, grouped
from outrider.train.data.config import CacheConfig

FORMAT = 2
MANIFEST = "manifest.json"
OPEN = 1024  # files that are open at a time: a process can map some 65,000
CHECKED, APART = 256, 2.0  # tokens that are looked at, nats by which another reading is better
AGAIN = "write the features again: scripts/cache_features.py with this run's target and data"


def shard_path(folder: Path, number: int) -> Path:
    """Return the file of a shard."""
    return folder / f"shard-{number:05d}.safetensors"


def computed_in(dtype: str, quantize: str) -> str:
    """Return how a target computes: its dtype, and the quantisation of its weights."""
    return dtype if quantize == "none" else f"{dtype}, {quantize}"


def identity_of(target: Target, rows: JoinedRows, dtype: str) -> dict[str, Any]:
    """Return what features must have in common with the run that reads them. dtype: see
    computed_in."""
    hashes = target.identity.to_json() if target.identity else {}
    found = {f"target.{k}": v for k, v in hashes.items() if k.endswith("sha256")}
    tokens = {"data.tokens_sha256": rows.totals.tokens_sha256}
    return {"format": FORMAT, **found, **tokens, "dtype": dtype}


def differences(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """Return what is not alike in two folders' plans, in words."""
    return "; ".join(
        f"{key} {str(theirs.get(key))[:24]} is not {str(mine.get(key))[:24]} of this run"
        for key in sorted({*mine, *theirs})
        if theirs.get(key) != mine.get(key)
    )


class FeatureStore:
    """Opened features. reads: the hidden states that are read. taps: those that are stored.
    stored: their dtype. bounds: first row of every shard, and the number of rows. offsets:
    [R + 1] of the data's rows."""

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        reads: Sequence[int],
        rows: JoinedRows,
        follow: bool = False,
    ) -> None:
        """Check and open features. follow: files may come later, and are checked as they are
        opened. Raises UserError, naming the file: unfinished, damaged or foreign files,
        features of another target or of other data, taps that are not stored."""
        path, self.folder, self.offsets = folder / MANIFEST, folder, rows.offsets
        try:
            card = json.loads(path.read_text())
            theirs, self.bounds = dict(card["identity"]), [int(row) for row in card["bounds"]]
            self.reads, self.taps = tuple(reads), tuple(card["taps"])
            self.stored, self.width = str(card["stored"]), int(card["width"])
        except FileNotFoundError:
            raise UserError(
                f"data.features: {folder} has no {MANIFEST}; scripts/cache_features.py writes one"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: unreadable ({type(error).__name__}); {AGAIN}") from None
        wrong = differences({key: theirs.get(key) for key in identity}, identity)
        if not wrong and [*self.bounds[:1], *self.bounds[-1:]] != [0, rows.lines.numel()]:
            wrong = "its shards do not cover the rows"
        if wrong:
            raise UserError(f"{path}: holds features of something else ({wrong}); {AGAIN}")
        if not {*reads} <= {*self.taps}:
            raise UserError(
                f"{path}: holds the hidden states {[*self.taps]}, the head reads {list(reads)}; "
                f"{AGAIN}, and with taps=[..] or heads=[..] of this head"
            )
        self._starts = torch.tensor(self.bounds[:-1])
        self._there, self._emptied = 0 if follow else len(self._starts), 0
        self._file = functools.lru_cache(OPEN)(self._opened)
        for number in range(self._there):
            self._opened(number)

    def _opened(self, number: int) -> Any:
        """Return an opened shard; its tensors must be what the manifest says."""
        path, (first, last) = shard_path(self.folder, number), self.bounds[number : number + 2]
        kind = self.stored.replace("bfloat", "BF").replace("float", "F")
        wanted = [int(self.offsets[last] - self.offsets[first]), self.width, kind]
        found, why = [], ""
        try:
            file = safe_open(path, "pt")
            parts = [file.get_slice(f"tap.{tap}") for tap in self.taps]
            found = [[*p.get_shape(), p.get_dtype()] for p in parts]
        except FileNotFoundError:
            raise UserError(
                f"{path}: is missing; the same cache_features writes it again"
            ) from None
        except (OSError, SafetensorError) as error:
            why = f" ({error})"
        if found != [wanted] * len(self.taps):
            raise UserError(
                f"{path}: does not hold {wanted[0]} tokens of the states {list(self.taps)} in "
                f"{self.stored}{why}; remove it and start the command that writes the features "
                "again, it continues"
            )
        return file

    def _number(self, row: int) -> int:
        """Return the shard of a row."""
        return int(torch.searchsorted(self._starts, row, right=True)) - 1

    def row(self, row: int) -> Tensor:
        """[T, F, D] in the stored dtype."""
        number = self._number(row)
        first = int(self.offsets[self.bounds[number]])
        part = slice(int(self.offsets[row]) - first, int(self.offsets[row + 1]) - first)
        file = self._file(number)
        return torch.stack([file.get_slice(f"tap.{tap}")[part] for tap in self.reads], 1)

    # Files that come and go (data.follow)

    def lacking(self, rows: Tensor) -> str:
        """Return what is not there yet of the files of ascending rows, "" where all of them are.
        Raises UserError for a file that is not what it should be, such as one that is emptied."""
        end = self._number(int(rows[-1]))
        for number in range(max(self._number(int(rows[0])), self._there), end + 1):
            if not (path := shard_path(self.folder, number)).is_file():
                return f"{path}, of the files up to number {end}"
            self._opened(number)
            self._there = number + 1
        return ""

    def forget(self, row: int, empty: bool) -> None:
        """Close all files, and empty those of the rows before `row` alone (empty: on the rank
        that does it for all): one that is there is not written again."""
        self._file.cache_clear()
        while empty and self._emptied < len(self._starts) and self.bounds[self._emptied + 1] <= row:
            path = shard_path(self.folder, self._emptied)
            if not path.is_file() or path.stat().st_size:
                disk.write_bytes(path, b"")
            self._emptied += 1


class CachedTarget:
    """A target whose features come from a store: for one batch, all that a head's forward asks
    of a target. They are read at once, into host memory from which a GPU copies without a wait.
    """

    def __init__(self, target: Target, store: FeatureStore, batch: Batch) -> None:
        """batch: on the CPU."""
        self._target, self._reads = target, store.reads
        whole = *batch.ids.shape, len(store.reads), store.width
        pinned = target.device.type == "cuda"
        self._read = torch.zeros(whole, dtype=target.dtype, pin_memory=pinned)
        for b, (row, size) in enumerate(zip(batch.sample_ids.tolist(), batch.sizes(), strict=True)):
            self._read[b, :size] = store.row(row).to(target.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def features(self, ids: Tensor, mask: Tensor, taps: Sequence[int]) -> Tensor:
        """As Target.features: [B, T, F, D], zeros in the padding. taps: of those that are read."""
        places = [self._reads.index(tap) for tap in taps]
        every = places == [*range(len(self._reads))]
        found = self._read if every else self._read[:, :, places]
        return found.to(self._target.device, non_blocking=True)


@torch.no_grad()
def check_last(target: CachedTarget, batch: Batch) -> None:
    """Raise UserError where the last hidden states of a batch tell its next tokens far worse
    than in another reading, or than chance. Other layers are not judged: no token follows from
    theirs; nor is a target whose final norm was never trained."""
    batch, on = batch.to(target.device), batch.mask[:, 2:].nonzero()[:CHECKED].unbind(1)
    states = target.features(batch.ids, batch.mask, [target.num_layers])[:, :-2, 0][on]
    with without_layers(target.model):  # the rest is the final norm
        norms = [p for p in target.body.parameters() if p.dim() == 1]
        if all(bool(p.min() == p.max()) for p in norms):
            return  # as it was made: random weights tell no token, and tied ones may tell their own
        normed = target.body(inputs_embeds=states[None], use_cache=False).last_hidden_state[0]
    readings = {
        "": (states, 1),
        "one token late": (states, 0),
        "one token early": (states, 2),
        "without the final norm": (normed, 1),
    }
    nats = {"of another layer or target": math.log(target.vocab_size)}
    for why, (read, ahead) in readings.items():
        logits = target.head.finish(target.lm_head(read)).float()
        nats[why] = float(cross_entropy(logits, batch.ids[:, ahead:][on]))
    why = min(nats, key=nats.__getitem__)
    if nats[""] > nats[why] + APART and len(states) > CHECKED // 16:
        raise UserError(
            f"data.features: the last hidden states are {why} (they tell the next token by "
            f"{nats['']:.1f} nats, {nats[why]:.1f} if so); {AGAIN}"
        )


# Writing
# -------------------------------------------------------------------------------------------


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
        states come next. Raises UserError for features that are not finite, naming the row,
        and where the disk refuses; then nothing of it remains."""
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
