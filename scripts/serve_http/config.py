"""Keys of scripts/serve.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

from outrider.conf.rules import Filled, OneOrMore
from outrider.scripts.common.keys import DecodingKeys
from outrider.scripts.common.names import no_drafters


@dataclass(frozen=True)
class ServeConfig(DecodingKeys):
    """Keys of scripts/serve.py."""

    # drafters that a request may name, the first one where it names none; none is always there
    drafters: Filled[str] = field(default_factory=lambda: ["none"])
    # the model's name in the API; empty: the target's own
    name: str = ""
    # where to listen; by another address than this machine's own, anybody may ask
    host: str = "127.0.0.1"
    # 0 = any free one
    port: Annotated[int, Interval(ge=0, lt=1 << 16)] = 8000
    # rows that a drafter decodes at a time
    batch_size: OneOrMore = 8
    # most tokens of prompt and answer; the target's context where that is less
    longest: Annotated[int, Interval(ge=2)] = 4096
    # tokens of an answer whose request names no limit
    max_new_tokens: OneOrMore = 512

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        return no_drafters(self.drafters, "drafters")
