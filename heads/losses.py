"""Vocabulary losses in chunks of tokens: [B, T, K, V] never exists, and the gradient is made
where the logits are.

The kernel walks over chunks of supervised tokens; in a chunk it computes the logits of every
head, their softmax, the loss, and at once the gradients with respect to hidden states and
weights. What it keeps is [K, n, D] and [K, Vd, D]. Matmuls run in the dtype of the hidden
states (bfloat16 with float32 accumulation); the softmax runs in float32 inside its kernel and
is stored in that dtype; all sums are float32 or better.

Terms (weights in the config, any mix): `hard` cross-entropy with the data's token; `soft`
cross-entropy with the target's law over the draft vocabulary (the forward KL's gradient); `tv` the
rejection rate 1 - sum min(p, q) itself (Leviathan et al. 2023), by the target's own p, whose tokens
outside are all rejected; `lk` -log sum min(p, q) (LK losses, arXiv 2602.23881).

Shape letters: n supervised tokens, K heads, D width, Vd draft vocabulary, m tokens of a chunk,
r low rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from conf.rules import NotNegative
from decode.target import Target
from heads import vocab

# Tokens whose logits exist at the same time: a CPU's caches are small, a GPU writes the gradient
# of the LM head once for each chunk.
CHUNKS = {"cpu": 512}
CHUNK = 4096

Laws = tuple[Tensor, Tensor]  # [m, Vd]: renormalised, and the target's own probabilities
LawFn = Callable[[slice], tuple[Laws, Tensor]]  # tokens of a chunk -> (laws, usable [m] bool)
Mask = Literal["token", "argmax", "all"]


@dataclass
class LossWeights:
    """Weights of the loss terms; at least one above 0."""

    # cross-entropy with the token of the data
    hard: NotNegative = 1.0
    # cross-entropy with the target's own law (the forward KL up to a constant)
    soft: NotNegative = 0.0
    # the rejection rate: total variation between the target's law and the head's
    tv: NotNegative = 0.0
    # minus the logarithm of the acceptance rate
    lk: NotNegative = 0.0
    # where the target's law teaches a draft vocabulary: token = the data's token lies inside,
    # argmax = the target's most probable one does (needs the whole LM head), all = everywhere
    mask: Mask = "token"

    @property
    def needs_law(self) -> bool:
        """Whether the target's law must be computed."""
        return bool(self.soft or self.tv or self.lk)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        if self.hard or self.needs_law:
            return []
        return ["hard: all loss weights are 0; set one above 0"]


def chunk_of(asked: int | None, device: torch.device) -> int:
    """The key `chunk`, by device where it is left open."""
    return asked or CHUNKS.get(device.type, CHUNK)


