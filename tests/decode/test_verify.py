"""The verifier: exact by enumeration, equal to a scalar reference, at least as good as the
theory says.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree, Proposal, TreeShape
from outrider.decode.verify import traversal, verify, walk
from outrider.scripts.certificate.enumerator import Case, enumerate_case
from tests.helpers.reference_verify import Row


def check_cases(seed: int, count: int, **size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        case = Case.random(generator, **size)
        found = enumerate_case(case, verify)
        assert found.error <= 1e-12, f"case {number} of seed {seed}: {case}"
        if case.scheme == "top":  # what the rule comes down to
            plain = enumerate_case(case, walk)
            assert plain.error <= 1e-12
            assert plain.accepted == pytest.approx(found.accepted, abs=1e-12)


def test_exact_distribution_on_random_cases() -> None:
    check_cases(0, 500)


@pytest.mark.usefixtures("accelerator")
def test_exact_distribution_on_random_cases_of_an_accelerator() -> None:
    check_cases(9, 60, max_nodes=3, max_vocab=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_exact_distribution_on_many_random_cases(seed: int) -> None:
    check_cases(seed, 400, max_nodes=5, max_vocab=5)


def random_world(
    seed: int, rows: int, paths: list[list[int]], vocab: int, sampled: str, narrow: bool = False
) -> tuple[DraftTree, Distribution]:
    """A batch of ragged trees over one shape with random distributions; `sampled`: all, some
    or none of the nodes. narrow: the draft vocabulary lacks one token, which some
    deterministic candidates are nevertheless."""
    g = torch.Generator().manual_seed(seed)
    shape = TreeShape.of(paths)
    n = len(shape)
    replacement = bool(torch.randint(2, (), generator=g)) and sampled == "all"
    ids, narrow = torch.arange(vocab), narrow and vocab > 3  # three siblings need three tokens
    if narrow:
        lacking = int(torch.randint(vocab, (), generator=g))
        ids = ids[ids != lacking]
    draft = (torch.randn(rows, n + 1, len(ids), generator=g, dtype=torch.float64) * 2).softmax(-1)
    parents = shape.parents(torch.device("cpu"))[0].tolist()
    tokens = torch.zeros(rows, n, dtype=torch.int64)
    mask = {"all": torch.ones, "none": torch.zeros}.get(sampled, torch.zeros)(
        rows, n, dtype=torch.bool
    )
    if sampled == "some":
        mask = torch.rand(rows, n, generator=g) < 0.5
    for b in range(rows):
        left, used = draft[b].clone(), set()
        for i, p in enumerate(parents):
            place = torch.multinomial(left[p + 1], 1, generator=g)
            outside = (
                narrow
                and not mask[b, i]
                and p not in used
                and bool(torch.rand((), generator=g) < 0.5)
            )
            tokens[b, i] = lacking if outside else ids[place]
            if outside:
                used.add(p)
            elif not replacement:
                left[p + 1, place] = 0
    row = (torch.tensor(parents, dtype=torch.int64) + 1).expand(rows, n)
    size = shape.size_at(torch.randint(shape.depth + 1, (rows,), generator=g))
    size[0] = n
    tree = DraftTree.static(
        shape, tokens, size, mask, Proposal(draft, row, ids if narrow else None, replacement)
    )
    logits = torch.randn(rows, n + 1, vocab, generator=g, dtype=torch.float64) * 2
    settings_ = (Sampling(1.0), Sampling(0.7, top_k=3), Sampling(1.0, top_p=0.8), Sampling(0.0))[
        seed % 4
    ]
    return tree, Distribution(settings_, logits, tree)


@st.composite
def shapes(draw: st.DrawFn) -> list[list[int]]:
    paths: list[list[int]] = []
    for _ in range(draw(st.integers(0, 10))):
        above = draw(st.sampled_from([[], *paths]))
        rank = sum(p[:-1] == above for p in paths)
        if rank < 3 and len(above) < 5:
            paths.append([*above, rank])
    return paths


@pytest.mark.usefixtures("anywhere")
@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    paths=shapes(),
    seed=st.integers(0, 10_000),
    rows=st.sampled_from([1, 3, 16]),
    vocab=st.integers(3, 7),
    sampled=st.sampled_from(["all", "some", "none"]),
    narrow=st.booleans(),
)
def test_batched_equals_scalar(
    paths: list[list[int]], seed: int, rows: int, vocab: int, sampled: str, narrow: bool
) -> None:
    tree, distribution = random_world(seed, rows, paths, vocab, sampled, narrow)
    rng = Rng(seed, torch.arange(rows), torch.full((rows,), 3))
    verdict = traversal(tree, distribution, rng) if len(paths) else walk(tree, distribution, rng)
    for b in range(rows):
        path, bonus = Row(tree, distribution, rng, b).traversal()
        got = verdict.path[b, : verdict.length[b]].tolist()
        assert (got, int(verdict.bonus[b])) == (path, bonus), f"row {b}"
        assert verdict.path[b, verdict.length[b] :].eq(-1).all()


def test_perfect_draft_is_accepted_whole() -> None:
    """p = q everywhere, in float32 where the residual sums to nothing: every level accepted,
    never NaN.
    """
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 6, 50, generator=g) * 3
    distribution = logits.softmax(-1)
    for nudge in (0.0, 2.0**-23):
        draft = distribution[:, :5] * (1 + nudge)
        tokens = torch.stack(
            [torch.multinomial(draft[:, i], 1, generator=g)[:, 0] for i in range(5)], 1
        )
        tree = DraftTree.chain(
            tokens,
            None,
            torch.ones_like(tokens, dtype=torch.bool),
            Proposal(draft, torch.arange(5).expand(64, 5)),
        )
        rng = Rng(1, torch.arange(64), torch.zeros(64, dtype=torch.int64))
        verdict = verify(tree, Distribution(Sampling(1.0), logits, tree), rng)
        assert verdict.length.float().mean() > 4.99
        assert ((verdict.bonus >= 0) & (verdict.bonus < 50)).all()
