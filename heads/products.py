"""Sums of matrix products in float32, of factors in a half precision."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b for matrices, where this device can without rounding the product to the
    factors' dtype before."""
    if into.dtype == a.dtype or not adds_wide(a.device, a.dtype, into.dtype):
        into += a @ b
    else:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)


@functools.cache
def adds_wide(device: torch.device, dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether this build adds products of `dtype` to sums in `wide` there. Asked once,
    of numbers that `dtype` does not have: builds differ in what they take."""
    a = torch.full((16, 16), 1.0078125, device=device, dtype=dtype)  # 1 + 2^-7
    into = torch.ones(16, 16, device=device, dtype=wide)
    try:
        torch.addmm(into, a, a, out_dtype=wide, out=into)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(into, (1 + a.double() @ a.double()).to(wide))
