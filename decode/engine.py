"""The decode loop: prefill, propose, score, verify, commit, observe. One loop for every
drafter and every batch size.

Plain autoregressive decoding is the empty tree (the NoDraft drafter), so baseline and
speculation share this code. Requests join and leave a batch while it runs; `generate` decodes a
list of them.

Shape letters: B live rows, N tree nodes, D path length, V vocabulary.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import checks, devices
from outrider.decode.cache import TreeCache
from outrider.decode.drafters import Drafter
from outrider.decode.generation import Cycle, DecodedRun, Generation, Request, Timing
from outrider.decode.guidance import Guided, Pairs
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
LEFT = "left"  # how a generation ends whose request was taken away
LEAST_LOGPROB = -9999.0  # in place of -inf, which JSON cannot write


@dataclass(frozen=True)
class TokenDistribution:
    """Log-probability of a token under the target alone at temperature 1 without any
    truncation, and the likeliest tokens with theirs, best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Fresh:
    """What one pass gave a row. drafted: per token, was it an accepted draft token.
    distributions: per token where they were asked for, else empty."""

    tokens: list[int]
    drafted: list[bool]
    distributions: list[TokenDistribution]


@dataclass(frozen=True)
class BatchLimits:
    """rows: most that run at a time. longest: most tokens of a row, prompt and answer."""

    rows: int
    longest: int


@dataclass(eq=False)
class Row:
    """A request in the batch, the `number`th of those that joined. limit: tokens that it may get.

    watch: told what each pass gives, while the pass runs. top: tokens whose log-probability is
    told beside the chosen one's; None: none is."""

    number: int
    request: Request
    generation: Generation
    limit: int
    watch: Callable[[Fresh], None] | None = None
    top: int | None = None
    cycle: int = 0
    done: bool = False

    @property
    def remaining(self) -> int:
        return self.limit - len(self.generation.token_ids)


