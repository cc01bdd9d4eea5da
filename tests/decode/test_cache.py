"""TreeCache: a state machine against plain passes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from tests.helpers.archs import build
from tests.helpers.mirror import Mirror

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
