"""Training rows as tokens, and which of them form batch k: a pure function of (seed, epoch,
k).

Nothing iterates, so nothing is rewound on resume, and the number of ranks does not change the
order.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.heads.batch import Batch, hash_u63
from outrider.train.data.passes import Limits, shared
from outrider.train.data.tokens import DROPPED, HIDDEN, TURNS, UNLEARNED, Totals, totals

LEAST, ENOUGH = 8, 100  # rows that are held out at least, and of how many
# In the run folder: file:line and reason of every row that is not trained on.
LEFT_OUT = "left_out.txt"
MIN_TEXT_PROMPT = 16  # tokens of a plain text that serve as its prompt


class File(NamedTuple):
    """Which rows of a whole a file has: `first` to the one before `end`. sha256: of its tokens
    and masks."""

    name: str
    first: int
    end: int
    sha256: str


class Joined:
    """1-d tensors end to end, never copied into one. Of what a tensor can, what token rows ask
    for."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = [*parts]
        self.starts = torch.tensor([0, *(part.numel() for part in parts)]).cumsum(0).tolist()

    def numel(self) -> int:
        """Return how many values there are."""
        return self.starts[-1]

    def __getitem__(self, places: slice) -> Tensor:
        """The values of a slice with step 1."""
        begin, end, _ = places.indices(self.numel())
        cut = [
            part[max(begin - start, 0) : max(end - start, 0)]
            for part, start in zip(self.parts, self.starts, strict=False)
        ]
        filled = [part for part in cut if part.numel()] or cut[:1]
        return filled[0] if len(filled) == 1 else torch.cat(filled)


