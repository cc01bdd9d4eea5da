"""Passes of fixed sizes, without a GPU: what would be captured runs as it is, over the same tensors,
and what is found must be what the plain way finds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from outrider.decode import graphs
from outrider.decode.cache import TreeCache
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.graphs import CHECKED, KEPT, Graphs
from outrider.decode.grow import Form
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import TreeShape
from outrider.heads.names import DraftSpec
from tests.contract import checks
from tests.contract.cases import CASES, moved
from tests.helpers.archs import build
from tests.helpers.graphs import standing_in

pytestmark = pytest.mark.usefixtures("captures")
STATIC = TreeShape.of([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
PROMPTS = [[5, 6, 7], [9] * 11, [3, 8] * 14]  # answers end behind 16, 24 and 32 slots
LAYERED = ["eagle1", "eagle3", "eagle3.1-two-layers", "eagle3-window", "p-eagle", "small_lm"]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    standing_in(monkeypatch)
    monkeypatch.setattr(graphs, "SHORTEST", 16)


@pytest.fixture
def never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graphs: Graphs, why: str) -> None:
        raise AssertionError(why)

    monkeypatch.setattr(Graphs, "_refuse", refuse)


def target(arch: str = "llama", captures: bool = True) -> Target:
    found = Target(build(arch, dtype=torch.float64))
    found.captures = captures
    return found


def drafters(of: Target) -> dict[str, Drafter]:
    small = target("qwen2", of.captures)
    return {
        "none": NoDraft(),
        "ngram": NGram(4, 6),
        "chain": DraftModel(small, 4, vocab_size=of.vocab_size),
        "tree": DraftModel(small, Form.tree(3, 8, 2, STATIC), vocab_size=of.vocab_size),
    }


@pytest.mark.usefixtures("never_refused")
@pytest.mark.parametrize("name", ["none", "ngram", "chain", "tree"])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_answers_are_those_of_plain_passes(arch: str, name: str) -> None:
    """Rows of several lengths that join and leave, windows, slots that grow; twice, for the second
    time takes over the first one's cache."""
    asked = [Request(prompt, 20, id=i) for i, prompt in enumerate(PROMPTS)]
    answers = []
    for captures in (True, False):
        one = target(arch, captures)
        drafter = drafters(one)[name]
        for temperature in (0.0, 1.0):
            run = generate(one, drafter, asked, Sampling(temperature), batch_size=2)
            answers.append([(g.token_ids, g.cycles) for g in run.generations])
        if captures:
            assert any(one.graphs._known.values())
    assert answers[:2] == answers[2:]


