"""The keys of scripts/cache_features.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from outrider.conf.rules import NotEmpty, OneOrMore, ZeroOrMore, one_of
from outrider.decode.models.config import DTYPES, AutoDtype, Dtype, TargetConfig
from outrider.train.data.config import DataConfig


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
