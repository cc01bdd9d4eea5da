"""What every layer of a certificate works with: the target and its plain passes, the settings, how
much to run, and the answers that Hugging Face `generate` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.decode.engine import Request, Rule
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.verify import verify
from outrider.scripts.common.progress import OnProgress, silent
from outrider.scripts.scoring.plain import Plain
from outrider.scripts.scoring.reference import hf_generate

SAFETY = 4  # rounding is measured on a few prompts only
MEASURED = 4  # prompts
CHUNK = 2  # batches at once: with more than one, rows are refilled while others decode


@dataclass(frozen=True)
class CertificatePlan:
    """How much to run under which settings: keys of scripts/certify.py. guidance: None when off.
    rule: the accept rule under test."""

    sampling: Sampling
    tokens: int
    max_new_tokens: int
    batch_size: int
    seed: int = 0
    guidance: float | None = None
    cases: int = 300
    greedy_prompts: int = 16
    greedy_tokens: int = 64
    alpha: float = 1e-4
    rule: Rule = verify

    @property
    def greedy(self) -> Sampling:
        """The same settings at T = 0, where truncation has nothing to cut."""
        return Sampling(0.0, repetition_penalty=self.sampling.repetition_penalty)


@dataclass
class CertifySetup:
    """target: that the engine decodes with. plain: the same one as Hugging Face runs it. prompts:
    token ids. requests: of the greedy layer, with the reference's answers. gap: what rounding does
    to the distance of two logits, see Plain.rounding; tie: the largest such distance that counts
    as rounding."""

    target: Target
    plain: Plain
    plan: CertificatePlan
    prompts: Sequence[Sequence[int]]
    requests: list[Request]
    references: list[list[int]]
    gap: float
    tie: float
    on_progress: OnProgress


def open_setup(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plan: CertificatePlan,
    on_progress: OnProgress = silent,
) -> CertifySetup:
    """Measure rounding and let the reference write its greedy answers."""
    target.probe()
    plain = Plain(target)
    gap = plain.rounding(list(prompts[:MEASURED]))
    spread = 1.0 if plan.guidance is None else abs(plan.guidance) + abs(1 - plan.guidance)
    requests = [
        Request(list(prompts[i % len(prompts)]), plan.greedy_tokens, id=i)
        for i in range(plan.greedy_prompts)
    ]
    on_progress(0, len(requests), "reference")
    answers = reference(plain, requests, plan)
    on_progress(len(requests), len(requests), "reference")
    tie = SAFETY * gap * spread
    return CertifySetup(target, plain, plan, prompts, requests, answers, gap, tie, on_progress)


def reference(plain: Plain, requests: list[Request], plan: CertificatePlan) -> list[list[int]]:
    """Return what Hugging Face `generate` writes for these prompts at T = 0."""
    size = 1 if plan.guidance is not None else plan.batch_size  # it cannot batch guided rows
    with plain.target.as_loaded():
        run = hf_generate(
            plain.target, requests, plan.greedy, batch_size=size, guidance=plan.guidance
        )
    return [generation.token_ids for generation in run.generations]
