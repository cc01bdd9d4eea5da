"""Which rows of a batch go through together and on which rank: every row once, within the limits,
as many passes everywhere where passes are collectives, little padding, and the same losses as when
ranks took every world-th row."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from outrider.heads.batch import Batch
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.data.load import load_rows
from outrider.train.data.packing import Limits, laid, shared
from tests.helpers.training import TINY, chats, run_config, tiny_target
from tests.train.test_features import VARIANTS, head_for

MEAN, SIGMA, MOST = 770, 0.9, 4096  # tokens of a conversation: log-normal, cut


def drawn(count: int, sigma: float = SIGMA, seed: int = 0) -> list[int]:
    """Lengths of conversations, tokens."""
    chance = random.Random(seed)
    median = 530 if sigma == SIGMA else MEAN
    return [max(16, min(MOST, int(chance.lognormvariate(0, sigma) * median))) for _ in range(count)]


def rows_of(lengths: list[int]) -> JoinedRows:
    """Rows of such lengths, without a token."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    places, no = torch.arange(len(lengths)), torch.zeros(len(lengths), dtype=torch.bool)
    return JoinedRows("made up", torch.zeros(1, dtype=torch.int32), no[:1], offsets, places, no, [])


@pytest.fixture(scope="module")
def talks() -> JoinedRows:
    return rows_of(drawn(20_000))


def test_packed_rows_leave_little_padding(talks: JoinedRows) -> None:
    plan = BatchPlan(talks, 64, 1, 0)
    assert plan.waste(Limits(tokens=16384, pack=MOST), 8, 20) < 0.03


# What must hold
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [0, 900])
@pytest.mark.parametrize("together", [False, True])
def test_every_row_once_within_the_limits(together: bool, pack: int) -> None:
    chance = random.Random(together)
    for trial in range(60):
        world = chance.choice([1, 2, 3, 8])
        lengths = sorted(drawn(world * chance.randint(1, 12), chance.choice([0.1, 0.9]), trial))
        limits = Limits(
            chance.choice([0, 1, 3]), chance.choice([0, 1, 500, 3000, 10**6]), pack, together
        )
        ranks = shared(lengths, world, limits)
        assert ranks == shared(lengths, world, limits)
        assert sorted(i for passes in ranks for part in passes for i in part) == [
            *range(len(lengths))
        ]
        assert len(ranks) == world and all(part for passes in ranks for part in passes)
        assert all(ranks)
        if together or not limits.tokens:
            assert len({len(passes) for passes in ranks}) == 1
        for part in (part for passes in ranks for part in passes):
            places, width = laid([lengths[i] for i in part], pack)
            assert not limits.rows or len(part) <= limits.rows
            assert not limits.tokens or len(part) == 1 or len(places) * width <= limits.tokens


def test_sequences_hold_every_row_once_and_no_more_than_fits() -> None:
    chance = random.Random(0)
    for trial in range(60):
        lengths = drawn(chance.randint(1, 40), seed=trial)
        pack = chance.choice([1, 700, 4096, 10**6])
        places, width = laid(lengths, pack)
        assert sorted(i for row in places for i in row) == [*range(len(lengths))]
        assert max(sum(lengths[i] for i in row) for row in places) == width
        assert width <= max(pack, *lengths)


def test_the_rows_of_a_step_do_not_depend_on_the_ranks(talks: JoinedRows) -> None:
    plan, limits = BatchPlan(talks, 64, 1, 0), Limits(tokens=16384)
    for step in (0, 7):
        for world in (1, 2, 16, 64):
            ranks = plan.shares(step, world, limits)
            rows = sorted(row for passes in ranks for part in passes for row in part)
            assert rows == sorted(plan.batch(step))


# What is learned
# -------------------------------------------------------------------------------------------


def as_before(batch: list[int], rows: JoinedRows, world: int, tokens: int) -> list[list[int]]:
    """Every world-th row to a rank, filled in their order: the passes of all ranks."""
    found = []
    for rank in range(world):
        passes: list[list[int]] = []
        for row in batch[rank::world]:
            if passes and rows.computed([*passes[-1], row]) <= tokens:
                passes[-1].append(row)
            else:
                passes.append([row])
        found += passes
    return found


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_the_same_rows_have_the_same_loss_and_gradient(tmp_path: Path, name: str) -> None:
    """Over all ranks, in float64, to 1e-9: a step is a sum over its rows."""
    assert name in VARIANTS
    target = tiny_target(**{**TINY, "layers": 3})
    target.model.double()
    data = run_config(chats(tmp_path / "data.jsonl"), Path("out")).data
    known = target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
    rows = load_rows(data, *known)
    head = head_for(name, target, rows.counts(target.vocab_size)).train()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.05 * torch.randn_like(p))
    plan = BatchPlan(rows, 16, 1, 0)
    batch = plan.batch(0)
    ways = [as_before(batch, rows, 4, 600)]
    for limits in (Limits(tokens=600), Limits(tokens=600, pack=300, together=True)):
        ways.append([part for passes in plan.shares(0, 4, limits) for part in passes])
    assert sorted(ways[0]) != sorted(ways[1])

    def step(parts: list[list[int]]) -> tuple[float, float, list[torch.Tensor]]:
        total = count = 0.0
        head.zero_grad()
        for part in parts:
            out = head(rows.batch(part), target)
            out.sum.backward()
            total, count = total + out.sum.item(), count + float(out.count)
        return total / count, count, [p.grad.clone() for p in head.parameters()]  # type: ignore[union-attr]

    loss, count, gradients = step(ways[0])
    assert isinstance(rows.batch(batch), Batch) and loss > 0.1
    for parts in ways[1:]:
        other, again, found = step(parts)
        assert other == pytest.approx(loss, abs=1e-9) and again == count
        for mine, old in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine / count, old / count, rtol=0, atol=1e-9)
