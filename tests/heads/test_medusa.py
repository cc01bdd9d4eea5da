"""Medusa heads: alignment, start, vocabulary, gradients, and the drafter that they make."""

from __future__ import annotations

import pytest
import torch

from outrider.heads import shapes, vocab
from outrider.heads.medusa.head import MedusaConfig, MedusaHead
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


def test_draft_vocabulary_counts_outside_tokens_as_misses(target) -> None:
    cfg = MedusaConfig(heads=2, draft_vocab=100)
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    counts[3:200] = 1
    counts[150:240] = 5
    head = MedusaHead.for_target(target, cfg, counts)
    ids = head.ids()
    assert ids.tolist() == list(range(3, 13)) + list(range(150, 240))
    assert vocab.from_d2t(vocab.to_d2t(ids)).equal(ids)
    assert vocab.to_t2d(ids, 260).nonzero()[:, 0].equal(ids)
    torch.testing.assert_close(head.proj[0], target.lm_head_weight[ids].float())
    assert head.coverage == pytest.approx(counts[ids].sum().item() / counts.sum().item())
    batch = random_batch()
    out = head(batch, target)
    rows, steps = batch.loss_mask.nonzero(as_tuple=True)
    inside = vocab.to_t2d(ids, 260)[batch.ids[rows, steps]] & (steps >= 2)
    assert out.stats["loss_0"][1] == inside.sum() < out.count
    assert out.stats["top1_0"][1] == (steps >= 2).sum()


def test_best_first_tree_from_measured_ranks() -> None:
    ranks = torch.tensor(
        [[0, 0], [0, 0], [0, 1], [1, 0], [1, 0], [1, 0], [2, shapes.RANKS], [shapes.RANKS, 0]]
    )
    found = shapes.measure(ranks.repeat(500, 1))
    assert found["acceptance"][0][:3] == [3 / 8, 3 / 8, 1 / 8]
    # whole-path hits: behind rank 1, rank 0 is always right
    assert found["paths"][:3] == [[0], [1], [1, 0]]
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
