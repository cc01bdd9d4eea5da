"""The keys of scripts/chat.py and scripts/demo.py."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.conf.rules import NotNegative, OneOrMore, Seed
from outrider.scripts.common.keys import DecodingKeys, SamplingKeys
from outrider.scripts.common.names import no_drafters


@dataclass(frozen=True)
class ChatConfig(SamplingKeys, DecodingKeys):
    """Keys of scripts/chat.py."""

    # none, ngram, a run folder, a head folder or hub:OWNER/NAME[@REVISION], @chain or @tree
    # behind them; @adaptive adapts the depth
    drafter: str = "none"
    temperature: NotNegative = 0.7
    # longest answer, tokens
    max_new_tokens: OneOrMore = 256
    # seed of all draws
    seed: Seed = 0
    # system message; empty: the chat template's own
    system: str = ""

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        return no_drafters([self.drafter])


@dataclass(frozen=True)
class DemoConfig:
    """Keys of scripts/demo.py."""

    # tiny budgets: a check that all parts work together
    fast: bool = False
