"""scripts/proofs/directions.py and power.py: uniform under the distribution, and as sharp as
they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.scripts.proofs import biases, directions, power, uniformity
from outrider.scripts.proofs.directions import Bank, PairLearner, Tally, TokenBlock

VOCAB, ANSWERS, LENGTH = 96, 24, 32


def distributions(seed: int = 0, size: int = VOCAB) -> list[Tensor]:
    """[LENGTH, size] float32 per answer: sharp and flat ones, with a common part."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=generator)
    scale = torch.rand(ANSWERS, LENGTH, 1, generator=generator) * 2.5 + 0.3
    logits = (torch.randn(ANSWERS, LENGTH, size, generator=generator) + common) * scale
    return list(logits.softmax(-1))


def blocks(answers: list[Tensor]) -> list[TokenBlock]:
    found = []
    for i, distribution in enumerate(answers):
        before = torch.cat([torch.zeros_like(distribution[:1]), distribution[:-1]])
        others = (sum(answers[1:], answers[0]) - distribution) / (len(answers) - 1)  # type: ignore[call-overload]
        none = torch.full((len(distribution), 1), -1)
        recent = torch.arange(len(distribution))[:, None] % VOCAB if i % 2 else none
        found.append(TokenBlock(distribution, before, others, recent, none))
    return found


def tally(
    answers: list[Tensor], emitted: list[Tensor], rounds: int, seed: int, key: int = 5
) -> Tally:
    """The tests of `rounds` texts drawn from `emitted` and judged by `answers`."""
    generator = torch.Generator().manual_seed(seed)
    found = Tally(Bank(answers[0].shape[1], key), ("all tokens",))
    opened = [found.bank.open(b) for b in blocks(answers)]
    for _ in range(rounds):
        for scores, q in zip(opened, emitted, strict=True):
            tokens = torch.multinomial(q, 1, generator=generator)[:, 0]
            found.add(scores, tokens, np.ones((len(q), 1), dtype=bool))
    return found


def biased(answers: list[Tensor], family: str, seed: int, total: float) -> list[Tensor]:
    """(1 - e) p + e r with this mean total variation."""
    member = biases.FAMILIES[family](np.random.default_rng(seed), VOCAB)
    r = []
    for i, distribution in enumerate(answers):
        before = torch.cat([torch.zeros_like(distribution[:1]), distribution[:-1]])
        r.append(
            member(
                biases.Distributions(
                    distribution, before, answers[(i + 1) % len(answers)], distribution
                )
            )
        )
    moved = [(a - b).abs().sum(-1) for a, b in zip(answers, r, strict=True)]
    unit = float(torch.stack(moved).mean() / 2)
    share = min(1.0, total / unit)
    return [(1 - share) * a + share * b for a, b in zip(answers, r, strict=True)]


def test_moments_and_values_agree_with_the_score_of_every_token() -> None:
    answers = distributions()[:2]
    scores = Bank(VOCAB, 3).open(blocks(answers)[1])
    rows, p = len(answers[1]), answers[1]
    every = torch.stack([scores.at(torch.full((rows,), x)) for x in range(VOCAB)], 1)  # [R, V, K]
    assert every.abs().max() <= 1
    for power_, found in enumerate(scores.moments(p), 1):
        assert torch.allclose(found, (p[:, :, None] * every**power_).sum(1), atol=1e-5)
    parity = torch.stack([scores.parities_at(torch.full((rows,), x)) for x in range(VOCAB)], 1)
    for power_, found in enumerate(scores.parities(p), 1):
        assert torch.allclose(found, (p[:, :, None] * parity**power_).sum(1), atol=1e-5)
    assert len(scores.bank.names) == every.shape[2] == len(set(scores.bank.names))


def test_tails_are_those_of_the_binomial_and_poisson_distributions() -> None:
    from scipy import stats

    for mean in (60.0, 400.0):
        for z in (-5.0, -3.0, 2.0, 4.0, 5.5):
            s = z * np.sqrt(mean)
            count = np.floor(mean + s)
            side = stats.poisson.sf(count, mean) if z > 0 else stats.poisson.cdf(count, mean)
            found = directions.tail(count + 0.5 - mean, mean, mean)
            most = 1.1 if abs(z) < 5 else 2  # too large is the safe side
            assert 0.9 < found / (2 * side) < most, (mean, z)
    n, p = 4000, 0.1
    variance, exact = n * p * (1 - p), stats.binom.sf(480, n, p)
    found = directions.tail(80.5, variance, variance * (1 - 2 * p))
    assert found == pytest.approx(2 * exact, rel=0.05)