@dataclass
class JoinedRows:
    """Token rows, end to end. ids: [S] int32. loss: [S] bool. offsets: [R + 1] int64. lines:
    [R] int64 (with `name`: where a row comes from). held: [R] bool, kept out of training. bad:
    "file:line: reason" of rows that were left out. counted: assistant turns by what became of
    them. known: the totals, where they are on file.

    files: which rows are from which file, where there are several; ids and loss are then
    `Joined`."""

    name: str
    ids: Tensor
    loss: Tensor
    offsets: Tensor
    lines: Tensor
    held: Tensor
    bad: list[str]
    counted: Mapping[str, int] = field(default_factory=dict)
    known: Totals | None = None
    files: tuple[File, ...] = ()

    @functools.cached_property
    def totals(self) -> Totals:
        """What follows from all tokens."""
        return self.known or totals(vars(self))

    @functools.cached_property
    def lengths(self) -> Tensor:
        """[R] int64 tokens."""
        return self.offsets.diff()

    def where(self, row: int) -> str:
        """file:line of a row."""
        name = next((f.name for f in self.files if row < f.end), self.name)
        return f"{name}:{int(self.lines[row])}"

    def at(self, places: Sequence[int | str]) -> Tensor:
        """[R] bool, the rows of some lines, or of "FILE:LINE" as messages name them. Raises
        UserError for a line of several files, and for a file that is none of them."""
        found = torch.zeros_like(self.held)
        files = self.files or (File(self.name, 0, self.held.numel(), ""),)
        for place in places:
            name, _, line = str(place).rpartition(":")
            here = [file for file in files if name in ("", file.name)]
            if not here:
                known = ", ".join(file.name for file in files)
                raise UserError(f"data.skip: {place}: no such file is read; there are {known}")
            if len(here) > 1:
                raise UserError(
                    f"data.skip: {place} is a line of which of the {len(files)} files? give "
                    f"FILE:LINE, such as {files[0].name}:{place}"
                )
            part = slice(here[0].first, here[0].end)
            found[part] |= self.lines[part] == int(line)
        return found

    def reasons(self, most: int = 4) -> str:
        """Return why rows were left out, in how many cases each."""
        bare = (re.sub(r"^.*?:\d+: | \(.*", "", problem).strip() for problem in self.bad)
        kinds = Counter(
            re.sub(r"'[^']*'", "'..'", re.sub(r"\d+", "N", problem)) for problem in bare
        )
        shown = ", ".join(f"{n} x {why}" for why, n in kinds.most_common(most))
        return shown + (f", {len(kinds) - most} more kinds" if len(kinds) > most else "")

    def supervision(self) -> str:
        """Return how many assistant turns are supervised, and why others are not; ""
        where there is nothing to say."""
        turns, shown, kept = (self.counted.get(name, 0) for name in TURNS)
        reasons = [
            f"{turns - shown:,} not shown apart by the chat template" if shown < turns else "",
            f"{shown - kept:,} beyond data.max_length" if kept < shown else "",
        ]
        why = ", ".join(filter(None, reasons))
        message = f"{kept:,} of {turns:,} assistant turns supervised" + (f" ({why})" if why else "")
        known = ((note, self.counted.get(note, 0)) for note in (DROPPED, HIDDEN, UNLEARNED))
        notes = (f"{n:,} {note}" for note, n in known if n)
        return "; ".join([message] * bool(turns) + [*notes])

    def list_bad(self, folder: Path) -> None:
        """Leave the list of the rows that were left out in a run folder; none where there are
        none. Best effort.
        """
        text = "".join(line + "\n" for line in self.bad)
        with contextlib.suppress(OSError):
            (folder / LEFT_OUT).unlink(missing_ok=True)
            if self.bad:
                (folder / LEFT_OUT).write_text(text, errors="backslashreplace")

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the given rows, right-padded to the longest."""
        starts, sizes = (t[list(rows)].tolist() for t in (self.offsets, self.lengths))
        ids = torch.zeros(len(rows), max(sizes), dtype=torch.int64)
        mask, loss = (torch.zeros_like(ids, dtype=torch.bool) for _ in range(2))
        for b, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            part = slice(start, start + size)
            ids[b, :size], mask[b, :size], loss[b, :size] = self.ids[part], True, self.loss[part]
        return Batch(ids, mask, loss, torch.tensor(rows))

    def prompt(self, row: int) -> list[int]:
        """Return the tokens before the first supervised one; of a plain text at least
        MIN_TEXT_PROMPT."""
        start, end = int(self.offsets[row]), int(self.offsets[row + 1])
        first = int(self.loss[start:end].to(torch.uint8).argmax())
        return self.ids[
            start : start + (first if first > 1 else min(MIN_TEXT_PROMPT, end - start - 1))
        ].tolist()

    def counts(self, vocab_size: int) -> Tensor:
        """[V] int64 occurrences among the supervised tokens of the training rows."""
        found = torch.zeros(vocab_size, dtype=torch.int64)
        found[: self.totals.tally.numel()] = self.totals.tally
        return found


def joined(parts: Sequence[JoinedRows]) -> JoinedRows:
    """Return the rows of several files, one file after the other; nothing is copied,
    counted or hashed that a file's cache knows. One file alone is what it is."""
    if len(parts) == 1:
        return parts[0]
    firsts = torch.tensor([0, *(p.lines.numel() for p in parts)]).cumsum(0).tolist()
    starts = torch.tensor([0, *(p.ids.numel() for p in parts)]).cumsum(0)
    known = [p.totals for p in parts]
    files = [
        File(p.name, first, end, p.totals.sha256)
        for p, first, end in zip(parts, firsts, firsts[1:], strict=False)
    ]
    tally = torch.zeros(max(t.tally.numel() for t in known), dtype=torch.int64)
    for one in known:
        tally[: one.tally.numel()] += one.tally
    return JoinedRows(
        ", ".join(p.name for p in parts),
        # Of tensors they can what rows ask of them.
        cast(Tensor, Joined([p.ids for p in parts])),
        cast(Tensor, Joined([p.loss for p in parts])),
        torch.cat([starts[:1], *(p.offsets[1:] + s for p, s in zip(parts, starts, strict=False))]),
        torch.cat([p.lines for p in parts]),
        torch.cat([p.held for p in parts]),
        [problem for p in parts for problem in p.bad],
        sum((Counter(p.counted) for p in parts), Counter()),
        Totals(
            sum(t.supervised for t in known),
            max(t.max_id for t in known),
            _sha256_of_all([t.sha256 for t in known]),
            _sha256_of_all([t.tokens_sha256 for t in known]),
            tally,
        ),
        tuple(files),
    )


