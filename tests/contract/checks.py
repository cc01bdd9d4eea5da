"""The contract of heads/base.py, a function each; test_heads.py asks it of every case, __main__.py
of any kind of head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.conf.typed import faults
from outrider.decode.checks import validate
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree
from outrider.heads.checkpoint import load_head, save_head
from outrider.heads.losses import LossWeights
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.heads.warm import Start
from tests.contract.cases import Case, alone, drafted, features, fresh, moved, observe, rng
from tests.helpers.decoding import texts
from tests.helpers.training import random_batch, tiny_target

SHAPES = ("chain", "tree")
WARM = Sampling(1.2, top_k=40)


def starts_as_promised(case: Case) -> None:
    """A fresh head's guess of x_s from the feature f_t is the LM head's guess from f_t, where
    that is promised."""
    if not case.starts_as_lm_head:
        return
    target, head = fresh(case)
    batch, ids = random_batch(), head.ids()
    feats = target.features(batch.ids, batch.mask, (target.num_layers,))[:, :, 0].flatten(0, 1)
    seen = 0
    for flat, level, z in head.teacher_forced(batch, target, head.levels):
        want = target.unembed(feats[flat - 2 - level])
        want = want if ids is None else want[:, ids]
        torch.testing.assert_close(z, want, rtol=1e-4, atol=1e-4)
        seen += len(flat)
    assert seen > 10


def only_the_draft_learns(case: Case) -> None:
    """Every weight that is said to learn has a gradient after the first update, no other
    weight of the target has one, and the target stays in evaluation mode."""
    target, head = fresh(case)
    learning = [w for w in head.parameters() if w.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.1)
    head.train()
    for _ in range(2):
        optimizer.zero_grad()
        head(random_batch(), target).sum.backward()
        assert all(w.grad is not None for w in learning)
        optimizer.step()
    assert learning and all(bool(w.grad.any()) for w in learning if w.grad is not None)
    mine = {id(w) for w in head.parameters() if w.requires_grad}
    for weight in target.model.parameters():
        assert id(weight) in mine or (weight.grad is None and not weight.requires_grad)
    head.eval()
    assert not any(part.training for part in target.model.modules())


def padding_and_batch_change_nothing(case: Case) -> None:
    """The loss of a padded batch is the sum of its rows' losses, so is its gradient; the count
    is that of the supervised tokens alone."""
    target, head = moved(case)
    batch = random_batch(3, 14)
    batch = replace(batch, loss_mask=batch.mask)  # also tokens that later levels cannot see
    learning = [w for w in head.parameters() if w.requires_grad]
    whole = head(batch, target)
    whole.sum.backward()
    wanted = [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in learning]
    head.zero_grad()
    parts = [head(alone(batch, row), target) for row in range(3)]
    for part in parts:
        part.sum.backward()
    got = [torch.zeros_like(w) if w.grad is None else w.grad for w in learning]
    torch.testing.assert_close(whole.sum, sum(p.sum for p in parts), rtol=1e-4, atol=1e-4)
    assert float(whole.count) == sum(float(p.count) for p in parts) > 0
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def chunks_change_nothing(case: Case) -> None:
    """Losses and teacher-forced logits do not depend on how many tokens are met at once."""
    batch, found = random_batch(), []
    for chunk in (4, 512):
        target, head = moved(case, chunk=chunk, loss=LossWeights(0.5, 0.5))
        rows = {
            (int(f), level): row
            for flat, level, z in head.teacher_forced(batch, target, head.levels)
            for f, row in zip(flat, z, strict=True)
        }
        found.append((head(batch, target).sum, rows))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert found[0][1].keys() == found[1][1].keys() and found[0][1]
    for key, row in found[0][1].items():
        torch.testing.assert_close(row, found[1][1][key], rtol=1e-4, atol=1e-4)


def pieces_change_nothing(case: Case) -> None:
    """A draft depends on what was observed, not in which pieces, nor on drafts in between;
    its nodes are what the drafter says they may be."""
    target, head = moved(case, "float64")
    ids = random_batch(1, 12).ids
    feats = features(target, head, ids)
    one = None if feats is None else feats[0]
    for shape in SHAPES:
        for sampling in (Sampling(), WARM):
            trees = []
            for ends in ([12], [5, 12], [3, 4, 9, 11, 12]):
                drafter = head.drafter(target, DraftSpec(shape=shape))
                trees.append(drafted(drafter, ids[0], one, ends, sampling))
                validate(trees[-1], target.vocab_size, drafter.max_nodes)
            for tree in trees[1:]:
                assert torch.equal(tree.tokens, trees[0].tokens), (shape, sampling)
                assert torch.equal(tree.parents, trees[0].parents), (shape, sampling)
            if shape == "chain":
                assert trees[0].layout.levels == drafter.max_depth


def rows_change_nothing(case: Case) -> None:
    """Rows of a batch draft as they would alone, while others come, stay behind and leave, and
    are cut by their own budgets."""
    target, head = moved(case, "float64")
    ids = random_batch(3, 14).ids
    ids = torch.where(ids > 0, ids, 7)
    feats = features(target, head, ids)
    ends = [[6, 3, 5], [8, 14, 9], [9, 14, 10]]  # at last the second has no news
    last = {2: 12, 0: 11}  # where those that stay end, in this order
    for shape in SHAPES:
        for sampling in (Sampling(), WARM):
            many = head.drafter(target, DraftSpec(shape=shape))
            deep = torch.full((3,), many.max_depth)
            many.reset(3, 64)
            many.begin([row[:1] for row in ids], sampling)
            before = [1, 1, 1]
            for after in ends:
                observe(many, ids, feats, before, after)
                many.propose(deep, sampling, rng(3))
                before = after
            single = [
                drafted(
                    head.drafter(target, DraftSpec(shape=shape)),
                    ids[row],
                    None if feats is None else feats[row],
                    [before[row]],
                    sampling,
                )
                for row in range(3)
            ]
            cut = many.propose(torch.tensor([many.max_depth, 0, 1]), sampling, rng(3))
            assert int(cut.size[0]) == int(single[0].size[0]) > int(cut.size[2]) > 0
            assert int(cut.size[1]) == 0
            assert many.propose(0 * deep, sampling, rng(3)).width == 0
            whole = many.propose(deep, sampling, rng(3))
            for row in range(3):
                assert torch.equal(used(whole, row), used(single[row], 0)), (shape, row)
            stay = list(last)
            many.select(stay)
            tree = many.propose(deep[:2], sampling, rng(2))
            for place, row in enumerate(stay):
                assert torch.equal(used(tree, place), used(whole, row)), (shape, row)
            own = None if feats is None else feats[stay]
            observe(many, ids[stay], own, [before[row] for row in stay], list(last.values()))
            tree = many.propose(deep[:2], sampling, rng(2))
            for place, row in enumerate(stay):
                one = None if feats is None else feats[row]
                drafter = head.drafter(target, DraftSpec(shape=shape))
                wanted = drafted(drafter, ids[row], one, [last[row]], sampling)
                assert torch.equal(used(tree, place), used(wanted, 0)), (shape, row)


def decoding_is_lossless(case: Case) -> None:
    """Greedy: the target's own tokens, whatever is drafted, in any batch. At T > 0 a request
    gets the same tokens alone and beside others."""
    target, head = moved(case, "float64")
    requested = [Request([5, 6, 7, 8 + i][: 2 + i], 14, id=i) for i in range(3)]
    plain = texts(target, NoDraft(), requested, eos_ids=())
    for shape in SHAPES:
        for sampling in (Sampling(), WARM):
            runs = [
                generate(
                    target,
                    head.drafter(target, DraftSpec(shape=shape)),
                    requested,
                    sampling,
                    batch_size=size,
                    eos_ids=(),
                )
                for size in (1, 3)
            ]
            one, three = ([g.token_ids for g in run.generations] for run in runs)
            assert one == three and all(len(text) == 14 for text in one)
            if sampling.greedy:
                assert one == plain, shape
            assert sum(c.proposed for g in runs[0].generations for c in g.cycles) > 0


def used(tree: DraftTree, row: int) -> Tensor:
    """The tokens of a row without its padding: drafts that are cut differ in size."""
    return tree.tokens[row, : int(tree.size[row])]


def a_saved_head_drafts_the_same(case: Case, folder: Path) -> None:
    """Its keys, weights and what it has measured come back from the disk, and so do its
    drafts, for a target that was loaded anew."""
    target, head = moved(case, "float64")
    save_head(head, folder / "head", target.identity)
    again = tiny_target("float64", layers=2)
    loaded = load_head(folder / "head", again)
    assert loaded.calibration == head.calibration and loaded.coverage == head.coverage
    assert type(loaded) is type(head) and not loaded.training
    ids = random_batch(1, 12).ids
    for shape in SHAPES:
        trees = []
        for one, where in ((head, target), (loaded, again)):
            feats = features(where, one, ids)
            drafter = one.drafter(where, DraftSpec(shape=shape))
            row = None if feats is None else feats[0]
            trees += [drafted(drafter, ids[0], row, [12], how) for how in (Sampling(), WARM)]
        for own, other in zip(trees[:2], trees[2:], strict=True):
            assert torch.equal(own.tokens, other.tokens), shape
            assert torch.equal(own.parents, other.parents), shape


def mistakes_are_named(case: Case) -> None:
    """A value that a key cannot have is refused in a line that begins with the key."""
    key, value = case.wrong
    assert not faults(case.config)  # type: ignore[attr-defined]
    problems = faults(replace(case.config, **{key: value}))  # type: ignore[attr-defined]
    assert problems and any(line.startswith(key) for line in problems), problems


EVERY = (
    starts_as_promised,
    only_the_draft_learns,
    padding_and_batch_change_nothing,
    chunks_change_nothing,
    pieces_change_nothing,
    rows_change_nothing,
    decoding_is_lossless,
    mistakes_are_named,
)


def starts_from_another(case: Case, folder: Path) -> None:
    """A head that starts from a trained one guesses as that one does."""
    target, old = moved(case)
    if old.config_json()["config"].get("lora", {}).get("rank"):
        return  # a frozen base that is not the old head's
    save_head(old, folder, target.identity)
    new = head_class(old.kind).for_target(target, case.config, torch.arange(target.vocab_size) + 1)
    assert "starts from" in Start(str(folder), old.kind, target).give(new.eval())
    batch = random_batch()
    for a, b in zip(
        old.teacher_forced(batch, target, old.levels),
        new.teacher_forced(batch, target, old.levels),
        strict=True,
    ):
        assert a[0].equal(b[0]) and a[1] == b[1] and a[2].equal(b[2])


ON_DISK = (a_saved_head_drafts_the_same, starts_from_another)
