"""Keys of scripts/serve.py."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

from outrider.conf.rules import Filled, OneOrMore, ZeroOrMore, one_of
from outrider.decode.models.config import DTYPES, AutoDtype, TargetConfig
from outrider.scripts.common.absent import no_drafters
from outrider.scripts.common.sampling_keys import Verify


@dataclass(frozen=True)
class ServeConfig(AutoDtype):
    """Keys of scripts/serve.py."""

    # the model that is served
    target: TargetConfig = field(default_factory=TargetConfig)
    # drafters that a request may name, the first one where it names none; none is always there
    drafters: Filled[str] = field(default_factory=lambda: ["none"])
    # the model's name in the API; empty: the target's own
    name: str = ""
    # where to listen; anything but this machine needs an API key
    host: str = "127.0.0.1"
    # 0 = any free one
    port: Annotated[int, Interval(ge=0, lt=1 << 16)] = 8000
    # environment variable that holds the API key; it is required where it is set
    key_env: str = "OUTRIDER_API_KEY"
    # rows that are decoded at a time, over all settings
    batch_size: OneOrMore = 8
    # settings (drafter and sampling) that are decoded in turns; each holds a cache of its own
    groups: OneOrMore = 4
    # most tokens of prompt and answer; 0 = the target's context, at most 4096
    longest: ZeroOrMore = 0
    # of an answer whose request names no limit
    max_new_tokens: OneOrMore = 512
    # requests that may wait; further ones are told 429
    queue: OneOrMore = 64
    # bytes of a request's body
    max_body: OneOrMore = 1 << 20
    # seconds that a client has to send a whole request, and to take what lies ready for it; then
    #     its connection is closed
    patience: Annotated[float, Interval(gt=0, lt=1e6)] = 20.0
    # seconds that running answers have after SIGTERM
    drain: Annotated[float, Interval(ge=0, lt=1e6)] = 30.0
    # number format of the target: auto (bfloat16, but float32 on a CPU without instructions for
    # it), bfloat16, float32 or float16
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None
    # rule of verification: traversal or rejection
    verify: Verify = "traversal"

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        return no_drafters(self.drafters, "drafters")

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        if self.longest == 1:
            return ["longest: 1 holds no prompt and answer; set 2 or more, or 0"]
        return []

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
