"""The replay: what it says is accepted is what the engine then accepts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.decode.draft_model import DraftModel
from outrider.decode.engine import Request, generate
from outrider.decode.grow import Form
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import shapes
from outrider.heads.checkpoint import save_head
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.heads.small_lm.config import SmallLMConfig
from outrider.heads.tuned import DraftSettings
from outrider.scripts.common.progress import silent
from outrider.scripts.tuning import replay, search
from outrider.scripts.tuning.replay import Shadow, Text
from outrider.scripts.tuning.search import Candidate, DrafterFamily


def tiny(**more: float) -> Target:
    shape = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "vocab": 260}
    return load_target(TargetConfig(kind="tiny", **(shape | more)), torch.float64)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny()


@pytest.fixture(scope="module")
def other() -> Target:
    """A draft model that is right now and then."""
    return tiny(init_std=0.25)


REQUESTED = [Request([5 + i, 6, 7, 5 + i, 6], 24, id=i) for i in range(2)]


def texts_of(target: Target, drafter: object) -> list[Text]:
    found, shadow = list[Text](), Shadow({"it": drafter})  # type: ignore[dict-item]
    for request in REQUESTED:
        (one,) = generate(target, shadow, [request], Sampling(), eos_ids=()).generations
        found.append(Text(one.token_ids, 24, shadow.drafts["it"]))
    return found


def engine(target: Target, drafter: object) -> list[list[tuple[int, bool]]]:
    run = generate(target, drafter, REQUESTED, Sampling(), eos_ids=())  # type: ignore[arg-type]
    return [[(c.accepted, not c.cut) for c in g.cycles] for g in run.generations]


def replayed(texts: list[Text], kept: list, depth: int) -> list[list[tuple[int, bool]]]:
    return [replay.walk(*pair, depth) for pair in zip(texts, kept, strict=True)]


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
    accepted = set()
    for depth, nodes in ((4, 40), (4, 12), (2, 12), (3, 6), (1, 4)):
        wanted = engine(target, make(depth, nodes))
        assert replayed(texts, replay.dynamic_of(texts, depth, nodes), depth) == wanted
        accepted |= {a for row in wanted for a, _ in row}
    assert len(accepted) > 1, "nothing was ever accepted: the test compares zeros"


def test_static_trees_replay_exactly(target: Target) -> None:
    torch.manual_seed(1)
    head = head_class("medusa").for_target(target, MedusaConfig(heads=3, draft_vocab=0))
    make = lambda tree: head.drafter(target, DraftSpec(shape="tree", paths=tuple(tree)))
    big = [tuple(p) for p in shapes.assumed(3)["paths"]]
    texts = texts_of(target, make(big))
    for nodes in (3, 10, 30):
        tree = big[:nodes]
        depth = max(map(len, tree))
        assert replayed(texts, replay.static_of(texts, tree), depth) == engine(target, make(tree))


def test_the_best_tree_for_recorded_hits() -> None:
    text: Any = SimpleNamespace(paths={t: (0, 1) if t % 2 else (2,) for t in range(1, 2001)})
    value = search.value_of([text], shapes.assumed(2))
    best = [p for p, _ in shapes.grow(value, 5, 2)]
    assert {(0,), (0, 1)} <= set(best), "half of all positions continue so"
    assert value((0, 1)) == pytest.approx(0.5, abs=0.03) and value((0, 1)) <= value((0,))


def test_what_accepts_no_more_with_more_levels_or_nodes_is_not_timed() -> None:
    def made(kind: str, depth: int, nodes: int | None, length: float) -> Candidate:
        return Candidate(DraftSettings(kind, depth, nodes), length)  # type: ignore[arg-type]

    kept = [made("tree", 2, 8, 2.0), made("tree", 3, 16, 2.2), made("chain", 2, None, 1.7)]
    lost = [made("tree", 3, 8, 2.0), made("tree", 2, 16, 1.9), made("chain", 4, None, 1.7)]
    assert search.worth_timing([*lost, *kept]) == kept


@pytest.mark.parametrize("kind", ["eagle3", "small_lm"])
def test_drafters_that_read_their_own_tokens_are_searched(kind: str, tmp_path: Path) -> None:
    """Recording and search of a dynamic tree, and that every candidate makes a drafter of its size
    whose accepted length is the replayed one."""
    target = tiny(layers=2)
    keys = {"draft_vocab": 0, "depth": 3, "nodes": 6, "width": 3}
    cfg = (
        EagleConfig(kind=kind, **keys)
        if kind == "eagle3"
        else SmallLMConfig(from_target_layers=1, **keys)
    )
    torch.manual_seed(0)
    save_head(head_class(kind).for_target(target, cfg), tmp_path / "head", target.identity)
    family = DrafterFamily.of(str(tmp_path / "head"), target, Sampling(), 3, 8)
    prompts = [[5, 6, 7], [8, 9, 5, 6]]
    texts = family.record(prompts, 8, 0, silent)
    assert set(texts) == {"chain", "tree"} and all(len(t) == 2 for t in texts.values())
    found = family.candidates(texts)
    assert {c.settings.shape for c in found} == {"chain", "tree"} and len(found) > 5
    for one in found:
        drafter = family.drafter(one.settings)
        assert (drafter.max_depth, drafter.max_nodes) == one.cost
        requested = [Request(p, 8, id=i * 64) for i, p in enumerate(prompts)]
        run = generate(target, drafter, requested, Sampling())
        clean = [c.accepted + 1 for g in run.generations for c in g.cycles if not c.cut]
        wanted = sum(clean) / len(clean) if clean else 1.0
        assert one.accepted_length == pytest.approx(wanted), one.settings
