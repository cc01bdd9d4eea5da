"""The cost model's fits and formulas, and the replay: what it says is accepted is what the
engine then accepts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.decode.draft_model import DraftModel
from outrider.decode.engine import Request, generate
from outrider.decode.grow import Form
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.price import Price
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.heads import head_class, save_head, shapes
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.names import DraftSpec
from outrider.heads.parallel.medusa import MedusaConfig
from outrider.heads.small_lm.config import SmallLMConfig
from outrider.heads.tuned import DraftSettings
from outrider.scripts.common.progress import silent
from outrider.scripts.tuning import cost, replay, search
from outrider.scripts.tuning.cost import CostModel, Curve, CycleShape, LinearCost
from outrider.scripts.tuning.family import Bounds, DrafterFamily
from outrider.scripts.tuning.replay import ReplayedCycle, Shadow, Text

# -- formulas and fits


def test_closed_formulas_by_hand() -> None:
    assert cost.expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)
    assert cost.expected_tokens(1.0, 3) == 4 and cost.expected_tokens(0.0, 3) == 1
    a = cost.acceptance_needed(2.0, 3)
    assert a is not None and cost.expected_tokens(a, 3) == pytest.approx(2.0)
    assert cost.acceptance_needed(4.1, 3) is None and cost.acceptance_needed(1.0, 3) == 0.0


def test_independence_matches_the_general_sum() -> None:
    a = 0.6
    assert cost.length_of_chain([a, a**2, a**3], 3) == pytest.approx(cost.expected_tokens(a, 3))


def test_a_curve_is_monotone_and_goes_on() -> None:
    curve = Curve.fit(
        [(1, 0, 10.0), (1, 0, 11.0), (1, 4, 9.0), (1, 8, 20.0), (2, 0, 20.0), (2, 8, 40.0)]
    )
    assert [ms for _, ms in curve.knots[1]] == sorted(ms for _, ms in curve.knots[1])
    assert curve(1, 6) == pytest.approx((curve(1, 4) + curve(1, 8)) / 2)
    assert curve(1, 10) > curve(1, 8) and curve(2, 4) == pytest.approx(30)
    assert curve(3, 8) == pytest.approx(60), "batch sizes beyond the last go on with the last slope"
    assert curve.line(2) == pytest.approx((20.0, 2.5))
    with pytest.raises(ValueError):
        Curve.fit([])


def test_isotonic_keeps_order_and_mean() -> None:
    values = [3.0, 1.0, 2.0, 5.0, 4.0]
    found = cost.isotonic(values, [1] * 5)
    assert found == pytest.approx([2.0, 2.0, 2.0, 4.5, 4.5])


def test_linear_finds_the_parts_and_none_below_zero() -> None:
    spread = ((1, 4, 4), (2, 8, 4), (4, 16, 4), (4, 16, 8), (8, 64, 8), (8, 8, 2))
    rows = [CycleShape(d, n, w).features() for d, n, w in spread]
    truth = {"one": 2.0, "passes": 3.0, "expanded": 0.25, "nodes": 0.01}
    fit = LinearCost.fit(
        rows, [sum(truth[k] * v for k, v in r.items()) for r in rows], cost.PROPOSE
    )
    assert fit.to_json() == pytest.approx(truth, abs=1e-3)
    falling = LinearCost.fit(
        [{"one": 1.0, "tokens": t} for t in (1.0, 2.0, 3.0)], [3.0, 2.0, 1.0], cost.OBSERVE
    )
    assert min(falling.weights) >= 0
    assert np.all(cost.nonnegative(np.array([[0.0], [0.0]]), np.ones(2)) == 0)


def flat(ms: float, per_node: float = 0.0) -> Curve:
    return Curve(
        {
            1: [(0.0, ms), (10.0, ms + 10 * per_node)],
            4: [(0.0, 2 * ms), (10.0, 2 * ms + 10 * per_node)],
        }
    )


MODEL = CostModel(
    flat(10, 0.5),
    flat(1),
    flat(0.5),
    flat(0.5),
    {"chain": {1: LinearCost(cost.PROPOSE, (1, 2, 0, 0))}},
    {"chain": {1: LinearCost(cost.OBSERVE, (0.5, 0.0))}},
    {"chain": 0.25},
)


def test_a_cycle_is_the_sum_of_its_parts() -> None:
    price = MODEL.cycle(1, CycleShape(3, 3), "chain", 2.0)
    assert price.target == pytest.approx(11.5) and price.drafter == pytest.approx(1 + 2 * 2 + 0.5)
    assert price.verify == pytest.approx(1 + 3 * 0.25)
    assert price.ms == pytest.approx(11.5 + 5.5 + 1.75 + 0.5 + 0.5)
    found = MODEL.predict(1, CycleShape(3, 3), "chain", 2.0)
    assert found["tokens_per_second"] == pytest.approx(2000 / price.ms)
    assert found["speedup"] == pytest.approx(2 * 12 / price.ms)
    assert found["break_even"] == pytest.approx(price.ms / 12)
    even = MODEL.predict(1, CycleShape(3, 3), "chain", found["break_even"])
    assert even["speedup"] == pytest.approx(1.0)


def test_replayed_cycles_are_priced_one_by_one() -> None:
    cycles = [[ReplayedCycle(1, 3, 1, 2, True), ReplayedCycle(3, 0, 0, 1, True)]]
    found = search.evaluate(MODEL, 1, CycleShape(3, 3), "chain", cycles)
    drafted, empty = (
        MODEL.cycle(1, CycleShape(3, 3), "chain", 1.5),
        MODEL.cycle(1, CycleShape(0, 0), "chain", 1.5),
    )
    assert found["tokens_per_second"] == pytest.approx(3000 / (drafted.ms + empty.ms))
    assert found["speedup"] == pytest.approx(36 / (drafted.ms + empty.ms))


def test_rows_of_a_batch_run_side_by_side() -> None:
    one = [ReplayedCycle(1, 3, 1, 2, True)] * 4
    whole = None
    assert search._passes([one, one[:2], one[:1]], 2) == [*[(3, 2, whole)] * 3, (3, 1, whole)]
    assert search._passes([one], 1) == [(3, 1, whole)] * 4
    grown = [ReplayedCycle(1, 3, 1, 2, True, 2), ReplayedCycle(3, 1, 1, 2, True, 4)]
    assert search._passes([grown, grown[::-1]], 2) == [(3, 2, 4), (3, 2, 4)]
    assert search._passes([grown], 1) == [(3, 1, 2), (1, 1, 4)]


def test_a_cycle_at_a_price_costs_the_levels_it_drafted() -> None:
    """A level that is not drafted costs nothing; asking whether to draft at all does."""
    message = [
        search.evaluate(
            MODEL, 1, CycleShape(3, 8), "chain", [[ReplayedCycle(1, nodes, 0, 1, True, levels)] * 3]
        )
        for nodes, levels in ((0, 1), (3, 2), (3, 3))
    ]
    wanted = [
        MODEL.cycle(1, shape, "chain", 1.0).ms for shape in map(CycleShape, (1, 2, 3), (0, 3, 3))
    ]
    assert [found["cycle_ms"] for found in message] == pytest.approx(wanted)


# -- replay against the engine


def tiny(**more: float) -> Target:
    shape = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "vocab": 260}
    return load_target(TargetConfig(kind="tiny", **shape, **more), torch.float64)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny()


@pytest.fixture(scope="module")
def other() -> Target:
    """A draft model that is right now and then."""
    return tiny(init_std=0.25)


REQUESTED = [Request([5 + i, 6, 7, 5 + i, 6], 24, id=i) for i in range(2)]


def texts_of(target: Target, drafter: object) -> list[Text]:
    shadow = Shadow({"it": drafter})  # type: ignore[dict-item]
    run = generate(target, shadow, REQUESTED, Sampling(), batch_size=2, eos_ids=())
    return [Text(g.token_ids, 24, shadow.drafts["it"][i]) for i, g in enumerate(run.generations)]


def engine(target: Target, drafter: object) -> list[list[tuple[int, bool]]]:
    run = generate(target, drafter, REQUESTED, Sampling(), eos_ids=())  # type: ignore[arg-type]
    return [[(c.accepted, not c.cut) for c in g.cycles] for g in run.generations]


def replayed(texts: list[Text], kept: list, depth: int) -> list[list[tuple[int, bool]]]:
    return [[(s.accepted, s.clean) for s in steps] for steps in replay.walks(texts, kept, depth)]


def test_chains_and_ngrams_replay_exactly(target: Target) -> None:
    for make in (lambda k: NGram(depth=k), lambda k: DraftModel(target, k)):
        texts = texts_of(target, make(6))
        for k in (1, 3, 6):
            assert replayed(texts, replay.chain_of(texts, k), k) == engine(target, make(k))


def test_dynamic_trees_replay_exactly_for_fewer_nodes_and_levels(
    target: Target, other: Target
) -> None:
    make = lambda depth, nodes: DraftModel(other, Form.tree(depth, nodes))
    texts = texts_of(target, make(4, 40))
    beams = replay.Beams(texts)
    accepted = set()
    for depth, nodes in ((4, 40), (4, 12), (2, 12), (3, 6), (1, 4)):
        wanted = engine(target, make(depth, nodes))
        assert replayed(texts, beams.of(depth, nodes, 4)[0], depth) == wanted
        accepted |= {a for row in wanted for a, _ in row}
    assert len(accepted) > 1, "nothing was ever accepted: the test compares zeros"


def test_trees_at_a_price_stop_where_a_pass_becomes_dear(target: Target, other: Target) -> None:
    """A kernel that takes six rows at once: behind the last token five more cost next to nothing,
    a sixth as much as a pass."""
    texts = texts_of(target, DraftModel(other, Form.tree(4, 40)))
    steps = Curve({1: [(0.0, 10.0), (5.0, 10.5), (6.0, 20.0), (11.0, 20.5), (12.0, 30.0)]})
    best = []
    for pass_ms in (steps, flat(10, 0.02)):
        model = dataclasses.replace(
            MODEL,
            target=pass_ms,
            propose={"tree": {1: LinearCost(cost.PROPOSE, (0.1, 0.1, 0, 0))}},
            observe={"tree": {1: LinearCost(cost.OBSERVE, (0.1, 0.0))}},
            extra={"tree": 0.0},
        )
        found = search.priced_trees(search.Pricing(model, 1), texts, 4, 40, (4,))
        best.append(search.best_prices(found)[0].settings)
    assert (best[0].nodes or 99) <= 5 < (best[1].nodes or 0)


def test_trees_at_a_price_replay_exactly(target: Target, other: Target) -> None:
    """Accepted tokens, nodes and levels of every cycle, for prices of nodes and of levels."""
    texts = texts_of(target, DraftModel(other, Form.tree(4, 40)))
    beams = replay.Beams(texts)
    sizes = set()
    for depth, nodes, node, level in (
        (4, 40, 0.003, 0.0),
        (4, 12, 0.02, 0.0),
        (3, 12, 0.01, 0.1),
        (4, 12, 0.003, 0.12),
        (4, 12, 0.5, 0.0),
    ):
        price = Price(node, level)
        drafter = Spied(other, Form.tree(depth, nodes, price=price))
        wanted = engine(target, drafter)
        kept, levels = beams.of(depth, nodes, 4, price)
        cycles = replay.walks(texts, kept, depth, levels)
        assert [[(s.accepted, s.clean) for s in steps] for steps in cycles] == wanted
        clean = [s for steps in cycles for s in steps if s.clean]
        seen = [one for one in drafter.seen if one[2] == depth]
        assert [(s.nodes, s.levels) for s in clean] == [one[:2] for one in seen[: len(clean)]]
        sizes |= {s.nodes for s in clean}
    assert len(sizes) > 4 and 0 in sizes


class Spied(DraftModel):
    """Keeps (nodes, levels drafted, levels allowed) of every draft of one row."""

    def __init__(self, draft: Target, form: Form) -> None:
        super().__init__(draft, form)
        self.seen: list[tuple[int, int, int]] = []

    def propose(self, budget: torch.Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        self.levels_read = []
        tree = super().propose(budget, sampling, rng)
        levels = max(self.levels_read, default=0) + 1
        self.seen.append((int(tree.size[0]), levels, int(budget[0])))
        return tree


def test_static_trees_replay_exactly(target: Target) -> None:
    torch.manual_seed(1)
    head = head_class("medusa").for_target(target, MedusaConfig(heads=3, draft_vocab=0))
    make = lambda tree: head.drafter(target, DraftSpec(shape="tree", paths=tuple(tree)))
    big = [p for p, _ in shapes.generic(3)]
    texts = texts_of(target, make(big))
    found = replay.paths(texts)
    for nodes in (3, 10, 30):
        tree = big[:nodes]
        depth = max(map(len, tree))
        assert replayed(texts, replay.static_of(found, tree), depth) == engine(target, make(tree))


def test_the_best_tree_for_recorded_hits() -> None:
    found = [{t: (0, 1) if t % 2 else (2,) for t in range(1, 2001)}]
    value = search.value_of(found, {}, 2)
    best = [p for p, _ in shapes.grow(value, 5, 2)]
    assert {(0,), (0, 1)} <= set(best), "half of all positions continue so"
    assert value((0, 1)) == pytest.approx(0.5, abs=0.03) and value((0, 1)) <= value((0,))


def test_the_few_are_different() -> None:
    def made(kind: str, depth: int, nodes: int, speed: float) -> search.Candidate:
        settings = DraftSettings(kind, depth=depth, nodes=nodes)
        return search.Candidate(settings, {"tokens_per_second": speed})

    found = [made("tree", 3, n, 50 - abs(n - 12)) for n in range(4, 33)]
    found += [made("chain", k, k, 20 + k) for k in range(1, 5)]
    few = search.best_few(found, 4)
    assert few[0].shape.nodes == 12 and len(few) == 4 and {c.kind for c in few} == {"tree", "chain"}
    assert all(search._differs(a, b) for i, a in enumerate(few) for b in few[:i])


@pytest.mark.parametrize("kind", ["eagle3", "small_lm"])
def test_drafters_that_read_their_own_tokens_are_searched(kind: str, tmp_path: Path) -> None:
    """Probes, recording and search of a dynamic tree, and that each proposed setting makes a
    drafter of its size.
    """
    shape = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "vocab": 260}
    target = load_target(TargetConfig(kind="tiny", **shape), torch.float64)
    keys = {"draft_vocab": 0, "depth": 3, "nodes": 6, "width": 3}
    cfg = (
        EagleConfig(kind=kind, **keys)
        if kind == "eagle3"
        else SmallLMConfig(from_target_layers=1, **keys)
    )
    torch.manual_seed(0)
    save_head(head_class(kind).for_target(target, cfg), tmp_path / "head", target.identity)
    family = DrafterFamily.of(
        str(tmp_path / "head"), target, Sampling(), Bounds(depth=3, nodes=8, width=3)
    )
    assert {p.kind for p in family.probes()} == {"chain", "tree"} and str(family.default()) != ""
    texts = family.record([[5, 6, 7], [8, 9, 5, 6]], 8, 0, silent)
    assert set(texts) == {"chain", "tree"} and all(len(t) == 2 for t in texts.values())
    linear = {1: LinearCost(cost.PROPOSE, (1, 1, 0.1, 0))}
    reads = {1: LinearCost(cost.OBSERVE, (0.5, 0.1))}
    model = CostModel(
        flat(10, 0.5),
        flat(1),
        flat(0.5),
        flat(0.5),
        {"chain": linear, "tree": linear},
        {"chain": reads, "tree": reads},
    )
    found = family.candidates(search.Pricing(model, 1), texts)
    assert {c.kind for c in found} == {"chain", "tree"} and len(found) > 10
    for one in search.best_few(found, 3):
        made = family.drafter(one.settings)
        assert made.max_depth == one.shape.depth and made.max_nodes == one.shape.nodes
        walks = replay.walks(texts[one.kind], _kept(texts, one), one.shape.depth)
        wanted = [[s.accepted for s in steps] for steps in walks]
        requested = [Request(p, 8, id=i * 64) for i, p in enumerate(([5, 6, 7], [8, 9, 5, 6]))]
        run = generate(target, made, requested, Sampling())
        assert [[c.accepted for c in g.cycles] for g in run.generations] == wanted


def _kept(texts: dict[str, list[Text]], one: search.Candidate) -> list:
    if one.kind == "chain":
        return replay.chain_of(texts["chain"], one.shape.depth)
    return replay.Beams(texts["tree"]).of(*dataclasses.astuple(one.shape))[0]
