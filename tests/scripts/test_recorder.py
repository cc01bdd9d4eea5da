"""scripts/proofs/recorder.py: what verification decided and on which logits."""

from __future__ import annotations

from typing import Any

import torch

from outrider.decode.draft_model import DraftModel
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.verify import verify
from outrider.scripts.proofs.engine_distribution import toy_model
from outrider.scripts.proofs.recorder import Recorder, astray

REQUESTED = [
    Request([1, 2, 3], 12, id=7),
    Request([4, 2], 9, id=3),
    Request([5, 5, 5, 1], 12, id=11),
]


def recorded(rule: Any = "traversal", sampling: Sampling = Sampling(1.0)) -> tuple[Recorder, Any]:
    seen = Recorder(rule, REQUESTED)
    drafter = DraftModel(toy_model(seed=5, layers=1), 3)
    run = generate(
        toy_model(), drafter, REQUESTED, sampling, batch_size=2, verify=seen, coins=seen.coins
    )
    return seen, run


def test_every_token_comes_with_the_logits_that_a_plain_pass_gives() -> None:
    seen, run = recorded()
    target = toy_model()
    lines = seen.emitted(run, REQUESTED)
    assert astray(lines, run) == 0 and sum(map(len, lines)) > 15
    for line, generation in zip(lines, run.generations, strict=True):
        assert [e.token for e in line] == generation.token_ids
        ids, start = [*generation.prompt_ids, *generation.token_ids], len(generation.prompt_ids)
        with torch.no_grad():
            plain = target.model(torch.tensor([ids])).logits[0, start - 1 : -1]
        ours = torch.stack([e.call.kept[e.index] for e in line])
        assert torch.allclose(plain, ours, atol=1e-9)


def test_recording_changes_nothing() -> None:
    drafter = DraftModel(toy_model(seed=5, layers=1), 3)
    bare = generate(toy_model(), drafter, REQUESTED, Sampling(1.0), batch_size=2)
    assert [g.token_ids for g in bare.generations] == [
        g.token_ids for g in recorded()[1].generations
    ]


def test_a_loop_that_emits_something_else_is_noticed() -> None:
    seen, run = recorded()
    run.generations[1].token_ids[4] ^= 1
    assert astray(seen.emitted(run, REQUESTED), run) == 1


def test_histories_hold_everything_before_each_token() -> None:
    heard: list[tuple[int, list[int]]] = []

    def keep(logits: torch.Tensor, tokens: torch.Tensor, histories: list[list[int]]) -> list[int]:
        heard.extend(zip(tokens.tolist(), histories, strict=True))
        return [0] * len(tokens)

    seen = Recorder(
        lambda tree, distribution, rng: verify(tree, distribution, rng), REQUESTED[:1], keep
    )
    drafter = DraftModel(toy_model(seed=5, layers=1), 3)
    run = generate(
        toy_model(), drafter, REQUESTED[:1], Sampling(1.0), verify=seen, coins=seen.coins
    )
    ids = [*REQUESTED[0].prompt, *run.generations[0].token_ids]
    for i, token in enumerate(run.generations[0].token_ids):
        assert heard[i] == (token, ids[: len(REQUESTED[0].prompt) + i])


def test_a_call_knows_whether_its_rows_are_those_of_the_call_before() -> None:
    """Two rows at a time: the third request joins when the second one is done."""
    seen, _ = recorded()
    rows = [call.requests for call in seen.calls]
    assert [call.moved for call in seen.calls] == [
        i == 0 or rows[i] != rows[i - 1] for i in range(len(rows))
    ]
    assert 3 <= sum(call.moved for call in seen.calls) < len(seen.calls)
