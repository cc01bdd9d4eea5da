"""What a head learns from its target and its data: `plain_loss` is the formula, the rest is
the same without [B, T, K, V].

The kernel walks over chunks of supervised tokens; in a chunk it computes the logits of every
head, their softmax, the loss, and at once the gradients with respect to hidden states and
weights: what it keeps is [K, n, D] and [K, Vd, D]. Matmuls run in the dtype of the hidden
states; all sums are float32 or better.

Shape letters: n supervised tokens, K heads, D width, Vd draft vocabulary, m tokens of a chunk,
r low rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.heads.config import LossWeights as LossWeights
from outrider.heads.products import add_product
from outrider.heads.teacher import Teacher, TeacherFn

# Tokens whose logits exist at the same time: a CPU's caches are small, a GPU writes the
# gradient of the LM head once for each chunk.
CHUNKS = {"cpu": 512}
CHUNK = 4096
# A smaller acceptance rate counts as this one where its logarithm is taken.
LEAST = 1e-6


def plain_loss(
    logits: Tensor, teacher: Teacher | None, target: Tensor, weights: LossWeights
) -> Tensor:
    """[n] the loss of each token, whose sum a head learns:

        hard * -log q(x)  +  soft * -sum_v p(v) log q(v)  +  tv * (1 - a)  +  lk * -log a

    where x is the token of the data, q the head's distribution, p the target's, and a =
    sum_v min(p(v), q(v)) the rate at which the verifier accepts what is drawn from q
    (Leviathan et al. 2023). `soft` is the forward KL up to a constant and takes p over the
    draft vocabulary; a takes the target's own p, whose tokens outside are all rejected;
    `lk` is LK losses' (arXiv 2602.23881).

    logits: [n, Vd]. teacher: p, None where no term needs it. target: [n] int64, x in the draft
    vocabulary, -1 outside."""
    log_q, in_vocab = logits.log_softmax(-1), target >= 0
    target_logp = log_q.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    loss = -weights.hard * target_logp * in_vocab
    if teacher is None:
        return loss
    rate = torch.minimum(teacher.raw_probs, log_q.exp()).sum(-1)
    taught = -weights.soft * (teacher.probs * log_q).sum(-1)
    taught = taught + weights.tv * (1 - rate) - weights.lk * rate.clamp(min=LEAST).log()
    return loss + teacher.usable * taught


class TokenLoss(NamedTuple):
    """`plain_loss` of m tokens of one head, and what else was found there. loss: [m]. grad:
    [m, Vd] with respect to the logits, in their dtype, its rows still to be multiplied by
    grad_scale [m]. hit: [m] bool, the head's best token is the data's. target_logp: [m]
    log-probability of the data's token, of any token outside the draft vocabulary. rate:
    [m] sum min(p, q), None where nobody asks for it."""

    loss: Tensor
    grad: Tensor
    grad_scale: Tensor
    hit: Tensor
    target_logp: Tensor
    rate: Tensor | None


def token_loss(
    logits: Tensor,
    teacher: Teacher | None,
    target: Tensor,
    weights: LossWeights,
    rated: bool = False,
) -> TokenLoss:
    """`plain_loss` with its gradient, for logits [m, Vd]. rated: the rate is wanted in any
    case. Every pass over [m, Vd] costs as much as a third of a matmul."""
    wide, in_vocab, spot = wide_of(logits), target >= 0, target.clamp(min=0)[:, None]
    q = torch.softmax(logits, -1)
    top, best = q.max(-1, keepdim=True)
    hit = (best == spot)[:, 0] & in_vocab
    # From the largest probability, not from the target's: its rounding is relative, so lse is
    # good to 2^-9 at worst.
    lse = logits.gather(1, best)[:, 0].to(wide) - top[:, 0].to(wide).log()
    target_logp = logits.gather(1, spot)[:, 0].to(wide) - lse
    loss, hard = torch.zeros_like(lse), weights.hard * in_vocab.to(wide)
    if weights.hard:
        loss -= hard * target_logp
    if teacher is None:
        return TokenLoss(loss, _less_one(q, spot), hard, hit, target_logp, None)
    has_teacher, parts = teacher.usable.to(wide), list[tuple[Tensor, Tensor]]()
    rate = None
    if weights.tv or weights.lk or rated:
        rate = torch.minimum(teacher.raw_probs, q).sum(-1, dtype=wide)
    if rate is not None and (weights.tv or weights.lk):
        safe = rate.clamp(min=LEAST)
        loss += has_teacher * (weights.tv * (1 - rate) - weights.lk * safe.log())
        gain = q * (q < teacher.raw_probs)  # d rate / d z = q (1[q < p] - sum q 1[q < p])
        gain.addcmul_(q, gain.sum(-1, keepdim=True, dtype=wide).to(q.dtype), value=-1)
        parts.append((gain, -has_teacher * (weights.tv + weights.lk / safe)))
    if weights.soft:
        loss += weights.soft * has_teacher * (lse - (teacher.probs * logits).sum(-1, dtype=wide))
        parts.append((q - teacher.probs, weights.soft * has_teacher))
    if weights.hard:
        parts.append((_less_one(q, spot), hard))
    if len(parts) == 1:
        return TokenLoss(loss, *parts[0], hit, target_logp, rate)
    mixed = sum(grad.mul_(scale.to(q.dtype)[:, None]) for grad, scale in parts)
    assert isinstance(mixed, Tensor)
    return TokenLoss(loss, mixed, torch.ones_like(loss), hit, target_logp, rate)


def _less_one(q: Tensor, spot: Tensor) -> Tensor:
    """q with 1 taken off at `spot` [m, 1], in place (scatter_add_ is slower)."""
    return q.scatter_(1, spot, q.gather(1, spot) - torch.ones_like(q[:, :1]))


def wide_of(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over numbers such as `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def chunk_of(requested: int | None, device: torch.device) -> int:
    """Return the key `chunk`, by device where it is left open."""
    return requested or CHUNKS.get(device.type, CHUNK)


def pieces(count: int, size: int) -> Iterable[slice]:
    """Return the tokens, out of `count`, that are met at once."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(frozen=True)
