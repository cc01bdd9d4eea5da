"""Decoders and servers that lie where single tokens do not tell: the first token of an answer,
answers taken from earlier ones, random numbers that serve twice (scripts/proofs/repeats.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider.decode.sampling import Sampling
from outrider.scripts.lab.pages.reliability import record
from outrider.scripts.lab.proofs import placed, sound
from outrider.scripts.proofs import recorder, uniformity
from outrider.scripts.proofs.repeats import LONG, Repeats
from outrider.scripts.proofs.sampled import Sample
from tests.helpers import detection, liars

FEW, MANY = 5_000, 20_000
ALPHA = 1e-4


@pytest.fixture(scope="module")
def bench() -> detection.Bench:
    return detection.Bench("float32")


def sample(bench: detection.Bench, tokens: int, rule: Any = "traversal", rng: Any = None) -> Sample:
    with pytest.MonkeyPatch.context() as patch:
        if rng is not None:
            patch.setattr(recorder, "Rng", rng)
        return bench.sample(Sampling(1.0), tokens, 0, rule)


def worst(tests: list[uniformity.Test]) -> uniformity.Test:
    return min(tests, key=lambda test: test.p)


def test_an_engine_whose_first_tokens_are_greedy_is_rejected(bench: detection.Bench) -> None:
    found = sample(bench, FEW, liars.greedy_first)
    assert uniformity.overall(found.tests()) < ALPHA
    assert worst(found.tests()).stratum == "first of an answer"
    others = [t for t in found.tests() if t.stratum != "first of an answer"]
    assert uniformity.overall(others) > ALPHA  # nothing else sees so few of them


def test_an_engine_that_answers_every_fifth_request_like_an_earlier_one_is_rejected(
    bench: detection.Bench,
) -> None:
    found = sample(bench, FEW, rng=liars.sharing(liars.every_fifth_from(len(bench.prompts))))
    assert uniformity.overall(found.tests()) < ALPHA
    assert worst(found.tests()).stratum == "answers to one prompt"
    assert found.repeats.again > 10 and found.repeats.expected < 0.1


def test_rows_that_share_their_random_numbers_are_rejected(bench: detection.Bench) -> None:
    """Two by two, and never two with one prompt."""
    found = sample(bench, FEW, rng=liars.sharing(lambda requests: requests // 2))
    assert found.repeats.again == 0 and uniformity.overall(found.tests()) < ALPHA
    assert worst(found.tests()).stratum == "two answers at one place"


def test_a_server_whose_first_tokens_are_greedy_is_rejected() -> None:
    found = liars.judged(liars.answers(1, FEW // liars.LIMIT, greedy=True))
    assert found.p() < ALPHA and worst(found.tests()).stratum == "first of an answer"


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_a_server_that_answers_every_fifth_repeated_prompt_from_a_cache_is_rejected(
    tokens: int,
) -> None:
    found = liars.judged(liars.answers(1, tokens // liars.LIMIT, cached=5))
    assert found.p() < ALPHA and worst(found.tests()).stratum == "answers to one prompt"
    # the learner on pairs sees a text that comes again, too: pairs that follow one another for sure
    copies = {"answers to one prompt", "learned direction, pairs of tokens"}
    others = [t for t in found.tests() if copies.isdisjoint((t.stratum, t.name))]
    assert uniformity.overall(others) > ALPHA


def test_a_cache_that_keeps_the_first_tokens_alone_is_rejected() -> None:
    """Every fifth answer takes LONG tokens of an earlier one and goes on freely."""
    whole, free = liars.answers(2, 312, cached=5), liars.answers(3, 312)
    found = Repeats()
    for old, new in zip(whole, free, strict=True):
        tokens = [*old.tokens[:LONG], *liars.answers(new.number, 1)[0].tokens[LONG:]]
        found.add(old.prompt, tokens, liars.masses(old.prompt, tokens))
    assert worst(found.tests()).p < 1e-9 and found.again > 50


def repeats_of(seed: int, count: int, distributions: torch.Tensor) -> Repeats:
    found = Repeats()
    for answer in liars.answers(seed, count, distributions=distributions):
        found.add(
            answer.prompt, answer.tokens, liars.masses(answer.prompt, answer.tokens, distributions)
        )
    return found


@pytest.mark.parametrize("heat", [1.0, 8.0])
def test_sound_answers_are_rejected_no_more_often_than_stated(heat: float) -> None:
    """Where the distributions are flat enough to part at once, and where they are so sharp that
    most sound answers repeat an earlier one."""
    distributions = liars.table() * heat
    every = [repeats_of(seed, 78, distributions) for seed in range(200)]
    p = np.array([worst(found.tests()).p for found in every])
    for level in (0.5, 0.1, 0.01):
        assert (p <= level).mean() <= level + 3 * np.sqrt(level / 200)
    again = sum(found.again for found in every)
    expected = sum(found.expected for found in every)
    assert abs(again - expected) < 5 * np.sqrt(expected) + 2
    assert (again > 200) == (heat > 1)


def test_the_mean_of_the_bets_is_one() -> None:
    """Summed over every answer of three tokens of four, whatever the earlier ones are."""
    distribution = np.array([0.5, 0.3, 0.15, 0.05])
    earlier = [[0, 0, 0], [0, 1, 2], [3, 0]]
    total = 0.0
    for a, b, c in np.ndindex(4, 4, 4):
        found = Repeats()
        for tokens in earlier:
            found.add([7], tokens, distribution[tokens])
        before = np.exp(found.wealth)
        found.add([7], [a, b, c], distribution[[a, b, c]])
        total += distribution[a] * distribution[b] * distribution[c] * np.exp(found.wealth) / before
    assert np.allclose(total, 1)


def test_answers_of_no_token_and_of_none_twice_are_no_test() -> None:
    found = Repeats()
    found.add([1], [], [])
    found.add([1], [4, 5], [0.5, 0.5])
    found.add([2], [4, 5], [0.5, 0.5])
    assert found.tests() == [] and found.json()["compared"] == 0
    found.add([1], [4, 6], [0.5, 0.0])  # it has no mass: the layer fails for that
    assert len(found.tests()) == 1


@pytest.mark.slow
def test_the_sound_server_passes_many_seeds() -> None:
    seeds = range(200)
    tests = [liars.judged(liars.answers(s, FEW // liars.LIMIT), s).tests() for s in seeds]
    found = sound.summary([*map(sound.p_values, tests)])
    uniform = found["tests"] - len(found["odd"])
    record(
        "sound_server",
        what=f"p-values of a sound server, {len(seeds)} seeds of {FEW:,} tokens",
        result=f"{found['rejected']} rejected at 1e-3; {uniform}/{found['tests']} tests uniform",
        met=found["rejected"] <= 1 and not found["odd"],
        **found,
    )
    assert found["rejected"] <= 1 and not found["odd"] and found["tests"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_the_sound_engine_passes_many_seeds(part: int) -> None:
    """Afresh, what docs/results/sound-seeds.json says of all of them."""
    bench = placed.Bench()
    tests = [
        bench.sample("traversal", FEW, seed).tests() for seed in range(50 * part, 50 * part + 50)
    ]
    found = sound.summary([*map(sound.p_values, tests)])
    assert found["rejected"] <= 1 and not found["odd"] and found["tests"] > 15


def test_p_values_that_are_not_uniform_are_named() -> None:
    coin = np.random.default_rng(0)
    rows = [{"": 1.0, "fair": coin.random(), "low": coin.random() ** 2} for _ in range(200)]
    found = sound.summary([*rows[1:], {**rows[0], "": 1e-4, "here alone": 0.5}])
    assert found["odd"] == ["low"] and found["tests"] == 2 and found["rejected"] == 1


@pytest.mark.slow
def test_both_lies_are_found_at_full_size(bench: detection.Bench) -> None:
    cache = liars.sharing(liars.every_fifth_from(len(bench.prompts)))
    count = MANY // liars.LIMIT
    p = {
        "engine, greedy first tokens": sample(bench, MANY, liars.greedy_first).tests(),
        "engine, every fifth answer repeated": sample(bench, MANY, rng=cache).tests(),
        "server, greedy first tokens": liars.judged(liars.answers(1, count, greedy=True)).tests(),
        "server, every fifth answer from a cache": liars.judged(
            liars.answers(1, count, cached=5)
        ).tests(),
    }
    found = {name: uniformity.overall(tests) for name, tests in p.items()}
    caught = sum(value < ALPHA for value in found.values())
    record(
        "liars",
        what=f"decoders that lie in first tokens or in repeated answers, {MANY:,} tokens",
        result=f"{caught}/{len(found)} rejected at {ALPHA:g}",
        met=caught == len(found),
        p=found,
    )
    assert caught == len(found)
