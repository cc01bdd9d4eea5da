"""The one distribution of the target that heads learn from: its value, where it teaches, and
that every family uses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import TreeShape
from outrider.decode.verify import verify
from outrider.heads import vocab
from outrider.heads.config import LossWeights, Mask
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.losses import Taught, chunked_loss
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.medusa.hydra_heads import HydraHeadsConfig
from outrider.heads.registry import head_class
from outrider.heads.teacher import target_distribution
from outrider.scripts.certificate.enumerator import Case, enumerate_case
from tests.helpers.archs import VOCAB, build
from tests.helpers.training import random_batch, tiny_target

SOFT = LossWeights(hard=0.0, soft=1.0)
FAMILIES: dict[str, Any] = {
    "medusa": MedusaConfig(heads=2, draft_vocab=60, loss=SOFT),
    "hydra_heads": HydraHeadsConfig(heads=2, draft_vocab=60, loss=SOFT),
    "eagle1": EagleConfig(kind="eagle1", draft_vocab=60, loss=SOFT),
    "eagle3": EagleConfig(kind="eagle3", draft_vocab=60, loss=SOFT),
}
IDS = torch.arange(0, 260, 4)
MASK = "head.loss.mask"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(dtype="float64")


def naive(target: Target, feats: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    """The distribution token by token, and by mask where it teaches."""
    whole = torch.softmax(target.unembed(feats), -1)
    p = whole[:, IDS] / whole[:, IDS].sum(1, keepdim=True)
    inside = set(IDS.tolist())
    return {
        "law": p,
        "own": whole[:, IDS],
        "token": torch.tensor([t in inside for t in tokens.tolist()]),
        "argmax": torch.tensor([t in inside for t in whole.argmax(1).tolist()]),
        "all": torch.ones(len(tokens), dtype=torch.bool),
    }


@pytest.mark.parametrize("mask", get_args(Mask))
def test_the_distribution_and_where_it_teaches(target: Target, mask: str) -> None:
    torch.manual_seed(0)
    feats = 3 * torch.randn(40, target.hidden_size, dtype=torch.float64)
    source = torch.arange(30) + 5
    tokens = torch.randint(0, 260, (30,))
    want = naive(target, feats[source], tokens)
    place, weight = vocab.places(IDS, tokens), target.lm_head_weight
    rows = (weight if mask == "argmax" else weight[IDS], None)
    made = target_distribution(target, rows, feats, source, IDS, place, mask)
    p, own, usable = made(slice(3, 20))
    torch.testing.assert_close(p, want["law"][3:20], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(own, want["own" if mask == "argmax" else "law"][3:20])
    assert torch.equal(usable, want[mask][3:20])


@pytest.mark.parametrize(
    "terms, size, top_k",
    [
        (LossWeights(0, tv=1.0), 1, 0),
        (LossWeights(0, lk=1.0), 9, 0),
        (LossWeights(0, tv=1.0), 61, 0),
        (LossWeights(0, lk=1.0), 61, 3),
        (LossWeights(0, tv=1.0), 9, 3),
    ],
)
def test_the_rate_is_what_the_verifier_accepts(terms: LossWeights, size: int, top_k: int) -> None:
    """Of a token drawn from the head's distribution, with the target's distribution over the
    whole vocabulary: every branch of the verifier counted. With top_k the target's other
    tokens are left out of it."""
    target = Target(build("llama", dtype=torch.float64))
    counts = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)) + 1
    cfg = EagleConfig(kind="eagle3", draft_vocab=size % VOCAB, loss=terms, mask_token=-1)
    head = head_class("eagle3").for_target(target, cfg, counts).double()
    g = torch.Generator().manual_seed(size)
    feats = torch.randn(3, 32, generator=g, dtype=torch.float64)
    hidden = torch.randn(1, 3, 5, generator=g, dtype=torch.float64)
    weight, source = torch.randn(size, 5, generator=g, dtype=torch.float64), torch.arange(3)
    place = torch.zeros(3, dtype=torch.int64)
    known = head.probs_rows(target), feats, source, head.ids(), place, "all"
    distribution = target_distribution(target, *known, top_k)
    whole = torch.ones(1, 3, dtype=torch.bool)
    taught = Taught(place, whole, terms, torch.ones(1, dtype=torch.float64), distribution)
    total, rows = chunked_loss(hidden, weight, taught)

    logits = target.unembed(feats)
    wanted = []
    for j in range(3):
        after = torch.randn(VOCAB + 2, VOCAB, generator=g, dtype=torch.float64)
        after[0], z = logits[j], (hidden[0, j] @ weight.T)[None]
        chain, ids = TreeShape.of([(0,)]), head.ids()
        case = Case(VOCAB, chain, "without", Sampling(1.0), after, z.expand(2, -1), ids)
        wanted.append(enumerate_case(case, verify).accepted)
    wanted_rates = torch.tensor([wanted], dtype=torch.float64)
    if top_k:
        own = logits.softmax(-1)[:, head.ids()] if head.ids() is not None else logits.softmax(-1)
        kept = own * (own >= own.topk(min(top_k, size), -1).values[:, -1:])
        wanted_rates = torch.minimum(kept, (hidden[0] @ weight.T).softmax(-1)).sum(-1)[None]
    torch.testing.assert_close(rows.rate, wanted_rates, rtol=1e-10, atol=1e-12)
    loss = (1 - wanted_rates) if terms.tv else -wanted_rates.log()
    torch.testing.assert_close(total, loss.sum(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_taught_at_the_same_tokens(kind: str) -> None:
    """The first level of a head counts the supervised tokens that the mask leaves and the head
    can see.
    """
    batch = random_batch(4, 20)
    seen, counts = batch.loss_mask & batch.mask, torch.arange(260) % 97
    message = {}
    for mask in get_args(Mask):
        torch.manual_seed(0)
        target = tiny_target(dtype="float64")
        cfg = replace(FAMILIES[kind], loss=replace(SOFT, mask=mask))
        head = head_class(kind).for_target(target, cfg, counts).double()
        message[mask] = int(head(batch, target).stats["loss_0"][1])
        inside = vocab.to_t2d(head.ids(), 260)
        feats = target.features(batch.ids, batch.mask, (target.num_layers,))[:, :, 0]
        best = torch.softmax(target.unembed(feats), -1).argmax(-1)
        teaches = {
            "token": inside[batch.ids],
            "argmax": torch.cat([inside[best[:, :1]], inside[best[:, :-1]]], 1),
            "all": torch.ones_like(seen),
        }[mask]
        assert message[mask] == int((seen & teaches).sum())
    assert len(set(message.values())) == 3, message
