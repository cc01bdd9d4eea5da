"""Training rows as tokens, and which of them form batch k: a pure function of (seed, epoch, k).

Nothing iterates, so nothing is rewound on resume, and the number of ranks does not change the order. Tokens are cached
by content (data, tokenizer, template, settings), so a second run starts at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import UserError
from decode.identity import cache_root, sha256_file, sha256_template, sha256_tokenizer
from heads.base import Batch
from train.config import DataConfig
from train.rows import BadRow, Row, encode, read_jsonl, read_records, read_text

VERSION = 1  # of the token cache: raise it when rows are encoded differently
MIN_TEXT_PROMPT = 16  # tokens of a plain text that serve as its prompt


@dataclass
class Rows:
    """Token rows, end to end. ids: [S] int32. loss: [S] bool. offsets: [R + 1] int64. lines: [R] int64 (with `name`:
    where a row comes from). held: [R] bool, kept out of training."""

    name: str
    ids: Tensor
    loss: Tensor
    offsets: Tensor
    lines: Tensor
    held: Tensor
    bad: list[str]

    @functools.cached_property
    def lengths(self) -> Tensor:
        """[R] int64 tokens."""
        return self.offsets.diff()

    def where(self, row: int) -> str:
        """file:line of a row."""
        return f"{self.name}:{int(self.lines[row])}"

    def batch(self, rows: Sequence[int], pack: int = 0) -> Batch:
        """Those rows, right-padded to the longest; pack: or packed end to end into sequences of so many tokens (or of
        the longest row, if that is more)."""
        lengths = self.lengths[list(rows)]
        if pack:
            return self._packed(list(rows), max(pack, int(lengths.max())))
        width = int(lengths.max())
        place = torch.arange(width)
        mask = place < lengths[:, None]
        flat = (self.offsets[list(rows)][:, None] + place).clamp(max=self.ids.numel() - 1)
        return Batch(self.ids[flat].long() * mask, mask, self.loss[flat] & mask, torch.tensor(list(rows)))

    def _packed(self, rows: list[int], width: int) -> Batch:
        """First fit decreasing: every row goes into the first sequence that has room for it."""
        sizes = self.lengths[rows].tolist()
        bins: list[list[int]] = []
        room: list[int] = []
        for i in sorted(range(len(rows)), key=lambda i: -sizes[i]):
            spot = next((b for b, free in enumerate(room) if free >= sizes[i]), len(bins))
            if spot == len(bins):
                bins.append([])
                room.append(width)
            bins[spot].append(i)
            room[spot] -= sizes[i]
        longest = width - min(room)
        ids = torch.zeros(len(bins), longest, dtype=torch.int64)
        mask, loss = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        position = torch.zeros_like(ids)
        for b, chosen in enumerate(bins):
            start = 0
            for i in chosen:
                part = slice(start, start := start + sizes[i])
                flat = slice(int(self.offsets[rows[i]]), int(self.offsets[rows[i] + 1]))
                ids[b, part], mask[b, part], loss[b, part] = self.ids[flat].long(), True, self.loss[flat]
                position[b, part] = torch.arange(sizes[i])
            position[b, start:] = torch.arange(longest - start)
        return Batch(ids, mask, loss, torch.tensor([rows[i] for chosen in bins for i in chosen]), position)

    def prompt(self, row: int) -> list[int]:
        """The tokens before the first supervised one; of a plain text at least MIN_TEXT_PROMPT."""
        start, end = int(self.offsets[row]), int(self.offsets[row + 1])
        first = int(self.loss[start:end].to(torch.uint8).argmax())
        return self.ids[start : start + (first if first > 1 else min(MIN_TEXT_PROMPT, end - start - 1))].tolist()

    def counts(self, vocab_size: int) -> Tensor:
        """[V] int64 occurrences among the supervised tokens of the training rows."""
        train = self.loss & ~self.held.repeat_interleave(self.lengths)
        return torch.bincount(self.ids[train].long(), minlength=vocab_size)

    def sha256(self) -> str:
        """Content hash of ids, mask, row bounds and the held-out choice."""
        total = hashlib.sha256()
        for tensor in (self.ids, self.loss, self.offsets, self.held):
            total.update(tensor.numpy().tobytes())
        return total.hexdigest()


class Plan:
    """Which training rows form which batch.

    An epoch is a permutation drawn from (seed, epoch); windows of `window` batches are sorted by length, cut into
    batches, and the batches of a window are shuffled. The incomplete batch at the end is left out; another permutation
    leaves out others. Raises UserError when there are fewer rows than one batch.
    """

    def __init__(self, rows: Rows, batch_size: int, window: int, seed: int) -> None:
        self.rows, self.batch_size, self.window, self.seed = rows, batch_size, window, seed
        self.train = (~rows.held).nonzero()[:, 0]
        self.per_epoch = self.train.numel() // batch_size
        if not self.per_epoch:
            raise UserError(f"batch_size: {batch_size} rows, but only {self.train.numel()} rows to train on; lower it")
        self._epoch = functools.lru_cache(maxsize=2)(self._order)

    def batch(self, step: int) -> list[int]:
        """Rows of the global batch of optimizer step `step`, sorted by length."""
        epoch, k = divmod(step, self.per_epoch)
        return self._epoch(epoch)[k].tolist()

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash_u63(self.seed, epoch))
        order = torch.randperm(self.train.numel(), generator=generator)[: self.per_epoch * self.batch_size]
        order = self.train[order]
        batches = []
        for part in order.split(self.window * self.batch_size):
            part = part[self.rows.lengths[part].argsort(stable=True)].view(-1, self.batch_size)
            batches.append(part[torch.randperm(part.shape[0], generator=generator)])
        return torch.cat(batches)

    def micro_batches(self, step: int, rank: int, world: int, micro: int) -> list[list[int]]:
        """The rows of one rank at one step, cut into micro-batches of at most `micro` rows (0 = all at once).

        Ranks take every world-th row of the sorted batch, so their padded sizes are alike. batch_size is a multiple of
        world, so all ranks have equally many micro-batches.
        """
        mine = self.batch(step)[rank::world]
        size = micro or len(mine)
        return [mine[i : i + size] for i in range(0, len(mine), size)]

    def waste(self, micro: int, world: int = 1, steps: int = 64, pack: int = 0) -> float:
        """Share of computed positions that are padding, over the first steps."""
        real = padded = 0
        for step in range(min(steps, self.per_epoch)):
            for rank in range(world):
                for rows in self.micro_batches(step, rank, world, micro):
                    lengths = self.rows.lengths[rows]
                    size = self.rows.batch(rows, pack).ids.numel() if pack else int(lengths.max()) * len(rows)
                    real, padded = real + int(lengths.sum()), padded + size
        return 1 - real / padded


def hash_u63(*values: int | str) -> int:
    """A seed for torch.Generator from any address."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8]) >> 1


