"""Training rows as tokens, and which of them form batch k: a pure function of (seed, epoch,
k).

Nothing iterates, so nothing is rewound on resume, and the number of ranks does not change the
order. Tokens are cached by content (data, tokenizer, template, settings), so a second run
starts at once; they are read by mapping that file, so they need not fit into memory
(train/data/tokens.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from outrider.conf import disk
from outrider.conf.errors import UserError, first_line
from outrider.conf.jsonl import read_lines
from outrider.decode.models.identity import (
    cache_root,
    sha256_known,
    sha256_remembered,
    sha256_template,
    sha256_tokenizer,
)
from outrider.heads.batch import Batch, hash_u63
from outrider.train.config import DataConfig
from outrider.train.data.mix import File, Joined, drawn, shares
from outrider.train.data.packing import Limits, laid, shared
from outrider.train.data.rows import BadRow, ChatRow, RowReading, read_records, read_text
from outrider.train.data.tokenizing import CHUNK, LETTERS, Item, Parts, Work, encoded
from outrider.train.data.tokens import HASHED, PART, RowCounter, TokenWriter, mapped, sha256_of
from outrider.train.data.workers import processes
from outrider.train.waiting import nothing, turn

LEAST, ENOUGH = 8, 100  # rows that are held out at least, and of how many
VERSION = 4  # of the token cache: raise it when rows are encoded differently
LEFT_OUT = (
    "left_out.txt"  # in the run folder: file:line and reason of every row that is not trained on
)
ROW = (
    'write {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", '
    '"content": ".."}]}, ShareGPT\'s '
    '{"conversations": [..]} or {"text": ".."}'
)
MIN_TEXT_PROMPT = 16  # tokens of a plain text that serve as its prompt


@dataclass
class JoinedRows:
    """Token rows, end to end. ids: [S] int32. loss: [S] bool. offsets: [R + 1] int64. lines:
    [R] int64 (with `name`: where a row comes from). held: [R] bool, kept out of training.
    turns: of how many assistant turns, how many the chat template shows, and how many are
    supervised. notes: how many turns lack what. tally, about: what the token cache has counted
    and hashed already.

    files: which rows are from which file, where there are several; ids and loss are then
    `Joined`. weights: of the first files, how often each is drawn from; () = as they are."""

    name: str
    ids: Tensor
    loss: Tensor
    offsets: Tensor
    lines: Tensor
    held: Tensor
    bad: list[str]
    turns: tuple[int, int, int] = (0, 0, 0)
    tally: Tensor | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[File, ...] = ()
    weights: tuple[float, ...] = ()
    notes: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """[R] int64 tokens."""
        return self.offsets.diff()

    @functools.cached_property
    def supervised(self) -> int:
        """How many tokens are supervised."""
        known = self.about.get("supervised")
        return int(self.loss.sum()) if known is None else int(known)

    @functools.cached_property
    def max_id(self) -> int:
        """The largest token id, -1 without tokens."""
        known = self.about.get("max_id")
        return int(known) if known is not None else int(self.ids.max()) if self.ids.numel() else -1

    def where(self, row: int) -> str:
        """file:line of a row."""
        name = next((f.name for f in self.files if row < f.end), self.name)
        return f"{name}:{int(self.lines[row])}"

    def at(self, places: Sequence[int | str]) -> Tensor:
        """[R] bool, the rows of some lines, or of "FILE:LINE" as messages name them. Raises
        UserError for a line of several files, and for a file that is none of them."""
        found = torch.zeros_like(self.held)
        files = self.files or (File(self.name, 0, self.held.numel(), ""),)
        bare = [place for place in places if isinstance(place, int)]
        if bare and len(files) > 1:
            raise UserError(
                f"data.skip: {bare[0]} is a line of which of the {len(files)} files? give "
                f"FILE:LINE, such as {files[0].name}:{bare[0]}"
            )
        named = {file.name: [*bare] for file in files}
        for place in places:
            if not isinstance(place, str):
                continue
            name, _, line = place.rpartition(":")
            if name not in named:
                raise UserError(
                    f"data.skip: {place}: no such file is read; there are {', '.join(named)}"
                )
            named[name].append(int(line))
        for file in files:
            part = slice(file.first, file.end)
            lines = torch.tensor(named[file.name], dtype=torch.int64)
            found[part] = torch.isin(self.lines[part], lines)
        return found

    def reasons(self, most: int = 4) -> str:
        """Why rows were left out, in how many cases each."""
        bare = (re.sub(r"^.*?:\d+: | \(.*", "", problem).strip() for problem in self.bad)
        kinds = Counter(
            re.sub(r"'[^']*'", "'..'", re.sub(r"\d+", "N", problem)) for problem in bare
        )
        shown = ", ".join(f"{n} x {why}" for why, n in kinds.most_common(most))
        return shown + (f", {len(kinds) - most} more kinds" if len(kinds) > most else "")

    def supervision(self) -> str:
        """How many assistant turns are supervised, and why others are not; "" without chats."""
        turns, shown, kept = self.turns
        reasons = [
            f"{turns - shown:,} not shown apart by the chat template" if shown < turns else "",
            f"{shown - kept:,} beyond data.max_length" if kept < shown else "",
        ]
        why = ", ".join(filter(None, reasons))
        message = f"{kept:,} of {turns:,} assistant turns supervised" + (f" ({why})" if why else "")
        notes = (f"{count:,} {note}" for note, count in self.notes.items() if count)
        return "; ".join([message, *notes]) if turns else ""

    def list_bad(self, folder: Path) -> None:
        """Leave the list of the rows that were left out in a run folder; none where there are
        none. Best effort.
        """
        with contextlib.suppress(OSError):
            if self.bad:
                (folder / LEFT_OUT).write_text(
                    "".join(line + "\n" for line in self.bad), errors="backslashreplace"
                )
            else:
                (folder / LEFT_OUT).unlink(missing_ok=True)

    def batch(self, rows: Sequence[int], pack: int = 0) -> Batch:
        """Those rows, right-padded to the longest; pack: or packed end to end into sequences
        of so many tokens (or of the longest row, if that is more). How many positions a
        sequence has, `laid` decides."""
        lengths = self.lengths[list(rows)]
        sequences, width = laid(lengths.tolist(), pack)
        if pack:
            return self._packed(list(rows), sequences, width)
        place = torch.arange(width)
        mask = place < lengths[:, None]
        flat = (self.offsets[list(rows)][:, None] + place).clamp(max=self.ids.numel() - 1)
        return Batch(
            self.ids[flat].long() * mask,
            mask,
            self.loss[flat] & mask,
            torch.tensor(list(rows)),
        )

    def computed(self, rows: Sequence[int], pack: int = 0) -> int:
        """Positions of the batch of those rows, padding included."""
        sequences, width = laid(self.lengths[list(rows)].tolist(), pack)
        return len(sequences) * width

    def _packed(self, rows: list[int], sequences: list[list[int]], width: int) -> Batch:
        sizes = self.lengths[rows].tolist()
        ids = torch.zeros(len(sequences), width, dtype=torch.int64)
        mask, loss = (torch.zeros_like(ids, dtype=torch.bool) for _ in range(2))
        position = torch.zeros_like(ids)
        for b, chosen in enumerate(sequences):
            start = 0
            for i in chosen:
                part = slice(start, start := start + sizes[i])
                flat = slice(int(self.offsets[rows[i]]), int(self.offsets[rows[i] + 1]))
                ids[b, part], mask[b, part] = self.ids[flat].long(), True
                loss[b, part] = self.loss[flat]
                position[b, part] = torch.arange(sizes[i])
            position[b, start:] = torch.arange(width - start)
        numbers = torch.tensor([rows[i] for chosen in sequences for i in chosen])
        return Batch(ids, mask, loss, numbers, position)

    def prompt(self, row: int) -> list[int]:
        """The tokens before the first supervised one; of a plain text at least
        MIN_TEXT_PROMPT.
        """
        start, end = int(self.offsets[row]), int(self.offsets[row + 1])
        first = int(self.loss[start:end].to(torch.uint8).argmax())
        return self.ids[
            start : start + (first if first > 1 else min(MIN_TEXT_PROMPT, end - start - 1))
        ].tolist()

    def counts(self, vocab_size: int) -> Tensor:
        """[V] int64 occurrences among the supervised tokens of the training rows."""
        total = torch.zeros(vocab_size, dtype=torch.int64)
        if self.tally is not None:
            total[: self.tally.numel()] = self.tally
            return total
        first, count = 0, self.held.numel()
        while first < count:  # the tokens may not fit into memory, those of some rows do
            last = int(torch.searchsorted(self.offsets, self.offsets[first] + PART)) - 1
            rows = slice(first, first := min(max(last, first + 1), count))
            part = slice(int(self.offsets[rows.start]), int(self.offsets[rows.stop]))
            train = self.loss[part] & ~self.held[rows].repeat_interleave(self.lengths[rows])
            total += torch.bincount(self.ids[part][train].long(), minlength=vocab_size)
        return total

    def sha256(self) -> str:
        """Content hash of ids, mask, row bounds and the held-out choice."""
        return self.about.get("sha256") or sha256_of({name: getattr(self, name) for name in HASHED})

    def tokens_sha256(self) -> str:
        """Content hash of ids and row bounds alone, on which features depend."""
        if known := self.about.get("tokens_sha256"):
            return str(known)
        total = hashlib.sha256(self.ids.numpy().data)
        total.update(self.offsets.numpy().data)
        return total.hexdigest()


def joined(parts: Sequence[JoinedRows], weights: Sequence[float] = ()) -> JoinedRows:
    """The rows of several files, one file after the other; nothing is copied, counted or
    hashed that a file's cache knows. One file alone is what it is."""
    if len(parts) == 1:
        return parts[0]
    firsts = torch.tensor([0, *(p.lines.numel() for p in parts)]).cumsum(0).tolist()
    starts = torch.tensor([0, *(p.ids.numel() for p in parts)]).cumsum(0)
    hashes = [p.sha256() for p in parts]
    files = [
        File(p.name, first, end, sha256)
        for p, first, end, sha256 in zip(parts, firsts, firsts[1:], hashes, strict=False)
    ]
    size = max(p.tally.numel() if p.tally is not None else 1 + p.max_id for p in parts)
    requested, shown, kept = (sum(p.turns[i] for p in parts) for i in range(3))
    return JoinedRows(
        ", ".join(p.name for p in parts),
        # Of tensors they can what rows ask of them.
        cast(Tensor, Joined([p.ids for p in parts])),
        cast(Tensor, Joined([p.loss for p in parts])),
        torch.cat([starts[:1], *(p.offsets[1:] + s for p, s in zip(parts, starts, strict=False))]),
        torch.cat([p.lines for p in parts]),
        torch.cat([p.held for p in parts]),
        [problem for p in parts for problem in p.bad],
        (requested, shown, kept),
        torch.stack([p.counts(size) for p in parts]).sum(0),
        {
            "supervised": sum(p.supervised for p in parts),
            "max_id": max(p.max_id for p in parts),
            "sha256": _sha256_of_all(hashes),
            "tokens_sha256": _sha256_of_all([p.tokens_sha256() for p in parts]),
        },
        tuple(files),
        tuple(weights),
        notes=sum((Counter(p.notes) for p in parts), Counter()),
    )


