"""train/validate.py: sound heads pass, and a head with a known mistake is caught by the
check for it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from outrider.heads.medusa.head import MedusaConfig, MedusaHead
from outrider.train import validate
from outrider.train.validate import main
from tests.helpers.commands import code_of
from tests.helpers.training import TINY, chats, random_batch, tiny_target

SMALL = [
    *(f"target.{k}={v}" for k, v in TINY.items()),
    "data.held_out=0.1",
    "data.cache=false",
    "batch_size=4",
    "dtype=float32",
    "device=cpu",
    "head.draft_vocab=0",
]
MORE = {"medusa": ["head.heads=2", "head.markov_rank=4"], "eagle3": ["head.steps=2"]}
MEDUSA = MedusaConfig(heads=2, draft_vocab=0)


def factory(kind, cfg):
    target = tiny_target()

    def fresh(counts=None, **changes):
        torch.manual_seed(0)
        known = {f.name for f in dataclasses.fields(cfg)}
        wanted = dataclasses.replace(cfg, **{k: v for k, v in changes.items() if k in known})
        return target, kind.for_target(target, wanted, counts)

    return fresh


def command(capsys, data: Path, *args: str) -> tuple[int, str, str]:
    code = code_of(main, "target=tiny", *SMALL, f"data.path={data}", *args)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("kind", ["medusa", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_sound_heads_pass_every_check(tmp_path: Path, capsys, kind: str) -> None:
    data = chats(tmp_path / "data.jsonl")
    code, out, _ = command(capsys, data, f"head={kind}", *MORE[kind])
    assert code == 0 and "all 3 checks passed" in out, out
    assert "[[the rider goes<|im_end|>]]" in out  # what is supervised, for a human eye
    assert "frozen" in out and "cycles of the engine" in out


class ReadsOneLate(MedusaHead):
    """Reads a feature that has seen one token more than decoding will have."""

    def states(self, batch, target, feats, reads):
        return super().states(batch, target, feats, (reads + 1).clamp(max=len(feats) - 1))


def test_moving_target_and_idle_parameters_are_caught() -> None:
    target = tiny_target()
    head = MedusaHead.for_target(target, MEDUSA)
    assert validate.gradients(target, head, random_batch()).passed
    head.idle = torch.nn.Parameter(torch.zeros(3))
    check = validate.gradients(target, head, random_batch())
    assert not check.passed and "none at idle" in "".join(check.lines)
    del head.idle
    target.model.get_output_embeddings().weight.requires_grad_(True)
    check = validate.gradients(target, head, random_batch())
    assert not check.passed and "would move" in check.lines[-1]


class DraftsNonsense(MedusaHead):
    """Trains well and drafts with other weights: what teacher-forced accuracy cannot see."""

    def drafter(self, target, draft=None):
        drafter = super().drafter(target, draft)
        drafter.proj = drafter.proj.roll(1, 1)
        return drafter


@pytest.mark.parametrize("kind", [MedusaHead, ReadsOneLate, DraftsNonsense])
def test_overfit_is_judged_by_the_engine(kind) -> None:
    check = validate.overfit(factory(kind, MEDUSA), [40, 41, 42], updates=120)
    assert check.passed == (kind is MedusaHead), check.lines
