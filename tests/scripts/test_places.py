"""Wrong at one kind of place, or by a key: what scripts/lab/proofs/placed.py makes of the engine,
and the strata that see it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.decode.engine import Request, generate
from outrider.decode.records import Cycle, Generation
from outrider.decode.sampling import Sampling
from outrider.scripts.lab.proofs import placed
from outrider.scripts.proofs.sampled import GROUPS, _cycles, _depths, _groups


def test_the_strata_of_an_answer() -> None:
    """Prefill, then cycles of 3 proposed tokens of which 1, 0, 0, 3, 1 are accepted, and one
    without a draft."""
    accepted, cycles, start = (1, 0, 0, 3, 1, 0), list[Cycle](), 1
    for i, count in enumerate(accepted):
        cycles.append(Cycle(3 if i < 5 else 0, count, (0,) * count, False, start))
        start += count + 1
    made = Generation([1], list(range(start)), cycles, [False] * start)
    moved = np.zeros(start, dtype=bool)
    moved[[0, 3]] = True
    found = _groups(made, _depths(made), _cycles(made), moved, 13)
    places = {name: np.flatnonzero(found[:, g]).tolist() for g, name in enumerate(GROUPS)}
    assert places["all tokens"] == list(range(12)) and places["first of an answer"] == [0]
    assert places["first of a cycle, after a rejection"] == [3, 4, 5, 11]
    assert places["first of a cycle, after two rejections"] == [4, 5]
    assert places["first of a cycle, after a whole draft"] == [9]
    assert places["first of a cycle, without a draft"] == [11]
    assert places["cycle after a row joined or left"] == [3]
    assert places["second half of the answer"] == [6, 7, 8, 9, 10, 11]
    assert places["last before the limit"] == []
    assert _groups(made, _depths(made), _cycles(made), moved, 12)[11, -2]


@pytest.mark.parametrize(
    "name", ["after two rejections in a row, cooled", "behind a whole draft, cooled"]
)
def test_a_rule_is_as_wrong_as_it_says(name: str) -> None:
    rule = placed.CASES[name][0]()
    placed.Bench().judged(rule, 300)
    assert rule.moved / rule.places == pytest.approx(0.2, abs=0.05)
    assert 0.01 < rule.places / rule.tokens < 0.6


def test_a_rule_that_is_never_wrong_is_the_engine_s_own() -> None:
    bench, never = placed.Bench(), placed.PlacedRule(lambda row: False, placed.best)
    assert bench.judged(never, 300)["p"] == bench.judged("traversal", 300)["p"]


def test_a_watermark_of_two_tokens_knows_both() -> None:
    """The same token before it, another one before that: another half of the ids."""
    p, rows = torch.full((64,), 1 / 64), [placed.RequestState(0, last=5, earlier=e) for e in (7, 8)]
    one, other = (placed.watermark(4.0, tokens=2)(row, p, p) for row in rows)
    assert not torch.equal(one, other)
    one, other = (placed.watermark(4.0)(row, p, p) for row in rows)
    assert torch.equal(one, other)


def test_the_two_tokens_before_a_draft_are_known() -> None:
    """They are those that end the answer so far, whether they were drafted or drawn."""
    seen: dict[int, list[tuple[int, int, int]]] = {}

    def never(row: placed.RequestState) -> bool:
        seen.setdefault(row.number, []).append((row.tokens, row.earlier, row.last))
        return False

    bench, rule = placed.Bench(), placed.PlacedRule(never, placed.best)
    requests = [Request(prompt, 24, id=i) for i, prompt in enumerate(bench.prompts[:4])]
    how = Sampling(1.0)
    run = generate(bench.target, bench.drafter, requests, how, batch_size=4, verify=rule)
    known = [(g.token_ids, row) for i, g in enumerate(run.generations) for row in seen[i]]
    later = [(ids[n - 2 : n], pair) for ids, (n, *pair) in known if n >= 2]
    assert len(later) > 20 and any(ids[n - 2] != ids[n - 1] for ids, (n, *_) in known if n >= 2)
    assert all(ids == pair for ids, pair in later)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, case in placed.CASES.items() if case[2]])
def test_every_place_is_rejected_at_full_size(name: str) -> None:
    make, tokens, _ = placed.CASES[name]
    assert placed.Bench().judged(make(), tokens)["rejected"]
