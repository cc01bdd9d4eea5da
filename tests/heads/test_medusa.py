"""Medusa heads: alignment, start, vocabulary, gradients, and the drafter that they make."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outrider.decode.checks import validate
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import TreeShape
from outrider.heads import shapes, vocab
from outrider.heads.losses import LossWeights
from outrider.heads.medusa.head import MedusaConfig, MedusaHead
from outrider.heads.names import DraftSpec
from tests.helpers.training import random_batch, tiny_target

FULL = MedusaConfig(heads=3, draft_vocab=0)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def trained_like(target, cfg: MedusaConfig = FULL, seed: int = 0) -> MedusaHead:
    """A head whose weights are no longer those of the start."""
    counts = torch.arange(target.vocab_size) + 1
    head = MedusaHead.for_target(target, cfg, counts)
    torch.manual_seed(seed)
    for p in head.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return head


@pytest.mark.parametrize("terms", [LossWeights(), LossWeights(0, 1)], ids=["hard", "soft"])
def test_loss_reads_the_feature_two_plus_i_before_the_token(target, terms) -> None:
    """Against the definition: head i at t predicts x_{t+i+2}, whose distribution is p(. |
    x_<t+i+2)."""
    head = trained_like(target, dataclasses.replace(FULL, loss=terms, decay=0.5))
    batch = random_batch()
    feats = target.features(batch.ids, batch.mask, head.taps)[:, :, 0]
    distributions = target.model(batch.ids).logits.log_softmax(-1)
    want, count = 0.0, 0
    for b, t in batch.loss_mask.nonzero().tolist():
        count += 1
        for i in range(3):
            if t - i - 2 < 0:
                continue
            f = feats[b, t - i - 2]
            h = f + torch.nn.functional.silu(head.block_weight[i, 0] @ f + head.block_bias[i, 0])
            logq = (head.proj[i] @ h).log_softmax(-1)
            loss = (
                -logq[batch.ids[b, t]]
                if terms.hard
                else -(distributions[b, t - 1].exp() * logq).sum()
            )
            want += 0.5**i * loss.item()
    out = head(batch, target)
    assert out.count == count
    assert out.sum.item() == pytest.approx(want, rel=1e-5)


def test_draft_vocabulary_counts_outside_tokens_as_misses(target) -> None:
    cfg = MedusaConfig(heads=2, draft_vocab=100)
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    counts[3:200] = 1
    counts[150:240] = 5
    head = MedusaHead.for_target(target, cfg, counts)
    ids = head.ids()
    assert ids.tolist() == list(range(3, 13)) + list(range(150, 240))
    assert vocab.from_d2t(vocab.to_d2t(ids)).equal(ids) and vocab.to_t2d(ids, 260).nonzero()[
        :, 0
    ].equal(ids)
    torch.testing.assert_close(head.proj[0], target.lm_head_weight[ids].float())
    assert head.coverage == pytest.approx(counts[ids].sum().item() / counts.sum().item())
    batch = random_batch()
    out = head(batch, target)
    rows, steps = batch.loss_mask.nonzero(as_tuple=True)
    inside = vocab.to_t2d(ids, 260)[batch.ids[rows, steps]] & (steps >= 2)
    assert out.stats["loss_0"][1] == inside.sum() < out.count
    assert out.stats["top1_0"][1] == (steps >= 2).sum()


def drive(drafter, tokens, feats, cuts):
    """Observe a sequence in pieces, as one row."""
    drafter.reset(1, 64)
    drafter.begin([tokens[:1]], Sampling())
    for a, b in zip([0, *cuts], [*cuts, len(tokens) - 1], strict=True):
        n = torch.tensor([b - a])
        drafter.observe(tokens[None, a + 1 : b + 1], feats[None, a:b], n, slice(0, 1))
    return drafter


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafter_reads_the_feature_that_predicted_the_last_token(target, shape) -> None:
    """Level d of the draft is head d at the position before the last committed token, whatever
    the pieces.
    """
    head = trained_like(target)
    tokens = random_batch(1, 10).ids[0]
    feats = target.features(tokens[None], torch.ones(1, 10, dtype=torch.bool), head.taps)[0]
    drafts = []
    for cuts in ([], [3], [2, 5, 8]):
        drafter = drive(head.drafter(target, DraftSpec(shape=shape)), tokens, feats, cuts)
        rng = Rng(0, torch.zeros(1).long(), torch.zeros(1).long())
        drafts.append(drafter.propose(torch.tensor([3]), Sampling(), rng))
    assert all(d.tokens.equal(drafts[0].tokens) for d in drafts)
    f = feats[8, 0]  # position 8 predicted the last token, which stands at 9
    h = f + torch.nn.functional.silu(head.block_weight[:, 0] @ f + head.block_bias[:, 0])
    order = (head.proj @ h[:, :, None])[:, :, 0].argsort(-1, descending=True)
    paths = (
        TreeShape.chain(3).paths
        if shape == "chain"
        else head.tree(head.cfg.nodes, head.cfg.heads).paths
    )
    assert drafts[0].tokens[0].tolist() == [int(order[len(p) - 1, p[-1]]) for p in paths]
    validate(drafts[0], target.vocab_size, drafter.max_nodes)


def test_how_trees_are_drawn_by_name(target, tmp_path) -> None:
    from outrider.heads import save_head
    from outrider.heads.drafters import resolve_drafter

    save_head(trained_like(target), tmp_path / "m", target.identity)
    old = trained_like(target, dataclasses.replace(FULL, tree_draw="fixed"))
    save_head(old, tmp_path / "old", target.identity)
    named = {"m": True, "m@tree:4": True, "old@tree": False}
    for spec, drawn in named.items():
        drafter = resolve_drafter(f"{tmp_path}/{spec}", target)
        assert (drafter.shape, drafter.form.drawn) == ("tree", drawn)


def test_best_first_tree_from_measured_ranks() -> None:
    ranks = torch.tensor(
        [[0, 0], [0, 0], [0, 1], [1, 0], [1, 0], [1, 0], [2, shapes.RANKS], [shapes.RANKS, 0]]
    )
    found = shapes.measure(ranks.repeat(500, 1))
    assert found["acceptance"][0][:3] == [3 / 8, 3 / 8, 1 / 8]
    assert found["paths"][:4] in (
        [[0], [1], [1, 0], [0, 0]],
        [[1], [0], [1, 0], [0, 0]],
        [[0], [1], [0, 0], [1, 0]],
    )
    assert found["paths"][:3] == [
        [0],
        [1],
        [1, 0],
    ]  # whole-path hits: behind rank 1, rank 0 is always right
    assert found["values"][2] == pytest.approx(3 / 8, abs=0.01)
    assert found["values"] == sorted(found["values"], reverse=True)
    for n in (1, 5, 16, 64):
        assert len(shapes.tree(found, n, 2)) == min(n, len(found["paths"]))
        assert len(shapes.tree({}, n, 4)) == n


def test_calibration_counts_ranks_of_the_right_tokens(target) -> None:
    head, batch = trained_like(target, MedusaConfig(heads=2, draft_vocab=0)), random_batch()
    head.calibrate([batch], target)
    feats = target.features(batch.ids, batch.mask, head.taps)[:, :, 0]
    hits = total = 0
    for b, t in (batch.loss_mask & (torch.arange(12) >= 2)).nonzero().tolist():
        f = feats[b, t - 2]
        h = f + torch.nn.functional.silu(head.block_weight[0, 0] @ f + head.block_bias[0, 0])
        z = head.proj[0] @ h
        total, hits = total + 1, hits + int((z > z[batch.ids[b, t]]).sum() < shapes.RANKS)
    assert head.calibration["positions"] == total
    assert sum(head.calibration["acceptance"][0]) == pytest.approx(hits / total)
