"""decode.json beside a head: checked on reading, obeyed by every resolver, and never at odds
with the head's hashes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.checkpoint import save_head
from outrider.heads.drafters import resolve_drafter
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.heads.tuned import DECODE, DraftSettings, Tuned, card_sha256
from tests.helpers.training import tiny_target

TREE = DraftSettings("tree", depth=2, nodes=3)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def medusa(tmp_path: Path, target: Target) -> Path:
    torch.manual_seed(0)
    head = head_class("medusa").for_target(target, MedusaConfig(heads=3, draft_vocab=0, nodes=5))
    save_head(head, tmp_path / "head", target.identity)
    return tmp_path / "head"


def leave(folder: Path, **changes: Any) -> None:
    message = Tuned(card_sha256(folder), TREE, DraftSettings("chain", depth=2), TREE).to_json()
    (folder / DECODE).write_text(json.dumps({**message, **changes}))


def test_a_head_drafts_as_it_was_tuned(medusa: Path, target: Target) -> None:
    assert resolve_drafter(str(medusa), target).max_nodes == 5
    leave(medusa)
    run = str(medusa)
    for spec, nodes, depth in (
        (run, 3, 2),
        (f"{run}@tree", 3, 2),
        (f"{run}@chain", 2, 2),
        (f"{run}@tree:4", 4, None),
        (f"{run}@chain:1", 1, 1),
        (f"{run}@chain:3", 3, 3),
    ):
        drafter = resolve_drafter(spec, target)
        assert (
            drafter.max_nodes == nodes
            and depth in (None, drafter.max_depth)
            and drafter.name == spec
        )
    tree = resolve_drafter(run, target)
    plain = generate(
        target, resolve_drafter("none", target), [Request([5, 6, 7], 12)], Sampling(), eos_ids=()
    )
    assert generate(target, tree, [Request([5, 6, 7], 12)], Sampling(), eos_ids=()).generations[
        0
    ].token_ids == (plain.generations[0].token_ids)


def test_a_tree_has_no_more_ranks_than_the_draft_has_tokens(target: Target) -> None:
    counts = torch.arange(target.vocab_size)
    head = head_class("medusa").for_target(target, MedusaConfig(heads=2, draft_vocab=3), counts)
    head.calibration = {"paths": [[i] for i in range(5)]}
    drafter = head.drafter(target, DraftSpec(shape="tree"))
    assert drafter.max_nodes == 3
    for sampling in (Sampling(0.0), Sampling(1.0)):
        run = generate(target, drafter, [Request([5, 6, 7], 6)], sampling, eos_ids=())
        assert len(run.generations[0].token_ids) == 6


def test_more_levels_than_heads_are_refused(medusa: Path, target: Target) -> None:
    with pytest.raises(UserError, match="7 levels, but the head guesses 3"):
        resolve_drafter(f"{medusa}@chain:7", target)


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"format": 2}, "format: "),
    ({"card_sha256": "0" * 64}, "tuned for another head"),
    ({"best": {"shape": "star"}}, "best.shape: "),
    ({"break_even": 1.5}, "break_even: no such key"),
    ({"best": {"shape": "chain", "depth": 10**9}}, "best.depth: "),
    ({"best": {"shape": "tree", "paths": [[0]]}}, "best.paths: no such key"),
    ({"chain": {"shape": "tree"}}, "chain: holds"),
]


def test_a_damaged_file_is_named_with_the_fix(medusa: Path, target: Target) -> None:
    for changes, words in DAMAGED:
        leave(medusa, **changes)
        with pytest.raises(UserError, match=words) as message:
            resolve_drafter(str(medusa), target)
        assert DECODE in str(message.value) and "delete the file" in str(message.value)
