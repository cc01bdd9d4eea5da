"""The parity gate of a report: every head that drafts is checked on its target, however its
name ends.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.heads.checkpoint import save_head
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.registry import head_class
from outrider.scripts.common.prompts import Prompt
from outrider.scripts.scoring.parity import gates
from outrider.scripts.scoring.systems import systems_of
from tests.helpers.training import tiny_target

PROMPTS = [Prompt("1", "chat", ["one two three"])]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A Medusa head on disk."""
    torch.manual_seed(0)
    target = tiny_target()
    head = head_class("medusa").for_target(target, MedusaConfig(heads=2, draft_vocab=0, nodes=4))
    save_head(head, tmp_path / "medusa", target.identity)
    return str(tmp_path / "medusa")


@pytest.mark.parametrize("ending", ["", "@chain:1", "@tree:3@adaptive"])
def test_a_head_is_gated_however_its_name_ends(folder: str, ending: str) -> None:
    target = tiny_target()
    systems = systems_of(["ngram@chain:2", f"{folder}{ending}"], target)
    found = gates(systems, target, PROMPTS, 1, 4, quiet=True)
    assert list(found) == [folder] and found[folder].passed
