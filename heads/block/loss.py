"""The loss of blocks: as heads/losses.py, with a weight for every slot that may depend on how
likely the slots before and behind it are to be right.

The kernel walks over chunks of whole blocks, so [B, T, V] never exists; the gradient is made
where the logits are.

Shape letters: N blocks, K slots of a block, n supervised slots (block by block), m of a chunk,
D width, Vd draft vocabulary, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.losses import LawFn, LossWeights, kernel

SMOOTH = 0.5  # D-PACE: share of a slot's weight that does not go by its probability


@dataclass(frozen=True)
class Task:
    """What is asked of the slots. on: [N, K] bool, supervised ones. place: [n] int64 of their
    tokens in the draft vocabulary, -1 outside. law: the target's, None where no term needs it.
    decay: slots in which a weight falls to 1 / e, None: D-PACE (arXiv 2605.18810).
    rated: the overlap of both laws is wanted whatever the terms. chunk: slots at a time."""

    on: Tensor
    place: Tensor
    law: LawFn | None
    terms: LossWeights
    decay: float | None
    rated: bool
    chunk: int

    def parts(self) -> list[tuple[slice, slice]]:
        """(blocks, their slots) of every chunk."""
        blocks, slots = self.on.shape
        step = max(1, self.chunk // slots)
        ends = [0, *self.on.sum(1).cumsum(0).tolist()]
        cuts = [*range(0, blocks, step), blocks]
        return [
            (slice(a, b), slice(ends[a], ends[b]))
            for a, b in zip(cuts, cuts[1:], strict=False)
            if ends[b] > ends[a]
        ]

    def weights(self, on: Tensor, own: Tensor) -> Tensor:
        """[m] of the slots `on` [N, K] of a chunk. own: [m] log-probability of their tokens,
        minus infinity outside the draft vocabulary."""
        if self.decay is not None:
            return decaying(on, self.decay, own.dtype)
        right = torch.ones(on.shape, dtype=own.dtype, device=on.device)
        right[on] = (1 - SMOOTH) * own.exp() + SMOOTH
        reached = right.cumprod(1) * on
        return reached.flip(1).cumsum(1).flip(1)[on]


def decaying(on: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """Weights [n] of the slots `on` [N, K] that fall to 1 / e in `decay` slots; 1 on average
    over a whole block."""
    fall = torch.exp(-torch.arange(on.shape[1], device=on.device).to(dtype) / decay)
    return (fall / fall.mean()).expand(on.shape)[on]


@dataclass(frozen=True)
class Found:
    """Of n supervised slots, without gradient. loss: unweighted. hit: the head's best token is
    the data's. rate: sum min(p, q), 0 where it was not asked for."""

    loss: Tensor
    hit: Tensor
    rate: Tensor


def block_loss(
    hidden: Tensor, weight: Tensor, low_rank: tuple[Tensor, Tensor] | None, task: Task
) -> tuple[Tensor, Found]:
    """(the weighted loss summed over the slots, with gradient to hidden [n, D], weight [Vd, D]
    and low_rank, m [n, r] and W [Vd, r] of a term m W^T of the logits; what was found)."""
    near, far = (None, None) if low_rank is None else low_rank
    total, loss, hit, rate = _BlockLoss.apply(hidden, weight, near, far, task)  # type: ignore[no-untyped-call]
    return total, Found(loss, hit, rate)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        near: Tensor | None,
        far: Tensor | None,
        task: Task,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        count, needs, terms = hidden.shape[0], ctx.needs_input_grad, task.terms
        cast = weight.detach().to(hidden.dtype)
        cast_far = None if far is None else far.detach().to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        loss, rate = torch.zeros(2, count, dtype=wide, device=hidden.device)
        hit = torch.zeros(count, dtype=torch.bool, device=hidden.device)
        into = [
            torch.zeros_like(t) if t is not None and need else None
            for t, need in zip((hidden, weight, near, far), needs, strict=False)
        ]
        for blocks, part in task.parts():
            inside, x = task.place[part] >= 0, hidden[part]
            p, usable = task.law(part) if task.law is not None else (None, inside)
            z = x @ cast.T
            if near is not None and cast_far is not None:
                z = torch.addmm(z, near[part], cast_far.T)
            spot = task.place[part].clamp(min=0)[:, None]
            found = kernel(z, p, spot, inside, usable, terms, task.rated)
            own = found.own.masked_fill(~inside, -torch.inf)
            weights = task.weights(task.on[blocks], own)
            total += (found.loss * weights).sum(dtype=torch.float64)
            loss[part], hit[part] = found.loss, found.hit & inside
            if found.rate is not None:
                rate[part] = found.rate * usable
            grad, row = found.grad, (found.row * weights).to(hidden.dtype)[:, None]
            if into[0] is not None:
                torch.mul(grad @ cast, row, out=into[0][part])
            if into[1] is not None:
                into[1] += grad.T @ (x * row)
            if into[2] is not None and cast_far is not None:
                torch.mul(grad @ cast_far, row, out=into[2][part])
            if into[3] is not None and near is not None:
                into[3] += grad.T @ (near[part] * row)
        ctx.save_for_backward(*(g for g in into if g is not None))
        ctx.has = [g is not None for g in into]
        ctx.mark_non_differentiable(loss, hit, rate)
        return total.to(wide), loss, hit, rate

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming one, scaled in place: one backward per
        forward."""
        saved = list(ctx.saved_tensors)
        return *(saved.pop(0).mul_(grads[0]) if has else None for has in ctx.has), None