def test_direction_tests_raise_false_alarms_at_the_stated_rate() -> None:
    """Every kind of direction, redrawn 30 times; bets may only be rarer than they say."""
    answers = distributions(1)
    found: dict[str, list[float]] = {}
    for seed in range(30):
        for t in tally(answers, answers, 2, seed, key=seed).tests():
            kind = "".join(c for c in t.name if not c.isdigit())
            found.setdefault(kind, []).append(t.p)
    assert len(found) > 12
    for kind, p in found.items():
        low = np.mean(np.array(p) < 0.1)
        assert low < 0.1 + 4 * np.sqrt(0.09 / 30), (kind, low)
    several = ("learned", "single", "start")  # bets, or the smallest of many
    plain = [p for kind, ps in found.items() if not any(w in kind for w in several) for p in ps]
    plain = np.array(plain)
    assert 0.07 < (plain < 0.1).mean() < 0.13 and 0.45 < (plain < 0.5).mean() < 0.55


def test_bets_never_pay_more_often_than_they_may() -> None:
    """Ville: the wealth reaches 1 / a in at most a share a of runs."""
    answers = distributions(2)
    tests = [t for seed in range(20) for t in tally(answers, answers, 3, seed).tests()]
    p = [t.p for t in tests if "learned" in t.name]
    assert len(p) == 120 and np.mean(np.array(p) <= 0.05) <= 0.05


@pytest.mark.parametrize(
    "family", ["within the tail, by a hash of the id", "neighbours by rank in the tail"]
)
def test_biases_that_one_order_cannot_see_are_found(family: str) -> None:
    """The order of probability hardly moves; the token ids and the ranks tell."""
    answers = distributions(3)
    tests = tally(answers, biased(answers, family, 1, 0.15), 12, 1).tests()
    assert uniformity.overall(tests) < 1e-6


def test_a_state_that_was_kept_goes_on() -> None:
    answers = distributions(4)
    one = tally(answers, answers, 1, 0)
    two = Tally(Bank(VOCAB, 5), ("all tokens",))
    two.restore(one.state())
    assert two.tests() == one.tests()
    for more in (one, two):
        for block, distribution in zip(blocks(answers), answers, strict=True):
            tokens = distribution.argmax(1)
            more.add(more.bank.open(block), tokens, np.ones((len(tokens), 1), dtype=bool))
    assert two.tests() == one.tests()
    assert any(t.name == "learned direction, pairs of tokens" and t.statistic for t in two.tests())


def chained(size: int, owed: Tensor, drawn: Tensor, many: int, seed: int) -> PairLearner:
    """A text of `many` tokens, each drawn from the row of `drawn` [V, V] that the token before
    it names, judged by `owed` in blocks of 32."""
    coin, found, last = np.random.default_rng(seed), PairLearner(), 0
    edges = drawn.double().cumsum(-1).numpy()
    for _ in range(many // 32):
        text = [last]
        for u in coin.random(32):
            row = edges[text[-1]]
            text.append(min(int(np.searchsorted(row, u * row[-1], side="right")), size - 1))
        last = text[-1]
        found.add(owed[text[:-1]], text[:-1], torch.tensor(text[1:]))
    return found


def test_pairs_find_a_key_that_the_token_before_sets_anew() -> None:
    """A watermark: under every token another half of the ids comes more often, by a hash. No
    direction over ids can know it; over all tokens before, the ids come as often as they should."""
    size = 24
    owed = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).softmax(-1)
    green = torch.stack([directions.keyed_signs(size, key, 1)[:, 0] for key in range(size)])
    marked = (owed * torch.where(green > 0, 1.8, 1.0)).float()
    marked /= marked.sum(-1, keepdim=True)
    assert float((marked - owed).abs().sum(-1).mean() / 2) == pytest.approx(0.12, abs=0.01)
    assert chained(size, owed, marked, 6400, 1).test().p < 1e-6
    sound = [chained(size, owed, owed, 640, seed).test().p for seed in range(60)]
    assert np.mean(np.array(sound) <= 0.1) <= 0.1