def some_held_out(rows: JoinedRows) -> JoinedRows:
    """The same rows, LEAST of them held out where there are ENOUGH and data.held_out's share
    meant fewer: by a hash of their prompts, so that equal ones and all rows of a chat fall on
    one side whatever their order. A prompt of more than LEAST rows stays."""
    missing = LEAST - int(rows.held.sum())
    if missing <= 0 or rows.held.numel() < ENOUGH:
        return rows
    chats: dict[str, str] = {}  # file:line -> hash of its first prompt
    groups: dict[str, list[int]] = {}
    for row in (~rows.held).nonzero()[:, 0].tolist():
        name = chats.get(place := rows.where(row))
        if name is None:
            ids = json.dumps(rows.prompt(row))
            name = chats[place] = hashlib.sha256(ids.encode()).hexdigest()
        groups.setdefault(name, []).append(row)
    held = rows.held.clone()
    for name in sorted(groups):
        if missing > 0 and len(groups[name]) <= LEAST:
            held[groups[name]] = True
            missing -= len(groups[name])
    about = {k: v for k, v in rows.about.items() if k != "sha256"}
    about["sha256"] = _sha256_of_all([rows.sha256(), held.numpy().tobytes().hex()])
    return replace(rows, held=held, tally=None, about=about)


def _sha256_of_all(hashes: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


class BatchPlan:
    """Which training rows form which batch.

    An epoch is a permutation drawn from (seed, epoch); windows of `window` batches are sorted
    by length, cut into batches, and the batches of a window are shuffled. The incomplete batch
    at the end is left out; another permutation leaves out others. Raises UserError when there
    are fewer rows than one batch.

    skip: lines whose rows are not trained on. skipped: how many rows that were. parts: of each
    file with a weight its rows to train on and how many an epoch has of them. With weights the
    rows that an epoch permutes are drawn first, from (seed, epoch) as well.
    """

    def __init__(
        self,
        rows: JoinedRows,
        batch_size: int,
        window: int,
        seed: int,
        skip: Sequence[int | str] = (),
    ) -> None:
        self.rows, self.batch_size, self.window, self.seed = rows, batch_size, window, seed
        named = rows.at(skip)
        self.train, self.skipped = (~rows.held & ~named).nonzero()[:, 0], int(named.sum())
        self.per_epoch = self.train.numel() // batch_size
        if not self.per_epoch:
            raise UserError(
                f"batch_size: {batch_size} rows, but only {self.train.numel()} rows to train "
                "on; "
                + (f"set batch_size={self.train.numel()}, or " if self.train.numel() else "")
                + "give more data"
            )
        self.parts = self._parts()
        self._epoch = functools.lru_cache(maxsize=2)(self._order)

    def _parts(self) -> list[tuple[Tensor, int]]:
        if not self.rows.weights:
            return []
        files = self.rows.files[: len(self.rows.weights)]
        counts = shares(self.rows.weights, self.train.numel())
        found = []
        for file, count in zip(files, counts, strict=True):
            first, end = torch.searchsorted(self.train, torch.tensor([file.first, file.end]))
            if not count or first == end:
                why = "it has none to train on" if count else "its weight is too small"
                raise UserError(f"data.weights: {file.name} gives an epoch no row: {why}")
            found.append((self.train[first:end], count))
        return found

    def mixture(self) -> str:
        """What an epoch has of each file; "" of a single one."""
        message = [
            f"{file.name} {count:,} rows an epoch of {rows.numel():,} "
            f"({count / rows.numel():.3g} times each)"
            for file, (rows, count) in zip(self.rows.files, self.parts, strict=False)
        ]
        plain = [f"{f.name} {f.end - f.first:,} rows" for f in self.rows.files]
        return "; ".join(message or plain)

    def batch(self, step: int) -> list[int]:
        """Rows of the global batch of optimizer step `step`, sorted by length."""
        epoch, k = divmod(step, self.per_epoch)
        return self._epoch(epoch)[k].tolist()

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash_u63(self.seed, epoch))
        train = self.train
        if self.parts:
            drawing = enumerate(self.parts)
            train = torch.cat([drawn(r, n, epoch, self.seed, i) for i, (r, n) in drawing])
        order = torch.randperm(train.numel(), generator=generator)[
            : self.per_epoch * self.batch_size
        ]
        order = train[order]
        batches = []
        for part in order.split(self.window * self.batch_size):
            part = part[self.rows.lengths[part].argsort(stable=True)].view(-1, self.batch_size)
            batches.append(part[torch.randperm(part.shape[0], generator=generator)])
        return torch.cat(batches)

    def micro_batches(
        self,
        step: int,
        rank: int,
        world: int,
        micro: int,
        tokens: int = 0,
        pack: int = 0,
        together: bool = False,
    ) -> list[list[int]]:
        """The rows of one rank at one step, cut into micro-batches of at most `micro` rows (0
        = any number) and at most `tokens` computed positions (0 = any number; one row in any
        case). pack: rows are packed into sequences of so many tokens. together: every pass of the
        ranks is a collective (a sharded target), so all have equally many; without `tokens` they
        have anyway.

        batch_size is a multiple of world. Which rows a step has does not depend on world.
        """
        return self.shares(step, world, Limits(micro, tokens, pack, together))[rank]

    def shares(self, step: int, world: int, limits: Limits) -> list[list[list[int]]]:
        """The micro-batches of every rank at one step."""
        batch = self.batch(step)
        found = shared(self.rows.lengths[batch].tolist(), world, limits)
        return [[[batch[i] for i in part] for part in share] for share in found]

    def waste(self, limits: Limits, world: int = 1, steps: int = 64) -> float:
        """Share of computed positions that are padding, over the first steps."""
        real = padded = 0
        for step in range(min(steps, self.per_epoch)):
            for share in self.shares(step, world, limits):
                for rows in share:
                    real += int(self.rows.lengths[rows].sum())
                    padded += self.rows.computed(rows, limits.pack)
        return 1 - real / padded


