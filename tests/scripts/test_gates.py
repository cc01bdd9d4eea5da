"""The parity gate of a report: every head that drafts is checked on its target, however its
name ends.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads import HEADS, save_head
from outrider.heads.parallel.medusa import MedusaConfig, TargetLoraConfig
from outrider.scripts.common.prompts import Prompt
from outrider.scripts.scoring.parity import gates
from outrider.scripts.scoring.systems import systems_of
from tests.helpers.training import tiny_target

PROMPTS = [Prompt("1", "chat", ["one two three"])]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """One Medusa head and one Medusa-2 head on disk."""
    found = {}
    for kind in ("medusa", "medusa2"):
        torch.manual_seed(0)
        target = tiny_target()
        cfg = MedusaConfig(
            kind=kind,
            heads=2,
            draft_vocab=0,
            nodes=4,
            tune=TargetLoraConfig(rank=2 * (kind == "medusa2")),
        )
        head = HEADS[kind].for_target(target, cfg)
        save_head(head, tmp_path / kind, target.identity)
        found[kind] = str(tmp_path / kind)
    return found


@pytest.mark.parametrize(
    "ending", ["", "@chain", "@chain:1", "@tree:3@adaptive", "@fixed@adaptive", "@tree:2@sampled"]
)
def test_a_head_is_gated_however_its_name_ends(folders: dict[str, str], ending: str) -> None:
    target = tiny_target()
    systems, skipped = systems_of(["ngram@2", f"{folders['medusa']}{ending}"], target)
    found = gates(systems, target, PROMPTS, 1, 4, quiet=True)
    assert not skipped and list(found) == [folders["medusa"]] and found[folders["medusa"]].passed


def test_a_head_that_goes_bad_before_the_gate_is_message(folders: dict[str, str]) -> None:
    target = tiny_target()
    systems, _ = systems_of([f"{folders['medusa']}@chain"], target)
    (Path(folders["medusa"]) / "head.json").write_text("{}")
    with pytest.raises(UserError, match="head.json: damaged"):
        gates(systems, target, PROMPTS, 1, 4, quiet=True)


def test_a_head_trained_with_its_target_is_gated_on_that_target(folders: dict[str, str]) -> None:
    target = tiny_target()
    plain: Target = target
    before = {k: v.clone() for k, v in plain.model.state_dict().items()}
    systems, skipped = systems_of(
        [f"{folders['medusa2']}@chain:1", f"{folders['medusa']}@tree"], target, tiny_target
    )
    found = gates(systems, target, PROMPTS, 1, 4, quiet=True)
    assert (
        not skipped
        and set(found) == set(folders.values())
        and all(f.passed for f in found.values())
    )
    alone, _ = systems_of([f"{folders['medusa2']}@chain"], target, tiny_target)
    assert len(gates(alone, target, PROMPTS, 1, 4, quiet=True)) == 1
    assert not target.tuning and all(
        v.equal(before[k]) for k, v in plain.model.state_dict().items()
    )
