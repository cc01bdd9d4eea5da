"""The sampling setting: from logits to the distribution that verification must reproduce exactly.

Order as in Hugging Face transformers: repetition penalty, temperature, top-k, top-p, min-p,
softmax. T = 0 is a one-hot distribution. Each truncation is a
threshold on the logit, ties at the threshold stay in: so the distribution does not depend on the
order of equal logits (in bfloat16 they are common).

Shape letters: B rows, N tree nodes, V vocabulary, R (row, slot) pairs asked for, S support
size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import devices
from outrider.decode.tree import DraftTree

# Enough for nearly every truncated distribution; more are fetched where it is not.
_FIRST_CANDIDATES = 256


@dataclass(frozen=True)
class Support:
    """A distribution on few tokens. ids: [R, S] int64, or None when S = V and the place is the
    token; probs: [R, S].
    """

    ids: Tensor | None
    probs: Tensor

    def token(self, index: Tensor) -> Tensor:
        """Return token ids [R] at support places `index` [R]."""
        return index if self.ids is None else self.ids.gather(1, index[:, None])[:, 0]

    def dense(self, vocab_size: int) -> Tensor:
        """[R, V]."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(self.probs.shape[0], vocab_size).scatter_add_(
            1, self.ids, self.probs
        )


@dataclass(frozen=True)
class Sampling:
    """Settings of the distribution. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and
    repetition_penalty 1 are off. Raises UserError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        good = {
            "temperature": (
                self.temperature == 0 or 1e-37 <= self.temperature < math.inf,
                "0 (greedy) or at least 1e-37",
            ),
            "top_k": (self.top_k >= 0 and self.top_k % 1 == 0, "an integer >= 0 (0 = off)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1] (1 = off)"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1) (0 = off)"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "> 0 (1 = off)"),
        }
        wrong = [
            f"{key}={getattr(self, key)}: must be {rule}"
            for key, (fits, rule) in good.items()
            if not fits
        ]
        if wrong:
            raise UserError("; ".join(wrong))
        # 2.0 passes above, and indexing refuses it.
        object.__setattr__(self, "top_k", int(self.top_k))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        return bool(self.top_k or self.top_p != 1 or self.min_p)

    @property
    def uses_history(self) -> bool:
        return self.repetition_penalty != 1

    def check_vocab(self, vocab_size: int) -> None:
        """Raise UserError when top_k exceeds the vocabulary."""
        if self.top_k > vocab_size:
            raise UserError(
                f"top_k={self.top_k}: above the vocabulary of {vocab_size} tokens; use "
                "top_k=0 to switch it off"
            )

    def support(self, scores: Tensor) -> Support:
        """Return the distribution of processed `scores` [R, V]; float32, or float64 when
        the scores are."""
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if self.greedy:
            best = scores.argmax(-1, keepdim=True)  # lowest id among equals
            return Support(best, torch.ones_like(best, dtype=scores.dtype))
        if self.temperature != 1:
            # The best token at 0 first: a small temperature takes every score beyond the range
            # of the dtype.
            scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature
        if not self.truncates:
            return Support(None, normalised(scores))
        return _truncate(scores, self.top_k, self.top_p, self.min_p)

    def draft_probs(self, logits: Tensor) -> Tensor:
        """Return the same warpers applied to a drafter's `logits` [R, Vd]: a dense
        distribution [R, Vd] to draw from.

        Any draft distribution is lossless; warping it like the target's only raises acceptance.
        History is not applied.
        """
        size = logits.shape[-1]
        warped = Sampling(self.temperature, min(self.top_k, size), self.top_p, self.min_p)
        return warped.support(logits).dense(size)


def normalised(scores: Tensor) -> Tensor:
    """Softmax of `scores` [R, S], whose rows sum to one in their dtype. torch adds up the many
    small terms of a large vocabulary one by one on CPUs: over 151,936 tokens in float32 a row
    comes to between 0.999 and 1.001."""
    probs = scores.softmax(-1)
    return probs.div_(probs.sum(-1, keepdim=True))


def _truncate(
    scores: Tensor, top_k: int, top_p: float, min_p: float, candidates: int = _FIRST_CANDIDATES
) -> Support:
    """Softmax over the logits at or above the highest of the three thresholds, found among the
    best `candidates`.

    Rows whose support, or a tie at its edge, may reach beyond the candidates are done again
    with more of them.
    """
    size = scores.shape[1]
    want = min(size, max(candidates, 2 * top_k))
    values, ids = scores.topk(want, dim=-1)
    floor = values[:, top_k - 1 : top_k] if top_k else torch.full_like(values[:, :1], -math.inf)
    if top_p < 1:
        kept = values.masked_fill(values < floor, -math.inf)
        total = kept.logsumexp(-1, keepdim=True) if top_k else scores.logsumexp(-1, keepdim=True)
        probs = (kept - total).exp().to(torch.float64)
        before = probs.cumsum(-1) - probs
        count = (before < top_p).sum(-1, keepdim=True).clamp_(min=1)
        floor = torch.maximum(floor, values.gather(1, count - 1))
    if min_p:
        floor = torch.maximum(floor, values[:, :1] + math.log(min_p))
    wide = torch.zeros_like(floor[:, 0], dtype=torch.bool)
    if want < size:
        wide = ((values[:, -1:] >= floor) & ~values[:, -1:].isneginf())[:, 0]
    kept = values.masked_fill(values < floor, -math.inf)
    count = (kept > -math.inf).sum(-1).masked_fill_(wide, 1)
    reach = want  # without asking; what is behind has no mass
    if devices.on_cpu(count):
        reach = int(count.max().clamp_(min=1)) if count.numel() else 1
    narrow = Support(ids[:, :reach], normalised(kept[:, :reach]))
    rows = wide.nonzero()[:, 0]
    if not rows.numel():
        return narrow
    again = _truncate(scores[rows], top_k, top_p, min_p, want * 16)
    assert again.ids is not None and narrow.ids is not None
    more = max(again.probs.shape[1] - reach, 0)
    all_ids, probs = (torch.nn.functional.pad(t, (0, more)) for t in (narrow.ids, narrow.probs))
    all_ids[rows], probs[rows] = 0, 0.0
    few = again.probs.shape[1]
    all_ids[rows, :few], probs[rows, :few] = again.ids, again.probs
    return Support(all_ids, probs)


class Distribution:
    """The target's distribution at every slot of a scored tree, computed only where verification
    asks.

    logits: [B, N + 1, V]. history: [B] committed tokens of every row, prompt included, where
    `sampling` looks at them.
    """

    def __init__(
        self,
        sampling: Sampling,
        logits: Tensor,
        tree: DraftTree,
        history: Sequence[list[int]] | None = None,
    ) -> None:
        self.sampling, self.logits, self.tree = sampling, logits, tree
        self.vocab_size = logits.shape[-1]
        if sampling.uses_history:
            if history is None:
                raise ValueError("this distribution needs the history of its rows")
            # Padding repeats a token that is there anyway.
            most = max(map(len, history))
            padded = [[*ids, *ids[:1] * (most - len(ids))] for ids in history]
            self.history = devices.send(padded, logits.device)  # [B, L]
        # By row: the last slot that was looked at and has no distribution, -1 for none.
        self._undefined = logits.new_full((len(logits),), -1, dtype=torch.int64)

    def at(self, rows: Tensor, slots: Tensor) -> Support:
        """Return the distributions [R] of (rows, slots); slot 0 follows the last committed
        token, slot i + 1 follows node i."""
        support, undefined = self.read(rows, slots)
        self.miss(rows, slots, undefined)
        return support

    def read(self, rows: Tensor, slots: Tensor) -> tuple[Support, Tensor]:
        """As `at`, for slots that may have no continuation: which [R] bool have no distribution
        is returned, not recorded (`miss`)."""
        scores = self.logits[rows, slots]
        if self.sampling.uses_history:
            scores = self._process(scores, rows, slots)
        # The maximum is NaN if any logit is, +inf if one is, -inf if all are masked: one test
        # for all three.
        undefined = ~scores.amax(-1).isfinite()
        return self.sampling.support(scores), undefined

    def miss(self, rows: Tensor, slots: Tensor, bad: Tensor) -> None:
        """`slots` [R] of `rows` [R] are looked at and have no distribution where `bad` [R] bool;
        a row may stand in `rows` more than once."""
        self._undefined.scatter_reduce_(0, rows, torch.where(bad, slots, -1), "amax")

    def doubtful(self) -> Tensor:
        """[B] bool, rows that `check` would refuse, without asking the device."""
        return self._undefined >= 0

    def check(self) -> None:
        """Raise UserError naming the first row and slot where there was no distribution. Call
        before committing."""
        rows = self.doubtful().nonzero()[:, 0].tolist()  # the one host round trip
        if rows:
            row = rows[0]
            slot, highest = int(self._undefined[row]), float(self.logits[row].float().amax())
            raise UserError(
                f"row {row}, slot {slot} of the draft: the target's logits hold NaN or "
                f"infinity, or every token is masked (maximum {highest}); check the weights and "
                "the dtype; nothing was committed"
            )

    def _process(self, scores: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        scores = scores if scores.dtype == torch.float64 else scores.float()
        old, mask = self.history[rows], self.tree.layout.mask
        on_path = mask[rows if mask.shape[0] > 1 else torch.zeros_like(rows), slots, 1:]
        tokens = self.tree.tokens[rows].clamp_(0, self.vocab_size - 1)  # as in siblings.groups
        ids = torch.cat([old, torch.where(on_path, tokens, old[:, :1])], 1)
        seen, penalty = scores.gather(1, ids), self.sampling.repetition_penalty
        return scores.scatter(1, ids, torch.where(seen < 0, seen * penalty, seen / penalty))