def held_out_batches(
    rows: JoinedRows, limit: int, size: int = 8, tokens: int = 0
) -> Iterator[Batch]:
    """Up to `limit` held-out rows, sorted by length, at most `size` at a time and at most so
    many padded tokens (0 = no limit; one row in any case)."""
    chosen = rows.held.nonzero()[:limit, 0]
    chosen = chosen[rows.lengths[chosen].argsort(stable=True)]
    part: list[int] = []
    for row in chosen.tolist():
        full = tokens and int(rows.lengths[row]) * (len(part) + 1) > tokens
        if part and (len(part) == size or full):
            yield rows.batch(part)
            part = []
        part.append(row)
    if part:
        yield rows.batch(part)


def load_rows(
    cfg: DataConfig,
    tokenizer: Any,
    eos_ids: Iterable[int],
    vocab_size: int,
    context: int,
    check_stop: Callable[[], None] = nothing,
) -> JoinedRows:
    """Read, check and tokenize the data, or take the tokens from the cache. Of several
    processes one tokenizes and the others wait for its file, without a collective.

    check_stop: called while that takes long; what it raises ends it, and finished parts stay.
    Raises UserError: no such file or data set, too many malformed rows (the first is named by
    file:line), no row at all, token ids outside the target's vocabulary.
    """
    parts = [_load(file, tokenizer, eos_ids, context, check_stop) for file in _files(cfg)]
    for part in parts:
        _check_any(part)
    rows = joined(parts, cfg.weights)
    if cfg.held_out and not isinstance(cfg.held_out, str):
        rows = some_held_out(rows)
    total = rows.lines.numel() + len(rows.bad)
    if len(rows.bad) > cfg.max_bad_fraction * total:
        raise UserError(
            f"{rows.bad[0]}; {len(rows.bad)} of {total} rows are unusable ({rows.reasons()}), "
            f"above data.max_bad_fraction={cfg.max_bad_fraction}; mend them or raise it (a run "
            f"that starts lists all of them in {LEFT_OUT})"
        )
    if rows.max_id >= vocab_size:
        raise UserError(
            f"target: its tokenizer makes id {rows.max_id}, its vocabulary has {vocab_size} "
            "entries; use the tokenizer of this model"
        )
    if not rows.supervised:
        raise UserError(
            f"data.path: no token of {rows.name} is supervised; the chat template marks no "
            "assistant text"
        )
    return rows


