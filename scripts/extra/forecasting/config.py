"""The keys of scripts/extra/forecast.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Interval

from outrider.conf.recipes import RECIPES
from outrider.conf.rules import Filled, NotEmpty, OneOrMore, Seed, one_of
from outrider.decode.models.config import DTYPES, AutoDtype, TargetConfig

Tokens = Annotated[float, Interval(ge=1, lt=1e15)]


@dataclass(frozen=True)
class ForecastConfig(AutoDtype):
    """Keys of scripts/extra/forecast.py."""

    # folder for forecast.json and the pilots; with check=, for truth.json
    out: NotEmpty
    # the frozen model
    target: TargetConfig = field(default_factory=TargetConfig)
    # JSONL of the prompts that will be asked: acceptance depends on them
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them, spread over the file
    num_prompts: Annotated[int, Ge(2)] = 16
    # longest answer, tokens
    max_new_tokens: Annotated[int, Ge(8)] = 64
    # run folders of short runs, one for each head that is weighed
    pilots: list[str] = field(default_factory=list)
    # recipes for which a pilot is trained here, on the conversations in chats
    heads: list[Annotated[str, one_of(RECIPES)]] = field(default_factory=list)
    # JSONL of conversations for those pilots
    chats: str = ""
    # steps of such a pilot; 1 = an untrained head: its cost, and nothing about its learning
    pilot_steps: OneOrMore = 40
    # further keys of the pilots' training, such as data.features=FOLDER
    more: list[str] = field(default_factory=list)
    # tokens to train on
    tokens: Filled[Tokens] = field(default_factory=lambda: [1e6, 2e6, 5e6])
    # prompts decoded at a time
    batch_sizes: Filled[OneOrMore] = field(default_factory=lambda: [1, 4])
    # measured learning curves
    curves: str = "docs/results/recipes.json"
    # measured rows of your engine (docs/serving.md): speedups there instead of here; empty = this
    # machine is timed
    costs: str = ""
    # repetitions of every point of the latency curve
    curve_rounds: OneOrMore = 2
    # an earlier forecast.json that is held against trained heads
    check: str = ""
    # run folders, head folders or checkpoints that were trained since
    truth: list[str] = field(default_factory=list)
    # auto (bfloat16, but float32 on a CPU without
    # instructions for it), bfloat16, float32 or float16
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None
    # addresses all random numbers
    seed: Seed = 0
    # no progress bar
    quiet: bool = False

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        if self.check:
            found += [] if self.truth else ["truth: empty; give the heads that were trained since"]
            return found
        if self.truth:
            found.append("truth: only with check=FILE, the forecast that it is held against")
        if not self.pilots and not self.heads:
            found.append("pilots: none, and no heads; give pilots=[FOLDER] or heads=[eagle3]")
        if self.heads and not self.chats:
            found.append("chats: empty; heads= needs the JSONL of conversations that they learn")
        if len(set(self.pilots)) != len(self.pilots) or len(set(self.heads)) != len(self.heads):
            found.append("pilots: one is named twice; name each once")
        return found
