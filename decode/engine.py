"""The decode loop: prefill, propose, score, verify, commit, observe. One loop for every
drafter and every batch size.

Plain autoregressive decoding is the empty tree (the NoDraft drafter), so baseline and
speculation share this code. Rows that finish leave and waiting requests take their place.

Shape letters: B live rows, N tree nodes, D path length, V vocabulary.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from decode import waits
from decode.cache import TreeCache
from decode.drafters import Drafter
from decode.fits import longest_answer
from decode.records import Cycle, Generation, Request, Run
from decode.rng import Rng
from decode.sampling import Law, Sampling
from decode.scorer import Step
from decode.target import Target
from decode.timing import Timing
from decode.tree import DraftTree
from decode.verify import Coins, Verdict
from decode.verify import verify as run_verify

__all__ = [
    "CoinSource",
    "Cycle",
    "Engine",
    "Generation",
    "OnTokens",
    "Options",
    "Request",
    "Rule",
    "Run",
    "Timing",
    "generate",
]


OnTokens = Callable[[int, list[int], list[bool]], None]
Rule = Callable[[DraftTree, Law, Coins], Verdict]
CoinSource = Callable[[int, Tensor, Tensor], Rng]
Clock = Callable[[], float]


class Options(TypedDict, total=False):
    """How requests are decoded; see `Engine` for each."""

    batch_size: int
    seed: int
    verify: str | Rule
    guidance: float | None
    on_tokens: OnTokens | None
    eos_ids: Sequence[int] | None
    coins: CoinSource
    clock: Clock


def generate(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    sampling: Sampling,
    **options: Unpack[Options],
) -> Run:
    """Decode every request. options: those of `Engine`, by name. Raises UserError as it does."""
    return Engine(target, drafter, requests, sampling, **options).run()


@dataclass
class _Row:
    index: int
    request: Request
    out: Generation
    limit: int
    cycle: int = 0
    done: bool = False

    @property
    def remaining(self) -> int:
        return self.limit - len(self.out.token_ids)

    @property
    def uncond(self) -> Sequence[int]:
        """The companion's prompt under guidance."""
        return self.request.uncond or self.request.prompt[-1:]


@dataclass(frozen=True)
class _Seen:
    """What the host knows of a verified cycle. path [B, D], length [B] as in Verdict, proposed
    [B] levels, all on the host; kept: committed tokens of every row, padded; ranks: sibling
    rank of each node of the path; drafters: who proposed it (empty without a union).
    """

    path: Tensor
    length: Tensor
    proposed: Tensor
    kept: list[list[int]]
    ranks: list[list[int]]
    drafters: list[list[int]]