def _files(cfg: DataConfig) -> list[DataConfig]:
    """A configuration for each file: those of data.path, and data.held_out if it names one,
    last. Raises UserError for a file that is named twice."""
    held = cfg.held_out
    if not isinstance(held, str):
        found = [replace(cfg, path=path) for path in cfg.paths]
    else:
        if not Path(held).expanduser().is_file():
            raise UserError(f"data.held_out: {held} is neither a file nor a share of the rows")
        found = [replace(cfg, path=path, held_out=0.0) for path in cfg.paths]
        own = replace(cfg, path=held, held_out=1.0, streaming=False)
        found.append(own if cfg.kind == "text" else replace(own, kind="jsonl"))
    if len(found) > 1:
        places = [Path(str(f.path)).expanduser().resolve() for f in found]
        for i, place in enumerate(places):
            if place in places[:i]:
                instead = (
                    "give data.weights"
                    if i < len(cfg.paths)
                    else "it is trained on; give another file, or a share of its rows"
                )
                key = "path" if i < len(cfg.paths) else "held_out"
                raise UserError(f"data.{key}: {found[i].path} is named twice; {instead}")
    return found


def _check_any(rows: JoinedRows) -> None:
    """Raises UserError for a file without a row that can be used."""
    total = rows.lines.numel() + len(rows.bad)
    if not total:
        raise UserError(
            f"data.path: {rows.name} holds no rows; give a file with messages, conversations or "
            "text"
        )
    if len(rows.bad) == total:
        raise UserError(
            f"{rows.bad[0]}; none of the {total} rows can be used ({rows.reasons()}): " + ROW
        )