@dataclass(eq=False)
class Engine:
    """A batch, one cycle at a time.

        engine = Engine(target, drafter, Sampling(), BatchLimits(rows=8, longest=2048))
        row = engine.join(Request(ids, 64, id=seed), watch)
        while engine.busy:
            ended = engine.step()

    A row's random numbers belong to its request (decode/generation.py), whichever rows join or
    leave. After an exception of `step` the engine is broken: throw it away.

    verify: the accept rule (scripts/certify.py runs known wrong ones). eos_ids: the target's where
    None. coins(seed, request ids [B], cycles [B]) makes the random numbers of one cycle; an
    enumerator in its place walks every branch. cuts: a draft that comes to NaN or infinity ends
    there, which `left_out` counts; else it is refused. timing: of all steps, without what happens
    once: the cache is made, the target probed and packed; its lists are kept where `timed`.
    """

    target: Target
    drafter: Drafter
    sampling: Sampling
    limits: BatchLimits
    seed: int = 0
    verify: Rule = run_verify
    guidance: float | None = None
    eos_ids: Sequence[int] | None = None
    coins: CoinSource = Rng
    cuts: bool = False
    timed: bool = False
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self.sampling.check_vocab(self.target.vocab_size)
        # Both know the same calls.
        self.scorer: Any = self.target
        if self.guidance is not None:
            self.scorer = Guided(self.target, self.guidance)
        self.eos = frozenset(self.target.eos_ids if self.eos_ids is None else self.eos_ids)
        self.queue, self.rows, self.ended = deque[Row](), list[Row](), list[Row]()
        self.joined = 0
        self._cache: TreeCache | Pairs | None = None
        self._cut = torch.zeros((), dtype=torch.int64, device=self.target.device)

    @property
    def cache(self) -> TreeCache | Pairs:
        """The keys and values of all rows; there from the first step on."""
        assert self._cache is not None
        return self._cache

    @property
    def busy(self) -> bool:
        """True while any request is running or waiting, or `step` has yet to name its end."""
        return bool(self.queue or self.rows or self.ended)

    def left_out(self) -> str:
        """Return what to say of the drafts so far that were cut short, "" if there were
        none; reads from the device."""
        count = int(self._cut)
        words = f"{count} drafts came to NaN or infinity and end there; {checks.NON_FINITE}"
        return words if count else ""

    def join(
        self,
        request: Request,
        watch: Callable[[Fresh], None] | None = None,
        top: int | None = None,
    ) -> Row:
        """Take a request in; it is read at the next step that finds a free row.

        Raises UserError for a prompt that is empty, leaves the vocabulary, or does not leave
        room for one token.
        """
        number, size = self.joined, max(len(request.prompt), len(request.uncond or ()))
        limit = checks.longest_answer(request, number, self.target)
        room = self.limits.longest - size
        if limit > 0 >= room:
            raise UserError(
                f"prompt: {size} tokens, and a row holds {self.limits.longest} with its answer; "
                "shorten the prompt"
            )
        self.joined += 1
        limit = min(limit, room)
        row = Row(number, request, Generation(list(request.prompt)), limit, watch, top)
        row.done = limit <= 0
        (self.ended if row.done else self.queue).append(row)
        return row

    def leave(self, row: Row) -> None:
        """Take a request away: its row is free at the next step, and `step` names it then."""
        if row.done:
            return
        row.done, row.generation.finish = True, LEFT
        if row in self.queue:
            self.queue.remove(row)
            self.ended.append(row)
            row.watch = None

    def release(self) -> None:
        """Give the target's keys and values back; what joins later makes new ones."""
        if self._cache is not None:
            self.scorer.release(self._cache)
            self._cache = None

    def close(self) -> None:
        """As `release`, and the drafter's."""
        self.release()
        self.drafter.reset(1, 1)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Free rows, read waiting prompts, run one cycle; the requests that ended with it. Raises
        UserError for logits without a distribution."""
        if self._cache is None and self.queue:
            checks.check_shape(self.drafter, self.target)
            size = self.limits.rows, self.limits.longest
            self._cache = self.scorer.new_cache(*size, self.drafter.max_nodes)
            self.drafter.reset(*size)
        begin = time.perf_counter()
        self._retire()
        self._admit()
        if self.rows:
            self._cycle()
        ended, self.ended = self.ended, []
        self.timing.total_s += time.perf_counter() - begin
        return ended

    def _admit(self) -> None:
        """Prefill waiting requests into free rows and draw their first token, which belongs
        to no cycle."""
        while self.queue and len(self.rows) < self.limits.rows:
            start = time.perf_counter()
            count = min(len(self.queue), self.limits.rows - len(self.rows))
            new = [self.queue.popleft() for _ in range(count)]
            prompts = self._tensors(row.request.prompt for row in new)
            step = self._prefill(prompts, new)
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
            for row, token, logits in zip(new, bonus.tolist(), step.logits, strict=True):
                row.cycle += 1  # this draw had a number as well: no random number serves twice
                self._emit(row, [token], [False], logits)
            self._retire()
            self.timing.prefill_s += time.perf_counter() - start

    def _prefill(self, prompts: list[Tensor], new: list[Row]) -> Step:
        """Return one pass over the prompts of new rows, under guidance with their companions'."""
        if self.guidance is not None:
            others = self._tensors(r.request.uncond or r.request.prompt[-1:] for r in new)
            prompts = [p for pair in zip(prompts, others, strict=True) for p in pair]
        step: Step = self.scorer.prefill(self.cache, prompts, self.drafter.taps)
        return step

    def _tensors(self, texts: Iterable[Sequence[int]]) -> list[Tensor]:
        return [devices.send(text, self.target.device) for text in texts]

    def _cycle(self) -> None:
        """One target pass for every live row."""
        begin = time.perf_counter()
        budget, rng = self._budget(), self._rng(self.rows)
        with self.timing.phase("draft"):
            tree = self._propose(budget, rng)
        with self.timing.phase("target"):
            step = self._score(tree)
        with self.timing.phase("verify"):
            seen = self._verify(tree, step, rng)  # the one wait for the device
        with self.timing.phase("commit"):
            self._commit(step, seen, budget)
        self.timing.cycles += 1
        if self.timed:
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
        if self.cuts:
            bad = checks.non_finite(tree)
            self._cut += bad.any(1).sum()
            tree = checks.cut(tree, bad)
        return tree

    def _score(self, tree: DraftTree) -> Step:
        last = devices.send([row.generation.token_ids[-1] for row in self.rows], self.target.device)
        step: Step = self.scorer.score(self.cache, last, tree, self.drafter.taps)
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

    def _commit(self, step: Step, seen: HostVerdict, budget: Tensor) -> None:
        """Keep what was emitted: cache, drafter, generations; rows that are done leave."""
        self.cache.commit(seen.path, seen.length)
        feats = step.feats
        if feats is not None:
            every = torch.arange(len(self.rows), device=self.target.device)
            feats = feats[every[:, None], seen.slots]
        self.drafter.observe(seen.tokens, feats, seen.length + 1, slice(0, len(self.rows)))
        self._record(step.logits, seen, budget)
        self._retire()

    def _record(self, logits: Tensor, seen: HostVerdict, budget: Tensor) -> None:
        most = budget.tolist()
        for b, (row, accepted) in enumerate(zip(self.rows, seen.length.tolist(), strict=True)):
            before = len(row.generation.token_ids)
            row.cycle += 1
            tokens, drafted = seen.emitted[b][: accepted + 1], [True] * accepted + [False]
            emitted = self._emit(row, tokens, drafted, logits[b], seen.slots[b])
            kept = min(accepted, emitted)
            row.generation.cycles.append(
                Cycle(
                    proposed=seen.proposed[b],
                    accepted=kept,
                    cut=emitted <= accepted or most[b] < self.drafter.max_depth,
                    start=before,
                )
            )

    def _emit(
        self,
        row: Row,
        tokens: list[int],
        drafted: list[bool],
        logits: Tensor,
        slots: Tensor | None = None,
    ) -> int:
        """Append up to the stop token or the limit; returns how many tokens went out. logits:
        [N + 1, V], of which each token came from one of `slots` [D + 1] (None: the first)."""
        stop = next((i + 1 for i, t in enumerate(tokens) if t in self.eos), len(tokens))
        count = min(stop, row.remaining)
        tokens, drafted = tokens[:count], drafted[:count]
        row.generation.token_ids += tokens
        row.generation.from_draft += drafted
        if tokens[-1] in self.eos:
            row.done, row.generation.finish = True, "eos"
        elif row.remaining == 0:
            row.done = True
        if row.watch:
            told = list[TokenDistribution]()
            if row.top is not None:
                rows = logits[:1] if slots is None else logits[slots[:count]]
                told = token_distributions(rows, tokens, row.top)
            row.watch(Fresh(tokens, drafted, told))
        return count

    def _retire(self) -> None:
        """Finished rows leave, and forget who watched: nothing outlives its answer."""
        keep = [b for b, row in enumerate(self.rows) if not row.done]
        if len(keep) < len(self.rows):
            gone = [row for row in self.rows if row.done]
            for row in gone:
                row.watch = None
            self.ended += gone
            kept = set(keep)
            # The last rows come into the places that are free: no other one is copied.
            last = [b for b in keep if b >= len(keep)]
            keep = [b if b in kept else last.pop() for b in range(len(keep))]
            self.cache.select(keep)
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


