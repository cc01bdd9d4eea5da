"""Linear layers, norms and the choice of rows, as torch and transformers have them: the same
functions, with backward passes that cost less. Weights are float32; every module computes in the
dtype of its input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class Linear(nn.Linear):
    """A linear layer with float32 master weights that computes in its input's dtype. kept: the
    weights in that dtype, inside `cast_once`.
    """

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out], in x's dtype."""
        if self.bias is None and self.weight.dtype != x.dtype and torch.is_grad_enabled():
            cast = self.weight.detach().to(x.dtype) if self.kept is None else self.kept
            return _Cast.apply(x, self.weight, cast)  # type: ignore[no-any-return]
        return F.linear(
            x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )


class _Cast(torch.autograd.Function):
    """x W^T by weights that were cast before. Gradients of the weights add up in their own
    dtype, as if each call had cast them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.save_for_backward(x, cast)
        ctx.dtype = weight.dtype
        return F.linear(x, cast)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (x, cast) = grads[0], ctx.saved_tensors
        into_x = into_weight = None
        if ctx.needs_input_grad[0]:
            into_x = grad @ cast
        if ctx.needs_input_grad[1]:
            rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            into_weight = (rows[0].T @ rows[1]).to(ctx.dtype)
        return into_x, into_weight, None


@contextlib.contextmanager
def cast_once(net: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While open, every Linear in `net` computes with weights that were cast to `dtype` once:
    they must not change. An LM head's are left: the loss casts them itself."""
    parts = [
        m
        for name, m in net.named_modules()
        if isinstance(m, Linear) and m.bias is None and name.partition(".")[0] != "lm_head"
    ]
    some = [m for m in parts if m.weight.dtype != dtype and torch.is_grad_enabled()]
    for part in some:
        part.kept = part.weight.detach().to(dtype)
    try:
        yield
    finally:
        for part in some:
            part.kept = None


class RMSNorm(LlamaRMSNorm):
    """LlamaRMSNorm with a backward pass that re-uses the output; statistics in float32 or
    better.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[.., D] -> [.., D], in the input's dtype."""
        if not torch.is_grad_enabled():  # decoding: one call instead of a graph node
            return F.rms_norm(
                hidden_states,
                self.weight.shape,
                self.weight.to(hidden_states.dtype),
                self.variance_epsilon,
            )
        return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-any-return]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        scale = square.div_(x.shape[-1]).add_(eps).rsqrt_().to(x.dtype)
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (unit, scale, weight) = grads[0], ctx.saved_tensors
        wide = torch.promote_types(unit.dtype, torch.float32)
        into_weight = into_x = None
        if ctx.needs_input_grad[1]:
            into_weight = (grad * unit).flatten(0, -2).sum(0, dtype=wide).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            inner = grad * weight.to(grad.dtype)
            mean = (
                (inner * unit).sum(-1, keepdim=True, dtype=wide).div_(unit.shape[-1]).to(unit.dtype)
            )
            into_x = torch.addcmul(inner, unit, mean, value=-1).mul_(scale)
        return into_x, into_weight, None


def owned(module: nn.Module) -> nn.Module:
    """Replace the plain linear layers and norms of a transformers module by the classes above,
    in place.
    """
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(
                module, name, Linear(child.in_features, child.out_features, child.bias is not None)
            )
        else:
            owned(child)
    return module


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] for distinct `rows` [n] of x [N, ..]: its backward copies where index_select
    would add row by row.
    """
    return _Take.apply(x, rows)  # type: ignore[no-any-return]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size).index_copy_(0, rows, grads[0]), None
