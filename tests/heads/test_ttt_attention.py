"""Attention of training-time test: every kernel against plain softmax attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.heads.layers import attention
from outrider.heads.layers.attention import BLOCKS, CPU, FLASH, Kernel, Memory, PassLayout, attend
from tests.helpers.flash import Torch

RAGGED = torch.tensor([3, 4, 5, 6, 7, 14, 15, 16, 30, 31, 32])
KEPT = torch.tensor([0, 1, 2, 5, 7, 8, 9, 12, 13, 14, 15, 16])
LAYOUTS = {
    "ragged": PassLayout.of((3, 11), RAGGED),
    "sparse": PassLayout.of((3, 9), KEPT),
    "one row": PassLayout.of((1, 1), torch.tensor([0])),
}
LAYOUTS |= {
    f"{name}, window {window}": LAYOUTS[name].seen(window)
    for name, window in (("ragged", 3), ("sparse", 1), ("sparse", 4))
}


@pytest.fixture
def cuda_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "torch", Torch())


def inputs_of(layout: PassLayout, heads: int, kv: int, steps: int, rows: int) -> list[Tensor]:
    """Random query, key, value and own keys and values, in float64."""
    torch.manual_seed(0)
    (count, length), wide = layout.shape, torch.float64
    pair = [torch.randn(count, kv, length, 4, dtype=wide) for _ in range(2)]
    own = [torch.randn(rows, kv, 4, dtype=wide) for _ in range(2 * steps)]
    found = [torch.randn(rows, heads, 4, dtype=wide) * 3, *pair, *own]
    return [t.requires_grad_() for t in found]


def dense(
    query: Tensor, layout: PassLayout, scale: float, first: tuple[Tensor, Tensor], own: list[Tensor]
) -> Tensor:
    """`attend` by plain operations, with all scores of all heads."""
    (count, length), heads = layout.shape, query.shape[1]
    at = torch.arange(count * length)
    rows = at if layout.rows is None else layout.rows
    key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in first)
    repeated = [t.repeat_interleave(heads // t.shape[1], 1) for t in own]
    number = at // length
    seen = (number[rows, None] == number) & (at <= rows[:, None])
    if layout.window:
        seen &= at > rows[:, None] - layout.window
    key, value = (t.transpose(1, 2).flatten(0, 1) for t in (key, value))  # [B * T, H, hd]
    scores = torch.einsum("nhd,khd->nhk", query, key) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    diagonal = [(query * k).sum(-1, keepdim=True) * scale for k in repeated[0::2]]
    attn = torch.cat([scores, *diagonal], -1).softmax(-1)
    out = torch.einsum("nhk,khd->nhd", attn[..., : count * length], value)
    for i, v in enumerate(repeated[1::2]):
        out = out + attn[..., count * length + i, None] * v
    return out


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "kernel, kv", [(CPU, 2), (BLOCKS, 4), (BLOCKS, 1), (FLASH, 2)], ids=lambda x: str(x)[:9]
)
@pytest.mark.usefixtures("cuda_kernel")
def test_every_kernel_equals_dense(
    kernel: Kernel, kv: int, layout: PassLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and all gradients, with steps behind the first and without; groups of heads by
    themselves where memory says so."""
    monkeypatch.setattr(attention, "kernel_for", lambda query: kernel)
    for steps, there, block in ((3, layout, 1), (0, layout.whole(), 1 << 24)):
        monkeypatch.setattr(attention, "BLOCK", block)
        rows = layout.shape[0] * layout.shape[1] if there.rows is None else len(there.rows)
        query, key, value, *own = given = inputs_of(there, 4, kv, steps, rows)
        weight = torch.randn_like(query)
        outs = [run(query, there, 0.5, (key, value), own) for run in (attend, dense)]
        torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
        found = [torch.autograd.grad((out * weight).sum(), given) for out in outs]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_windows_that_change_nothing_are_none() -> None:
    layout = LAYOUTS["sparse"]  # its rows have nine tokens
    assert [layout.seen(n).window for n in (0, 1, 8, 9, 99)] == [0, 1, 8, 0, 0]
    memory = Memory(layout, 3)
    assert [memory.at(s).layout.window for s in (0, 1, 2)] == [3, 2, 1]
    assert Memory(layout).at(7).layout.window == 0