def keyed_by_the_token_before(key_at: slice, groups: tuple[str, ...], seed: int) -> Tally:
    """A text of 6,400 tokens whose distributions the whole context sets anew, cut into cycles of
    four; in the places `key_at` of each, a hash of the token before has made half of the ids four times as
    likely."""
    size, coin = 24, np.random.default_rng(seed)
    green = [directions.keyed_signs(size, key, 1)[:, 0].numpy() > 0 for key in range(size)]
    found, last = Tally(Bank(size, 5), groups), 0
    for _ in range(200):
        p, text = np.exp(2.5 * coin.normal(size=(32, size))), [last]
        p /= p.sum(1, keepdims=True)
        marked = np.zeros(32, dtype=bool)
        marked.reshape(8, 4)[:, key_at] = True
        for t in range(32):
            edges = (p[t] * np.where(green[text[-1]] & marked[t], 4.0, 1.0)).cumsum()
            text.append(int(np.searchsorted(edges, coin.random() * edges[-1], side="right")))
        last, members = text[-1], np.stack([np.ones(32), np.arange(32) % 4 == 0], 1)
        none = torch.full((32, 1), -1)
        block = TokenBlock(torch.tensor(p).float(), *[torch.zeros(32, size)] * 2, none, none)
        block.recent = torch.tensor(text[:-1])[:, None]
        scores, tokens = found.bank.open(block), torch.tensor(text[1:])
        found.add(scores, tokens, members[:, : len(groups)].astype(bool))
    return found


def pair_tests(found: Tally) -> dict[str, float]:
    return {t.stratum: t.p for t in found.tests() if t.name.endswith("pairs of tokens")}


def test_a_key_in_first_tokens_alone_is_found_among_them() -> None:
    """Where the context moves every distribution, so that a token comes where it is likely: its
    probability there says little of earlier visits."""
    groups = ("all tokens", "first of a cycle, after a rejection")
    found = pair_tests(keyed_by_the_token_before(slice(1), groups, 1))
    assert found["first of a cycle"] < 1e-6 < found["all tokens"]
    sound = pair_tests(keyed_by_the_token_before(slice(0), groups, 1))
    assert min(sound.values()) > 0.01


def test_a_best_token_too_often_is_found_at_few_places() -> None:
    """Every fifth of 170 places greedy: what a run of 20,000 tokens has of a place that comes
    once in an answer of 64, in every second answer."""
    p, coin = distributions(9)[0], np.random.default_rng(3)
    p = torch.cat([a[(a.amax(1) < 0.3)] for a in distributions(9)])[:170]
    assert len(p) == 170
    for share, seen in ((0.25, True), (0.0, False)):
        found = Tally(Bank(VOCAB, 5), ("all tokens",))
        tokens = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(1))[:, 0]
        best = torch.tensor(coin.random(170) < share)
        zero, none = torch.zeros_like(p), torch.full((170, 1), -1)
        block = TokenBlock(p, zero, zero, none, none)
        found.add(
            found.bank.open(block),
            torch.where(best, p.argmax(1), tokens),
            np.ones((170, 1), dtype=bool),
        )
        test = next(t for t in found.tests() if t.name == "the likeliest token")
        assert (test.p < 1e-7) == seen, test


@pytest.mark.parametrize("variance", [10, 20, 60])
@pytest.mark.parametrize("p", [0.003, 0.1, 0.5, 0.95])
def test_counted_directions_raise_no_more_alarms_than_stated(variance: int, p: float) -> None:
    """Every count that n tokens may have, with its probability: at no level are more rejected."""
    from scipy import stats

    n = int(np.ceil(variance / (p * (1 - p))))
    sums = directions.DirectionSums(["stop tokens"], ("all tokens",))
    far = int(9 * np.sqrt(variance))
    count = np.arange(max(0, int(n * p) - far), min(n, int(n * p) + far) + 1)
    found = []
    for k in count:
        sums.sums[:, 0, 0] = k - n * p, n * p * (1 - p), n * p * (1 - p) * (1 - 2 * p)
        found += [t.p for t in sums.tests()] or [1.0]
    said, mass = np.array(found), stats.binom.pmf(count, n, p)
    assert said.min() < 1e-6
    for level in np.geomspace(1e-10, 0.1, 60):
        assert mass[said <= level].sum() <= level


def test_stop_tokens_are_a_direction_of_their_own() -> None:
    """An engine that ends its answers half as often as it should."""
    answers = distributions(5)
    stop = int(torch.cat(answers).mean(0).argsort()[-20])
    rare = [p * torch.where(torch.arange(VOCAB) == stop, 0.4, 1.0) for p in answers]
    found = Tally(Bank(VOCAB, 5, stops=[stop]), ("all tokens",))
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        for block, q in zip(blocks(answers), rare, strict=True):
            tokens = torch.multinomial(q, 1, generator=generator)[:, 0]
            found.add(found.bank.open(block), tokens, np.ones((len(q), 1), dtype=bool))
    best = min(found.tests(), key=lambda test: test.p)
    assert best.name == "stop tokens" and best.p < 1e-4
    assert "stop tokens" not in Bank(VOCAB, 5).names


