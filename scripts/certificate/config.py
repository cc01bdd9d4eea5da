"""The keys of scripts/certify.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt

from outrider.conf.rules import AboveZero, AtATime, Inside, NotNegative, OneOrMore
from outrider.scripts.certificate import FEWEST
from outrider.scripts.common.keys import LongKeys, PenaltyKeys, TargetKeys
from outrider.scripts.common.names import no_drafters, no_prompts

if TYPE_CHECKING:
    from outrider.scripts.certificate.setup import CertificatePlan

URL_TOKENS = 1200  # asked of a server by default
ANSWER, RETRIES = 60.0, 2  # seconds for one answer; tries after the first
ALPHA, URL_ALPHA = 1e-4, 1e-3


@dataclass(frozen=True, kw_only=True)
class CertifyConfig(PenaltyKeys, TargetKeys, LongKeys):
    """Keys of scripts/certify.py: with `url` a running server is asked, without it this engine
    is certified."""

    # none, ngram, a run folder, a head folder or hub:OWNER/NAME[@REVISION]; FOLDER@chain and
    # FOLDER@tree choose the shape, @adaptive behind any of them adapts the draft length
    drafter: str = ""
    # address of a running server to check instead, such as http://127.0.0.1:8080
    url: str = ""
    # folder for certificate.json; with url it may be left out
    out: str = ""
    # 0 = greedy: then the greedy layer decides alone; a server is asked at 0.6 times it as well
    temperature: NotNegative = 1.0
    # classifier-free guidance, with the prompt's last token as unconditional prompt; 1 = off
    guidance_scale: AboveZero = 1.0
    # sampled tokens; more find smaller biases; null = as many as find a shift of `detect`, of a
    # server 1200
    tokens: OneOrMore | None = None
    # most tokens per answer in the sampling layer
    max_new_tokens: OneOrMore = 64
    # prompts that are decoded together
    batch_size: OneOrMore = 16
    # JSONL of prompts; their first turns are used, of a server's the first eight
    prompts: str = "scripts/prompts/demo.jsonl"
    # random small models of the exact layer
    cases: OneOrMore = 300
    # prompts of the greedy layer
    greedy_prompts: OneOrMore = 16
    # tokens per prompt in the greedy layer
    greedy_tokens: OneOrMore = 64
    # false-alarm rate of all statistical tests together (Bonferroni); null = 1e-4, of a server
    # 1e-3
    alpha: Inside | None = None
    # total variation from which on a shift must be seen with probability 0.95: "lossless" may
    # leave less unseen
    detect: Inside = 0.05
    # with url: most seconds for everything; a longer run has time for more tokens
    seconds: Annotated[float, Gt(4)] = 120.0
    # with url: numbers of requests that are asked together
    at_a_time: AtATime = field(default_factory=lambda: [1, 8])
    # with url: environment variable that holds the server's key; empty = none
    key_env: str = ""
    # float32, bfloat16 or float16; rounding is smallest in float32
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def absent(self) -> list[str]:
        """Return what is named and not there, as "key: value; fix"."""
        return no_drafters(filter(None, [self.drafter])) + no_prompts(self.prompts)

    def validate(self) -> list[str]:
        """Return problems as "key: value; rule; fix"."""
        found = super().validate()
        if self.url and self.drafter:
            found.append("drafter: says nothing with url; leave it out")
        if self.url and not self.temperature:
            found.append("temperature: 0 with url; draws are judged: set it above 0")
        if self.url and (self.tokens or FEWEST) < FEWEST:
            found.append(f"tokens: {self.tokens} with url decide nothing; set {FEWEST} or more")
        missing = [key for key in ("drafter", "out") if not self.url and not getattr(self, key)]
        return found + [f"{key}: is required; set {key}=..." for key in missing]

    def plan(self) -> CertificatePlan:
        """Return what the layers do."""
        from outrider.scripts.certificate import sampled, uniformity
        from outrider.scripts.certificate.setup import CertificatePlan

        alpha = self.alpha or ALPHA
        return CertificatePlan(
            self.sampling(),
            self.tokens or uniformity.tokens_for(self.detect, alpha, sampled.MOST_TESTS),
            self.max_new_tokens,
            self.batch_size,
            self.seed,
            None if self.guidance_scale == 1 else self.guidance_scale,
            self.cases,
            self.greedy_prompts,
            self.greedy_tokens,
            alpha,
        )
