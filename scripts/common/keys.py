"""The keys that several commands share: a target, a sampling setting."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from outrider.conf.rules import AboveZero, BelowOne, NotNegative, Seed, ZeroOrMore
from outrider.decode.models.config import AutoDtype, Dtype, TargetConfig

if TYPE_CHECKING:
    from outrider.decode.sampling import Sampling

COLDEST = 1e-37  # of a temperature above 0: what decode.sampling.Sampling takes beyond the ranges


@dataclass(frozen=True, kw_only=True)
class TargetKeys:
    """Keys of every command that runs a target."""

    # the frozen model
    target: TargetConfig = field(default_factory=TargetConfig)
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class DecodingKeys(AutoDtype, TargetKeys):
    """Those of the commands in which it answers."""

    # number format of the target: auto (bfloat16, but float32 on a CPU without instructions for
    # it), bfloat16, float32 or float16
    dtype: Dtype = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class LongKeys:
    """Keys of the commands that work for long and leave a report."""

    # replace the report of another run in `out`
    overwrite: bool = False
    # addresses all random numbers: same seed, same answers
    seed: Seed = 0
    # no progress bar
    quiet: bool = False


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
        return replace(super().sampling(), repetition_penalty=self.repetition_penalty)