# --- power


def answers_of(found: list[Tensor]) -> list[power.AnswerDistributions]:
    return [power.AnswerDistributions(distribution, distribution) for distribution in found]


def test_every_family_moves_distributions_into_distributions() -> None:
    p, size = distributions(5)[0], VOCAB
    before, other = distributions(5)[1], distributions(5)[2]
    for name, family in biases.FAMILIES.items():
        for seed in range(6):
            r = family(np.random.default_rng(seed), size)(biases.Distributions(p, before, other, p))
            assert torch.allclose(r.sum(-1), torch.ones(len(r)), atol=1e-4), name
            assert float(r.min()) >= 0, name
            assert float((r - p).abs().sum()) > 0, name


def test_power_says_what_every_direction_would_find() -> None:
    answers = distributions(6)
    rounds = 10
    n = rounds * ANSWERS * LENGTH
    known = power.Power(answers_of(answers), Bank(VOCAB, 5), n, 1e-4, 50)
    member = biases.FAMILIES["between rare and frequent tokens"](np.random.default_rng(2), VOCAB)
    shift = known.shift(member)
    q = biased(answers, "between rare and frequent tokens", 2, 0.05)
    share = 0.05 / shift.total
    seen = np.mean([tally(answers, q, rounds, seed).sums[0, 0] for seed in range(6)], 0) / n
    expected = share * shift.mean.numpy()
    error = np.sqrt(known.variance / n / 6)
    keep = np.array(known.bank.names) != "tokens of the same answer"  # these are not in Power
    assert (np.abs(seen - expected)[keep] < 5 * error[keep] + 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", list(biases.FAMILIES))
def test_what_power_calls_found_is_found_when_it_is_drawn(family: str) -> None:
    """Where a member is found with power 0.99: in 18 of 20 redrawn texts at least."""
    answers, rounds, alpha = distributions(7), 12, 1e-4
    n = rounds * ANSWERS * LENGTH
    sample = tally(answers, answers, rounds, 0).tests()
    known = power.Power(answers_of(answers), Bank(VOCAB, 5), n, alpha, len(sample))
    for member in (0, 1):
        curve, reach = known.curve(biases.FAMILIES[family](np.random.default_rng(member), VOCAB))
        good = np.flatnonzero(curve >= 0.99)
        if not len(good):
            assert reach < 0.1, "a bias this large must be found"
            continue
        q = biased(answers, family, member, float(power.GRID[good[0]]))
        least = [min(t.p for t in tally(answers, q, rounds, 100 + i).tests()) for i in range(20)]
        hits = sum(p < alpha / len(sample) for p in least)
        assert hits >= 18, (family, member, hits)


def test_a_family_that_is_not_found_is_named() -> None:
    answers = distributions(8)
    few = power.Power(answers_of(answers), Bank(VOCAB, 5), 400, 1e-4, 150)
    many = power.Power(answers_of(answers), Bank(VOCAB, 5), 200_000, 1e-4, 150)
    less, more = (power.measure(p, 0.1, 0, members=3) for p in (few, many))
    assert less["blind"] and not more["blind"] and more["min_detectable"] < 0.05
    for name, row in more["families"].items():
        assert set(row) == {"min_detectable", "largest", "at_detect", "power_at", "curve"}, name


def test_the_size_that_is_worked_out_beforehand_is_the_one_that_the_certificate_asks_for() -> None:
    answers, steps = answers_of(distributions(8)), (1000, 2000, 4000, 8000, 16_000, 200_000)
    known = power.Power(answers, Bank(VOCAB, 5), 1, 1e-4, 400)
    for detect in (0.1, 0.2):
        found = power.enough(known, detect, 0, steps, members=3)
        assert found in steps[1:-1]
        for n in (found, steps[steps.index(found) - 1]):
            measured = power.measure(known.of_size(n), detect, 0, members=3)
            least = measured["min_detectable"]
            good = least is not None and least <= detect and not measured["blind"]
            assert good == (n == found), (detect, n)
    fewer_tests = power.Power(answers, Bank(VOCAB, 5), found, 1e-4, 100)  # than there may be
    assert power.measure(fewer_tests, 0.2, 0, members=3)["min_detectable"] <= 0.2
    assert power.enough(known, 0.1, 0, steps[:1], members=3) is None
    assert power.enough(known, 0.001, 0, steps, members=1) is None