def pieces(count: int, size: int) -> Iterable[slice]:
    """The tokens, out of `count`, that are met at once; a dry run looks at few of these."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def target_law(
    target: Target,
    rows: tuple[Tensor, Tensor | None],
    feats: Tensor,
    source: Tensor,
    ids: Tensor | None,
    place: Tensor,
    mask: str,
    top_k: int = 0,
) -> LawFn:
    """The target's law p(x_s | x_<s) at n predicted tokens over a draft vocabulary, renormalised
    and (of all rows) as it is.

    rows: weight [Vd, D] and bias [Vd] or None of the target's LM head over the draft vocabulary,
    or over all V tokens. feats: [N, D], output of the target after its final norm. source: [n]
    int64, the row of feats that predicts token j, one before it. ids: [Vd] int64 ascending draft
    vocabulary, None for all. place: [n] int64, where the token of the data stands in it, -1
    outside. mask: which tokens are taught, see LossWeights; the others have no law. "argmax" (of
    all rows) is EAGLE-3's (Li et al. 2025); on text that the target wrote greedily "token" is the
    same, from Vd rows.
    top_k: keep only so many most probable tokens of the law (HASS); 0 = all.
    """
    weight, bias = rows
    inside = None if ids is None else vocab.to_t2d(ids, target.vocab_size)
    less = bool(top_k) if ids is None else len(weight) > len(ids)

    def law(part: slice) -> tuple[Laws, Tensor]:
        with torch.no_grad():
            logits = target.head.finish(functional.linear(feats[source[part]], weight, bias))
            usable = torch.ones_like(place[part], dtype=torch.bool)
            if mask == "token":
                usable = place[part] >= 0
            elif mask == "argmax" and inside is not None:
                usable = inside[logits.argmax(-1)]
            own = torch.softmax(logits, -1) if less else None
            if own is not None and ids is not None:
                own, logits = own.index_select(-1, ids), logits.index_select(-1, ids)
            if top_k:
                floor = logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:]
                logits = logits.masked_fill(logits < floor, -torch.inf)
            p = torch.softmax(logits, -1)
            return (p, p if own is None else own * (p > 0)), usable

    return law


@dataclass(frozen=True)
class Taught:
    """What K heads learn from n predicted tokens.

    place: [n] int64, the token's place in the draft vocabulary, -1 outside. valid: [K, n]
    bool, head k has a feature for token j. terms: of the loss. scale: [K] float32, how much
    each head's loss counts. law: see LawFn; None where no term needs it. chunk: tokens that are
    met at once. parts: the chunks where they may not begin anywhere. weigh: gives weights [m] to
    the tokens of a chunk by the log-probabilities [m] of the data's tokens, minus infinity outside
    the draft vocabulary; None: all are 1. rated: the overlap of both laws is wanted.
    """

    place: Tensor
    valid: Tensor
    terms: LossWeights
    scale: Tensor
    law: LawFn | None = None
    chunk: int = CHUNKS["cpu"]
    parts: list[slice] | None = None
    weigh: Callable[[slice, Tensor], Tensor] | None = None
    rated: bool = False

    def chunks(self) -> Iterable[slice]:
        """The tokens that are met at once."""
        return pieces(self.place.numel(), self.chunk) if self.parts is None else self.parts


class Rows(NamedTuple):
    """What was found of n tokens by K heads, [K, n] each, without gradient. loss: unweighted,
    0 where a head has no feature. hit: the head's best token is the data's. counted: there is
    a loss. rate: sum min(p, q) where the law is usable, 0 where it was not asked for. tried:
    the head has a feature."""

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
) -> tuple[Tensor, Rows]:
    """Loss of K parallel heads over one draft vocabulary.

    hidden: [K, n, D], head k's hidden state for predicted token j. weight: [K, Vd, D], or [Vd,
    D] shared by all heads; cast to hidden's dtype once. low_rank: m [n, r] and W [Vd, r] of a
    term m W^T added to the logits of all heads; both are cast to hidden's dtype.

    Returns (scalar loss summed over tokens and heads, with gradient to hidden, weight and the
    low-rank pair; what was found token by token).
    """
    near, far = (None, None) if low_rank is None else (low_rank[0].to(hidden.dtype), low_rank[1])
    args = (hidden, weight, near, far, taught)
    total, loss, hit, counted, rate = _ChunkedLoss.apply(*args)  # type: ignore[no-untyped-call]
    return total, Rows(loss, hit, counted, rate, taught.valid)


class _Product:
    """The logits x W^T + m V^T of K heads, a chunk at a time, and what their gradients come to.
    into: the gradients with respect to hidden, weight, near and far, None where nobody needs
    one."""

    def __init__(self, given: tuple[Tensor, Tensor, Tensor | None, Tensor | None], needs: Any):
        self.hidden, weight, self.near, far = given
        self.dtype, self.shared = self.hidden.dtype, weight.dim() == 2
        self.weight = weight.detach().to(self.dtype)
        self.far = None if far is None else far.detach().to(self.dtype)
        blank = (torch.empty_like, *[torch.zeros_like] * 3)  # every row of hidden is written
        self.into = [
            make(t) if t is not None and need else None
            for make, t, need in zip(blank, given, needs, strict=False)
        ]

    def open(self, part: slice) -> None:
        """The tokens of a chunk come next: what all heads share of it."""
        self.common, self.near_sum = None, self.hidden.new_zeros(1, dtype=wide_of(self.hidden))
        if self.near is not None and self.far is not None:
            self.common = self.near[part] @ self.far.T

    def logits(self, k: int, part: slice) -> Tensor:
        """[m, Vd] of head k."""
        x, w = self.hidden[k, part], self._rows(k)
        return x @ w.T if self.common is None else torch.addmm(self.common, x, w.T)

    def add(self, k: int, part: slice, grad: Tensor, row: Tensor) -> None:
        """Take in the gradient [m, Vd] of head k's logits, its rows times `row` [m]."""
        into_hidden, into_weight, into_near, into_far = self.into
        row = row.to(self.dtype)[:, None]
        if into_hidden is not None:
            torch.mul(grad @ self._rows(k), row, out=into_hidden[k, part])
        if into_weight is not None:
            own = into_weight if self.shared else into_weight[k]
            own += grad.T @ (self.hidden[k, part] * row)
        if into_near is not None and self.far is not None:
            self.near_sum = self.near_sum + (grad @ self.far) * row
            into_near[part] = self.near_sum.to(self.dtype)
        if into_far is not None and self.near is not None:
            into_far += grad.T @ (self.near[part] * row)

    def _rows(self, k: int) -> Tensor:
        return self.weight if self.shared else self.weight[k]


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
        terms, (heads, n, _) = taught.terms, hidden.shape
        wide = wide_of(hidden)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        losses, rates = torch.zeros(2, heads, n, dtype=wide, device=hidden.device)
        hits, counted = torch.zeros(2, heads, n, dtype=torch.bool, device=hidden.device)
        product = _Product((hidden, weight, near, far), ctx.needs_input_grad)
        for part in taught.chunks():
            place = taught.place[part]
            inside, spot = place >= 0, place.clamp(min=0)[:, None]
            laws, usable = (None, inside) if taught.law is None else taught.law(part)
            product.open(part)
            for k in range(heads):
                tried, z = taught.valid[k, part], product.logits(k, part)
                loss, grad, row, hit, own, rate = kernel(
                    z, laws, spot, inside, usable, terms, taught.rated
                )
                loss, row = loss * tried, row * tried * taught.scale[k]
                losses[k, part], hits[k, part] = loss, hit & inside & tried
                learned = (inside & bool(terms.hard)) | (usable & terms.needs_law)
                counted[k, part] = tried & learned
                if rate is not None:
                    rates[k, part] = rate * usable
                if taught.weigh is not None:
                    weights = taught.weigh(part, own.masked_fill(~inside, -torch.inf))
                    loss, row = loss * weights, row * weights
                total += loss.sum(dtype=torch.float64) * taught.scale[k]
                product.add(k, part, grad, row)
        ctx.save_for_backward(*(g for g in product.into if g is not None))
        ctx.has = [g is not None for g in product.into]
        ctx.mark_non_differentiable(losses, hits, counted, rates)
        return total.to(wide), losses, hits, counted, rates

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming one, in place: one backward per forward."""
        scale, saved = grads[0], list(ctx.saved_tensors)
        found = [saved.pop(0).mul_(scale) if has else None for has in ctx.has]
        return *found, None


def kernel(
    z: Tensor,
    laws: Laws | None,
    spot: Tensor,
    inside: Tensor,
    usable: Tensor,
    terms: LossWeights,
    rated: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """One head, one chunk: loss [m] wide; its gradient [m, Vd] with respect to the logits, in
    their dtype, still to be multiplied by the row factors [m]; hit [m] bool; log-probability
    of the data's token [m]; sum min(p, q) [m], None where nobody asks for it.

    z: [m, Vd] logits. laws: the target's, None where no term needs them. spot: [m, 1] int64 place
    of the data's token. inside, usable: [m] bool, it lies in the draft vocabulary, the laws are to
    be learned from. rated: the overlap is wanted in any case. Every pass over [m, Vd] costs as
    much as a third of a matmul."""
    wide = wide_of(z)
    q = torch.softmax(z, -1)
    top, best = q.max(-1, keepdim=True)
    hit = (best == spot)[:, 0]
    # From the largest probability, not from the target's: its rounding is relative, so lse is
    # good to 2^-9 at worst.
    lse = z.gather(1, best)[:, 0].to(wide) - top[:, 0].to(wide).log()
    own = z.gather(1, spot)[:, 0].to(wide) - lse
    loss, in_vocab, has_law = torch.zeros_like(lse), inside.to(wide), usable.to(wide)
    if terms.hard:
        loss -= terms.hard * in_vocab * own
    if laws is None:
        grad = _less(q, spot, torch.ones_like(q[:, :1]))
        return loss, grad, terms.hard * in_vocab, hit, own, None
    (p, own_p), parts = laws, list[tuple[Tensor, Tensor]]()  # parts: gradient, its row factors
    rate = torch.minimum(own_p, q).sum(-1, dtype=wide) if terms.tv or terms.lk or rated else None
    if rate is not None and (terms.tv or terms.lk):
        safe = rate.clamp(min=1e-6)
        loss += has_law * (terms.tv * (1 - rate) - terms.lk * safe.log())
        gain = q * (q < own_p)  # d rate / d z = q (1[q < p] - sum q 1[q < p])
        gain.addcmul_(q, gain.sum(-1, keepdim=True, dtype=wide).to(q.dtype), value=-1)
        parts.append((gain, -has_law * (terms.tv + terms.lk / safe)))
    if terms.soft:
        loss += terms.soft * has_law * (lse - (p * z).sum(-1, dtype=wide))
        parts.append((q - p, terms.soft * has_law))
    if terms.hard:
        parts.append((_less(q, spot, torch.ones_like(q[:, :1])), terms.hard * in_vocab))
    if len(parts) == 1:
        return loss, *parts[0], hit, own, rate
    mixed = sum(part.mul_(row.to(q.dtype)[:, None]) for part, row in parts)
    assert isinstance(mixed, Tensor)
    return loss, mixed, torch.ones_like(loss), hit, own, rate


def wide_of(x: Tensor) -> torch.dtype:
    """The dtype of sums over numbers such as `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _less(q: Tensor, spot: Tensor, amount: Tensor) -> Tensor:
    """q with `amount` [m, 1] taken off at `spot` [m, 1], in place (scatter_add_ is slower)."""
    return q.scatter_(1, spot, q.gather(1, spot) - amount)
