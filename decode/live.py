"""A batch that requests join and leave while it runs: the loop of decode/engine.py, one
cycle at a time, for whoever hands out answers as they come (scripts/serve.py,
scripts/api.py).

    batch = LiveBatch(target, drafter, Sampling(), LiveLimits(rows=8, longest=2048))
    seat = batch.join(Request(ids, 64, id=seed), watch)
    while batch.busy:
        ended = batch.step()

A row's tokens are those of `generate(target, drafter, [request], sampling)`, whoever joins or
leaves beside it: random numbers are addressed by the request's id.

Shape letters: B live rows, N tree nodes, D path length, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import checks
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Cache, Engine, Generation, Request, Row
from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.scorer import Step
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.verify import HostVerdict

LEFT = "left"  # how a generation ends whose request was taken away
LEAST_LOGPROB = -9999.0  # stands for -inf, which JSON has no word for


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


Watch = Callable[[Fresh], None]


@dataclass(frozen=True)
class LiveLimits:
    """rows: most that run at a time. longest: most tokens of a row, prompt and answer."""

    rows: int
    longest: int


@dataclass(eq=False, kw_only=True)
class Seat(Row):
    """A request in the batch. top: tokens whose distribution is told beside the chosen one;
    None = no distributions. watch is called during a step; it may call `leave`."""

    watch: Watch
    top: int | None


class LiveBatch(Engine):
    """An engine without a list of requests. All rows share one distribution (`sampling`)
    and one rule.

    A draft that comes to NaN or infinity ends there, and other rows are unaffected;
    `left_out` says how many there were.

    After an exception of `step` the batch is broken: throw it away.

    seconds: of all steps so far, without what happens once before the first: the cache is
    made, and the target probed and packed.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        sampling: Sampling,
        room: LiveLimits,
        seed: int = 0,
    ):
        super().__init__(
            target,
            drafter,
            [],
            sampling,
            batch_size=room.rows,
            seed=seed,
            on_tokens=self._summary,
        )
        self.room = room
        self._cache: Cache | None = None
        self._joined, self.seconds = 0, 0.0
        self._seats: dict[int, Seat] = {}
        self._at: tuple[Tensor, list[Row], Tensor | None] | None = None
        self._wild = torch.zeros((), dtype=torch.int64, device=target.device)

    def left_out(self) -> str:
        """Return what to say of the drafts so far that were cut short, "" if there were
        none; reads from the device."""
        count = int(self._wild)
        words = f"{count} drafts came to NaN or infinity and end there; {checks.NON_FINITE}"
        return words if count else ""

    @property
    def busy(self) -> bool:
        """True while any request is running or waiting."""
        return bool(self._seats)

    def join(self, request: Request, watch: Watch, top: int | None = None) -> Seat:
        """Take a request in; it is read at the next step that finds a free row.

        Raises UserError for a prompt that is empty, leaves the vocabulary, or does not leave
        room for one token.
        """
        number = self._joined
        room = self.room.longest - len(request.prompt)
        limit = min(checks.longest_answer(request, number, self.target), room)
        if room < 1:
            raise UserError(
                f"prompt: {len(request.prompt)} tokens, and a row holds {self.room.longest} with "
                "its answer; shorten the prompt"
            )
        self._joined += 1
        generation = Generation(list(request.prompt))
        seat = Seat(number, request, generation, limit, done=limit <= 0, watch=watch, top=top)
        self._seats[number] = seat
        if not seat.done:
            self.queue.append(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """Take a request away: its row is free at the next step, and `step` names it then."""
        if seat.done:
            return
        seat.done, seat.generation.finish = True, LEFT
        if seat in self.queue:
            self.queue.remove(seat)

    @torch.inference_mode()
    def step(self) -> list[Seat]:
        """Free rows, read waiting prompts, run one cycle; the requests that ended with it."""
        if self._cache is None:
            size = self.room.rows, self.room.longest
            self._cache = self.scorer.new_cache(*size, self.drafter.max_nodes)
            self.drafter.reset(*size)
        begin = time.perf_counter()
        self._retire(self._cache)
        self._admit(self._cache)
        if self.rows:
            self._cycle(self._cache)
        self._at = None
        ended = [seat for seat in self._seats.values() if seat.done]
        for seat in ended:
            del self._seats[seat.number]
        self.seconds += time.perf_counter() - begin
        return ended

    def _propose(self, budget: Tensor, rng: Rng) -> DraftTree:
        tree = super()._propose(budget, rng)
        bad = checks.non_finite(tree)
        self._wild += bad.any(1).sum()
        return checks.cut(tree, bad)

    # -- what the engine hands over on its way

    def _distribution(self, logits: Tensor, tree: DraftTree, rows: list[Row]) -> Distribution:
        self._at = logits, rows, None
        return super()._distribution(logits, tree, rows)

    def _observe(self, step: Step, seen: HostVerdict) -> None:
        assert self._at is not None
        self._at = *self._at[:2], seen.slots
        super()._observe(step, seen)

    def _summary(self, number: int, tokens: list[int], drafted: list[bool]) -> None:
        seat = self._seats[number]
        distributions = [] if seat.top is None else self._distributions(seat, tokens, seat.top)
        seat.watch(Fresh(tokens, drafted, distributions))

    def _distributions(self, seat: Seat, tokens: list[int], top: int) -> list[TokenDistribution]:
        """Return the target's own distributions at the slots that the tokens came from."""
        assert self._at is not None
        logits, rows, slots = self._at
        b = rows.index(seat)
        places = [0] if slots is None else slots[b, : len(tokens)].tolist()
        found = torch.log_softmax(logits[b, places].float(), -1).clamp(min=LEAST_LOGPROB)
        own = found.gather(1, torch.tensor(tokens, device=found.device)[:, None])[:, 0].tolist()
        values, ids = (part.tolist() for part in found.topk(min(top, found.shape[1]), -1))
        return [
            TokenDistribution(logprob, list(zip(best, value, strict=True)))
            for logprob, best, value in zip(own, ids, values, strict=True)
        ]