def held_out_batches(rows: Rows, limit: int, size: int = 8) -> Iterator[Batch]:
    """Up to `limit` held-out rows, sorted by length, `size` at a time."""
    chosen = rows.held.nonzero()[:limit, 0]
    chosen = chosen[rows.lengths[chosen].argsort(stable=True)]
    for part in chosen.split(size):
        if part.numel():
            yield rows.batch(part.tolist())


def load_rows(cfg: DataConfig, tokenizer: Any, eos_ids: Sequence[int], vocab_size: int, context: int) -> Rows:
    """Read, check and tokenize the data, or take the tokens from the cache.

    Raises UserError: no such file or data set, too many malformed rows (the first is named by file:line), no row at
    all, token ids outside the target's vocabulary.
    """
    max_length = min(cfg.max_length, context)
    source, name, content = _source(cfg)
    identity = [VERSION, cfg.kind, content, sha256_tokenizer(tokenizer), sha256_template(tokenizer), sorted(eos_ids),
                max_length, cfg.held_out]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    path = cache_root() / "tokens" / f"{key}.safetensors"
    rows = _from_cache(path, name) if cfg.cache else None
    if rows is None:
        rows = _tokenize(source, name, tokenizer, eos_ids, max_length, cfg.held_out)
        if cfg.cache:
            _to_cache(rows, path)
    total = rows.lines.numel() + len(rows.bad)
    if not total:
        raise UserError(f"data.path: {name} holds no rows; give a file with messages, conversations or text")
    if len(rows.bad) > cfg.max_bad_fraction * total:
        raise UserError(f"{rows.bad[0]}; {len(rows.bad)} of {total} rows are unusable, above data.max_bad_fraction="
                        f"{cfg.max_bad_fraction}; mend them or raise it")
    if rows.ids.numel() and int(rows.ids.max()) >= vocab_size:
        raise UserError(f"target: its tokenizer makes id {int(rows.ids.max())}, its vocabulary has {vocab_size} "
                        "entries; use the tokenizer of this model")
    if not bool(rows.loss.any()):
        raise UserError(f"data.path: no token of {name} is supervised; the chat template marks no assistant text")
    return rows


