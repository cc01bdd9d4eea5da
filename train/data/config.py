"""The keys of training text, where it comes from and what becomes of it, and of features of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from outrider.conf.paths import missing
from outrider.conf.rules import (
    BelowOne,
    FileName,
    NotEmpty,
    OneOrMore,
    Share,
    ZeroOrMore,
    one_of,
)
from outrider.decode.models.config import DTYPES, AutoDtype, Dtype, TargetConfig


@dataclass(frozen=True)
class RowsConfig:
    """What becomes of chats, wherever they come from."""

    # longer rows are cut here, tokens
    max_length: Annotated[int, Ge(8)] = 1024
    # share of rows kept out of training for decoded acceptance, chosen by a hash of their
    # prompt, and at least 8 where there are 100 rows; or a file of such rows; 0 = none
    held_out: BelowOne | FileName = 0.03
    # chat: a chat is a row; rows: one row for each assistant turn, ending with it, as reasoning
    # models see a chat when they answer (templates drop the reasoning of earlier turns)
    turns: Literal["chat", "rows"] = "chat"
    # supervise the last assistant turn of a chat alone
    last_turn_only: bool = False
    # further arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # lines of the file (rows of a data set) that are not trained on, though they can be read;
    # FILE:LINE where there are several
    skip: list[int | str] = field(default_factory=list)
    # stop when a larger share of the rows is malformed
    max_bad_fraction: Share = 0.001
    # rows are sorted by length inside windows of this many batches: less padding, steps of
    # very different weight; 1 = no sorting across batches
    window: OneOrMore = 1
    # keep the tokens in the cache folder for the next run, and read them from there: they need
    # not fit into memory
    cache: bool = True
    # processes that tokenize; 0 = as many as there are cores
    workers: ZeroOrMore = 0


@dataclass(frozen=True)
class DataConfig(RowsConfig):
    """Where the training text comes from."""

    # jsonl (a file of chats or texts), hub (a `datasets` name or local folder), text (a plain
    # text file)
    kind: Literal["jsonl", "hub", "text"] = "jsonl"
    # jsonl, text: the file, or [FILE,FILE]; hub: a local folder in place of a name
    path: str | list[str] = ""
    # hub: repository of a data set
    name: str = ""
    # hub: split
    split: str = "train"
    # hub: branch, tag or commit
    revision: str = "main"
    # hub: read the files one after the other instead of downloading and converting all of them
    #     first
    streaming: bool = False
    # folder of outrider cache_features: read the target's features there; empty = run the
    # target
    features: str = ""
    # features: the folder may still be growing; the first epoch goes through the rows in their
    # order, shuffled within rounds, and a round begins when its files are complete
    follow: bool = False
    # follow: batches of a round
    follow_batches: OneOrMore = 64
    # follow: empty files whose rows are learned, once a checkpoint holds it; one epoch
    follow_delete: bool = False

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix"."""
        found = []
        if self.kind in ("jsonl", "text") and not all(self.paths):
            found.append("path: is empty; set data.path=FILE")
        if self.kind == "hub" and len(self.paths) > 1:
            found.append("path: several only with data=jsonl and data=text; give one folder")
        if self.kind == "hub" and not (self.name or self.path):
            found.append("name: is empty; set data.name=REPOSITORY or data.path=FOLDER")
        if self.follow and not self.features:
            found.append("follow: without features; set data.features=FOLDER, or leave it out")
        if self.follow_delete and not self.follow:
            found.append("follow_delete: only with data.follow=true; set it, or leave both out")
        for line in self.skip:
            if not re.fullmatch(r"(.+:)?\d+", str(line)) or (
                isinstance(line, str) and line.isdigit()
            ):
                found.append(f"skip: {line!r} is no line; give LINE or FILE:LINE as messages do")
        return found

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        found = []
        if self.kind != "hub":
            fix = f"give a {'JSONL' if self.kind == 'jsonl' else 'text'} file"
            found += [line for path in self.paths for line in missing("path", path, fix)]
        if isinstance(self.held_out, str) and not Path(self.held_out).expanduser().is_file():
            found.append(f"held_out: {self.held_out} is neither a file nor a share of the rows")
        if self.features and not self.follow:
            fix = "give one that scripts/cache_features.py wrote, or leave it out"
            found += missing("features", self.features, fix, "folder")
        return found

    @property
    def paths(self) -> list[str]:
        """data.path as a list, never empty."""
        return [*self.path] or [""] if isinstance(self.path, list) else [self.path]


@dataclass(frozen=True)
class CacheConfig(AutoDtype):
    """Keys of scripts/cache_features.py."""

    # the frozen target
    target: TargetConfig
    # training text, as the training run will name it
    data: DataConfig
    # folder to write or to continue
    out: NotEmpty
    # kinds of head that will read the features; their default taps are stored
    heads: list[str] = field(default_factory=lambda: ["medusa", "eagle3"])
    # further taps, hidden_states[k] of transformers
    taps: list[int] = field(default_factory=list)
    # dtype of the target, which must be that of the training run; auto is the same there
    dtype: Dtype = "bfloat16"
    # dtype on disk; empty = that of the target
    store: Annotated[str, one_of(["", *DTYPES])] = ""
    # tokens of one forward pass, padding included
    batch_tokens: OneOrMore = 4096
    # megabytes of one file
    shard_mb: OneOrMore = 256
    # gigabytes that may lie there at a time, while training deletes what it has learned
    # (data.follow_delete); 0 = all
    room_gb: ZeroOrMore = 0
    # cpu, cuda, or empty for what is there
    device: str = ""
    # a vLLM server that captures the hidden states (docs/scaling.md), with /v1; empty = a pass here
    base_url: str = ""
    # the folder in which that server writes them, as it is seen from here
    captured: str = ""
    # requests to it at a time
    concurrency: OneOrMore = 64

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        lines = [f"data.{line}" for line in self.data.absent()]
        if self.captured and not Path(self.captured).expanduser().is_dir():
            lines.append(f"captured: no such folder {self.captured}; give the server's")
        return lines

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix"."""
        if bool(self.base_url) != bool(self.captured):
            return ["base_url, captured: one needs the other; set both, or leave both out"]
        return []
