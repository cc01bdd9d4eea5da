"""A separate small causal LM as the drafter, one of its own passes per level (Leviathan et al.
2022; Chen et al. 2023).

`observe` reads the newly committed tokens in one pass and keeps the state that predicts the
next one; `propose` goes on from there in slots behind the committed ones, which the next
`observe` overwrites. Accepted tokens are so read twice, which costs next to nothing: the pass
that reads the bonus token must run anyway. Nothing is rolled back, and the state after k
observes is that of one observe of all.

Shape letters: B live rows, D width, V the target's vocabulary, Vd draft vocabulary, W tokens
of a pass, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import devices, grow
from outrider.decode.grow import Form, Nodes
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.scorer import Tokens
from outrider.decode.states import StateCache, committed
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree


class DraftModel:
    """Chain or tree over `draft`, which must share the target's tokenizer.

    T = 0: its most probable tokens. T > 0: a chain or a static tree sampled from its own
    distribution under the target's settings, so that a step of a chain is accepted with probability
    1 - TV; the dynamic tree's candidates are deterministic. A row that has outgrown the draft's
    context is decoded plainly.
    """

    taps: tuple[int, ...] = ()
    kind = "small_lm"
    cache: Any = None

    def __init__(
        self,
        draft: Target,
        form: Form | int = 5,
        name: str = "draft",
        *,
        ids: Tensor | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """form: what it drafts; a number: a chain of so many levels. ids: [Vd] ascending tokens
        it may propose, None for all. vocab_size: the target's, None: the draft's own.

        Raises UserError for a draft whose LM head cannot be read apart, for a tree of a hybrid."""
        form = Form.chain(form) if isinstance(form, int) else form
        if not draft.head.exact:
            raise UserError(
                f"drafters: {name}: the draft's logits do not follow from its last hidden state"
            )
        if form.shape == "tree" and draft.probe().states is not None:
            raise UserError(
                f"drafters: {name}: {type(draft.body).__name__} has recurrent or convolution "
                "states, which go along one path; draft a chain (@chain)"
            )
        self.draft, self.name, self.form, self.shape = draft, name, form, form.shape
        self.max_depth, self.max_nodes = form.depth, form.nodes
        self.device = draft.device
        rows, bias = draft.lm_head_weight, getattr(draft.lm_head, "bias", None)
        common = min(draft.vocab_size, vocab_size or draft.vocab_size)
        if ids is None and common < (vocab_size or 0):
            ids = torch.arange(common, device=self.device)
        keep: Any = slice(0, common) if ids is None else ids
        self.proj, self.bias = rows[keep].detach(), None if bias is None else bias[keep].detach()
        self._ids = ids
        self.reset(1, 1)

    # -- the protocol

    def reset(self, rows: int, max_len: int) -> None:
        self.limit = min(max_len, self.draft.context_length)
        scratch = self.max_depth
        if self.shape == "tree":
            scratch = max(self.max_depth * self.form.width, len(self.form.static or ()))
        if self.cache is not None:
            self.draft.release(self.cache)
        self.cache = self.draft.new_cache(rows, self.limit, scratch + self.max_depth)
        self.slots = self.limit + scratch + self.max_depth + 1  # a hybrid keeps more to read again
        self.cache.finite = True
        if isinstance(self.cache, StateCache):
            self.cache.tries = True
        # Prompts' first tokens, of rows that have observed nothing yet.
        self.first: list[Tensor] = []
        self.blind: list[bool] = []  # rows that have outgrown the draft's context
        self.state = self.proj.new_zeros(0, self.proj.shape[1])

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        most = self.draft.vocab_size - 1  # the rest of the prompt arrives by observe
        self.first += [p[:1].clamp(max=most) for p in prompts]

    @torch.inference_mode()
    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        """See decode.drafters.Drafter: `rows` are all rows that were there before, or all that
        have just begun.
        """
        counts = n.tolist()
        # A target's padded vocabulary may be longer.
        tokens = tokens.clamp(max=self.draft.vocab_size - 1)
        live = self.cache.rows
        if rows.start >= live:
            self._begun(tokens, counts)
            return
        self.blind = [
            b or have + c > self.limit
            for b, have, c in zip(self.blind, committed(self.cache), counts, strict=True)
        ]
        counts = [0 if blind else c for blind, c in zip(self.blind, counts, strict=True)]
        while max(counts):
            # Of another drafter in a union more may have been accepted than this one drafts, and
            # a row near the end of the context leaves no room for all of it in one pass.
            room = self.slots - max(committed(self.cache))
            fits = [min(c, room) for c in counts]
            self._take(tokens[:, : max(fits)], fits)
            tokens = tokens[:, max(fits) :]
            counts = [c - taken for c, taken in zip(counts, fits, strict=True)]

    def _begun(self, tokens: Tensor, counts: list[int]) -> None:
        """Read the texts of new rows, counts[b] tokens of tokens [b, n_max] behind the first."""
        firsts = zip(self.first, tokens, counts, strict=True)
        whole = [torch.cat([first.to(ids), ids[:count]]) for first, ids, count in firsts]
        self.first = []
        self.blind += [len(ids) > self.limit for ids in whole]
        step = self.draft.prefill(
            self.cache, [ids[: self.limit] for ids in whole], (self.draft.num_layers,)
        )
        assert step.feats is not None
        ends = (min(len(ids), self.limit) - 1 for ids in whole)
        last = [feats[end, 0] for feats, end in zip(step.feats, ends, strict=True)]
        self.state = torch.cat([self.state, torch.stack(last)])

    def _take(self, fresh: Tensor, counts: list[int]) -> None:
        """Read and keep the next tokens of every live row, counts[b] of fresh [B, n_max]."""
        live, size = self.cache.rows, torch.tensor(counts) - 1
        last = size.clamp(min=0)
        hidden = self._read(fresh)
        state = hidden[torch.arange(live, device=self.device), last.to(self.device)]
        self.cache.commit(torch.arange(fresh.shape[1] - 1).expand(live, -1), size)
        if min(counts) == 0:  # a row without news keeps its state
            news = devices.send(counts, self.device)[:, None] > 0
            state = torch.where(news, state, self.state)
        self.state = state

    @torch.inference_mode()
    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        texts = zip(self.blind, committed(self.cache), strict=True)
        room = [0 if blind else self.draft.context_length + 1 - have for blind, have in texts]
        budget = torch.minimum(budget, torch.tensor(room))
        return grow.draft(self, self.form, budget, sampling, rng)

    def select(self, rows: list[int]) -> None:
        self.cache.select(rows)
        self.state = self.state[rows]
        self.blind = [self.blind[r] for r in rows]

    # -- growing (decode.grow.LevelSource)

    def draft_ids(self) -> Tensor | None:
        return self._ids

    def open(self, levels: int) -> Tensor:
        self.levels_read: list[int] = []  # of every token read in this cycle, from 0
        self.drafted: list[Tensor] = []  # those tokens [B, 1], of a hybrid
        return self.logits(self.state[:, None])

    def level(self, nodes: Nodes) -> Tensor:
        return self.logits(self._extend(nodes.tokens, nodes.seen, nodes.level))

    def logits(self, state: Tensor) -> Tensor:
        """[.., D] -> [.., Vd]."""
        return self.draft.head.finish(F.linear(state, self.proj, self.bias))

    def _extend(self, tokens: Tensor, seen: Tensor | None, level: int) -> Tensor:
        """Read drafted tokens [B, W] of one level: their states [B, W, D]. A hybrid reads its chain
        from the start, for its cache puts the states back."""
        if isinstance(self.cache, StateCache):
            self.drafted.append(tokens)
            return self._read(torch.cat(self.drafted, 1))[:, -1:]
        self.levels_read += [level - 1] * tokens.shape[1]
        depth = devices.send([self.levels_read], self.device)
        return self.draft.read(self.cache, Tokens(tokens, seen, depth))

    def _read(self, tokens: Tensor) -> Tensor:
        """States [B, W, D] of committed tokens [B, W]; cache.commit keeps them."""
        tree = DraftTree.chain(tokens[:, 1:])
        if isinstance(self.cache, StateCache):
            taps = (self.draft.num_layers,)
            feats = self.draft.score(self.cache, tokens[:, 0], tree, taps).feats
            assert feats is not None
            return feats[:, :, 0]
        return self.draft.read(self.cache, Tokens(tokens, tree.layout.mask, tree.layout.positions))
