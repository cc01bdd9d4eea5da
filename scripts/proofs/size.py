"""How many tokens a sample takes, said before any of them is drawn.

A pilot of plain decoding, under random numbers of its own, shows the distributions that the
prompts meet; what a sample of n tokens finds among them (power.py) says how large n must be.
The sample itself is not looked at, so its p-values stay those of a fixed n.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.decode.drafters import NoDraft
from outrider.scripts.common.memo import Memo
from outrider.scripts.proofs import power
from outrider.scripts.proofs.greedy import Plain
from outrider.scripts.proofs.sampled import Setting, bank_of, most_tests, sampling_layer, texts_of

# tokens that are tried. With fewer than the first the negative controls may get through, which
# are samples too.
STEPS = (5000, 7000, 9000, 11000, 14000, 17000, 20000, 25000, 30000, 40000, 50000, 70000, 100000)
APART = 1 << 62  # the pilot's seed differs from the sample's by so much


@dataclass(frozen=True)
class Pilot:
    """texts: ids of plain answers, and where each begins. seconds: of a sampled token, from
    decoding to its tests, without a drafter."""

    texts: list[tuple[list[int], int]]
    seconds: float

    @classmethod
    def drawn(
        cls, plain: Plain, prompts: Sequence[Sequence[int]], how: Setting, memo: Memo
    ) -> Pilot:
        """Enough plain answers for the power, those of an earlier run where it left some."""

        def made() -> dict[str, Any]:
            chunks, start = Memo(None), time.perf_counter()
            tokens = power.rows_wanted(plain.target.vocab_size)
            other = dataclasses.replace(how, tokens=tokens, seed=how.seed ^ APART, chunk=1)
            sampling_layer(plain, plain.target, NoDraft(), prompts, other, memo=chunks)
            spent = time.perf_counter() - start
            texts = texts_of(chunks.lines("sampling"), prompts)
            return {"texts": texts, "seconds": spent / tokens}

        kept = memo.once("pilot", made)
        return cls([(list(ids), start) for ids, start in kept["texts"]], kept["seconds"])

    def answers(self, plain: Plain, how: Setting) -> list[power.AnswerDistributions]:
        """Their distributions, by plain passes."""
        left, found = power.rows_wanted(plain.target.vocab_size), list[power.AnswerDistributions]()
        for ids, start in self.texts:
            if left <= 0:
                break
            logits = next(plain.in_batches([(ids, start)], how.guidance))[1][:left]
            rows = range(len(logits)) if how.sampling.uses_history else ()
            past = [ids[: start + i] for i in rows]
            found.append(power.AnswerDistributions.of(logits, how.sampling, past))
            left -= len(logits)
        return found


@dataclass(frozen=True)
class SampleSize:
    """tokens: of the sample. reached: whether they find what is asked for. seconds: of one of
    them, see Pilot."""

    tokens: int
    reached: bool
    seconds: float


def sized(
    pilot: Pilot, plain: Plain, how: Setting, alpha: float, detect: float, most: int
) -> SampleSize:
    """The fewest tokens of STEPS, at most `most`, with which a bias of `detect` in any family
    is surely found, however many of the sample's tests there turn out to be."""
    bank = bank_of(plain.target, how.seed)
    steps = [*(n for n in STEPS if n < most), most]
    known = power.Power(pilot.answers(plain, how), bank, steps[0], alpha, most_tests(bank))
    found = power.enough(known, detect, how.seed, steps)
    return SampleSize(found or most, found is not None, pilot.seconds)
