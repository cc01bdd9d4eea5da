"""Attention of training-time test: every kernel against plain softmax attention, and what a
GPU would hold of it.

pytest tests/heads/test_ttt_attention.py
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.heads.layers import kernels
from outrider.heads.layers.attention import Memory, dense
from outrider.heads.layers.kernels import BLOCKS, CPU, FLASH, Kernel
from outrider.heads.layers.layout import PassLayout
from outrider.heads.layers.merged import merged

RAGGED = torch.tensor([3, 4, 5, 6, 7, 14, 15, 16, 30, 31, 32])
POSITION = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 0, 0]])
KEPT = torch.tensor([0, 1, 2, 5, 7, 8, 9, 12, 13, 14, 15, 16])
LAYOUTS = {
    "ragged": PassLayout.of((3, 11), RAGGED),
    "packed": PassLayout.of((2, 9), KEPT, POSITION),
    "one row": PassLayout.of((1, 1), torch.tensor([0])),
    "all rows": PassLayout.of((2, 5), torch.arange(10)),
}
LAYOUTS |= {
    f"{name}, window {window}": LAYOUTS[name].seen(window)
    for name, window in (("ragged", 3), ("ragged", 9), ("packed", 1), ("packed", 4))
}


def _unseen(size: int, left: int | None, right: int | None) -> Tensor:
    """[size, size] bool, what a row does not see."""
    future = torch.ones(size, size).triu(1).bool()
    assert right in (None, 0) and (left is None) == (right is None)
    return future if left is None else future | torch.ones(size, size).tril(-left - 1).bool()


def _flash(
    query,
    key,
    value,
    cuts,
    other_cuts,
    longest,
    other,
    dropout,
    causal,
    debug,
    *,
    scale,
    window_size_left=None,
    window_size_right=None,
):
    """What aten._flash_attention_forward gives for documents side by side: [N, H, hd], [H,
    N]."""
    assert cuts.dtype == other_cuts.dtype == torch.int32 and (dropout, causal) == (0.0, True)
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
    assert longest == other == max(b - a for a, b in pairwise(cuts.tolist()))
    for a, b in pairwise(cuts.tolist()):
        scores = torch.einsum("qhd,khd->hqk", query[a:b], key[a:b]) * scale
        scores = scores.masked_fill(_unseen(b - a, window_size_left, window_size_right), -torch.inf)
        lse[:, a:b] = scores.logsumexp(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[a:b])
    return out, lse, torch.zeros(2), torch.zeros(()), torch.empty(0)


def _flash_back(grad, query, key, value, out, lse, cuts, *rest, scale, **window):
    """What aten._flash_attention_backward gives."""
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = (t.repeat_interleave(groups, 1) for t in (key, value))
    into = [torch.zeros_like(t) for t in (query, wide_key, wide_value)]
    assert lse.is_contiguous() and grad.shape == out.shape == query.shape
    for a, b in pairwise(cuts.tolist()):
        scores = torch.einsum("qhd,khd->hqk", query[a:b], wide_key[a:b]) * scale
        left, right = (window.get(f"window_size_{side}") for side in ("left", "right"))
        distribution = (scores - lse[:, a:b, None]).exp() * ~_unseen(b - a, left, right)
        pull = torch.einsum("qhd,khd->hqk", grad[a:b], wide_value[a:b])
        score = distribution * (pull - (grad[a:b] * out[a:b]).sum(-1).T[..., None]) * scale
        into[0][a:b] = torch.einsum("hqk,khd->qhd", score, wide_key[a:b])
        into[1][a:b] = torch.einsum("hqk,qhd->khd", score, query[a:b])
        into[2][a:b] = torch.einsum("hqk,qhd->khd", distribution, grad[a:b])
    summed = (t.unflatten(1, (-1, groups)).sum(2) for t in into[1:])
    return into[0], *summed


@pytest.fixture
def cuda_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two functions of CUDA's flash attention, by plain operations on the CPU."""

    class Aten:
        _flash_attention_forward = staticmethod(_flash)
        _flash_attention_backward = staticmethod(_flash_back)
        of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu = of_cpu

    class Ops:
        aten = Aten

    class Torch:
        ops = Ops

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(kernels, "torch", Torch())


