"""The target's features read from disk in place of a forward pass: what
train/cache_features.py wrote.

A cache is a folder of shards (safetensors: one tensor [tokens, D] per tap, rows end to end)
and manifest.json with the sha256 of every shard and the identity of what is stored: target,
tokenizer, chat template, tokens, taps, dtypes. A training run with data.features=FOLDER reads
its features there; embeddings and LM head remain the target's own.

Shape letters: B rows, T positions, F taps, D width of the features.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from outrider.conf.errors import UserError
from outrider.decode.models.identity import sha256_remembered
from outrider.decode.models.shards import layer_stacks
from outrider.decode.target import Target
from outrider.heads.base import Batch, Head
from outrider.train.data.batches import JoinedRows

FORMAT = 1
PLAN, MANIFEST = "plan.json", "manifest.json"
SHARD = re.compile(r"shard-\d{5}\.safetensors")
KEYS = (
    "target.weights_sha256",
    "target.tokenizer_sha256",
    "target.template_sha256",
    "data.tokens_sha256",
    "dtype",
)
AGAIN = "write the features again: scripts/cache_features.py with this run's target and data"


def tokens_sha256(rows: JoinedRows) -> str:
    """What features depend on: the ids and where rows begin. The loss mask and the held-out
    choice do not matter.
    """
    return rows.totals.tokens_sha256


def computed_in(cfg: Any) -> str:
    """How the target of a run computes: its dtype, and the quantisation of its weights."""
    kind = cfg.target.quantize
    return str(cfg.dtype) if kind == "none" else f"{cfg.dtype}, {kind}"


def identity_of(target: Target, rows: JoinedRows, dtype: str) -> dict[str, Any]:
    """What features must have in common with the run that reads them. dtype: see computed_in."""
    hashes = target.identity.to_json() if target.identity else {}
    found = {f"target.{k}": v for k, v in hashes.items() if k.endswith("sha256")}
    return {"format": FORMAT, **found, "data.tokens_sha256": tokens_sha256(rows), "dtype": dtype}


def card_sha256(card: dict[str, Any]) -> str:
    """The hash that a manifest states of itself."""
    rest = {k: v for k, v in card.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@dataclass
class Shard:
    """One file. rows: first row and the one after the last."""

    path: Path
    rows: tuple[int, int]
    bytes: int
    sha256: str


class FeatureStore:
    """An opened cache. taps: stored hidden states. stored: their dtype. offsets: [R + 1] of
    the data's rows.
    """

    def __init__(
        self, folder: Path, card: dict[str, Any], shards: list[Shard], offsets: Tensor
    ) -> None:
        self.folder, self.shards, self.offsets = folder, shards, offsets
        self.taps: tuple[int, ...] = tuple(card["taps"])
        self.stored: str = card["stored"]
        self.width: int = card["width"]
        self.identity: dict[str, Any] = card["identity"]
        self._starts = torch.tensor([s.rows[0] for s in shards])
        self._open: dict[int, Any] = {}

    @classmethod
    def open(
        cls, folder: Path, identity: dict[str, Any], taps: Sequence[int], rows: JoinedRows
    ) -> FeatureStore:
        """Check and open a cache. Raises UserError, naming the file: unfinished, damaged or
        foreign files, features of another target or of other data, taps that are not stored."""
        card, shards = read_manifest(folder)
        path = folder / MANIFEST
        theirs = card["identity"]
        wrong = [
            f"{k} {str(theirs.get(k))[:12]} is not {str(identity.get(k))[:24]} of this run"
            for k in KEYS
            if theirs.get(k) != identity.get(k)
        ]
        if wrong:
            raise UserError(
                f"{path}: holds features of something else ({'; '.join(wrong)}); {AGAIN}"
            )
        missing = [t for t in taps if t not in card["taps"]]
        if missing:
            raise UserError(
                f"{path}: holds the hidden states {card['taps']}, the head reads {list(taps)}; "
                f"{AGAIN}, and with taps=[..] or heads=[..] of this head"
            )
        problems = damage(shards)
        if problems:
            raise UserError(
                f"{problems[0]}; the command that wrote the features mends this file alone"
            )
        store = cls(folder, card, shards, rows.offsets)
        for number in range(len(shards)):
            store._file(number)
        return store

    def _file(self, number: int) -> Any:
        """The opened shard; its tensors must be what the manifest says."""
        if number not in self._open:
            shard = self.shards[number]
            tokens = int(self.offsets[shard.rows[1]] - self.offsets[shard.rows[0]])
            try:
                file = safe_open(shard.path, "pt")
                shapes = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise UserError(f"{shard.path}: cannot be read ({error}); {AGAIN}") from None
            wanted = {f"tap.{t}": (tokens, self.width) for t in self.taps}
            if any(shapes.get(name) != shape for name, shape in wanted.items()):
                raise UserError(
                    f"{shard.path}: does not hold {tokens} tokens of the states "
                    f"{list(self.taps)}; {AGAIN}"
                )
            self._open[number] = file
        return self._open[number]

    def bytes_per_token(self, taps: Sequence[int]) -> int:
        """Bytes that a head with these taps reads for a token."""
        size = getattr(torch, self.stored).itemsize
        return len({*taps, max(self.taps)}) * self.width * size

    def row(self, row: int, taps: Sequence[int]) -> Tensor:
        """[T, F, D] in the stored dtype."""
        number = int(torch.searchsorted(self._starts, row, right=True)) - 1
        first = int(self.offsets[self.shards[number].rows[0]])
        part = slice(int(self.offsets[row]) - first, int(self.offsets[row + 1]) - first)
        file = self._file(number)
        return torch.stack([file.get_slice(f"tap.{tap}")[part] for tap in taps], 1)


def read_manifest(folder: Path) -> tuple[dict[str, Any], list[Shard]]:
    """The checked manifest of a finished cache. Raises UserError naming the file."""
    path = folder / MANIFEST
    try:
        text = path.read_text()
        card = json.loads(text)
        if card["sha256"] != card_sha256(card):
            raise UserError(f"{path}: damaged (sha256 differs from the one it states); {AGAIN}")
        if card["identity"]["format"] != FORMAT:
            raise UserError(
                f"{path}: format {card['identity']['format']}, this version reads {FORMAT}; {AGAIN}"
            )
        bad = [name for name in card["shards"] if not SHARD.fullmatch(name)]
        if bad:
            raise UserError(f"{path}: names a file that is no shard ({bad[0]!r}); {AGAIN}")
        shards = [
            Shard(
                folder / name,
                (int(e["rows"][0]), int(e["rows"][1])),
                int(e["bytes"]),
                str(e["sha256"]),
            )
            for name, e in sorted(card["shards"].items())
        ]
        bounds = [s.rows[0] for s in shards] + [card["rows"]]
        if bounds[:1] != [0] or [s.rows[1] for s in shards] != bounds[1:]:
            raise UserError(
                f"{path}: its shards do not cover the rows 0 to {card['rows']} once; {AGAIN}"
            )
        # Reads the same, but it is not what was written.
        if text != json.dumps(card, indent=1) + "\n":
            raise UserError(f"{path}: damaged (changed after it was written); {AGAIN}")
    except FileNotFoundError:
        if (folder / PLAN).is_file():
            raise UserError(
                f"{folder}: the features are not complete; start the command that wrote them "
                "again, it continues"
            ) from None
        raise UserError(
            f"data.features: {folder} has no {MANIFEST}; scripts/cache_features.py writes one"
        ) from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
    ) as error:
        raise UserError(f"{path}: unreadable ({type(error).__name__}); {AGAIN}") from None
    return card, shards


def damage(shards: Sequence[Shard]) -> list[str]:
    """What is wrong with shards, naming each file; [] when size and sha256 are as written.
    Hashes are remembered by size, times and inode, so that only a changed file is read again."""

    def check(shard: Shard) -> str | None:
        try:
            size = shard.path.stat().st_size
            if size != shard.bytes:
                return f"{shard.path}: {size:,} bytes, {shard.bytes:,} were written"
            same = sha256_remembered([shard.path])[0] == shard.sha256
            return None if same else f"{shard.path}: sha256 differs"
        except OSError as error:
            return f"{shard.path}: cannot be read ({error.strerror})"

    with ThreadPoolExecutor(4) as pool:
        return [problem for problem in pool.map(check, shards) if problem]


class CachedTarget:
    """A target whose features come from a store: for one batch, all that a head's forward asks
    of a target.
    """

    def __init__(self, target: Target, store: FeatureStore, batch: Batch) -> None:
        """batch: on the CPU."""
        self._target, self._store = target, store
        self._places = list(zip(batch.sample_ids.tolist(), batch.spans(), strict=True))
        self._shape = batch.ids.shape
        self._read: tuple[tuple[int, ...], Tensor] | None = None

    def read_ahead(self, taps: Sequence[int]) -> None:
        """Read now what `features` will be asked for, in host memory from which a GPU copies
        without a wait."""
        self._read = tuple(taps), self._gathered(taps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def features(
        self,
        ids: Tensor,
        mask: Tensor,
        taps: Sequence[int],
        position: Tensor | None = None,
    ) -> Tensor:
        """As Target.features: [B, T, F, D], zeros in the padding."""
        known, wanted = self._read, tuple(taps)
        if known and known[0] == wanted:
            out = known[1]
        else:
            self._shape = ids.shape
            out = self._gathered(taps)
        return out.to(self._target.device, non_blocking=True)

    def _gathered(self, taps: Sequence[int]) -> Tensor:
        target = self._target
        out = torch.zeros(
            *self._shape,
            len(taps),
            self._store.width,
            dtype=target.dtype,
            pin_memory=target.device.type == "cuda",
        )
        for row, (b, start, size) in self._places:
            out[b, start : start + size] = self._store.row(row, taps).to(out.dtype)
        return out


class Freed(nn.Module):
    """Stands where a layer was."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError: without its layers the target has no features but the stored
        ones.
        """
        raise RuntimeError("the target's layers were freed because data.features was given")


def free_layers(target: Target) -> int:
    """Drop the stacked layers of a target's body, keep embedding, norms and LM head. Returns
    the bytes let go.
    """
    freed = 0
    for name, stack in layer_stacks(target.model):
        freed += sum(p.numel() * p.element_size() for p in stack.parameters())
        parent, _, last = name.rpartition(".")
        setattr(target.body.get_submodule(parent), last, nn.ModuleList([Freed()]))
    return freed


class Source:
    """What a head's forward gets as its target, by batch: the target itself, or with
    data.features one that reads the store. note: a line about it. pack: tokens of a packed
    sequence, 0 = not packed. meaning: what of it changes what is learned (see
    train.checkpoint.check_meaning). reads: the hidden states that most heads ask for."""

    def __init__(self, cfg: Any, head: Head, target: Target, rows: JoinedRows) -> None:
        """Opens the store, and frees the target's layers where no evaluation needs them.
        Raises UserError for a store that does not fit."""
        self.target, self.note = target, ""
        final = target.num_layers
        self.reads = head.taps if final in head.taps else (*head.taps, final)
        self.store: FeatureStore | None = None
        self.pack = cfg.data.max_length if cfg.data.packing else 0
        if self.pack:
            reason = (
                f"{type(head).kind} heads do not keep packed documents apart"
                if not head.packs
                else target.packs()
            )
            if reason:
                raise UserError(f"data.packing: {reason}; leave it out")
        self.meaning: dict[str, Any] = {}
        if not cfg.data.features:
            return
        folder = Path(cfg.data.features).expanduser()
        _ = target.head  # asks the layers how logits follow; later they may be gone
        self.store = FeatureStore.open(
            folder, identity_of(target, rows, computed_in(cfg)), self.reads, rows
        )
        freed = 0 if cfg.eval.every or cfg.eval.parity else free_layers(target)
        self.note = f"features: {folder}, {len(self.store.shards)} files in {self.store.stored}"
        self.note += f"; the target's layers are freed ({freed / 2**20:,.0f} MiB)" if freed else ""
        if self.store.stored != cfg.dtype:
            self.meaning["features"] = f"stored in {self.store.stored}"

    def __call__(self, batch: Batch) -> Any:
        """The target for one batch."""
        return self.target if self.store is None else CachedTarget(self.target, self.store, batch)
