"""The keys of scripts/certify.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from outrider.conf.rules import (
    AboveZero,
    AtATime,
    Inside,
    NotEmpty,
    NotNegative,
    OneOrMore,
    Seed,
    ZeroOrMore,
)
from outrider.decode.models.config import TargetConfig
from outrider.scripts.common.absent import no_drafters, no_prompts
from outrider.scripts.common.sampling_keys import PenaltyKeys, SamplingKeys, Verify

if TYPE_CHECKING:
    from outrider.scripts.proofs import certificate
    from outrider.scripts.serving import server_certificate
    from outrider.scripts.serving.asking import Address
    from outrider.scripts.serving.quick import QuickPlan


@dataclass(frozen=True, kw_only=True)
class CertifyConfig(PenaltyKeys):
    """Keys of scripts/certify.py."""

    # folder for certificate.json and certificate.html
    out: str
    # none, ngram, a run folder, a head folder or hub:OWNER/NAME[@REVISION]; FOLDER@chain and
    # FOLDER@tree choose the shape; @fixed behind a tree takes the most probable tokens where
    # T > 0, @adaptive behind any of them adapts the draft length
    drafter: str
    # the frozen model whose distribution is at stake
    target: TargetConfig = field(default_factory=TargetConfig)
    # 0 = greedy: then the greedy layer decides alone
    temperature: NotNegative = 1.0
    # classifier-free guidance, with the prompt's last token as unconditional prompt; 1 = off
    guidance_scale: AboveZero = 1.0
    # the rule under test: traversal or rejection
    verify: Verify = "traversal"
    # emitted tokens of the sampling layer; more find smaller biases; null = as many as surely
    # find a bias of `detect`, which is worked out before any of them is drawn
    tokens: OneOrMore | None = None
    # no more than so many where tokens is null
    most_tokens: OneOrMore = 50_000
    # most tokens per answer in the sampling layer
    max_new_tokens: OneOrMore = 64
    # prompts that are decoded together
    batch_size: OneOrMore = 16
    # JSONL of prompts; their first turns are used
    prompts: str = "scripts/prompts/demo.jsonl"
    # toy worlds of the exact layer
    cases: OneOrMore = 300
    # prompts of the greedy layer
    greedy_prompts: OneOrMore = 16
    # tokens per prompt in the greedy layer
    greedy_tokens: OneOrMore = 64
    # negative controls: run, none (the verdict is then undecided at best), or the folder of a
    # certificate of this target and these settings that ran them
    controls: NotEmpty = "run"
    # false-alarm rate of the sampling layer, all its tests together (Bonferroni)
    alpha: Inside = 1e-4
    # mean total variation from which on a bias of every known family must be found: "lossless"
    # may leave less unseen
    detect: Inside = 0.1
    # float32, bfloat16 or float16; rounding is smallest in float32
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None
    # addresses all random numbers
    seed: Seed = 0
    # no progress bar
    quiet: bool = False

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        return no_drafters([self.drafter]) + no_prompts(self.prompts)

    def plan(self) -> certificate.CertificatePlan:
        """What the layers do."""
        from outrider.scripts.proofs import certificate

        return certificate.CertificatePlan(
            self.sampling(),
            self.tokens or self.most_tokens,
            self.max_new_tokens,
            self.batch_size,
            self.seed,
            self.verify,
            None if self.guidance_scale == 1 else self.guidance_scale,
            cases=self.cases,
            greedy_prompts=self.greedy_prompts,
            greedy_tokens=self.greedy_tokens,
            alpha=self.alpha,
            detect=self.detect,
        )


@dataclass(frozen=True, kw_only=True)
class CertifyServerConfig(SamplingKeys):
    """Keys of scripts/certify.py url=..."""

    # folder for certificate.json
    out: str
    # address of the server under test, such as http://127.0.0.1:8080
    url: str
    # weights: the distributions of the same weights in this process; else the address of a
    # server of the same model without speculation
    plain: str = "weights"
    # the model that the server runs
    target: TargetConfig = field(default_factory=TargetConfig)
    # the drafter that the server runs, where it lies here (a run folder, a head folder, a
    # smaller model): leans towards its distribution are looked for; empty = not known, none
    # = it has none
    drafter: str = ""
    # what is asked of the server; 0 = greedy alone
    temperature: NotNegative = 1.0
    # sampled tokens, spread evenly over `at_a_time`; more find smaller biases
    tokens: OneOrMore = 20000
    # most tokens per answer
    max_new_tokens: OneOrMore = 64
    # numbers of requests that are asked together
    at_a_time: AtATime = field(default_factory=lambda: [1, 2, 8])
    # prompts that are answered greedily, at each of `at_a_time`
    greedy_prompts: OneOrMore = 8
    # JSONL of prompts; their first turns are used
    prompts: str = "scripts/prompts/demo.jsonl"
    # false-alarm rate of the sampling layer, all its tests together (Bonferroni)
    alpha: Inside = 1e-3
    # mean total variation from which on a bias of every known family must be found
    detect: Inside = 0.1
    # largest distance of a greedy token's logit to the best one that is a tie; 0 = measured
    # (with plain=URL: 0.01)
    tie: NotNegative = 0.0
    # seconds for one answer
    timeout: AboveZero = 120.0
    # tries after the first
    retries: ZeroOrMore = 4
    # environment variable that holds the server's key; empty = none
    key_env: str = ""
    # random biases of each family that the power is measured on; 0 = 16
    members: ZeroOrMore = 0
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None
    # addresses all random numbers
    seed: Seed = 0
    # no progress bar
    quiet: bool = False

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        return no_drafters(filter(None, [self.drafter])) + no_prompts(self.prompts)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = super().validate()
        if len(set(self.at_a_time)) != len(self.at_a_time):
            found.append(f"at_a_time: {self.at_a_time} names one twice; name each once")
        if self.plain == "weights" or not self.temperature:
            return found
        from outrider.scripts.serving.asking import MOST_TOP

        if not 0 < self.top_k <= MOST_TOP:
            found.append(
                f"top_k: {self.top_k}; a plain server tells the {MOST_TOP} best of a "
                "distribution only: set "
                f"top_k to 1..{MOST_TOP}, or plain=weights"
            )
        return found

    def how(self) -> server_certificate.How:
        """What is asked of the server, and how it is judged."""
        from outrider.scripts.serving import server_certificate

        return server_certificate.How(
            self.sampling(),
            self.tokens,
            self.max_new_tokens,
            self.greedy_prompts,
            tuple(self.at_a_time),
            self.alpha,
            self.detect,
            self.tie,
            self.seed,
            self.members or None,
        )


@dataclass(frozen=True, kw_only=True)
class CertifyQuickConfig:
    """Keys of scripts/certify.py url=... quick=true"""

    # address of the server, such as http://127.0.0.1:8080
    url: str
    # true: this check; false, or left out: the certificate of a server
    quick: bool = True
    # what is asked of the server, and once more at 0.6 times that
    temperature: AboveZero = 1.0
    # most sampled tokens
    tokens: Annotated[int, Interval(ge=1, le=1200)] = 1200
    # most seconds for everything
    seconds: Annotated[float, Interval(gt=4, le=120)] = 120.0
    # numbers of requests that are asked together
    at_a_time: AtATime = field(default_factory=lambda: [1, 8])
    # JSONL of prompts; the first turns of the first eight are used
    prompts: str = "scripts/prompts/demo.jsonl"
    # folder for quick.json; empty = none is written
    out: str = ""
    # false-alarm rate of all tests together
    alpha: Inside = 1e-3
    # seconds for one answer
    timeout: AboveZero = 60.0
    # tries after the first
    retries: ZeroOrMore = 2
    # environment variable that holds the server's key; empty = none
    key_env: str = ""
    # addresses all random numbers
    seed: Seed = 0
    # no progress bar
    quiet: bool = False

    def absent(self) -> list[str]:
        """What is named and not there, as "key: value; fix"."""
        return no_prompts(self.prompts)

    def plan(self, prompts: list[str], address: Address) -> QuickPlan:
        """What is asked and how it is judged."""
        from outrider.scripts.serving.quick import QuickPlan

        levels = tuple(sorted(set(self.at_a_time)))
        sizes = (self.temperature, self.tokens, self.seconds, levels, self.alpha, self.seed)
        return QuickPlan(address, prompts, *sizes)
