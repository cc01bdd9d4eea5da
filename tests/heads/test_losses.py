"""The plain formula by hand, and the chunked loss against it in float64, values and
gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.heads import products
from outrider.heads.losses import LossWeights, Taught, chunked_loss, plain_loss
from outrider.heads.teacher import Teacher

K, N, D, V = 3, 23, 5, 11


def naive(hidden, weight, place, valid, distribution, terms, head_weights):
    """The sum of the plain formula over heads and tokens, by autograd."""
    teacher, total = distribution(slice(0, N)) if distribution else None, hidden.new_zeros(())
    for k in range(K):
        z = hidden[k] @ (weight if weight.dim() == 2 else weight[k]).T
        total = total + head_weights[k] * (plain_loss(z, teacher, place, terms) * valid[k]).sum()
    return total


def test_the_plain_formula_by_hand() -> None:
    """Four tokens of three: q = (1/2, 1/4, 1/4); the last has no teacher, the third lies
    outside."""
    z = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64).log().expand(4, 3)
    p = torch.tensor([[0.2, 0.3, 0.5]] * 4, dtype=torch.float64)
    usable = torch.tensor([True, True, True, False])
    teacher, target = Teacher(p, 0.8 * p, usable), torch.tensor([0, 2, -1, 1])
    soft = 0.2 * math.log(2) + 0.8 * math.log(4)
    rate = 0.8 * 0.2 + 0.8 * 0.3 + 0.25
    hard = [math.log(2), math.log(4), 0, math.log(4)]
    for terms, taught in (
        (LossWeights(3, 0), 0),
        (LossWeights(3, 5), 5 * soft),
        (LossWeights(3, 0, 7), 7 * (1 - rate)),
        (LossWeights(3, 0, 0, 2), -2 * math.log(rate)),
        (LossWeights(3, 5, 7, 2), 5 * soft + 7 * (1 - rate) - 2 * math.log(rate)),
    ):
        found = plain_loss(z, teacher, target, terms).tolist()
        wanted = [3 * h + (taught if i < 3 else 0) for i, h in enumerate(hard)]
        assert found == pytest.approx(wanted, rel=1e-14)
    assert plain_loss(z, None, target, LossWeights(3)).tolist() == pytest.approx(
        [3 * h for h in hard]
    )


# terms, whether all heads share the weight, whether there is a low-rank term
MIXES = [
    (LossWeights(2.0), False, False),
    (LossWeights(0, 1), True, False),
    (LossWeights(0, 0, 1), False, False),
    (LossWeights(0, 0, 0, 1), True, False),
    (LossWeights(1), False, True),
    (LossWeights(0.5, 2.0, 0.25, 0.125), False, False),
    (LossWeights(0.5, 2.0, 0.25, 0.125), True, True),
]


@pytest.mark.parametrize("terms, shared, low_rank", MIXES, ids=str)
def test_chunked_equals_naive(terms: LossWeights, shared: bool, low_rank: bool) -> None:
    """Values and all gradients; with the term of the token before they are those of logits
    h W^T + m U^T."""
    g = torch.Generator().manual_seed(1)
    sizes = ((K, N, D), (V, D) if shared else (K, V, D), (N, 2), (V, 2))
    made = [torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in sizes]
    hidden, weight, near, far = made
    place, valid = torch.randint(-1, V, (N,), generator=g), torch.rand(K, N, generator=g) > 0.2
    p = torch.randn(N, V, generator=g, dtype=torch.float64).softmax(-1)
    usable = torch.rand(N, generator=g) > 0.2
    own = p * torch.rand(N, 1, generator=g, dtype=torch.float64)  # the rest lies outside
    distribution = None
    if terms.needs_distribution:
        distribution = lambda part: Teacher(p[part], own[part], usable[part])
    scale = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
    wide, both, pair = hidden, weight, None
    if low_rank:
        wide, pair = torch.cat([hidden, near.expand(K, N, 2)], -1), (near, far)
        both = torch.cat([weight, far if shared else far.expand(K, V, 2)], -1)
    want = naive(wide, both, place, valid, distribution, terms, scale)
    taught = Taught(place, valid, terms, scale, distribution, chunk=7)
    got, rows = chunked_loss(hidden, weight, taught, pair)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    learned = made if low_rank else made[:2]
    grads = [torch.autograd.grad(3 * total, learned) for total in (got, want)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    losses, hits = rows.sums()
    assert torch.allclose((losses[:, 0] * scale).sum(), got)
    best = torch.stack([(wide[k] @ (both if shared else both[k]).T).argmax(-1) for k in range(K)])
    assert hits[:, 0].tolist() == ((best == place) & valid).sum(1).tolist()
    assert hits[:, 1].tolist() == valid.sum(1).tolist()


def test_no_supervised_token_gives_zero_gradients() -> None:
    """A rank may have a micro-batch without any: its gradients must exist for the exchange."""
    hidden = torch.randn(K, 0, D).requires_grad_()
    weight = torch.randn(K, V, D).requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    valid = torch.ones(K, 0, dtype=torch.bool)
    taught = Taught(none, valid, LossWeights(), torch.ones(K))
    loss, _ = chunked_loss(hidden, weight, taught)
    loss.backward()
    assert loss.item() == 0 and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("builds", ["wide", "rounding", "none"])
def test_gradients_of_the_weight_add_up_without_rounding(
    builds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over chunks, in bfloat16, with a build that adds in float32; with one that rounds first or
    has no such product the plain sum."""

    def addmm(into: Any, a: Any, b: Any, *, out_dtype: Any, out: Any) -> Any:
        if builds == "none":
            raise NotImplementedError
        product = (a @ b).float() if builds == "rounding" else a.float() @ b.float()
        return out.add_(product)

    names = {name: getattr(torch, name) for name in ("full", "ones", "equal")}
    monkeypatch.setattr(products, "torch", SimpleNamespace(addmm=addmm, **names))
    products.adds_wide.cache_clear()
    g = torch.Generator().manual_seed(0)
    into, plain, wide = torch.zeros(3, 11, 7).unbind()
    for _ in range(5):
        a, b = (torch.randn(*s, generator=g).bfloat16() for s in ((11, 40), (40, 7)))
        products.add_product(into, a, b)
        plain += a @ b
        wide += a.float() @ b.float()
    products.adds_wide.cache_clear()
    assert torch.equal(into, wide if builds == "wide" else plain) and not torch.equal(plain, wide)
