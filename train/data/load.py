"""Data files, and sets of `datasets`, as rows of tokens.

Tokens are cached by content (data, tokenizer, template, settings), so that a second run
starts at once. Rows are read line by line here, since `datasets` infers one schema for a
file, and a line that breaks it fails the whole file without its number.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from outrider.conf.errors import UserError, first_line
from outrider.conf.jsonl import form, read_lines
from outrider.conf.typed import raise_all
from outrider.decode.models.identity import (
    cache_root,
    sha256_remembered,
    sha256_template,
    sha256_tokenizer,
)
from outrider.train.data import tokens
from outrider.train.data.batches import LEFT_OUT, JoinedRows, joined, some_held_out
from outrider.train.data.config import DataConfig
from outrider.train.data.rows import Item, read_text

VERSION = 7  # of the token cache: raise it when rows are encoded differently
GIVE = "give a file with messages, conversations or text"
ROW = (
    'write {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", '
    '"content": ".."}]}, ShareGPT\'s '
    '{"conversations": [..]} or {"text": ".."}'
)


def load_rows(
    cfg: DataConfig,
    tokenizer: Any,
    eos_ids: Iterable[int],
    vocab_size: int,
    context: int,
) -> JoinedRows:
    """Read, check and tokenize the data, or take the tokens from the cache.

    Raises UserError: no such file or data set, too many malformed rows (the first is named by
    file:line), no row at all, token ids outside the target's vocabulary.
    """
    raise_all([f"data.{line}" for line in cfg.absent()])
    parts = [_load(file, tokenizer, eos_ids, context) for file in _files(cfg)]
    for part in parts:
        total = part.lines.numel() + len(part.bad)
        if not total:
            raise UserError(f"data.path: {part.name} holds no rows; {GIVE}")
        if len(part.bad) == total:
            why = f"none of the {total} rows can be used ({part.reasons()}): {ROW}"
            raise UserError(f"{part.bad[0]}; {why}")
    rows = joined(parts)
    if cfg.held_out and not isinstance(cfg.held_out, str):
        rows = some_held_out(rows)
    total = rows.lines.numel() + len(rows.bad)
    if len(rows.bad) > cfg.max_bad_fraction * total:
        raise UserError(
            f"{rows.bad[0]}; {len(rows.bad)} of {total} rows are unusable ({rows.reasons()}), "
            f"above data.max_bad_fraction={cfg.max_bad_fraction}; mend them or raise it (a run "
            f"that starts lists all of them in {LEFT_OUT})"
        )
    if rows.totals.max_id >= vocab_size:
        raise UserError(
            f"target: its tokenizer makes id {rows.totals.max_id}, its vocabulary has "
            f"{vocab_size} entries; use the tokenizer of this model"
        )
    if not rows.totals.supervised:
        raise UserError(
            f"data.path: no token of {rows.name} is supervised; the chat template marks no "
            "assistant text"
        )
    return rows


def _files(cfg: DataConfig) -> list[DataConfig]:
    """Return a configuration for each file: those of data.path, and data.held_out if it
    names one, last. Raises UserError for a file that is named twice."""
    held = cfg.held_out
    if not isinstance(held, str):
        found = [replace(cfg, path=path) for path in cfg.paths]
    else:
        found = [replace(cfg, path=path, held_out=0.0) for path in cfg.paths]
        kind: Any = "text" if cfg.kind == "text" else "jsonl"
        found.append(replace(cfg, path=held, held_out=1.0, streaming=False, kind=kind))
    places = [Path(str(f.path)).expanduser().resolve() for f in found]
    if len({*places}) < len(places):
        raise UserError("data.path: a file is named twice, or is data.held_out as well; leave one")
    return found


def _load(cfg: DataConfig, tokenizer: Any, eos_ids: Iterable[int], context: int) -> JoinedRows:
    """Return the rows of one file or data set."""
    cfg, eos = replace(cfg, max_length=min(cfg.max_length, context)), frozenset(eos_ids)
    source, name, content = _source(cfg)
    identity = [
        VERSION,
        cfg.kind,
        content,
        sha256_tokenizer(tokenizer),
        sha256_template(tokenizer),
        sorted(eos),
        cfg.max_length,
        cfg.held_out,
        cfg.turns,
        cfg.last_turn_only,
        cfg.chat_template_kwargs,
    ]
    text = json.dumps(identity, sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = cache_root() / "tokens" / f"{key}.safetensors" if cfg.cache else None
    found = tokens.load(path) if path else None
    if found is None:
        work = tokens.Work(name, tokenizer, cfg, eos, float(cfg.held_out))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        parts = tokens.encoded(source, work, cfg.workers or min(32, cores or 1))
        try:
            made, about = tokens.gathered(parts, name, path.parent if path else None)
            if path:
                tokens.save(path, made, about)
        except OSError as error:
            raise UserError(
                f"data.cache: the tokens do not go to {path.parent if path else gettempdir()} "
                f"({error.strerror or error}); free space there, set OUTRIDER_CACHE (without a "
                "cache TMPDIR), or set data.cache=false"
            ) from None
        found = (path and tokens.load(path)) or (made, about, tokens.totals(made))
    tensors, about, known = found
    ids, loss, offsets, lines, held = (tensors[key] for key in tokens.COLUMNS)
    bad = [name + line for line in about["bad"]]
    return JoinedRows(
        name, ids, loss, offsets, lines, held, bad, counted=about["counted"], known=known
    )


def _source(cfg: DataConfig) -> tuple[Iterable[Item], str, str]:
    """(rows, name for messages, what changes with the content)."""
    if cfg.kind in ("jsonl", "text"):
        path = Path(str(cfg.path)).expanduser()
        content = sha256_remembered([path])[0]
        if cfg.kind == "text":
            return read_text(path), str(path), content
        with path.open("rb") as stream:
            kind, _ = form(stream)
        if not kind or "parquet" in kind:
            return read_lines(path), str(path), content
        return _unpacked(path), str(path), content
    import datasets

    (folder,) = cfg.paths
    name, where = f"{folder or cfg.name}[{cfg.split}]", {"path": folder or cfg.name}
    if not folder:
        where["revision"] = cfg.revision
    try:
        if folder and (Path(folder) / "state.json").is_file():
            data: Any = datasets.load_from_disk(folder)  # mapped, so streamed in any case
        else:
            data = datasets.load_dataset(**where, split=cfg.split, streaming=cfg.streaming)
        if isinstance(data, datasets.Dataset):
            content = data._fingerprint
        else:  # the name of a builder's folder means its files at their times or commit
            content = f"{datasets.load_dataset_builder(**where).cache_dir} {cfg.split}"
    except Exception as error:  # hub, network, parsing: all about what the user named
        raise UserError(
            f"data.name: cannot load {folder or cfg.name} ({first_line(error)}); check name, "
            "split and network"
        ) from None
    return _unbroken(data, name), name, content


def _unpacked(path: Path) -> Iterable[Item]:
    """Return the rows of a compressed file, or of one JSON array, counted from 1."""
    import datasets

    try:
        data: Any = datasets.Dataset.from_json(str(path))
    except Exception as error:  # decompression, parsing, a package for it that is not there
        why = first_line(error.__cause__ or error)
        raise UserError(f"data.path: {path} cannot be unpacked ({why}); unpack it") from None
    return enumerate(data, 1)


def _unbroken(rows: Iterable[Any], name: str) -> Iterator[Item]:
    """Yield rows with their numbers, counted from 0. Raises UserError for a connection or a
    file that fails on the way."""
    count = 0
    try:
        for row in rows:
            yield count, row
            count += 1
    except Exception as error:  # network, parquet, decompression: all about what the user named
        raise UserError(
            f"data.name: {name} cannot be read beyond row {count} ({first_line(error)}); start the "
            "same command again, or set data.streaming=false"
        ) from None
