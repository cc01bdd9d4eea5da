"""The keys of a sampling setting, for the commands that decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from outrider.conf.rules import AboveZero, BelowOne, NotNegative, ZeroOrMore

if TYPE_CHECKING:
    from outrider.decode.sampling import Sampling

COLDEST = 1e-37  # of a temperature above 0: what decode.sampling.Sampling takes beyond the ranges


@dataclass(frozen=True, kw_only=True)
class SamplingKeys:
    """Keys of every command that draws tokens."""

    # 0 = greedy
    temperature: NotNegative = 0.0
    # sample among the k best tokens; 0 = off
    top_k: ZeroOrMore = 0
    # sample among the fewest tokens that hold this much probability; 1 = off
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    # drop tokens below this share of the best token's probability; 0 = off
    min_p: BelowOne = 0.0

    def sampling(self) -> Sampling:
        """Return the distribution. Raises UserError for keys that do not go together."""
        from outrider.decode.sampling import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix"."""
        if 0 < self.temperature < COLDEST:
            return [f"temperature={self.temperature}: must be 0 (greedy) or at least {COLDEST}"]
        return []


@dataclass(frozen=True, kw_only=True)
class PenaltyKeys(SamplingKeys):
    """The same with a repetition penalty."""

    # Hugging Face's repetition penalty; 1 = off
    repetition_penalty: AboveZero = 1.0

    def sampling(self) -> Sampling:
        """Return the distribution. Raises UserError for keys that do not go together."""
        from outrider.decode.sampling import Sampling

        drawn = (self.temperature, self.top_k, self.top_p, self.min_p)
        return Sampling(*drawn, self.repetition_penalty)