def inputs_of(layout: PassLayout, heads: int, kv: int, steps: int, rows: int) -> list[Tensor]:
    """Random query, key, value and own keys and values, in float64."""
    torch.manual_seed(0)
    (count, length), wide = layout.shape, torch.float64
    pair = [torch.randn(count, kv, length, 4, dtype=wide) for _ in range(2)]
    own = [torch.randn(rows, kv, 4, dtype=wide) for _ in range(2 * steps)]
    found = [torch.randn(rows, heads, 4, dtype=wide) * 3, *pair, *own]
    return [t.requires_grad_() for t in found]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "kernel, kv",
    [
        pytest.param(CPU, 4, id="cpu-4"),  # its keys are repeated before
        *(pytest.param(BLOCKS, kv, id=f"blocks-{kv}") for kv in (4, 2, 1)),
        *(pytest.param(FLASH, kv, id=f"flash-{kv}") for kv in (4, 2, 1)),
    ],
)
@pytest.mark.usefixtures("cuda_kernel")
def test_every_kernel_equals_dense(
    kernel: Kernel, kv: int, layout: PassLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and all gradients, with steps behind the first and without."""
    monkeypatch.setattr(kernels, "LEAST_BAND", 2)  # a window cuts documents of eleven tokens
    whole = torch.arange(layout.shape[0] * layout.shape[1])
    for steps, rows in ((3, layout.rows), (0, layout.rows), (0, None)):
        there = layout if rows is not None else PassLayout(layout.shape, whole, *parts(layout))
        query, key, value, *own = inputs_of(there, 4, kv, steps, len(there.rows))
        given = [query, key, value, *own]
        weight = torch.randn_like(query)
        outs = [
            merged(query, there, rows, 0.5, (key, value), own, kernel),
            dense(query, there, 0.5, (key, value), own),
        ]
        torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
        found = [torch.autograd.grad((out * weight).sum(), given) for out in outs]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def parts(layout: PassLayout) -> tuple[Any, ...]:
    """The documents of a layout, all of whose tokens are rows."""
    sizes = [b - a for a, b in pairwise(layout.edges)]
    every = np.arange(layout.shape[0] * layout.shape[1])
    return layout.starts, sizes, sizes, layout.cuts, every, layout.window


@pytest.mark.parametrize("kernel", [BLOCKS, FLASH], ids=["blocks", "flash"])
@pytest.mark.usefixtures("cuda_kernel")
def test_gradients_are_those_of_finite_differences(kernel: Kernel) -> None:
    layout = LAYOUTS["packed"]
    query, *rest = inputs_of(layout, 2, 1, 2, len(KEPT))

    def run(query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        return merged(query, layout, layout.rows, 0.5, (key, value), [*own], kernel)

    assert torch.autograd.gradcheck(run, (query, *rest), fast_mode=True)


def test_blocks_are_cut_where_memory_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of heads by themselves give what all at once do."""
    layout = LAYOUTS["ragged"]
    query, key, value, *own = inputs_of(layout, 4, 2, 1, len(RAGGED))
    whole = merged(query, layout, layout.rows, 0.5, (key, value), own, BLOCKS)
    monkeypatch.setattr(kernels, "BLOCK", 1)
    cut = merged(query, layout, layout.rows, 0.5, (key, value), own, BLOCKS)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("window", [1, 64, 200, 1000])
def test_a_window_costs_what_it_shows(window: int) -> None:
    """Bands of long documents: every row is in one block, every key that it sees beside it,
    and the blocks grow with the window and not with the document."""
    torch.manual_seed(0)
    rows = (torch.rand(2 * 1500) < 0.6).nonzero()[:, 0]
    layout = PassLayout.of((2, 1500), rows).seen(window)
    assert layout.window == window
    for chosen, total in ((rows, len(rows)), (None, 3000)):
        met, scores = [], 0
        for block in kernels._blocks(layout, chosen, 1, 1):
            met.append(block.at + 1500 * block.far[0])
            scores += block.hidden.numel()
            sees = torch.minimum(block.at + 1, torch.tensor(window))
            assert ((~block.hidden).sum(1) == sees).all()
        assert torch.cat(met).equal(rows if chosen is not None else torch.arange(3000))
        assert scores <= total * (window + max(kernels.LEAST_BAND, window // 4))


def test_windows_that_change_nothing_are_none() -> None:
    layout = LAYOUTS["packed"]  # its longest document has five tokens
    assert [layout.seen(n).window for n in (0, 1, 4, 5, 99)] == [0, 1, 4, 0, 0]
    memory = Memory(layout, 3)
    assert [memory.at(s).layout.window for s in (0, 1, 2)] == [3, 2, 1]
    with pytest.raises(ValueError, match="step 3 of a window of 3"):
        memory.at(3)
    assert Memory(layout).at(7).layout.window == 0


def test_a_layout_says_where_documents_and_rows_lie() -> None:
    layout = LAYOUTS["packed"]
    assert layout.starts == [0, 4, 6, 9, 11, 16, 17] and layout.longest == 5
    assert layout.counts == [3, 1, 2, 1, 4, 1, 0] and layout.reaches == [3, 2, 3, 1, 5, 1, 0]
    assert layout.cuts.tolist() == [*layout.starts, 18] and layout.cuts.dtype == torch.int32


def test_dense_is_not_rounded_before_it_is_widened() -> None:
    """Scores of size 20 in 16 bits would be off by 0.06."""
    layout = PassLayout.of((1, 64), torch.arange(64))
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(64, 2, 16),
        torch.randn(1, 2, 64, 16),
        torch.rand(1, 2, 64, 16),
    )
    given = [(t * 4).bfloat16() for t in (query, key)] + [value.bfloat16()]
    found = dense(given[0], layout, 1.0, (given[1], given[2]), [])
    right = dense(given[0].double(), layout, 1.0, (given[1].double(), given[2].double()), [])
    assert float((found.double() - right).abs().max()) < 3e-3


# What a GPU would hold, by tensors without numbers
# -------------------------------------------------------------------------------------------
