"""The keys of scripts/chat.py and scripts/demo.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.conf.rules import NotNegative, OneOrMore, Seed
from outrider.decode.models.config import AutoDtype, Dtype, TargetConfig
from outrider.scripts.common.names import no_drafters
from outrider.scripts.common.sampling_keys import SamplingKeys


@dataclass(frozen=True)
class ChatConfig(SamplingKeys, AutoDtype):
    """Keys of scripts/chat.py."""

    # the model to talk to
    target: TargetConfig = field(default_factory=TargetConfig)
    # none, ngram, a run folder, a head folder or hub:OWNER/NAME[@REVISION], @chain or @tree
    # behind them; @adaptive adapts the depth
    drafter: str = "none"
    temperature: NotNegative = 0.7
    # longest answer, tokens
    max_new_tokens: OneOrMore = 256
    # number format of the target: auto (bfloat16, but float32 on a CPU without instructions for
    # it), bfloat16, float32 or float16
    dtype: Dtype = "bfloat16"
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
