"""The statistics of `certify url=...`: exact bets, sound answers that pass, wrong
ones that are named."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from outrider.scripts.certificate import server_judged
from outrider.scripts.certificate.server_places import (
    JudgedAnswer,
    beyond_at_most,
    places,
    powered,
)
from tests.helpers.table_server import BEST, LIKELIEST, LIMIT, PROMPTS, TABLE, VOCAB, Draw, sound


def answers(seed: int, draw: Draw = sound) -> list[JudgedAnswer]:
    """1,200 tokens, as the command asks for them."""
    rng, found = np.random.default_rng(seed), list[JudgedAnswer]()
    plan = [(1, 1.0, 16)] * 8 + [(8, 1.0, 16)] + [(1, 1.0, 0.9)] * 8 + [(8, 1.0, 0.9)]
    plan += [(1, 0.6, 0)] * 8 + [(8, 0.6, 0)]
    for wave, (level, heat, cut) in enumerate(plan):
        for _ in range(level):
            last = len(found) % PROMPTS
            prompt, tokens, rows = [last], [], []
            for place in range(LIMIT):
                log_probs = TABLE[last]
                row = {int(i): float(log_probs[i]) for i in LIKELIEST[last]}
                last = draw(rng, log_probs, heat, cut, place, level)
                row.setdefault(last, float(log_probs[last]))
                tokens.append(last)
                rows.append(row)
            stop = () if cut else (STOP,)
            end = tokens.index(STOP) + 1 if stop and STOP in tokens else LIMIT
            few, share = (int(cut), 1.0) if cut >= 1 or not cut else (0, cut)
            how = (heat, few, level, wave, share, stop)
            found.append(JudgedAnswer(prompt, tokens[:end], rows[:end], *how))
    return found


# the commonest token of untruncated answers
STOP = int(np.linalg.matrix_power(np.exp(powered(TABLE, 1 / 0.6)), 50)[0].argmax())


def judged(seed: int, draw: Draw = sound) -> dict:
    return server_judged.judged(answers(seed, draw), BEST)


def test_the_mean_of_every_bet_is_one() -> None:
    """Over all tokens that a place may have, whatever came before: for an answer's first
    token and for a later one."""
    known = places(answers(4)[:3], BEST)
    for at in (0, 7, len(known.own) - 1):
        total: dict[str, np.ndarray] = {}
        for other in np.flatnonzero(np.isfinite(known.logs[at])):
            own = np.where(np.arange(len(known.own)) == at, other, known.own)
            mass = math.exp(known.logs[at, other])
            some = dataclasses.replace(known, own=own)
            for name, ratios in server_judged.alternatives(some).items():
                total[name] = total.get(name, 0.0) + mass * np.exp(ratios[:, at])
        assert all(np.allclose(mean, 1, atol=1e-9) for mean in total.values())


def test_a_temperature_is_measured() -> None:
    rng = np.random.default_rng(3)
    rows = TABLE[rng.integers(VOCAB, size=2000)]
    for b in (0.7, 1.0, 1.6):
        chosen = (powered(rows, b) + rng.gumbel(size=rows.shape)).argmax(1)
        likely, _ = server_judged.exponent(rows, chosen)
        assert abs(likely - b) < 0.15
    assert server_judged.exponent(rows, rows.argmax(1))[0] == math.inf


def test_what_lies_beyond_the_likeliest_is_bounded() -> None:
    for last, heat in itertools.product(range(VOCAB), (0.6, 1.0, 1.4)):
        kept = [(int(i), float(TABLE[last, i])) for i in LIKELIEST[last]]
        whole = np.exp(TABLE[last] / heat)
        beyond = 1 - whole[LIKELIEST[last]].sum() / whole.sum()
        assert beyond <= beyond_at_most(kept, heat) + 1e-6
        if heat == 1:
            assert math.isclose(beyond, beyond_at_most(kept, heat), abs_tol=2e-6)


def test_sound_answers_pass_and_say_what_they_measured() -> None:
    found = [judged(seed) for seed in range(4)]
    assert all(one["verdict"] == "passed" and one["p"] > 2e-3 for one in found)
    assert all(one["temperature_honoured"] and not one["ignored"] for one in found)
    assert found[0]["line"].startswith("as asked: ")
    assert "tokens at temperature 1 and 0.6, 1, 8 at a time" in found[0]["line"]
    assert {one["depends_on_the_batch"] for one in found} == {"no sign of it"}


def always(share: float = 1.0, level: int = 0, place: int | None = None) -> Draw:
    """The likeliest token, at a share of the places; above so many at a time; at one place."""

    def draw(rng, log_probs, heat, cut, at, together) -> int:
        here = together > level and (place is None or at == place) and rng.random() < share
        return int(log_probs.argmax()) if here else sound(rng, log_probs, heat, cut, at, together)

    return draw


def heated(by: float = 1.0, to: float = 0.0) -> Draw:
    """At another temperature."""
    return lambda rng, logs, heat, cut, *rest: sound(rng, logs, to or heat * by, cut, *rest)


WRONG: dict[str, tuple[Draw, str]] = {
    "greedy": (always(), "likest those of temperature 0.00 and 0.00"),
    "ignored": (heated(to=1.0), "another temperature, temperature 0.6"),
    "hot": (heated(1.6), "another temperature"),
    "batch": (always(0.4, 1), "; 1 at a time p = "),
    "first": (always(place=0), "the best token too often, first of an answer"),
    "often": (always(0.3), "the best token too often"),
}


def test_what_is_wrong_is_named() -> None:
    for name, (draw, said) in WRONG.items():
        found = judged(0, draw)
        assert found["verdict"] == "rejected" and said in found["line"], found["line"]
        assert (found["depends_on_the_batch"] == "yes") == (name == "batch")
        if name in ("greedy", "ignored", "hot"):
            assert not found["temperature_honoured"]


def test_a_truncation_that_is_not_taken_is_no_other_distribution() -> None:
    found = judged(0, lambda rng, logs, heat, cut, *rest: sound(rng, logs, heat, 0, *rest))
    assert found["verdict"] == "passed" and found["beyond"] > 20
    assert "top_k=16" in found["ignored"]


def test_tokens_beyond_top_k_that_only_drafts_bring_are_rejected() -> None:
    def draw(rng, logs, heat, cut, place, level) -> int:
        return sound(rng, logs, heat, cut if place == 0 else 0, place, level)

    found = judged(0, draw)
    assert found["verdict"] == "rejected" and server_judged.BEYOND in found["line"]


def test_a_stop_token_that_is_never_kept_is_named() -> None:
    def draw(rng, logs, heat, cut, *rest) -> int:
        other = np.where((np.arange(VOCAB) == STOP) & (cut == 0), -np.inf, logs)
        return sound(rng, other, heat, cut, *rest)

    found = server_judged.judged(answers(0, draw) + answers(1, draw), BEST)
    assert found["verdict"] == "rejected" and "stop tokens" in found["line"], found["line"]


def test_few_tokens_decide_nothing() -> None:
    found = server_judged.judged(answers(0)[:10], BEST)
    assert found["verdict"] == "undecided" and "400 are needed" in found["line"]
    assert server_judged.judged([], BEST)["verdict"] == "undecided"


def test_a_vocabulary_of_one_token_leaves_no_choice() -> None:
    one = JudgedAnswer([0], [7] * LIMIT, [{7: 0.0}] * LIMIT, 1.0, 16, 1, 0)
    found = server_judged.judged([one] * 30, BEST)
    assert found["verdict"] == "undecided" and "leave no choice" in found["line"]
