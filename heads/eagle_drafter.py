"""Drafting with an EAGLE head: a chain, a dynamic tree (EAGLE-2), or a static tree sampled without replacement.

`observe` runs the newly committed rows, with the target's true features, through the layer and extends its cache;
`propose` goes on from the last row with the drafter's own outputs, in slots behind the committed ones that the next
`observe` overwrites. So nothing is rolled back, and the state after k observes is that of one observe of all.

Shape letters: B live rows, D width, Vd draft vocabulary, W nodes expanded per level, N nodes, M candidates, S slots.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from decode import attention
from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree, Proposal, TreeShape
from heads import shapes
from heads.eagle_cache import DraftCache, tree_layout

if TYPE_CHECKING:
    from heads.eagle import EagleHead


class EagleDrafter:
    """A chain or tree drafter over a copy of the head's weights in the target's dtype. See decode.drafters.Drafter."""

    def __init__(self, head: EagleHead, target: Target, shape: str) -> None:
        cfg, dtype = head.cfg, target.dtype
        self.name, self.shape, self.taps = f"{head.kind}@{shape}", shape, head.taps
        self.max_depth, self.width = cfg.depth, min(cfg.width, cfg.draft_vocab or head.vocab_size)
        self.max_nodes = cfg.depth if shape == "chain" else cfg.nodes
        self.static: TreeShape | None = None
        if shape == "tree" and cfg.tree_draw == "sampled":
            levels = min(cfg.depth, cfg.steps) if head.calibration else cfg.depth
            self.static = shapes.tree(head.calibration, cfg.nodes, levels)
        self.net = copy.deepcopy(head.net).to(device=target.device, dtype=dtype).eval().requires_grad_(False)
        self.net.attend(attention.NAME)
        self.proj = head.projection(target).detach().to(dtype)
        self.ids, self.embed, self.device = head.ids(), target.embed, target.device
        self.lengths: list[int] = []
        self.reset(1, 1)

    def reset(self, rows: int, max_len: int) -> None:
        """Forget everything; room for `rows` rows of `max_len` committed tokens and a draft behind them."""
        scratch = self.max_depth if self.shape == "chain" else max(self.max_nodes, self.max_depth * self.width)
        slots = max_len + scratch + self.max_depth + 2
        self.cache = DraftCache(self.net, rows, slots, self.proj.dtype, self.device)
        self.rope = self.net.rope(slots, self.proj.dtype, self.device)
        self.h = torch.zeros(rows, self.proj.shape[1], dtype=self.proj.dtype, device=self.device)
        self.lengths = []

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append rows; what they hold comes with observe. Makes room where reset was told of less."""
        have, need = len(self.lengths), len(self.lengths) + len(prompts)
        if need > self.h.shape[0]:
            raise ValueError(f"begin: {need} rows, but reset made room for {self.h.shape[0]}")
        self.lengths += [0] * len(prompts)
        self.h[have:need] = 0

    @torch.inference_mode()
    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        """tokens [b, n_max], feats [b, n_max, F, D], n [b]: row i is (feature before token i, token i)."""
        if feats is None:
            raise ValueError("EAGLE drafts from the target's features; none were given")
        lengths, counts = self.lengths[rows], n.tolist()
        new = max(counts)
        places = self.cache.aim(rows, lengths, 0, new)
        mask = None
        if new > 1 and max(lengths) or new == 1 and places.shape[0] > 1:
            mask = (torch.arange(self.cache.reach, device=self.device) <= places[..., None])[:, None]
        g = self.net.start(feats[:, :new].to(self.proj.dtype))
        last = torch.tensor([i * new + max(c, 1) - 1 for i, c in enumerate(counts)], device=self.device)
        h = self._pass(self.embed(tokens[:, :new]), g, places, mask, last)
        if min(counts) == 0:  # a row without news keeps its state
            h = torch.where(n[:, None] > 0, h, self.h[rows])
        self.h[rows] = h
        self.lengths[rows] = [a + b for a, b in zip(lengths, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        """Keep these live rows in this order."""
        if rows != list(range(len(rows))):
            self.cache.select(rows, max((self.lengths[r] for r in rows), default=0))
            self.h[: len(rows)] = self.h[rows]
        self.lengths = [self.lengths[r] for r in rows]

    @torch.inference_mode()
    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft no deeper than budget [B]."""
        count = len(self.lengths)
        levels = min(self.max_depth, int(budget.max())) if count else 0
        if levels <= 0:
            return DraftTree.empty(count, self.device)
        if self.shape == "chain":
            return self._chain(levels, budget, sampling, rng)
        if self.static is not None and not sampling.greedy:
            return self._sampled(self.static, levels, budget, sampling, rng)
        return self._dynamic(levels, budget)

    def _pass(self, e: Tensor, g: Tensor, places: Tensor, mask: Tensor | None, keep: Tensor | None = None,
              depth: Tensor | None = None) -> Tensor:  # fmt: skip
        """One pass of the layers; positions are the places, or `depth` where slots and positions differ."""
        at = places if depth is None else depth
        return self.net.advance(e, g, (self.rope[0][at], self.rope[1][at]), keep, attention_mask=mask,
                                past_key_values=self.cache)  # fmt: skip

    def _logits(self, h: Tensor) -> Tensor:
        return F.linear(self.net.read(h), self.proj)

    def _tokens(self, places: Tensor) -> Tensor:
        return places if self.ids is None else self.ids[places]

    # -- chain

    def _chain(self, levels: int, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """T = 0: the most probable token; T > 0: drawn from the drafter's own law under the target's settings."""
        rows = slice(0, len(self.lengths))
        every = torch.arange(rows.stop, device=self.device)
        h, tokens, laws = self.h[rows], [], []
        for level in range(levels):
            logits = self._logits(h)
            if sampling.greedy:
                place = logits.argmax(-1)
            else:
                laws.append(sampling.draft_law(logits))
                place = rng.draft(laws[-1], every, torch.full_like(every, level))
            tokens.append(self._tokens(place))
            if level + 1 < levels:
                places = self.cache.aim(rows, self.lengths, level, 1)
                mask = None
                if places.shape[0] > 1:
                    mask = (torch.arange(self.cache.reach, device=self.device) <= places[..., None])[:, None]
                h = self._pass(self.embed(tokens[-1])[:, None], self.net.feed(h)[:, None], places, mask)[:, 0]
        chain, size = torch.stack(tokens, 1), budget.clamp(0, levels)
        if sampling.greedy:
            return DraftTree.chain(chain, size)
        law = torch.arange(levels, device=self.device).expand(rows.stop, levels)
        return DraftTree.chain(chain, size, torch.ones_like(chain, dtype=torch.bool),
                               Proposal(torch.stack(laws, 1), law, self.ids))  # fmt: skip

    # -- dynamic tree

    def _dynamic(self, levels: int, budget: Tensor) -> DraftTree:
        """EAGLE-2 (Li et al. 2406.16858): expand the W best nodes of every level by cumulative log-probability, then
        keep the N best candidates of all levels. Candidates are the most probable tokens, so each is a point mass."""
        count, width = len(self.lengths), self.width
        rows, h = slice(0, count), self.h[:count]
        law = torch.log_softmax(self._logits(h).float(), -1)
        score, place = law.topk(width, -1)  # [B, W]
        origin = torch.full_like(place, -1)
        scores, tokens, origins = [score], [self._tokens(place)], [origin]
        beam, feature = torch.arange(width, device=self.device).expand(count, width), h[:, None].expand(-1, width, -1)
        ancestors = torch.zeros(count, width, 0, dtype=torch.bool, device=self.device)
        own = torch.eye(width, dtype=torch.bool, device=self.device).expand(count, width, width)
        start = 0
        for level in range(1, levels):
            # The beam: W candidates of the last level, `beam` their numbers in it, `feature` what they go on from.
            ancestors = torch.cat([ancestors, own], 2)
            places = self.cache.aim(rows, self.lengths, (level - 1) * width, width)
            mask = self._tree_mask(ancestors, places[:, :1] - (level - 1) * width)
            depth = (places[:, :1] - (level - 1) * (width - 1)).expand(-1, width)
            token, total = tokens[-1].gather(1, beam), scores[-1].gather(1, beam)
            h = self._pass(self.embed(token), self.net.feed(feature), places, mask, depth=depth)  # [B, W, D]
            score, place = torch.log_softmax(self._logits(h).float(), -1).topk(width, -1)  # [B, W, W]
            scores.append((total[..., None] + score).flatten(1))
            tokens.append(self._tokens(place.flatten(1)))
            origins.append((start + beam).repeat_interleave(width, 1))
            start += scores[-2].shape[1]
            if level + 1 < levels:
                beam = scores[-1].topk(width, -1).indices
                up = beam // width
                feature = h.gather(1, up[..., None].expand(-1, -1, h.shape[-1]))
                ancestors = ancestors.gather(1, up[..., None].expand(-1, -1, ancestors.shape[2]))
        return self._rerank(torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(origins, 1), levels, budget)

    def _tree_mask(self, ancestors: Tensor, ends: Tensor) -> Tensor:
        """[B or 1, 1, W, S] bool: committed slots and the ancestors' (the node's own included). ends: [B or 1, 1]."""
        reach = self.cache.reach
        slot = torch.arange(reach, device=self.device)
        mask = (slot < ends)[:, None].expand(ancestors.shape[0], ancestors.shape[1], reach).clone()
        if ends.shape[0] == 1:
            mask[:, :, reach - ancestors.shape[2] :] = ancestors
        else:
            spot = ends + torch.arange(ancestors.shape[2], device=self.device)
            mask.scatter_(2, spot[:, None].expand_as(ancestors), ancestors)
        return mask[:, None]

    def _rerank(self, score: Tensor, token: Tensor, origin: Tensor, levels: int, budget: Tensor) -> DraftTree:
        """The N best of M candidates [B, M] that stand level by level; a candidate is never better than its origin,
        and the sort is stable, so parents stay in and in front."""
        count, total = score.shape
        width, nodes = self.width, min(self.max_nodes, total)
        level = torch.tensor([0] * width + [d for d in range(1, levels) for _ in range(width**2)], device=self.device)
        score = score.masked_fill(level >= budget[:, None], -torch.inf)
        best = score.sort(dim=1, descending=True, stable=True)
        size = (best.values[:, :nodes] > -torch.inf).sum(1)
        node = torch.arange(nodes, device=self.device)
        chosen = torch.where(node < size[:, None], best.indices[:, :nodes], total + node).sort(1).values
        used = chosen < total
        chosen = torch.where(used, chosen, 0)
        where = score.new_full((count, total + 1), -1, dtype=torch.int64)
        where.scatter_(1, torch.where(used, chosen, total), node.expand(count, nodes))
        above = origin.gather(1, chosen)
        parents = torch.where(used & (above >= 0), where.gather(1, above.clamp(min=0)), -1)
        return DraftTree(
            token.gather(1, chosen),
            parents,
            size,
            static_layout=tree_layout(parents, torch.where(used, level[chosen], 0), levels),
            score=score.gather(1, chosen),
        )

    # -- sampled tree

    def _sampled(self, shape: TreeShape, levels: int, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A static tree whose siblings are drawn one after the other from the drafter's law, without replacement; which
        nodes exist does not depend on what was drawn. Where a law has run out of tokens the next best one stands in as
        a deterministic candidate."""
        count = len(self.lengths)
        shape = TreeShape(tuple(p for p in shape.paths if len(p) <= levels))
        layout, every = shape.layout(self.device), torch.arange(count, device=self.device)
        tokens = torch.zeros(count, len(shape), dtype=torch.int64, device=self.device)
        drawn = torch.ones(count, len(shape), dtype=torch.bool, device=self.device)
        laws: list[Tensor] = []
        law_row = torch.zeros(len(shape), dtype=torch.int64)
        kids = [[i for i in row if i >= 0] for row in layout.children[0].tolist()]  # by slot
        states = {0: self.h[:count]}
        for level in range(shape.depth):
            parents = [0] if level == 0 else [i + 1 for i in shape.level(level - 1) if kids[i + 1]]
            if level:
                states = self._expand(shape, level, parents, tokens, states)
            for slot in parents:
                logits = self._logits(states[slot])
                law = sampling.draft_law(logits)
                left, spare = law.clone(), logits.float()
                for node in kids[slot]:
                    number = torch.full_like(every, node)
                    empty = left.sum(-1) <= 0
                    place = torch.where(empty, spare.argmax(-1), rng.draft(left, every, number))
                    left.scatter_(1, place[:, None], 0.0)
                    spare.scatter_(1, place[:, None], -torch.inf)
                    tokens[:, node], drawn[:, node] = self._tokens(place), ~empty
                    law_row[node] = len(laws)
                laws.append(law)
        proposal = Proposal(torch.stack(laws, 1), law_row.to(self.device).expand(count, -1), self.ids)
        return DraftTree.static(shape, tokens, shape.size_at(budget), drawn, proposal)

    def _expand(self, shape: TreeShape, level: int, parents: list[int], tokens: Tensor,
                states: dict[int, Tensor]) -> dict[int, Tensor]:  # fmt: skip
        """States h of the slots `parents`, nodes of one level; the whole level runs, so that slots are numbers."""
        count, nodes = tokens.shape[0], list(shape.level(level - 1))
        layout = shape.layout(self.device)
        above = [int(layout.parents[0, i]) + 1 for i in nodes]
        g = torch.stack([self.net.feed(states[a]) for a in above], 1)
        places = self.cache.aim(slice(0, count), self.lengths, nodes[0], len(nodes))
        ends = places[:, :1] - nodes[0]
        ancestors = layout.mask[:, nodes[0] + 1 : nodes[-1] + 2, 1 : nodes[-1] + 2].expand(count, -1, -1)
        depth = (ends + level - 1).expand(-1, len(nodes))
        h = self._pass(self.embed(tokens[:, nodes]), g, places, self._tree_mask(ancestors, ends), depth=depth)
        return {i + 1: h[:, j] for j, i in enumerate(nodes) if i + 1 in parents}
