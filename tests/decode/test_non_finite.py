"""A row whose drafter gives NaN goes on without a draft in a running batch: with its own random
numbers, and neither its neighbours nor who comes after it in its place learn of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import checks
from outrider.decode.adaptive import Adaptive, Wrapped
from outrider.decode.checks import cut, non_finite
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import BatchLimits, Engine, Generation, Request, generate
from outrider.decode.grow import siblings
from outrider.decode.ngram import NGram
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.union import Union
from outrider.heads.names import DraftSpec
from tests.contract.cases import CASES, moved
from tests.helpers.non_finite import World
from tests.helpers.training import tiny_target

ILL, SUCCESSOR = 7, 9
DRAWN = Sampling(1.0)


@dataclass
class Sick(Wrapped):
    """Shows its inner drafter NaN in place of what the target gave the rows in `ill`, as a head
    whose numbers overflow would have it. calm: cuts their drafts by itself."""

    inner: Drafter
    calm: bool = False
    ill: set[int] = field(default_factory=set)
    rows: list[int] = field(default_factory=list)  # the prompt's first token of every live row

    def reset(self, rows: int, max_len: int) -> None:
        self.rows = []
        self.inner.reset(rows, max_len)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.rows += [int(prompt[0]) for prompt in prompts]
        self.inner.begin(prompts, sampling)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        ill = [first in self.ill for first in self.rows[rows]]
        if feats is not None and any(ill):
            feats = feats.masked_fill(torch.tensor(ill)[:, None, None, None], torch.nan)
        self.inner.observe(tokens, feats, n, rows)

    def propose(self, *args: Any) -> DraftTree:
        tree = self.inner.propose(*args)
        return cut(tree, non_finite(tree)) if self.calm else tree

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.inner.select(rows)


# Two neighbours, shorter than the row that is ill when it leaves, and one that comes later. Each is
# known by the first token of its prompt.
PROMPTS = {3: [3, 4, 5, 6], ILL: [7, *range(20, 53)], 5: [5, 4, 3, 4, 5, 4, 3, 4, 5], 9: [9, 8]}


def ask(first: int) -> Request:
    return Request(PROMPTS[first], 12 if first == ILL else 40, id=first)


def together(
    target: Target, drafter: Drafter, sampling: Sampling
) -> tuple[dict[int, Generation], str]:
    """What every request gets, and what is said of drafts that were left out."""
    batch = Engine(target, drafter, sampling, BatchLimits(3, 64), eos_ids=(), cuts=True)
    rows = {first: batch.join(ask(first)) for first in (3, ILL, 5, SUCCESSOR)}
    while batch.busy:
        batch.step()
    return {first: row.generation for first, row in rows.items()}, batch.left_out()


def alone(target: Target, drafter: Drafter, first: int, sampling: Sampling) -> Generation:
    return generate(target, drafter, [ask(first)], sampling, eos_ids=()).generations[0]


FORMS = [
    *((case, ("chain", "tree")[place % 2], "") for place, case in enumerate(CASES)),
    ("eagle3", "chain", "ngram"),
    ("eagle3", "tree", "adaptive"),
    ("dspark", "chain", "adaptive"),
]
SEES = [form for form in FORMS if "small_lm" not in form[0]]


def made(form: tuple[str, str, str]) -> tuple[Target, Drafter]:
    """A head that learned nothing and is accepted now and then all the same."""
    case, shape, around = form
    target, head = moved(CASES[case])
    drafter: Drafter = head.drafter(target, DraftSpec(shape=shape))
    if around == "ngram":
        return target, Union([drafter, NGram()])
    return target, Adaptive(drafter) if around else drafter


@pytest.mark.parametrize("place, form", enumerate(SEES))
def test_nobody_learns_of_a_row_that_is_ill(place: int, form: tuple[str, str, str]) -> None:
    """Greedy and drawn, chains and trees in turn."""
    target, drafter = made(form)
    sampling = Sampling() if place % 3 == 0 else DRAWN
    sound, none = together(target, Sick(drafter), sampling)
    found, said = together(target, Sick(drafter, ill={ILL}), sampling)
    assert none == "" and all(g.cycles for g in sound.values())
    for first in (3, 5, SUCCESSOR):
        assert found[first] == sound[first] == alone(target, drafter, first, sampling)
    own = alone(target, Sick(drafter, calm=True, ill={ILL}), ILL, sampling)
    assert found[ILL] == own and len(own.token_ids) == 12
    if sampling.greedy:
        assert own.token_ids == alone(target, NoDraft(), ILL, sampling).token_ids
    elif form[0].startswith(("dflash", "dspark")):
        assert said == ""  # what a block reads of the target is keys alone, and those stay finite
    else:
        assert "NaN or infinity" in said
        with pytest.raises(UserError, match="nothing was committed"):
            alone(target, Sick(drafter, ill={ILL}), ILL, sampling)


def test_the_same_without_waiting_for_the_device(request: pytest.FixtureRequest) -> None:
    target, drafter = made(("eagle3", "chain", ""))
    want = together(target, Sick(drafter, ill={ILL}), DRAWN)
    request.getfixturevalue("accelerator")
    assert together(target, Sick(drafter, ill={ILL}), DRAWN) == want


def test_a_separate_draft_remembers_nothing_that_is_not_finite() -> None:
    target, draft = tiny_target(), tiny_target(seed=5)
    with torch.no_grad():
        draft.model.get_input_embeddings().weight[ILL] = torch.nan
    drafter = DraftModel(draft, 3)
    assert len(alone(target, drafter, ILL, Sampling()).token_ids) == 12
    assert all(bool(buffer.isfinite().all()) for buffer in drafter.cache.buffers)


def errors(seeds: range) -> dict[str, float]:
    worlds = [World.random(seed) for seed in seeds]
    return {world.words: world.enumerated().error for world in worlds}


@pytest.mark.parametrize("device", ["host", "accelerator"])
@pytest.mark.parametrize(
    "first, count", [(0, 30), pytest.param(1000, 1000, marks=pytest.mark.slow)]
)
def test_a_draft_that_ends_where_it_is_not_finite_keeps_the_distribution(
    device: str, first: int, count: int, request: pytest.FixtureRequest
) -> None:
    """NaN and infinities in rows and in single entries, behind some drafted tokens alone: tables,
    separate models, trained heads of every kind, unions, adaptive lengths, guidance."""
    if device == "accelerator":
        request.getfixturevalue(device)
        first += 10_000
    found = errors(range(first, first + count))
    assert not {words: error for words, error in found.items() if not error < 1e-6}


def test_a_draft_that_is_dropped_whole_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is would depend on the tokens that were drawn."""
    end = checks.cut
    monkeypatch.setattr(
        checks, "cut", lambda tree, bad: end(tree, bad.any(1, keepdim=True).expand_as(bad))
    )
    assert sum(error > 1e-3 for error in errors(range(30)).values()) > 2


@pytest.mark.usefixtures("anywhere")
def test_what_stands_in_for_a_sibling_is_another_token() -> None:
    """All tokens but one are masked: once the second sibling was the first again, and the whole
    batch ended."""
    logits = torch.tensor([[[0.0, -torch.inf, -torch.inf]]])
    rng = Rng(0, torch.tensor([0]), torch.tensor([0]))
    _, place, drawn = siblings(logits.softmax(-1), logits, [[0, 1, 2]], rng)
    assert sorted(place[0].tolist()) == [0, 1, 2] and drawn[0].tolist() == [True, False, False]
