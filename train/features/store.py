"""The target's features read from disk in place of a forward pass: what
scripts/cache_features.py wrote.

A folder of shards (safetensors: one tensor [tokens, D] per tap, rows end to end) and
manifest.json, which says what is stored: target, tokenizer, chat template, tokens, taps,
dtypes, and the rows of each shard. A training run with data.features=FOLDER reads its
features there; embeddings and LM head remain the target's own.

Shape letters: B rows, T positions, F taps, D width of the features.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads.base import Batch, Head
from outrider.train.data.batches import JoinedRows

FORMAT = 2
MANIFEST = "manifest.json"
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


class FeatureStore:
    """Opened features. taps: stored hidden states. stored: their dtype. bounds: first row of
    every shard, and the number of rows. offsets: [R + 1] of the data's rows."""

    def __init__(
        self, folder: Path, identity: dict[str, Any], taps: Sequence[int], rows: JoinedRows
    ) -> None:
        """Check and open features. Raises UserError, naming the file: unfinished, damaged
        or foreign files, features of another target or of other data, taps that are not
        stored."""
        path, self.offsets = folder / MANIFEST, rows.offsets
        try:
            card = json.loads(path.read_text())
            theirs, self.bounds = dict(card["identity"]), [int(row) for row in card["bounds"]]
            self.taps: tuple[int, ...] = tuple(card["taps"])
            self.stored, self.width = str(card["stored"]), int(card["width"])
        except FileNotFoundError:
            raise UserError(
                f"data.features: {folder} has no {MANIFEST}; scripts/cache_features.py writes one"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: unreadable ({type(error).__name__}); {AGAIN}") from None
        wrong = [
            f"{key} {str(theirs.get(key))[:12]} is not {str(value)[:24]} of this run"
            for key, value in identity.items()
            if theirs.get(key) != value
        ]
        if not wrong and [*self.bounds[:1], *self.bounds[-1:]] != [0, rows.lines.numel()]:
            wrong = ["its shards do not cover the rows"]
        if wrong:
            raise UserError(
                f"{path}: holds features of something else ({'; '.join(wrong)}); {AGAIN}"
            )
        if not {*taps} <= {*self.taps}:
            raise UserError(
                f"{path}: holds the hidden states {[*self.taps]}, the head reads {list(taps)}; "
                f"{AGAIN}, and with taps=[..] or heads=[..] of this head"
            )
        self._starts = torch.tensor(self.bounds[:-1])
        self._files = [self._file(shard_path(folder, i), i) for i in range(len(self._starts))]

    def _file(self, path: Path, number: int) -> Any:
        """Return an opened shard; its tensors must be what the manifest says."""
        first, last = self.bounds[number : number + 2]
        wanted = (int(self.offsets[last] - self.offsets[first]), self.width)
        shapes, why = set(), ""
        try:
            file = safe_open(path, "pt")
            shapes = {tuple(file.get_slice(f"tap.{t}").get_shape()) for t in self.taps}
        except (OSError, SafetensorError) as error:
            why = f" ({error})"
        if shapes != {wanted}:
            raise UserError(
                f"{path}: does not hold {wanted[0]} tokens of the states {list(self.taps)}{why}; "
                "remove it and start the command that writes the features again, it continues"
            )
        return file

    def bytes_per_token(self, taps: Sequence[int]) -> int:
        """Return bytes that a head with these taps reads for a token."""
        size = getattr(torch, self.stored).itemsize
        return len({*taps, max(self.taps)}) * self.width * size

    def row(self, row: int, taps: Sequence[int]) -> Tensor:
        """[T, F, D] in the stored dtype."""
        number = int(torch.searchsorted(self._starts, row, right=True)) - 1
        first = int(self.offsets[self.bounds[number]])
        part = slice(int(self.offsets[row]) - first, int(self.offsets[row + 1]) - first)
        file = self._files[number]
        return torch.stack([file.get_slice(f"tap.{tap}")[part] for tap in taps], 1)


class CachedTarget:
    """A target whose features come from a store: for one batch, all that a head's forward asks
    of a target.
    """

    def __init__(self, target: Target, store: FeatureStore, batch: Batch) -> None:
        """batch: on the CPU."""
        self._target, self._store = target, store
        self._places = list(zip(batch.sample_ids.tolist(), batch.sizes(), strict=True))
        self._shape = batch.ids.shape
        self._read: tuple[tuple[int, ...], Tensor] | None = None

    def read_ahead(self, taps: Sequence[int]) -> None:
        """Read now what `features` will be asked for, in host memory from which a GPU copies
        without a wait."""
        self._read = tuple(taps), self._gathered(taps, self._shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def features(self, ids: Tensor, mask: Tensor, taps: Sequence[int]) -> Tensor:
        """As Target.features: [B, T, F, D], zeros in the padding."""
        known, wanted = self._read, tuple(taps)
        out = known[1] if known and known[0] == wanted else self._gathered(taps, ids.shape)
        return out.to(self._target.device, non_blocking=True)

    def _gathered(self, taps: Sequence[int], shape: Sequence[int]) -> Tensor:
        target, pinned = self._target, self._target.device.type == "cuda"
        whole = *shape, len(taps), self._store.width
        out = torch.zeros(whole, dtype=target.dtype, pin_memory=pinned)
        for b, (row, size) in enumerate(self._places):
            out[b, :size] = self._store.row(row, taps).to(out.dtype)
        return out


class Source:
    """What a head's forward gets as its target, by batch: the target itself, or one that reads
    `store`. note: a line about it. meaning: what of it changes what is learned
    (train.resuming). reads: the hidden states that most heads ask for."""

    def __init__(self, target: Target, head: Head) -> None:
        self.target, self.note = target, ""
        final = target.num_layers
        self.reads = head.taps if final in head.taps else (*head.taps, final)
        self.store: FeatureStore | None = None
        self.meaning: dict[str, Any] = {}

    def open(self, folder: str, dtype: str, quantize: str, rows: JoinedRows) -> None:
        """Read features from a folder. dtype, quantize: of the target. Raises UserError where
        they are not those of the run."""
        place = Path(folder).expanduser()
        _ = self.target.head  # asks the layers how logits follow; later they may be gone
        identity = identity_of(self.target, rows, computed_in(dtype, quantize))
        self.store = FeatureStore(place, identity, self.reads, rows)
        self.note = f"features: {place}, {len(self.store.bounds) - 1} files in {self.store.stored}"
        if self.store.stored != dtype:
            self.meaning["features"] = f"stored in {self.store.stored}"

    def __call__(self, batch: Batch) -> Any:
        """The target for one batch."""
        return self.target if self.store is None else CachedTarget(self.target, self.store, batch)