@dataclass
class Engine:
    """One run of the loop over all requests.

    batch_size: rows that run at a time. verify: the name of a rule, or the rule itself (how
    scripts/certify.py runs known wrong ones). on_tokens(request index, new token ids,
    from_draft) streams. eos_ids: the target's where None. coins(seed, request ids [B], cycles
    [B]) makes the random numbers of one cycle; an enumerator in its place walks every branch.
    clock: seconds; one that waits for the device makes the parts of the timing exact on a GPU,
    and the whole slower.

    Raises UserError for a prompt that is empty, fills the context or leaves the vocabulary,
    and, while it runs, for logits without a law.
    """

    target: Target
    drafter: Drafter
    requests: Sequence[Request]
    sampling: Sampling
    batch_size: int = 1
    seed: int = 0
    verify: str | Rule = "traversal"
    guidance: float | None = None
    on_tokens: OnTokens | None = None
    eos_ids: Sequence[int] | None = None
    coins: CoinSource = Rng
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        self.sampling.check_vocab(self.target.vocab_size)
        rule = self.verify
        self.rule: Rule = rule if callable(rule) else functools.partial(run_verify, rule=rule)
        self.eos = frozenset(self.target.eos_ids if self.eos_ids is None else self.eos_ids)
        self.timing, self.law_rows = Timing(), 0
        room = self.target.context_length, self.target.vocab_size
        self.all = [
            _Row(i, r, Generation(list(r.prompt)), longest_answer(r, i, *room))
            for i, r in enumerate(self.requests)
        ]
        self.queue = deque(row for row in self.all if row.limit > 0)
        self.rows: list[_Row] = []

    @torch.inference_mode()
    def run(self) -> Run:
        """Decode them all."""
        self.target.pack_weights()  # once, so no part of a run's time
        start = self.clock()
        if self.queue:
            longest = max(
                max(len(r.request.prompt), len(r.request.uncond or ())) + r.limit
                for r in self.queue
            )
            rows = min(self.batch_size, len(self.queue))
            cache = self.target.new_cache(rows, longest, self.drafter.max_nodes, self.guidance)
            made = self.clock()
            self.drafter.reset(rows, longest)
            self.timing.cache_s, self.timing.drafter_s = made - start, self.clock() - made
            while self.queue or self.rows:
                self._admit(cache)
                if self.rows:
                    self._cycle(cache)
        self.timing.total_s = self.clock() - start
        return Run([row.out for row in self.all], self.timing, self.law_rows)

    def _admit(self, cache: TreeCache) -> None:
        """Prefill waiting requests into free rows and draw their next token.

        A request's first token belongs to no cycle. Rows that must be read again (see
        `_retire`) wait in front and come in passes of their own: theirs are cycles without a
        draft, and no prefill.
        """
        while self.queue and len(self.rows) < self.batch_size:
            start = self.clock()
            again = bool(self.queue[0].out.token_ids)
            new: list[_Row] = []
            while self.queue and len(self.rows) + len(new) < self.batch_size:
                if bool(self.queue[0].out.token_ids) != again:
                    break
                new.append(self.queue.popleft())
            count = len(new)
            prompts = self._tensors([*row.request.prompt, *row.out.token_ids] for row in new)
            uncond = None
            if self.guidance is not None:
                uncond = self._tensors([*row.uncond, *row.out.token_ids] for row in new)
            step = self.target.prefill(cache, prompts, self.drafter.taps, uncond)
            law = self._law(step.logits, DraftTree.empty(count, self.target.device), new)
            verdict = self.rule(law.tree, law, self._rng(new))
            law.check()
            self.law_rows += law.computed
            first = verdict.bonus.tolist()
            old = len(self.rows)
            self.rows += new
            self.drafter.begin(prompts, self.sampling)
            lengths = torch.tensor([len(p) for p in prompts])
            tokens = torch.zeros(
                count, int(lengths.max()), dtype=torch.int64, device=self.target.device
            )
            for b, prompt in enumerate(prompts):
                tokens[b, : len(prompt) - 1] = prompt[1:]
                tokens[b, len(prompt) - 1] = first[b]
            self.drafter.observe(tokens, step.feats, lengths, slice(old, old + count))
            for row, token in zip(new, first, strict=True):
                row.cycle += 1  # this draw had a number as well: no random number serves twice
                if again:
                    row.out.cycles.append(Cycle(0, 0, (), True, len(row.out.token_ids)))
                self._emit(row, [token], [False])
            self._retire(cache)
            if again:
                self.timing.target_s += self.clock() - start
                self.timing.cycles += 1
            else:
                self.timing.prefill_s += self.clock() - start

    def _tensors(self, texts: Iterable[list[int]]) -> list[Tensor]:
        return [waits.sent(text, self.target.device) for text in texts]

    def _headroom(self, row: _Row) -> int:
        """Levels of a draft before the row, or its companion under guidance, must be read
        again; negative: now.
        """
        prompts = (
            [row.request.prompt] if self.guidance is None else [row.request.prompt, row.uncond]
        )
        return min(
            self.target.headroom(len(prompt) + len(row.out.token_ids) - 1) for prompt in prompts
        )

    def _cycle(self, cache: TreeCache) -> None:
        """One target pass for every live row: propose, score, verify, commit, observe, record,
        retire.
        """
        part = functools.partial(self.timing.part, clock=self.clock)
        with part("draft"):
            budget = self._budget()
            rng = self._rng(self.rows)
            tree = self._propose(budget, rng)
        with part("target"):
            step = self._score(cache, tree)
        with part("verify"):
            verdict, law = self._verify(tree, step, rng)
            kept, slots = _kept(tree, verdict)
            with part("law"):
                seen = self._look(tree, verdict, law, kept)
        with part("commit"):
            with part("cache"):
                cache.commit(seen.path, seen.length)
            self._observe(step, kept, slots, seen.length)
            self._record(seen, budget)
            with part("cache"):
                self._retire(cache)
        self.timing.cycles += 1

    def _budget(self) -> Tensor:
        """[B] levels that each row may draft, on the host: the bonus token takes one of those
        that remain."""
        most = self.drafter.max_depth
        levels = [min(row.remaining - 1, most, self._headroom(row)) for row in self.rows]
        return torch.tensor(levels)

    def _propose(self, budget: Tensor, rng: Rng) -> DraftTree:
        with self.timing.part("drafter", self.clock):
            tree = self.drafter.propose(budget, self.sampling, rng)
        if waits.free(tree.tokens) or tree.static_layout is None:  # which is asked for as well
            tree.validate(self.target.vocab_size, self.drafter.max_nodes)
        else:
            tree.check_form(self.drafter.max_nodes)  # the values are looked at in _look
        return tree

    def _score(self, cache: TreeCache, tree: DraftTree) -> Step:
        last = waits.sent([row.out.token_ids[-1] for row in self.rows], self.target.device)
        return self.target.score(cache, last, tree, self.drafter.taps)

    def _verify(self, tree: DraftTree, step: Step, rng: Rng) -> tuple[Verdict, Law]:
        with self.timing.part("law", self.clock):
            law = self._law(step.logits, tree, self.rows)
        verdict = self.rule(tree, law, rng)
        self.timing.law_s += law.seconds
        self.law_rows += law.computed
        return verdict, law

    def _look(self, tree: DraftTree, verdict: Verdict, law: Law, kept: Tensor) -> _Seen:
        """All that the host wants to know of a cycle, in its one round trip. Raises what
        `tree.validate` and `law.check` do: nothing is committed yet."""
        vocab, (rows, levels) = self.target.vocab_size, verdict.path.shape
        doubts = [law.doubtful()]
        if not waits.free(tree.tokens):
            doubts.append(tree.doubtful(vocab))
        node = torch.arange(tree.width, device=tree.tokens.device)
        depth = torch.where(node < tree.size[:, None], tree.layout.depth + 1, 0)
        proposed = depth.amax(1) if tree.width else torch.zeros_like(verdict.length)
        path = verdict.path.clamp(min=0)
        told = [tree.layout.rank.expand(rows, tree.width)]
        told += [] if tree.drafters is None else [tree.drafters]
        marks = [t.gather(1, path) if tree.width else path for t in told]
        head = torch.stack([torch.stack(doubts).any(0), verdict.length, proposed], 1)
        table = torch.cat([head, verdict.path, kept, *marks], 1).cpu()
        if bool(table[:, 0].any()):
            tree.validate(vocab, self.drafter.max_nodes)
            law.check()
        sizes = [1, 1, 1, levels, levels + 1, *[levels] * len(marks)]
        _, length, levels_proposed, path, tokens, *marks = table.split(sizes, 1)
        drafters = marks[1].tolist() if len(marks) > 1 else [[]] * rows
        return _Seen(
            path, length[:, 0], levels_proposed[:, 0], tokens.tolist(), marks[0].tolist(), drafters
        )

    def _observe(self, step: Step, kept: Tensor, slots: Tensor, length: Tensor) -> None:
        """Show the drafter what was committed (`_kept`); length: [B] on the host."""
        feats = step.feats
        if feats is not None:
            every = torch.arange(len(self.rows), device=self.target.device)
            feats = feats[every[:, None], slots]
        with self.timing.part("drafter", self.clock):
            self.drafter.observe(kept, feats, length + 1, slice(0, len(self.rows)))

    def _record(self, seen: _Seen, budget: Tensor) -> None:
        lengths, proposed = seen.length.tolist(), seen.proposed.tolist()
        columns = lengths, proposed, seen.kept, seen.ranks, seen.drafters, budget.tolist()
        for row, accepted, levels, kept, ranks, drafters, most in zip(
            self.rows, *columns, strict=True
        ):
            before = len(row.out.token_ids)
            row.cycle += 1
            emitted = self._emit(row, kept[: accepted + 1], [True] * accepted + [False])
            cut = emitted <= accepted or most < self.drafter.max_depth
            row.out.cycles.append(
                Cycle(
                    proposed=levels,
                    accepted=min(accepted, emitted),
                    ranks=tuple(ranks[: min(accepted, emitted)]),
                    cut=cut,
                    start=before,
                    drafters=tuple(drafters[: min(accepted, emitted)]),
                )
            )

    def _emit(self, row: _Row, tokens: list[int], drafted: list[bool]) -> int:
        """Append up to the stop token or the limit; returns how many tokens went out."""
        stop = next((i + 1 for i, t in enumerate(tokens) if t in self.eos), len(tokens))
        count = min(stop, row.remaining)
        tokens, drafted = tokens[:count], drafted[:count]
        row.out.token_ids += tokens
        row.out.from_draft += drafted
        if tokens[-1] in self.eos:
            row.done, row.out.finish = True, "eos"
        elif row.remaining == 0:
            row.done = True
        if self.on_tokens:
            self.on_tokens(row.index, tokens, drafted)
        return count

    def _retire(self, cache: TreeCache) -> None:
        """Finished rows leave. So do those whose rotary frequencies change with the next token
        (decode.models.rope): they join the queue in front, and all their text is read again."""
        keep = [b for b, row in enumerate(self.rows) if not row.done and self._headroom(row) >= 0]
        if len(keep) < len(self.rows):
            kept = set(keep)
            again = [row for b, row in enumerate(self.rows) if b not in kept and not row.done]
            self.queue.extendleft(reversed(again))
            cache.select(keep)
            self.drafter.select(keep)
            self.rows = [self.rows[b] for b in keep]

    def _rng(self, rows: list[_Row]) -> Rng:
        requests = torch.tensor([row.request.id for row in rows])
        rng = self.coins(self.seed, requests, torch.tensor([row.cycle for row in rows]))
        if isinstance(rng, Rng):
            rng.reserve(self.drafter.max_nodes)
        return rng

    def _law(self, logits: Tensor, tree: DraftTree, rows: list[_Row]) -> Law:
        if not self.sampling.uses_history:
            return Law(self.sampling, logits, tree, clock=self.clock)
        ids = [[*row.request.prompt, *row.out.token_ids] for row in rows]
        longest = max(map(len, ids))
        history = torch.tensor([i + [0] * (longest - len(i)) for i in ids], device=logits.device)
        lengths = torch.tensor([len(i) for i in ids], device=logits.device)
        return Law(self.sampling, logits, tree, history, lengths, self.clock)


def _kept(tree: DraftTree, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Committed tokens [B, D + 1] (path, then bonus, then padding) and the slot that predicted
    each of them.
    """
    rows, levels = verdict.path.shape
    slots = torch.cat([verdict.path.new_zeros(rows, 1), verdict.path + 1], 1)
    tokens = tree.tokens.gather(1, verdict.path.clamp(min=0)) if levels else verdict.path
    tokens = torch.cat([tokens, verdict.bonus[:, None]], 1)
    return tokens.scatter(1, verdict.length[:, None], verdict.bonus[:, None]), slots