def some_held_out(rows: JoinedRows) -> JoinedRows:
    """Return the same rows, LEAST of them held out where there are ENOUGH and
    data.held_out's share meant fewer: by a hash of their prompts, so that equal ones and
    all rows of a chat fall on one side whatever their order. A prompt of more than LEAST
    rows stays."""
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
    held, tally = rows.held.clone(), rows.totals.tally.clone()
    for name in sorted(groups):
        if missing > 0 and len(groups[name]) <= LEAST:
            held[groups[name]] = True
            missing -= len(groups[name])
            for row in groups[name]:
                part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
                tokens = rows.ids[part][rows.loss[part]].long()
                tally -= torch.bincount(tokens, minlength=tally.numel())
    sha256 = _sha256_of_all([rows.totals.sha256, held.numpy().tobytes().hex()])
    return replace(rows, held=held, known=rows.totals._replace(tally=tally, sha256=sha256))


def _sha256_of_all(hashes: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


class BatchPlan:
    """Which training rows form which batch.

    An epoch is a permutation drawn from (seed, epoch); windows of `window` batches are sorted
    by length, cut into batches, and the batches of a window are shuffled. The incomplete batch
    at the end is left out; another permutation leaves out others. Raises UserError when there
    are fewer rows than one batch.

    skip: lines whose rows are not trained on. skipped: how many rows that were. follow:
    batches of a round; the first epoch then goes round by round through the rows in their
    order, each drawn, sorted and shuffled as an epoch is. 0: the epoch is one round.
    """

    def __init__(
        self,
        rows: JoinedRows,
        batch_size: int,
        window: int,
        seed: int,
        skip: Sequence[int | str] = (),
        follow: int = 0,
    ) -> None:
        self.follow = follow
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
        self._epoch = functools.lru_cache(maxsize=2)(self._order)

    def batch(self, step: int) -> list[int]:
        """Return rows of the global batch of optimizer step `step`, sorted by length."""
        epoch, k = divmod(step, self.per_epoch)
        return self._epoch(epoch)[k].tolist()

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash_u63(self.seed, epoch))
        size = self.follow * self.batch_size if self.follow and not epoch else self.train.numel()
        batches = []
        for rows in self.train.split(size):
            order = torch.randperm(rows.numel(), generator=generator)
            order = rows[order[: rows.numel() // self.batch_size * self.batch_size]]
            for part in order.split(self.window * self.batch_size) if order.numel() else ():
                part = part[self.rows.lengths[part].argsort(stable=True)].view(-1, self.batch_size)
                batches.append(part[torch.randperm(part.shape[0], generator=generator)])
        return torch.cat(batches)

    def round(self, step: int) -> tuple[int, Tensor]:
        """Return (the step behind the round that a step is of, its rows ascending)."""
        if not self.follow or step >= self.per_epoch:
            return sys.maxsize, self.train
        rounds = self.train.split(self.follow * self.batch_size)
        at = step // self.follow
        return min((at + 1) * self.follow, self.per_epoch), rounds[at]

    def shares(self, step: int, world: int, limits: Limits) -> list[list[list[int]]]:
        """Return the rows of every rank at one step, cut into micro-batches. world divides
        batch_size; which rows a step has does not depend on it."""
        batch = self.batch(step)
        found = shared(self.rows.lengths[batch].tolist(), world, limits)
        return [[[batch[i] for i in part] for part in share] for share in found]


def held_out_batches(
    rows: JoinedRows, limit: int, size: int = 8, tokens: int = 0
) -> Iterator[Batch]:
    """Up to `limit` held-out rows, in batches as `grouped` makes them."""
    chosen = rows.held.nonzero()[:limit, 0]
    return map(rows.batch, grouped(chosen, rows.lengths, size, tokens))


def grouped(rows: Tensor, lengths: Tensor, size: int, tokens: int) -> Iterator[list[int]]:
    """Yield rows by rising length, at most `size` at a time (0 = any number) and at most so
    many padded tokens (0 = any number; one row in any case). lengths: of all rows."""
    part: list[int] = []
    for row in rows[lengths[rows].argsort(stable=True)].tolist():
        full = tokens and int(lengths[row]) * (len(part) + 1) > tokens
        if part and (len(part) == size or full):
            yield part
            part = []
        part.append(row)
    if part:
        yield part
