"""What CUDA's flash attention gives, by plain operations on the CPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _unseen(rows: int, keys: int, causal: bool, left: int | None) -> Tensor:
    """[rows, keys] bool, what a row does not see."""
    every = torch.ones(rows, keys, dtype=torch.bool)
    future = every.triu(1) if causal else ~every
    return future if left is None else future | every.tril(-left - 1)


def _sequences(cuts: Tensor, other: Tensor, longest: int, most: int) -> list[tuple[slice, slice]]:
    """Rows and keys of every sequence."""
    assert cuts.dtype == other.dtype == torch.int32
    found = [[slice(*pair) for pair in pairwise(side.tolist())] for side in (cuts, other)]
    sizes = [max(s.stop - s.start for s in side) for side in found]
    assert [longest, most] == sizes and all(s.stop > s.start for s in found[1])
    return list(zip(*found, strict=True))


def _forward(query, key, value, cuts, other, longest, most, dropout, causal, debug, **more):
    """[n, H, hd], [H, n], and what the backward pass wants to have back."""
    assert (dropout, debug) == (0.0, False)
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
    for a, b in _sequences(cuts, other, longest, most):
        scores = torch.einsum("qhd,khd->hqk", query[a], key[b]) * more["scale"]
        hidden = _unseen(*scores.shape[1:], causal, more.get("window_size_left"))
        scores = scores.masked_fill(hidden, -torch.inf)
        lse[:, a] = scores.logsumexp(-1)
        out[a] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[b])
    return out, lse, torch.zeros(2), torch.zeros(()), torch.empty(0)


def _backward(grad, query, key, value, out, lse, cuts, other, longest, most, *rest, **more):
    """Gradients of query, key and value."""
    dropout, causal, seed, offset = rest
    assert dropout == 0.0 and seed.shape == (2,) and offset.shape == ()
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = (t.repeat_interleave(groups, 1) for t in (key, value))
    into = [torch.zeros_like(t) for t in (query, wide_key, wide_value)]
    assert lse.is_contiguous() and grad.shape == out.shape == query.shape
    for a, b in _sequences(cuts, other, longest, most):
        scores = torch.einsum("qhd,khd->hqk", query[a], wide_key[b]) * more["scale"]
        hidden = _unseen(*scores.shape[1:], causal, more.get("window_size_left"))
        distribution = (scores - lse[:, a, None]).exp() * ~hidden
        pull = torch.einsum("qhd,khd->hqk", grad[a], wide_value[b])
        score = distribution * (pull - (grad[a] * out[a]).sum(-1).T[..., None]) * more["scale"]
        into[0][a] = torch.einsum("hqk,khd->qhd", score, wide_key[b])
        into[1][b] = torch.einsum("hqk,qhd->khd", score, query[a])
        into[2][b] = torch.einsum("hqk,qhd->khd", distribution, grad[a])
    return into[0], *(t.unflatten(1, (-1, groups)).sum(2) for t in into[1:])


class Aten:
    _flash_attention_forward = staticmethod(_forward)
    _flash_attention_backward = staticmethod(_backward)
    _scaled_dot_product_flash_attention_for_cpu = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    )


class Ops:
    aten = Aten


class Torch:
    """torch, for a module whose calls of flash attention are to run on a CPU."""

    ops = Ops

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
