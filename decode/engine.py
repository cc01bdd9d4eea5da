"""The decode loop: prefill, propose, score, verify, commit, observe. One loop for every
drafter and every batch size.

Plain autoregressive decoding is the empty tree (the NoDraft drafter), so baseline and
speculation share this code. Rows that finish leave and waiting requests take their place.

Shape letters: B live rows, N tree nodes, D path length, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.decode import checks, devices
from outrider.decode.cache import TreeCache
from outrider.decode.drafters import Drafter
from outrider.decode.guidance import Guided, Pairs
from outrider.decode.records import Cycle, DecodedRun, Generation, Request, Timing
from outrider.decode.rng import Coins, Rng
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.scorer import Step
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.verify import HostVerdict, Verdict, to_host
from outrider.decode.verify import verify as run_verify

__all__ = ["Cycle", "DecodedRun", "Engine", "Generation", "Request", "Timing", "generate"]

OnTokens = Callable[[int, list[int], list[bool]], None]
Rule = Callable[[DraftTree, Distribution, Coins], Verdict]
CoinSource = Callable[[int, Tensor, Tensor], Rng]
Cache = TreeCache | Pairs


@dataclass(eq=False)
class Row:
    """A request on its way, `number` of its run. limit: tokens that it may get."""

    number: int
    request: Request
    generation: Generation
    limit: int
    cycle: int = 0
    done: bool = False

    @property
    def remaining(self) -> int:
        return self.limit - len(self.generation.token_ids)


@dataclass
class Engine:
    """One run of the loop over all requests.

    batch_size: rows that run at a time. verify: the accept rule (scripts/certify.py runs known
    wrong ones). on_tokens(request index, new token ids, from_draft) streams. eos_ids: the
    target's where None. coins(seed, request ids [B], cycles [B]) makes the random numbers of one
    cycle; an enumerator in its place walks every branch.

    Raises UserError for a prompt that is empty, fills the context or leaves the vocabulary,
    and, while it runs, for logits without a distribution.
    """

    target: Target
    drafter: Drafter
    requests: Sequence[Request]
    sampling: Sampling
    batch_size: int = 1
    seed: int = 0
    verify: Rule = run_verify
    guidance: float | None = None
    on_tokens: OnTokens | None = None
    eos_ids: Sequence[int] | None = None
    coins: CoinSource = Rng

    def __post_init__(self) -> None:
        self.sampling.check_vocab(self.target.vocab_size)
        # Both know the same calls.
        self.scorer: Any = self.target
        if self.guidance is not None:
            self.scorer = Guided(self.target, self.guidance)
        self.eos = frozenset(self.target.eos_ids if self.eos_ids is None else self.eos_ids)
        self.timing = Timing()
        self.all = [
            Row(i, r, Generation(list(r.prompt)), checks.longest_answer(r, i, self.target))
            for i, r in enumerate(self.requests)
        ]
        self.queue = deque(row for row in self.all if row.limit > 0)
        self.rows: list[Row] = []

    @torch.inference_mode()
    def run(self) -> DecodedRun:
        """Decode them all."""
        self.target.pack_weights()  # once, so no part of a run's time
        start = time.perf_counter()
        if self.queue:
            longest = max(
                max(len(r.request.prompt), len(r.request.uncond or ())) + r.limit
                for r in self.queue
            )
            rows = min(self.batch_size, len(self.queue))
            cache = self.scorer.new_cache(rows, longest, self.drafter.max_nodes)
            self.drafter.reset(rows, longest)
            while self.queue or self.rows:
                self._admit(cache)
                if self.rows:
                    self._cycle(cache)
        self.timing.total_s = time.perf_counter() - start
        return DecodedRun([row.generation for row in self.all], self.timing)

    def _admit(self, cache: Cache) -> None:
        """Prefill waiting requests into free rows and draw their first token, which belongs
        to no cycle."""
        while self.queue and len(self.rows) < self.batch_size:
            start = time.perf_counter()
            count = min(len(self.queue), self.batch_size - len(self.rows))
            new = [self.queue.popleft() for _ in range(count)]
            prompts = self._tensors(row.request.prompt for row in new)
            step = self._prefill(cache, prompts, new)
            tree = DraftTree.empty(count, self.target.device)
            distribution = self._distribution(step.logits, tree, new)
            bonus = self.verify(tree, distribution, self._rng(new)).bonus
            distribution.check()
            old = len(self.rows)
            self.rows += new
            self.drafter.begin(prompts, self.sampling)
            lengths = torch.tensor([len(p) for p in prompts])
            seen = [
                torch.cat([p[1:], token[None]]) for p, token in zip(prompts, bonus, strict=True)
            ]
            tokens = torch.nn.utils.rnn.pad_sequence(seen, batch_first=True)
            self.drafter.observe(tokens, step.feats, lengths, slice(old, old + count))
            for row, token in zip(new, bonus.tolist(), strict=True):
                row.cycle += 1  # this draw had a number as well: no random number serves twice
                self._emit(row, [token], [False])
            self._retire(cache)
            self.timing.prefill_s += time.perf_counter() - start

    def _prefill(self, cache: Cache, prompts: list[Tensor], new: list[Row]) -> Step:
        """Return one pass over the prompts of new rows, under guidance with their companions'."""
        if self.guidance is not None:
            others = self._tensors(r.request.uncond or r.request.prompt[-1:] for r in new)
            prompts = [p for pair in zip(prompts, others, strict=True) for p in pair]
        step: Step = self.scorer.prefill(cache, prompts, self.drafter.taps)
        return step

    def _tensors(self, texts: Iterable[Sequence[int]]) -> list[Tensor]:
        return [devices.send(text, self.target.device) for text in texts]

    def _cycle(self, cache: Cache) -> None:
        """One target pass for every live row."""
        begin = time.perf_counter()
        budget, rng = self._budget(), self._rng(self.rows)
        with self.timing.phase("draft"):
            tree = self._propose(budget, rng)
        with self.timing.phase("target"):
            step = self._score(cache, tree)
        with self.timing.phase("verify"):
            seen = self._verify(tree, step, rng)  # the one wait for the device
        with self.timing.phase("commit"):
            self._commit(cache, step, seen, budget)
        self.timing.cycles += 1
        self.timing.cycle_s.append(time.perf_counter() - begin)
        self.timing.cycle_nodes.append(tree.width)

    def _budget(self) -> Tensor:
        """[B] levels that each row may draft, on the host: one less for the bonus token."""
        most = self.drafter.max_depth
        return torch.tensor([min(row.remaining - 1, most) for row in self.rows])

    def _propose(self, budget: Tensor, rng: Rng) -> DraftTree:
        """Raise ValueError for a draft of the wrong form; its values are looked at when it
        is verified, where its parents are known to be right."""
        tree = self.drafter.propose(budget, self.sampling, rng)
        checks.check_form(tree, self.drafter.max_nodes)
        if tree.static_layout is None:
            checks.validate(tree, self.target.vocab_size)
        return tree

    def _score(self, cache: Cache, tree: DraftTree) -> Step:
        last = devices.send([row.generation.token_ids[-1] for row in self.rows], self.target.device)
        step: Step = self.scorer.score(cache, last, tree, self.drafter.taps)
        return step

    def _verify(self, tree: DraftTree, step: Step, rng: Rng) -> HostVerdict:
        """Return what the target takes of the draft, in the one round trip of a cycle.
        Raises what `checks.validate` and `distribution.check` do: nothing is committed yet."""
        distribution = self._distribution(step.logits, tree, self.rows)
        verdict = self.verify(tree, distribution, rng)
        doubtful = distribution.doubtful() | checks.doubtful(tree, self.target.vocab_size)
        seen = to_host(verdict, tree, doubtful)
        if seen.doubtful:
            checks.validate(tree, self.target.vocab_size)
            distribution.check()
        return seen

    def _commit(self, cache: Cache, step: Step, seen: HostVerdict, budget: Tensor) -> None:
        """Keep what was emitted: cache, drafter, generations; rows that are done leave."""
        cache.commit(seen.path, seen.length)
        self._observe(step, seen)
        self._record(seen, budget)
        self._retire(cache)

    def _observe(self, step: Step, seen: HostVerdict) -> None:
        """Show the drafter what was committed."""
        feats = step.feats
        if feats is not None:
            every = torch.arange(len(self.rows), device=self.target.device)
            feats = feats[every[:, None], seen.slots]
        self.drafter.observe(seen.tokens, feats, seen.length + 1, slice(0, len(self.rows)))

    def _record(self, seen: HostVerdict, budget: Tensor) -> None:
        most = budget.tolist()
        for b, (row, accepted) in enumerate(zip(self.rows, seen.length.tolist(), strict=True)):
            before = len(row.generation.token_ids)
            row.cycle += 1
            emitted = self._emit(row, seen.emitted[b][: accepted + 1], [True] * accepted + [False])
            kept = min(accepted, emitted)
            row.generation.cycles.append(
                Cycle(
                    proposed=seen.proposed[b],
                    accepted=kept,
                    ranks=tuple(seen.ranks[b][:kept]),
                    cut=emitted <= accepted or most[b] < self.drafter.max_depth,
                    start=before,
                    drafters=tuple(seen.drafters[b][:kept]),
                )
            )

    def _emit(self, row: Row, tokens: list[int], drafted: list[bool]) -> int:
        """Append up to the stop token or the limit; returns how many tokens went out."""
        stop = next((i + 1 for i, t in enumerate(tokens) if t in self.eos), len(tokens))
        count = min(stop, row.remaining)
        tokens, drafted = tokens[:count], drafted[:count]
        row.generation.token_ids += tokens
        row.generation.from_draft += drafted
        if tokens[-1] in self.eos:
            row.done, row.generation.finish = True, "eos"
        elif row.remaining == 0:
            row.done = True
        if self.on_tokens:
            self.on_tokens(row.number, tokens, drafted)
        return count

    def _retire(self, cache: Cache) -> None:
        """Finished rows leave."""
        keep = [b for b, row in enumerate(self.rows) if not row.done]
        if len(keep) < len(self.rows):
            kept = set(keep)
            # The last rows come into the places that are free: no other one is copied.
            last = [b for b in keep if b >= len(keep)]
            keep = [b if b in kept else last.pop() for b in range(len(keep))]
            cache.select(keep)
            self.drafter.select(keep)
            self.rows = [self.rows[b] for b in keep]

    def _rng(self, rows: list[Row]) -> Rng:
        requests = torch.tensor([row.request.id for row in rows])
        rng = self.coins(self.seed, requests, torch.tensor([row.cycle for row in rows]))
        if isinstance(rng, Rng):
            rng.reserve(self.drafter.max_nodes)
        return rng

    def _distribution(self, logits: Tensor, tree: DraftTree, rows: list[Row]) -> Distribution:
        history = None
        if self.sampling.uses_history:
            history = [[*row.request.prompt, *row.generation.token_ids] for row in rows]
        return Distribution(self.sampling, logits, tree, history)


def generate(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    sampling: Sampling,
    **options: Any,
) -> DecodedRun:
    """Decode every request: the run of an `Engine`, whose `options` it takes. Raises UserError as
    it does."""
    return Engine(target, drafter, requests, sampling, **options).run()
