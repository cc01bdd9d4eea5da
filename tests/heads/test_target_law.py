"""The one law of the target that heads learn from: its value, where it teaches, and that every
family uses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from conf.errors import UserError
from conf.typed import faults
from decode.target import Target
from heads import HEADS, vocab
from heads.eagle.config import EagleConfig
from heads.losses import LossWeights, Mask, target_law
from heads.parallel.hydra_heads import HydraHeadsConfig
from heads.parallel.medusa import MedusaConfig, TuneConfig
from heads.stored_law import stored_law
from tests.helpers.training import random_batch, tiny_target
from train.state import check_meaning

SOFT = LossWeights(hard=0.0, soft=1.0)
FAMILIES: dict[str, Any] = {
    "medusa": MedusaConfig(heads=2, draft_vocab=60, loss=SOFT),
    "medusa2": MedusaConfig(
        kind="medusa2", heads=2, draft_vocab=60, loss=SOFT, tune=TuneConfig(rank=2)
    ),
    "hydra_heads": HydraHeadsConfig(heads=2, draft_vocab=60, loss=SOFT),
    "eagle1": EagleConfig(kind="eagle1", draft_vocab=60, loss=SOFT),
    "eagle3": EagleConfig(kind="eagle3", draft_vocab=60, loss=SOFT),
}
IDS = torch.arange(0, 260, 4)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(dtype="float64")


def naive(target: Target, feats: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    """The law token by token, and by mask where it teaches."""
    whole = torch.softmax(target.unembed(feats), -1)
    p = whole[:, IDS] / whole[:, IDS].sum(1, keepdim=True)
    inside = set(IDS.tolist())
    return {
        "law": p,
        "token": torch.tensor([t in inside for t in tokens.tolist()]),
        "argmax": torch.tensor([t in inside for t in whole.argmax(1).tolist()]),
        "all": torch.ones(len(tokens), dtype=torch.bool),
    }


@pytest.mark.parametrize("mask", get_args(Mask))
def test_the_law_and_where_it_teaches(target: Target, mask: str) -> None:
    torch.manual_seed(0)
    feats, source = (
        3 * torch.randn(40, target.hidden_size, dtype=torch.float64),
        torch.arange(30) + 5,
    )
    tokens = torch.randint(0, 260, (30,))
    want = naive(target, feats[source], tokens)
    place, weight = vocab.places(IDS, tokens), target.lm_head_weight
    rows = (weight if mask == "argmax" else weight[IDS], None)
    p, usable = target_law(target, rows, feats, source, IDS, place, mask)(slice(3, 20))
    torch.testing.assert_close(p, want["law"][3:20], rtol=1e-10, atol=1e-12)
    assert torch.equal(usable, want[mask][3:20])
    whole = torch.softmax(target.unembed(feats), -1).topk(260, -1)
    stored = stored_law((whole.indices, whole.values), source, IDS, 260, place, mask)
    p, usable = stored(slice(3, 20))
    torch.testing.assert_close(p, want["law"][3:20], rtol=1e-10, atol=1e-12)
    assert torch.equal(usable, want[mask][3:20])


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_taught_at_the_same_tokens(kind: str) -> None:
    """The first level of a head counts the supervised tokens that the mask leaves and the head
    can see.
    """
    batch = random_batch(4, 20)
    seen, counts = batch.loss_mask & batch.mask, torch.arange(260) % 97
    told = {}
    for mask in get_args(Mask):
        torch.manual_seed(0)
        target = tiny_target(dtype="float64")
        cfg = replace(FAMILIES[kind], loss=replace(SOFT, mask=mask))
        head = HEADS[kind].for_target(target, cfg, counts).double()
        told[mask] = int(head(batch, target).stats["loss_0"][1])
        inside = vocab.to_t2d(head.ids(), 260)
        feats = target.features(batch.ids, batch.mask, (target.num_layers,))[:, :, 0]
        best = torch.softmax(target.unembed(feats), -1).argmax(-1)
        teaches = {
            "token": inside[batch.ids],
            "argmax": torch.cat([inside[best[:, :1]], inside[best[:, :-1]]], 1),
            "all": torch.ones_like(seen),
        }[mask]
        assert told[mask] == int((seen & teaches).sum())
    assert len(set(told.values())) == 3, told


def test_an_unknown_mask_is_told() -> None:
    assert faults(LossWeights(mask="some")) == [
        "mask: 'some' is none of token, argmax, all; choose one"
    ]


def test_a_run_of_parallel_heads_begun_with_the_other_mask_is_not_mixed() -> None:
    """Before the mask had a name parallel heads used argmax: to go on needs
    head.loss.mask=argmax.
    """
    saved = {"head.kind": "hydra_heads", "head.loss.soft": 1.0, "head.draft_vocab": 64, "steps": 9}
    now = {**saved, "head.loss.mask": "token"}
    default = {"head.loss.mask": "token"}
    with pytest.raises(
        UserError, match="head.loss.mask: argmax in the checkpoint, token now"
    ) as told:
        check_meaning(saved, now, "runs/x", default)  # type: ignore[arg-type]
    assert "\n" not in str(told.value)
    same = (
        {"head.loss.mask": "argmax"},
        {"head.loss.soft": 0.0},
        {"head.kind": "eagle3"},
        {"head.draft_vocab": 0},
    )
    for change in same:
        before = {**saved, **{k: v for k, v in change.items() if k != "head.loss.mask"}}
        assert check_meaning(before, {**now, **change}, "runs/x", default) == []  # type: ignore[arg-type]