class Taught:
    """What K heads learn from n predicted tokens.

    place: [n] int64, the token's place in the draft vocabulary, -1 outside. valid: [K, n]
    bool, head k has a feature for token j. terms: of the loss. scale: [K] float32, how much
    each head's loss counts. teacher: see TeacherFn; None where no term needs it. chunk: tokens
    that are met at once. weights: [n] of the tokens; None: all are 1. rated: the overlap of
    both distributions is wanted."""

    place: Tensor
    valid: Tensor
    terms: LossWeights
    scale: Tensor
    teacher: TeacherFn | None = None
    chunk: int = CHUNKS["cpu"]
    weights: Tensor | None = None
    rated: bool = False


class TokenStats(NamedTuple):
    """What was found of n tokens by K heads, [K, n] each, without gradient. loss: unweighted,
    0 where a head has no feature. hit: the head's best token is the data's. counted: there is
    a loss. rate: sum min(p, q) where the distribution is usable, 0 where it was not asked for.
    tried: the head has a feature."""

    loss: Tensor
    hit: Tensor
    counted: Tensor
    rate: Tensor
    tried: Tensor

    def sums(self) -> tuple[Tensor, Tensor]:
        """[K, 2] float64: the loss and its number of tokens per head, hits and tries. A valid
        token outside the draft vocabulary gives no loss but counts as a miss."""
        losses = torch.stack([self.loss.sum(1, dtype=torch.float64), self.counted.sum(1)], 1)
        return losses, torch.stack([self.hit.sum(1), self.tried.sum(1)], 1).double()

    def stats(self) -> dict[str, Tensor]:
        """`sums` as a head's stats."""
        return by_level(*self.sums())


def by_level(losses: Tensor, hits: Tensor) -> dict[str, Tensor]:
    """Tables [K, 2] of (sum, count) as a head's stats: loss_0, loss_1, .., top1_0, .."""
    tables = (("loss", losses), ("top1", hits))
    return {f"{name}_{k}": row for name, table in tables for k, row in enumerate(table)}


