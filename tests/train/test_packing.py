"""Packed documents against padded rows: the same features, losses and gradients for every
head, or a refusal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads.registry import head_class
from outrider.train.data.batches import BatchPlan
from outrider.train.data.load import load_rows
from outrider.train.data.packing import Limits
from outrider.train.features.store import CachedTarget, Source
from tests.helpers.archs import build
from tests.helpers.training import TINY, chats, run_config, tiny_target
from tests.train.test_features import VARIANTS, head_for, written
from tests.train.test_scale import losses

SHAPE = {**TINY, "layers": 3}
CHOSEN = [3, 11, 30, 46, 20, 8, 7]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    target = tiny_target(**SHAPE)
    cfg = run_config(chats(tmp_path_factory.mktemp("data") / "data.jsonl"), Path("out")).data
    return load_rows(
        cfg, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
    )


def wide_target() -> Target:
    target = tiny_target(**SHAPE)
    target.model.double()
    return target


def test_every_token_stands_where_its_span_says(rows) -> None:
    for width in (1, 150, 200, 1000):
        packed = rows.batch(CHOSEN, width)
        assert sorted(packed.sample_ids.tolist()) == sorted(CHOSEN)
        assert packed.ids.shape[1] <= max(width, int(rows.lengths[CHOSEN].max()))
        total = 0
        for row, (b, start, size) in zip(packed.sample_ids.tolist(), packed.spans(), strict=True):
            alone, part = rows.batch([row]), slice(start, start + size)
            assert size == rows.lengths[row] and torch.equal(packed.ids[b, part], alone.ids[0])
            assert packed.mask[b, part].all() and torch.equal(
                packed.loss_mask[b, part], alone.loss_mask[0]
            )
            assert torch.equal(packed.position[b, part], torch.arange(size))
            total += size
        assert total == packed.mask.sum() and bool(
            (packed.mask[:, 1:] <= packed.mask[:, :-1]).all()
        )
    assert (
        rows.batch(CHOSEN, 1).ids.shape[0] == len(CHOSEN)
        and rows.batch(CHOSEN, 1000).ids.shape[0] == 1
    )
    assert rows.batch(CHOSEN).spans() == [
        (b, 0, int(rows.lengths[r])) for b, r in enumerate(CHOSEN)
    ]


@pytest.mark.parametrize("name", [*sorted(VARIANTS), "medusa-markov"])
def test_packed_loss_and_gradient_equal_padded(name: str, rows) -> None:
    target = wide_target()
    if name in VARIANTS:
        head = head_for(name, target, rows.counts(target.vocab_size))
    else:
        kind: Any = head_class("medusa")
        cfg = kind.Config(draft_vocab=0, markov_rank=4)
        head = kind.for_target(target, cfg).double()
    torch.manual_seed(1)
    with torch.no_grad():  # fresh Medusa blocks are zero: nothing would be compared
        for p in head.parameters():
            p.add_(0.05 * torch.randn_like(p))
    head.train()
    found = []
    for width in (0, 160, 1000):
        out = head(rows.batch(CHOSEN, width), target)
        out.sum.backward()
        found.append(
            (
                out.sum.item(),
                out.count.item(),
                {n: p.grad.clone() for n, p in head.named_parameters()},
            )
        )
        head.zero_grad()
    within = 1e-9
    for loss, count, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=within) and count == found[0][1]
        for key, grad in grads.items():
            torch.testing.assert_close(grad, found[0][2][key], rtol=within, atol=within)
    assert max(float(g.abs().max()) for g in found[0][2].values()) > 0.01


@pytest.mark.parametrize("arch", ["gpt2", "gemma2", "mixtral", "opt", "bloom"])
def test_a_target_takes_packed_documents_or_says_why_not(arch: str) -> None:
    target = Target(build(arch), None)
    reason = target.packs()
    ids = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1))
    at = torch.tensor([[*range(7), *range(13)], [*range(16), *range(4)]])
    real = torch.ones_like(ids, dtype=torch.bool)
    packed = target.features(ids, real, (1, target.num_layers), position=at)
    worst = 0.0
    for b, cut in ((0, 7), (1, 16)):
        for part in (slice(0, cut), slice(cut, 20)):
            alone = target.features(
                ids[b : b + 1, part], real[b : b + 1, part], (1, target.num_layers)
            )
            worst = max(worst, float((packed[b : b + 1, part] - alone).abs().max()))
    assert (worst < 1e-4) == (reason == ""), (worst, reason)
    assert bool(reason) == (
        arch in ("bloom", "opt")
    )  # ALiBi, and a mask that is made without the positions


def test_packed_rows_read_stored_features(tmp_path: Path, rows) -> None:
    writer = written(chats(tmp_path / "data.jsonl"), tmp_path / "f", dtype=torch.float64)
    from tests.train.test_features import opened

    store, head = opened(writer), head_for("eagle3", writer.target, rows.counts(260))
    found = []
    for width in (0, 160):
        batch = writer.rows.batch(CHOSEN, width)
        found.append(head(batch, CachedTarget(writer.target, store, batch)).sum.item())
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_heads_and_targets_that_cannot_pack_are_named(rows, monkeypatch) -> None:
    target = tiny_target(**SHAPE)
    head = head_for("medusa", target, rows.counts(260))
    cfg = run_config(Path("none"), Path("out"), "data.packing=true")
    assert Source(cfg, head, target, rows).pack == cfg.data.max_length
    monkeypatch.setattr(type(head), "packs", False)
    with pytest.raises(
        UserError, match="data.packing: medusa heads do not keep packed documents apart"
    ):
        Source(cfg, head, target, rows)
    monkeypatch.undo()
    target._packs = "packed documents see each other (relative error 0.3)"
    with pytest.raises(UserError, match="data.packing: packed documents see each other"):
        Source(cfg, head, target, rows)


def test_packing_leaves_the_batches_alone_and_the_losses_equal(tmp_path: Path, rows) -> None:
    data = chats(tmp_path / "data.jsonl")
    plan = BatchPlan(rows, 32, 1, 0)
    assert plan.waste(Limits(pack=400)) < plan.waste(Limits())
    for head in ("medusa", "eagle3"):
        one = losses(data, tmp_path / f"{head}-a", f"head={head}")
        other = losses(
            data,
            tmp_path / f"{head}-b",
            f"head={head}",
            "data.packing=true",
            "data.max_length=1024",
            "micro_batch=5",
        )
        for step, loss in one.items():
            assert other[step] == pytest.approx(loss, abs=1e-9)