@pytest.mark.usefixtures("never_refused")
def test_a_graph_knows_no_number_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replayed are operations, recorded at another length and place in the draft."""
    standing_in(monkeypatch, recorded=True)
    monkeypatch.setattr(graphs, "SHORTEST", 64)
    found = []
    for captures in (True, False):
        one, head = moved(CASES["eagle3"], "float64")
        one.captures = captures
        drafter = head.drafter(one, DraftSpec(shape="chain"))
        run = generate(one, drafter, [Request([5, 6, 7], 16)], Sampling(), eos_ids=())
        found.append([(g.token_ids, g.cycles) for g in run.generations])
    assert found[0] == found[1]


@pytest.mark.usefixtures("never_refused")
@pytest.mark.parametrize("name", LAYERED)
def test_draft_heads_keep_the_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "captures", True)
    for check in (checks.pieces_change_nothing, checks.rows_change_nothing):
        check(CASES[name])


@pytest.mark.usefixtures("never_refused")
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", LAYERED)
def test_drafts_of_heads_are_those_of_plain_passes(name: str, shape: str) -> None:
    asked = [Request(prompt, 12, id=i) for i, prompt in enumerate(PROMPTS[:2])]
    found = []
    for captures in (True, False):
        one, head = moved(CASES[name], "float64")
        one.captures = captures
        drafter = head.drafter(one, DraftSpec(shape=shape))
        for temperature in (0.0, 1.2):
            run = generate(one, drafter, asked, Sampling(temperature), batch_size=2)
            found.append([(g.token_ids, g.cycles) for g in run.generations])
    assert found[:2] == found[2:]


def run(
    found: Graphs, way: Callable[..., tuple[Tensor | None, ...]], times: int = 4
) -> list[float]:
    """Ask for x + 1 of rising x, by `way` where a graph is used."""
    given = [torch.full((1, 1), float(i)) for i in range(times)]
    return [
        float(found.run("one", [x], [(2, 2)], way, lambda x=x: (x + 1,))[0])  # type: ignore[misc]
        for x in given
    ]


def wrong_later() -> Callable[[Tensor], Sequence[Tensor]]:
    """Return what is right until its second use."""
    used = list[int]()

    def way(x: Tensor) -> tuple[Tensor]:
        used.append(0)
        return (x + 1 + (len(used) > 2),)

    return way


def fails(x: Tensor) -> tuple[Tensor]:
    raise RuntimeError("cannot be captured")


@pytest.mark.parametrize("way", [fails, lambda x: (x * 0,), lambda x: (x.log(),), wrong_later()])
def test_what_fails_or_finds_something_else_goes_the_plain_way(
    way: Callable[..., tuple[Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = Graphs()
    assert run(found, way) == [1, 2, 3, 4]
    assert found.refused and not any(found._known.values())
    run(found, way)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.usefixtures("never_refused")
def test_a_graph_may_find_the_infinities_of_the_plain_way() -> None:
    found, inf, nan = Graphs(), float("inf"), float("nan")
    for x in torch.tensor([[[1.0, 2, nan]], [[3, 4, -inf]], [[nan, nan, nan]], [[inf, 5, 6]]]):
        made = found.run("one", [x], [(1, 3)], lambda x: (x + 1,), lambda x=x: (x + 1,))[0]  # type: ignore[misc]
        assert made is not None and torch.equal(made.nan_to_num(), (x + 1).nan_to_num())


def test_a_graph_reads_what_it_is_given_and_zeros_behind_it() -> None:
    found, seen = Graphs(), list[list[list[float]]]()

    def way(x: Tensor) -> tuple[Tensor, None]:
        seen.append(x.tolist())
        return x + 1, None

    for size in [(2, 3), (2, 3), (1, 2), (2, 1)]:
        x = torch.ones(size)
        made, none = found.run("one", [x], [(2, 4)], way, lambda x=x: (x + 1, None))  # type: ignore[misc]
        assert none is None and made is not None and torch.equal(made, x + 1)
    assert seen[-2:] == [[[1, 1, 0, 0], [0] * 4], [[1, 0, 0, 0], [1, 0, 0, 0]]]


def test_graphs_are_few_and_go_when_the_model_is_wanted_otherwise() -> None:
    one = target()
    for rows in range(1, KEPT + 3):
        asked = [Request([5, 6, 7], 5 + CHECKED, id=i) for i in range(rows)]
        generate(one, NoDraft(), asked, Sampling(), batch_size=rows)
    assert 0 < len(one.graphs._known) <= KEPT
    ids = torch.tensor([[5, 6, 7]])
    one.features(ids, ids > 0, (0,))
    assert not one.graphs._known and one.graphs.cache is None


def test_two_engines_do_not_share_a_cache() -> None:
    one = target()
    first, second = one.new_cache(1, 20, 4), one.new_cache(1, 20, 4)
    assert first is not second
    one.release(second)
    assert one.new_cache(1, 10, 2) is second and one.new_cache(2, 10, 2) is not second


@pytest.mark.usefixtures("never_refused")
def test_a_first_answer_is_captured_and_a_longer_one_with_fewer_nodes_is_right() -> None:
    answers = []
    for captures in (True, False):
        one = target(captures=captures)
        for drafter, tokens in ((NGram(4, 30), 20), (NoDraft(), 45)):
            run = generate(one, drafter, [Request([5, 6, 7] * 3, tokens)], Sampling(), eos_ids=())
            answers.append([(g.token_ids, g.cycles) for g in run.generations])
            assert any(one.graphs._known.values()) == captures
    assert answers[:2] == answers[2:]


def test_a_cache_that_is_too_small_goes_before_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = target()
    small = weakref.ref(one.new_cache(1, 10, 2))
    one.graphs.lent, make, seen = False, TreeCache.__init__, list[TreeCache | None]()
    monkeypatch.setattr(TreeCache, "__init__", lambda *a: seen.append(small()) or make(*a))
    one.new_cache(1, 20, 2)
    assert seen == [None]
