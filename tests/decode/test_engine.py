"""The decode loop on tiny targets: equal to plain decoding and to transformers, in any batch,
to the last token.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import LEFT, BatchLimits, Engine, Request, Row, generate
from outrider.decode.grow import Form
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, Proposal, TreeShape
from tests.helpers.decoding import texts


class Tree(NoDraft):
    """A static tree of tokens that depend on the row's length alone, the true ones smuggled in
    at times.
    """

    name, shape = "tree", "tree"
    paths = TreeShape.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    max_nodes, max_depth = 7, 3

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tokens = torch.arange(7).expand(self.rows, 7) * 3 + 5
        return DraftTree.static(self.paths, tokens, self.paths.size_at(budget))


PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [10, 11], [3] * 20, [50], list(range(40, 90)), [7, 8] * 6]


def requests(count: int = 6, tokens: int = 24) -> list[Request]:
    return [Request(p, tokens, id=i) for i, p in enumerate(PROMPTS[:count])]


def drafters(target: Target, other: Target) -> list[Drafter]:
    return [NGram(), DraftModel(target, 4), DraftModel(other, 3), Tree()]


def tokens(target: Target, drafter: Drafter, sampling: Sampling, **more: object) -> list[list[int]]:
    return texts(target, drafter, requests(), sampling, **more)


DISTRIBUTIONS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.8, top_k=20, top_p=0.9),
    Sampling(1.0, repetition_penalty=1.3),
]


@pytest.mark.parametrize("sampling", DISTRIBUTIONS)
def test_tokens_do_not_depend_on_batch_size_or_position(
    target: Target, other: Target, sampling: Sampling
) -> None:
    for drafter in [NoDraft(), *drafters(target, other)]:
        alone = tokens(target, drafter, sampling, batch_size=1, seed=3)
        # In another place of a batch of another size; behind it rows of several requests.
        back = generate(target, drafter, requests()[::-1], sampling, batch_size=3, seed=3)
        assert alone == [g.token_ids for g in back.generations[::-1]], drafter.name
    if not sampling.greedy:
        assert alone != tokens(target, drafter, sampling, seed=4)


def test_perfect_drafter_accepts_everything(target: Target) -> None:
    """A lossless engine with a broken drafter state fails here: the target as its own draft."""
    for sampling in (Sampling(), Sampling(1.0), Sampling(0.7, top_p=0.8)):
        for batch in (1, 3):
            run = generate(
                target,
                DraftModel(target, 4),
                requests(tokens=31),
                sampling,
                batch_size=batch,
                seed=1,
            )
            clean = [c for g in run.generations for c in g.cycles if not c.cut]
            assert clean and all(c.accepted == c.proposed == 4 for c in clean)


def test_limits_are_exact(target: Target, other: Target) -> None:
    for drafter in [NoDraft(), *drafters(target, other)]:
        for limit in (0, 1, 2, 7):
            run = generate(target, drafter, requests(tokens=limit), Sampling(), batch_size=3)
            assert all(len(g.token_ids) == limit == len(g.from_draft) for g in run.generations)


def test_stop_token_inside_an_accepted_block(target: Target) -> None:
    free = tokens(target, NoDraft(), Sampling())
    for place in (0, 1, 3, 4, 5):
        stop = free[0][place]
        if stop in free[0][:place]:
            continue
        run = generate(target, DraftModel(target, 4), requests(1), Sampling(), eos_ids=[stop])
        got = run.generations[0]
        assert got.token_ids == free[0][: place + 1] and got.finish == "eos"
        assert sum(c.accepted for c in got.cycles) == sum(got.from_draft)


def test_context_end_trims_the_tree(target: Target) -> None:
    small = load_target(TargetConfig(kind="tiny", context=32), torch.float64)
    prompt = list(range(20, 49))  # 29 of 32 positions
    for drafter in (NoDraft(), NGram(), DraftModel(small, 4), Tree()):
        got = (
            generate(small, drafter, [Request(prompt, 50)], Sampling(), eos_ids=[])
            .generations[0]
            .token_ids
        )
        assert len(got) == 3
    with pytest.raises(UserError, match="context holds 32"):
        generate(small, NoDraft(), [Request(list(range(40, 72)), 5)], Sampling())


def test_cycles_add_up(target: Target, other: Target) -> None:
    for drafter in drafters(target, other):
        for g in generate(
            target, drafter, requests(), Sampling(1.0), batch_size=2, eos_ids=[]
        ).generations:
            assert 1 + sum(c.accepted + 1 for c in g.cycles) == len(g.token_ids)
            assert sum(g.from_draft) == sum(c.accepted for c in g.cycles)
            assert [c.start for c in g.cycles] == [
                1 + sum(c.accepted + 1 for c in g.cycles[:i]) for i in range(len(g.cycles))
            ]
            assert all(c.accepted <= c.proposed <= drafter.max_depth for c in g.cycles)


def test_rows_that_join_and_leave_keep_their_tokens(target: Target) -> None:
    ids = [[3 + i, 4, 5, 3 + i, 4, 5, 6] for i in range(7)]
    asked = [Request(p, 24, id=n) for n, p in enumerate(ids)]
    for sampling in (Sampling(), Sampling(0.9, top_p=0.9)):
        wanted = texts(target, NGram(), asked, sampling)
        engine = Engine(target, NGram(), sampling, BatchLimits(3, 64))
        got: list[list[int]] = [[] for _ in ids]
        rows, ended = list[Row](), list[Row]()
        for step in range(200):
            if step % 3 == 0 and len(rows) < len(ids):
                to = got[len(rows)]
                rows.append(engine.join(asked[len(rows)], lambda f, to=to: to.extend(f.tokens)))
            if step == 7:
                engine.leave(rows[1])
            ended += engine.step()
        assert sorted(row.number for row in ended) == list(range(len(ids))) and not engine.busy
        assert rows[1].generation.finish == LEFT
        assert got[1] == wanted[1][: len(got[1])]
        assert [*got[:1], *got[2:]] == [*wanted[:1], *wanted[2:]]


def test_a_row_that_is_refused_leaves_nothing(target: Target) -> None:
    engine = Engine(target, NoDraft(), Sampling(), BatchLimits(1, 8))
    for prompt in ([], [3] * 8, [10**6]):
        with pytest.raises(UserError):
            engine.join(Request(prompt, 4))
    assert not engine.busy and engine.step() == []


def test_guidance_is_exact_for_the_guided_target(target: Target, other: Target) -> None:
    """Speculation under guidance gives transformers' guided tokens; companions follow rows
    through the queue.
    """
    requested = [
        Request(p, 16, uncond=[9, 9, 4] if i % 2 else None, id=i) for i, p in enumerate(PROMPTS)
    ]
    for drafter in [NoDraft(), *drafters(target, other)]:
        for batch in (1, 4):
            run = generate(
                target, drafter, requested, Sampling(), batch_size=batch, guidance=1.7, eos_ids=[]
            )
            for request, got in zip(requested, run.generations, strict=True):
                negative = torch.tensor([request.uncond or request.prompt[-1:]])
                want = target.model.generate(
                    torch.tensor([request.prompt]),
                    do_sample=False,
                    max_new_tokens=16,
                    pad_token_id=0,
                    guidance_scale=1.7,
                    negative_prompt_ids=negative,
                    eos_token_id=None,
                )
                assert got.token_ids == want[0, len(request.prompt) :].tolist(), drafter.name


def test_dynamic_trees_under_guidance_on_rows_of_one_length(target: Target, other: Target) -> None:
    """Their layout holds every row: companions, as long as their requests here, once met a
    mask of half the rows.
    """
    requested = [
        Request(p, 12, uncond=p[::-1], id=i) for i, p in enumerate(([5, 6, 7, 8], [9, 10, 11, 12]))
    ]
    found = []
    for drafter in (NoDraft(), DraftModel(other, Form.tree(3, nodes=6))):
        found.append(texts(target, drafter, requested, batch_size=2, guidance=1.7, eos_ids=[]))
    assert found[0] == found[1]


class Drawn(Tree):
    """The same tree, all of it drawn from even distributions. token: what stands in the
    place of its third node, or of all padding and in every distribution row of it."""

    def __init__(self, token: int, padding: bool) -> None:
        super().__init__()
        self.token, self.padding = token, padding

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tokens = torch.arange(7).repeat(self.rows, 1) * 3 + 5
        size, node = self.paths.size_at(budget), torch.arange(7)
        size[0] = size[0].clamp(max=3)
        row = torch.tensor([0, 0, 0, 1, 1, 2, 3]).repeat(self.rows, 1)
        there = (node < size[:, None]) if self.padding else (node != 2).expand(self.rows, 7)
        tokens[~there] = self.token
        row[(node >= size[:, None]) & self.padding] = self.token
        distribution = torch.full((self.rows, 4, 320), 1 / 320)
        drawn = torch.ones_like(there)
        return DraftTree.static(self.paths, tokens, size, drawn, Proposal(distribution, row))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("token, penalty", [(-1, 1.3), (10**9, 1.0)])
def test_a_drawn_token_outside_the_vocabulary_is_named(
    token: int, penalty: float, target: Target
) -> None:
    """An index out of range ends a process on an accelerator before anything can be said."""
    sampling = Sampling(1.0, repetition_penalty=penalty)
    with pytest.raises(ValueError, match=f"row 0, node 2: token {token} outside the vocab"):
        generate(target, Drawn(token, False), requests(2), sampling, batch_size=2)


@pytest.mark.usefixtures("anywhere")
def test_padding_of_a_drawn_tree_may_hold_anything(target: Target) -> None:
    sampling = Sampling(1.0, repetition_penalty=1.3)
    found = [
        tokens(target, Drawn(token, True), sampling, batch_size=3, eos_ids=())
        for token in (0, -1, 10**9)
    ]
    assert found[0] == found[1] == found[2]
