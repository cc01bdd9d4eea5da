"""TreeCache: bookkeeping, refusals before anything changes, and a state machine against plain
passes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outrider.conf.errors import UserError
from outrider.decode.cache import TreeCache
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from tests.helpers.archs import build
from tests.helpers.mirror import Mirror

DEVICE = torch.device("cpu")


def small(rows: int = 2, length: int = 8, nodes: int = 3) -> TreeCache:
    return TreeCache([(1, 2, 2), None, (1, 2, 4)], rows, length, nodes, torch.float32, DEVICE)


def fill(cache: TreeCache, lengths: list[int], nodes: int) -> None:
    """As if rows of these lengths had just scored a tree: slot s of row b holds 100 b + s, in
    every layer.
    """
    cache.lengths = lengths
    cache.open(0, len(lengths), max(lengths), nodes + 1)
    cache.pending = nodes
    for buffer in cache.buffers:
        rows, slots = torch.arange(buffer.shape[1]), torch.arange(cache.slots)
        buffer.copy_((100.0 * rows[:, None] + slots)[None, :, None, :, None].expand_as(buffer))


def test_truncate_rolls_rows_back() -> None:
    cache = small()
    cache.lengths = [5, 6]
    cache.truncate([4, 6])
    assert cache.lengths == [4, 6]
    for wrong in ([5, 6], [4], [-1, 6]):
        with pytest.raises(ValueError, match="truncate"):
            cache.truncate(wrong)
    assert cache.lengths == [4, 6]


@pytest.mark.parametrize(
    ("path", "length", "message"),
    [
        ([[0, 3], [0, 1]], [2, 2], r"row 0: path \[0, 3\].*3 nodes"),
        ([[0, 1], [0, 1]], [2, 3], "row 1"),
        ([[0, 1]], [2], "for 2 rows"),
    ],
)
def test_commit_refuses_a_path_outside_the_tree(path: list, length: list, message: str) -> None:
    cache = small()
    fill(cache, [5, 2], 3)
    with pytest.raises(ValueError, match=message):
        cache.commit(torch.tensor(path), torch.tensor(length))
    assert cache.lengths == [5, 2] and cache.pending == 3
    cache.commit(torch.tensor([[0, 1], [-1, -1]]), torch.tensor([2, 0]))
    with pytest.raises(ValueError, match="no scored tree"):
        cache.commit(torch.tensor([[0], [0]]), torch.tensor([1, 1]))


def test_select_refuses_rows_that_are_not_live() -> None:
    cache = small(3)
    fill(cache, [3, 5], 1)
    for rows in ([0, 0], [2]):
        with pytest.raises(ValueError, match="live rows"):
            cache.select(rows)


def test_a_full_cache_names_row_and_lengths_and_changes_nothing() -> None:
    target = Target(build("llama"))
    m = Mirror(target, build("llama"), (2, 6, 2), 1e-4)
    m.prefill([3, 6])
    tree, _ = m.score([[-1, -1], [-1, 0]])
    m.commit(tree, [1, 1])
    buffers = [b.clone() for b in m.cache.buffers]
    with pytest.raises(
        UserError, match=r"full: row 1 holds 9 tokens and 1 more need 10 slots of 9"
    ):
        target.score(m.cache, torch.tensor([4, 5]), DraftTree.empty(2))
    assert m.cache.lengths == [5, 9] and all(
        torch.equal(a, b) for a, b in zip(buffers, m.cache.buffers, strict=True)
    )
    m.select([0])  # the long row leaves: the other goes on
    m.check(DraftTree.empty(1))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt 0.*at least one token"),
        ([[3] * 4, [3] * 21], "prompt 1: 21 tokens exceed the cache"),
        ([[3] * 17], "prompt 0: 17 tokens exceed the target's context of 16"),
        ([[3], [4], [5]], "3 new ones exceed its 2 rows"),
    ],
)
def test_prefill_refuses_before_writing(prompts: list, message: str) -> None:
    context = 16 if "context" in message else 64
    target = Target(build("llama", max_position_embeddings=context))
    cache = target.new_cache(2, 20, 8)
    with pytest.raises(UserError, match=message):
        target.prefill(cache, [torch.tensor(p, dtype=torch.int64) for p in prompts])
    assert cache.rows == 0 and all(float(b.abs().sum()) == 0 for b in cache.buffers)


def test_new_cache_refuses_more_than_the_context() -> None:
    target = Target(build("llama", max_position_embeddings=16))
    target.new_cache(1, 20, 4)
    with pytest.raises(UserError, match="21 tokens per row exceed the target's context of 16"):
        target.new_cache(1, 21, 4)
    with pytest.raises(UserError, match="at least 1, 1 and 0"):
        target.new_cache(0, 4, 4)


TARGETS: dict[str, tuple[Target, object]] = {}


def shared(arch: str) -> tuple[Target, object]:
    if arch not in TARGETS:
        TARGETS[arch] = Target(build(arch)), build(arch)
    return TARGETS[arch]


class CacheMachine(RuleBasedStateMachine):
    """Any order of prefill, score, commit and select: each logit equals a fresh pass over that
    row's text.
    """

    @initialize(
        arch=st.sampled_from(["llama", "gemma3_text", "mistral", "gpt2"]),
        guidance=st.sampled_from([None, None, 2.0]),
        seed=st.integers(0, 999),
    )
    def begin(self, arch: str, guidance: float | None, seed: int) -> None:
        target, oracle = shared(arch)
        self.mirror = Mirror(target, oracle, (3, 32, 6), 1e-3, seed, guidance)
        self.tree: DraftTree | None = None

    def longest(self) -> int:
        return max(self.mirror.lengths(), default=0)

    @precondition(lambda self: len(self.mirror.texts) < 3)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        room = 3 - len(self.mirror.texts)
        self.mirror.prefill(data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=room)))
        self.tree = None

    @precondition(lambda self: len(self.mirror.texts) > 0 and self.longest() < 32)
    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        rows = []
        for _ in range(len(self.mirror.texts)):
            n = data.draw(st.integers(0, 6))
            rows.append([data.draw(st.integers(-1, i - 1)) for i in range(n)])
        self.tree, _ = self.mirror.score(rows)

    @precondition(lambda self: self.tree is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.tree is not None
        nodes = [data.draw(st.integers(-1, int(s) - 1)) for s in self.tree.size]
        self.mirror.commit(self.tree, nodes)
        self.tree = None

    @precondition(lambda self: len(self.mirror.texts) > 0)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.mirror.texts))))
        self.mirror.select(list(order[: data.draw(st.integers(0, len(order)))]))
        self.tree = None


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=25, stateful_step_count=12, deadline=None, derandomize=True
)
