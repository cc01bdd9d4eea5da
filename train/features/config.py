"""The keys of scripts/cache_features.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from outrider.conf import packages
from outrider.conf.rules import NotEmpty, OneOrMore, one_of
from outrider.decode.models.config import DTYPES, AutoDtype, Dtype, TargetConfig
from outrider.train.data.config import DataConfig
from outrider.train.runs import ENTRIES


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
    # cpu, cuda, or empty for what is there
    device: str = ""

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        return [f"data.{line}" for line in self.data.absent()]

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix"."""
        known = sorted({*ENTRIES, *(one.kind for one in packages.packaged())})
        return [
            f"heads: {name!r} is none of {', '.join(known)}; choose one"
            for name in self.heads
            if name not in known
        ]