def _load(
    cfg: DataConfig,
    tokenizer: Any,
    eos_ids: Iterable[int],
    context: int,
    check_stop: Callable[[], None],
) -> JoinedRows:
    """The rows of one file or data set."""
    how = RowReading(
        min(cfg.max_length, context),
        frozenset(eos_ids),
        cfg.turns,
        cfg.last_turn_only,
        cfg.chat_template_kwargs,
    )
    source, name, content = _source(cfg, check_stop)
    identity = [
        VERSION,
        cfg.kind,
        content,
        sha256_tokenizer(tokenizer),
        sha256_template(tokenizer),
        sorted(how.eos),
        how.max_length,
        cfg.held_out,
        how.turns,
        how.last_turn_only,
        how.kwargs,
    ]
    text = json.dumps(identity, sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = cache_root() / "tokens" / f"{key}.safetensors" if cfg.cache else None
    work = Work(name, tokenizer, how, float(cfg.held_out))
    # A file that this machine has not read yet is read through once, by whose turn it is.
    rows = _from_cache(path, name) if path is not None and _read(path) else None
    if rows is None and path is not None:
        with turn(f"tokens-{key}", cfg.wait, check_stop):
            rows = _from_cache(path, name) or _tokenize(cfg, source, work, path, check_stop)
    elif rows is None:
        rows = _tokenize(cfg, source, work, None, check_stop)
    return rows


def _source(cfg: DataConfig, check_stop: Callable[[], None]) -> tuple[Iterator[Item], str, str]:
    """(rows, name for messages, content hash)."""
    if cfg.kind in ("jsonl", "text"):
        path = Path(str(cfg.path)).expanduser()
        if not path.is_file():
            raise UserError(
                f"data.path: no such file {path}; give a "
                f"{'JSONL' if cfg.kind == 'jsonl' else 'text'} file"
            )
        rows = read_lines(path) if cfg.kind == "jsonl" else read_text(path)
        return rows, str(path), _content(path, cfg, check_stop)
    import datasets

    (folder,) = cfg.paths
    name = folder or cfg.name
    try:
        if folder and (Path(folder) / "state.json").is_file():
            data = datasets.load_from_disk(folder)  # mapped, so streamed in any case
        elif cfg.streaming:
            return _streamed(cfg, f"{name}[{cfg.split}]", check_stop)
        elif folder:
            data = datasets.load_dataset(folder, split=cfg.split)
        else:
            data = datasets.load_dataset(cfg.name, split=cfg.split, revision=cfg.revision)
    except Exception as error:  # hub, network, parsing: all about what the user named
        raise UserError(
            f"data.name: cannot load {name} ({first_line(error)}); check name, split and network"
        ) from None
    return (
        read_records(data, f"{name}[{cfg.split}]"),
        f"{name}[{cfg.split}]",
        str(data._fingerprint),
    )


def _content(file: Path, cfg: DataConfig, check_stop: Callable[[], None]) -> str:
    """The hash of a file's bytes. Of several processes one reads a file that is new here."""
    known = sha256_known(file)
    if known is not None:
        return known
    place = hashlib.sha256(str(file.resolve()).encode(errors="surrogateescape")).hexdigest()
    with turn(f"hash-{place[:32]}", cfg.wait, check_stop):
        return sha256_remembered([file])[0]


def _streamed(
    cfg: DataConfig, name: str, check_stop: Callable[[], None]
) -> tuple[Iterator[ChatRow | BadRow], str, str]:
    """As _source, file after file and row after row, without a copy on this machine. The
    content hash is that of the
    files: of their bytes in a local folder, of their names at a resolved commit on the hub."""
    import datasets

    (folder,) = cfg.paths
    where = {"path": folder} if folder else {"path": cfg.name, "revision": cfg.revision}
    builder = datasets.load_dataset_builder(**where)
    data = datasets.load_dataset(**where, split=cfg.split, streaming=True)
    files = [str(f) for f in (builder.config.data_files or {}).get(cfg.split, [])]
    parts = [
        [Path(f).name, _content(Path(f), cfg, check_stop)] if Path(f).is_file() else [f]
        for f in files
    ]
    content = ["stream", parts or [[str(where), cfg.split, builder.hash]]]
    return _unbroken(read_records(data, name), name), name, json.dumps(content)


def _unbroken(rows: Iterator[ChatRow | BadRow], name: str) -> Iterator[ChatRow | BadRow]:
    """The same rows; a connection or a file that fails on the way is told in words."""
    count = 0
    try:
        for row in rows:
            yield row
            count += 1
    except UserError:
        raise
    except Exception as error:  # network, parquet, decompression: all about what the user named
        raise UserError(
            f"data.name: {name} cannot be read beyond row {count} ({first_line(error)}); start the "
            "same command again, or set data.streaming=false"
        ) from None


def _tokenize(
    cfg: DataConfig,
    source: Iterable[Item],
    work: Work,
    path: Path | None,
    check_stop: Callable[[], None],
) -> JoinedRows:
    """Encode every row. path: the token cache to leave, if any; where it cannot be written the
    run goes on with the tokens in memory, unless they are streamed."""
    bad: list[str] = []
    turns = [0, 0, 0]
    notes: Counter[str] = Counter()
    message = RowCounter(work.name)
    parts = Parts(path and cache_root() / "token-parts" / f"{path.stem}-{CHUNK}-{LETTERS}")
    with TokenWriter(path.parent if path else None) as writer:
        try:
            for part in encoded(source, work, processes(cfg.workers), parts, check_stop):
                writer.extend(part.writer.tensors())
                bad += part.bad
                turns = [a + b for a, b in zip(turns, part.turns, strict=True)]
                notes += part.notes
                message.add(part.rows, writer.offsets[-1])
            if path is not None:
                writer.write(path, {"bad": bad, "turns": turns, "notes": dict(notes)})
                _remember(path)
                parts.remove()
        except OSError as error:
            if path is None or writer.spilled or cfg.streaming or error.filename is None:
                raise UserError(
                    f"data.cache: the tokens do not go to {path.parent if path else 'memory'} "
                    f"({error.strerror or error}); free space there or set OUTRIDER_CACHE"
                ) from None
            path = None
        kept = _from_cache(path, work.name)
        named = [work.name + line for line in bad]
        about = {"bad": named, "turns": turns, "notes": dict(notes)}
        return kept or _rows(work.name, writer.tensors(), about)


def _rows(name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> JoinedRows:
    """about: what a token file says of itself; the bad rows by their full names."""
    requested, shown, kept = about["turns"]
    bad, notes = about["bad"], about.get("notes", {})
    named: dict[str, Any] = dict(tensors)
    return JoinedRows(
        name, **named, bad=bad, turns=(requested, shown, kept), about=about, notes=notes
    )


def _from_cache(path: Path | None, name: str) -> JoinedRows | None:
    """The rows of a token file, None without a sound one. It is read through once on this
    machine, and again when it changes."""
    if path is None:
        return None
    known = _read(path)
    found = mapped(path, check=not known)
    if found is None:
        return None
    if not known:
        _remember(path)
    tensors, about = found
    try:
        bad = [name + line for line in about["bad"]]
        return _rows(name, tensors, {**about, "bad": bad})
    except (KeyError, TypeError, ValueError):
        return None


def _read(path: Path) -> bool:
    """Whether this machine has read a token file through, as it is now, and found it sound."""
    return _memory(path) == _stat(path)


def _stat(path: Path) -> list[int] | None:
    """What changes when a file does."""
    with contextlib.suppress(OSError):
        s = path.stat()
        return [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino]
    return None


def _checked(path: Path) -> Path:
    return cache_root() / "checked" / f"{path.stem}.json"


def _memory(path: Path) -> list[int] | str:
    """The `_stat` under which a token file was found sound."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return list(json.loads(_checked(path).read_text()))
    return "never"


def _remember(path: Path) -> None:
    """This token file is sound as it is now. Best effort."""
    with contextlib.suppress(OSError):
        disk.write_text(_checked(path), json.dumps(_stat(path)))