def chunked_loss(
    hidden: Tensor, weight: Tensor, taught: Taught, low_rank: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, TokenStats]:
    """Return the sum of `plain_loss` over the tokens of K parallel heads with one draft
    vocabulary.

    hidden: [K, n, D], head k's hidden state for predicted token j. weight: [K, Vd, D], or [Vd,
    D] shared by all heads; cast to hidden's dtype once. low_rank: m [n, r] and W [Vd, r] of a
    term m W^T added to the logits of all heads; both are cast to hidden's dtype.

    Returns (scalar loss summed over tokens and heads, with gradient to hidden, weight and the
    low-rank pair; what was found token by token)."""
    near, far = (None, None) if low_rank is None else (low_rank[0].to(hidden.dtype), low_rank[1])
    args = (hidden, weight, near, far, taught)
    total, loss, hit, counted, rate = _ChunkedLoss.apply(*args)  # type: ignore[no-untyped-call]
    return total, TokenStats(loss, hit, counted, rate, taught.valid)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        near: Tensor | None,
        far: Tensor | None,
        taught: Taught,
    ) -> tuple[Tensor, ...]:
        terms, (heads, n, _), wide = taught.terms, hidden.shape, wide_of(hidden)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        losses, rates = torch.zeros(2, heads, n, dtype=wide, device=hidden.device)
        hits, counted = torch.zeros(2, heads, n, dtype=torch.bool, device=hidden.device)
        grads = _Gradients.zero((hidden, weight, near, far), ctx.needs_input_grad)
        weights = weight.detach().to(hidden.dtype).expand(heads, -1, -1)
        far = None if far is None else far.detach().to(hidden.dtype)
        for part in pieces(n, taught.chunk):
            target = taught.place[part]
            teacher = None if taught.teacher is None else taught.teacher(part)
            learned = (target >= 0) & bool(terms.hard)
            if teacher is not None and terms.needs_distribution:
                learned |= teacher.usable
            m = None if near is None else near[part]
            shared = None if m is None or far is None else m @ far.T
            for k in range(heads):
                x, w, tried = hidden[k, part], weights[k], taught.valid[k, part]
                logits = x @ w.T if shared is None else torch.addmm(shared, x, w.T)
                found = token_loss(logits, teacher, target, terms, taught.rated)
                loss, scale = found.loss * tried, found.grad_scale * tried * taught.scale[k]
                losses[k, part], hits[k, part] = loss, found.hit & tried
                counted[k, part] = learned & tried
                if teacher is not None and found.rate is not None:
                    rates[k, part] = found.rate * teacher.usable
                if taught.weights is not None:
                    own = taught.weights[part].to(loss.dtype)
                    loss, scale = loss * own, scale * own
                total += loss.sum(dtype=torch.float64) * taught.scale[k]
                grads.add(k, part, (x, w, m, far), found.grad, scale)
        kept = grads.kept(hidden.dtype)
        ctx.save_for_backward(*(grad for grad in kept if grad is not None))
        ctx.has = [grad is not None for grad in kept]
        ctx.mark_non_differentiable(losses, hits, counted, rates)
        return total.to(wide), losses, hits, counted, rates

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients times the incoming one, in place: one backward per
        forward."""
        scale, saved = grads[0], list(ctx.saved_tensors)
        found = [saved.pop(0).mul_(scale) if has else None for has in ctx.has]
        return *found, None


class _Gradients(NamedTuple):
    """Gradients with respect to the factors of the logits x W^T + m V^T, added up over
    chunks and heads; None where nobody needs one. hidden: x [K, n, D]. weight: W, as it was
    given. near: m [n, r], wide. far: V [Vd, r]."""

    hidden: Tensor | None
    weight: Tensor | None
    near: Tensor | None
    far: Tensor | None

    @classmethod
    def zero(
        cls, factors: tuple[Tensor, Tensor, Tensor | None, Tensor | None], needs: Any
    ) -> _Gradients:
        """needs: of each factor whether it learns."""
        x, w, m, v = (t if need else None for t, need in zip(factors, needs, strict=False))
        return cls(
            None if x is None else torch.empty_like(x),  # every row is written
            None if w is None else torch.zeros_like(w),
            None if m is None else torch.zeros_like(m, dtype=wide_of(m)),
            None if v is None else torch.zeros_like(v),
        )

    def kept(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """In the order of the factors. dtype: of near."""
        return (
            self.hidden,
            self.weight,
            None if self.near is None else self.near.to(dtype),
            self.far,
        )

    def add(
        self,
        k: int,
        part: slice,
        factors: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        grad: Tensor,
        scale: Tensor,
    ) -> None:
        """Take in the gradient [m, Vd] of head k's logits in a chunk, its rows times scale
        [m]. factors: of these logits."""
        x, w, m, v = factors
        row = scale.to(x.dtype)[:, None]
        if self.hidden is not None:
            torch.mul(grad @ w, row, out=self.hidden[k, part])
        if self.weight is not None:
            into = self.weight if self.weight.dim() == 2 else self.weight[k]
            add_product(into, grad.T, x * row)
        if self.near is not None and v is not None:
            self.near[part] += (grad @ v) * row
        if self.far is not None and m is not None:
            add_product(self.far, grad.T, m * row)