def _source(cfg: DataConfig) -> tuple[Iterator[Row | BadRow], str, str]:
    """(rows, name for messages, content hash)."""
    if cfg.kind in ("jsonl", "text"):
        path = Path(cfg.path).expanduser()
        if not path.is_file():
            raise UserError(f"data.path: no such file {path}; give a {'JSONL' if cfg.kind == 'jsonl' else 'text'} file")
        return (read_jsonl if cfg.kind == "jsonl" else read_text)(path), str(path), sha256_file(path)
    import datasets

    name = cfg.path or cfg.name
    try:
        if cfg.path and (Path(cfg.path) / "state.json").is_file():
            data = datasets.load_from_disk(cfg.path)
        elif cfg.path:
            data = datasets.load_dataset(cfg.path, split=cfg.split)
        else:
            data = datasets.load_dataset(cfg.name, split=cfg.split, revision=cfg.revision)
    except Exception as error:  # hub, network, parsing: all about what the user named
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"data.name: cannot load {name} ({line}); check name, split and network") from None
    return read_records(data, f"{name}[{cfg.split}]"), f"{name}[{cfg.split}]", str(data._fingerprint)


def _tokenize(source: Iterator[Row | BadRow], name: str, tokenizer: Any, eos_ids: Sequence[int], max_length: int,
              held_out: float) -> Rows:
    ids: list[int] = []
    loss: list[bool] = []
    offsets, lines, held, bad = [0], [], [], []
    for row in source:
        try:
            if isinstance(row, BadRow):
                raise row
            parts = encode(row, tokenizer, eos_ids, max_length)
        except BadRow as problem:
            bad.append(str(problem))
            continue
        question = row.text if row.chat is None else "\n".join(m["content"] for m in row.chat if m["role"] == "user")
        share = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8]) / 2**64
        for part, mask in parts:
            ids += part
            loss += mask
            offsets.append(len(ids))
            lines.append(int(row.where.rpartition(":")[2]))
            held.append(share < held_out)
    return Rows(name, torch.tensor(ids, dtype=torch.int32), torch.tensor(loss, dtype=torch.bool),
                torch.tensor(offsets, dtype=torch.int64), torch.tensor(lines, dtype=torch.int64),
                torch.tensor(held, dtype=torch.bool), bad)


def _from_cache(path: Path, name: str) -> Rows | None:
    try:
        with safe_open(path, "pt") as file:
            parts = {k: file.get_tensor(k) for k in ("ids", "loss", "offsets", "lines", "held")}
            saved = json.loads(file.metadata()["rows"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
    rows = Rows(name, **parts, bad=[name + line for line in saved["bad"]])
    return rows if rows.sha256() == saved["sha256"] else None


def _to_cache(rows: Rows, path: Path) -> None:
    """Best effort: without room for a cache the run goes on."""
    meta = {"sha256": rows.sha256(), "bad": [line.removeprefix(rows.name) for line in rows.bad]}
    stage = path.with_name(f".tmp-{path.name}-{id(rows)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {k: getattr(rows, k) for k in ("ids", "loss", "offsets", "lines", "held")}
        save_file(tensors, stage, {"rows": json.dumps(meta)})
        stage.replace(path)
    except (OSError, SafetensorError):
        stage.unlink(missing_ok=True)