def token_distributions(logits: Tensor, tokens: list[int], top: int) -> list[TokenDistribution]:
    """Return the target's own distributions `logits` [n, V] at n `tokens` that came of them."""
    found = torch.log_softmax(logits.float(), -1).clamp(min=LEAST_LOGPROB)
    own = found.gather(1, torch.tensor(tokens, device=found.device)[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in found.topk(min(top, found.shape[1]), -1))
    return [
        TokenDistribution(logprob, list(zip(best, value, strict=True)))
        for logprob, best, value in zip(own, ids, values, strict=True)
    ]


def generate(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    batch_size: int = 1,
    on_tokens: OnTokens | None = None,
    **options: Any,
) -> DecodedRun:
    """Decode every request, `batch_size` at a time. on_tokens(request index, new token ids,
    from_draft) streams. options: of `Engine`.

    Raises UserError for a prompt that is empty, fills the context or leaves the vocabulary,
    and, while it runs, for logits without a distribution."""
    sizes = [max(len(r.prompt), len(r.uncond or ())) for r in requests]
    limits = [checks.longest_answer(r, i, target) for i, r in enumerate(requests)]
    longest = max(map(sum, zip(sizes, limits, strict=True)), default=0)
    size = BatchLimits(min(batch_size, len(requests)), longest)
    engine = Engine(target, drafter, sampling, size, timed=True, **options)

    def tell(index: int, fresh: Fresh) -> None:
        assert on_tokens is not None
        on_tokens(index, fresh.tokens, fresh.drafted)

    rows = [
        engine.join(request, functools.partial(tell, i) if on_tokens else None)
        for i, request in enumerate(requests)
    ]
    while engine.busy:
        engine.step()
    engine.release()
    return DecodedRun([row.generation for row in rows], engine.timing)
