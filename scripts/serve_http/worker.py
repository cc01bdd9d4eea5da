"""The thread that decodes: requests wait in order, those of one setting share a batch, batches
take turns cycle by cycle.

A setting is a drafter and a sampling setting: a batch has one of each, so every row's tokens are
those that it would have alone. At most `groups` batches live; a request whose setting has none
waits in front of the queue until one is empty, and nobody overtakes it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Generation, Request
from outrider.decode.live import Fresh, LiveBatch, LiveLimits, Seat
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.drafters import resolve_drafter
from outrider.scripts.serve_http.transcript import Said, Transcript

STOP, LENGTH = "stop", "length"
PROBATION = 2  # steps that each request of a broken batch makes alone: one reads, one drafts
MOST_BREAKS = 3  # batches that may break under a request with nobody at fault
ENDING = "the server is ending"
PLAIN = "none"  # the drafter of those whose own failed
SHORTEST_WAIT, LONGEST_WAIT = 1, 60  # seconds that a client is asked to wait


@dataclass(frozen=True)
class CompletionRequest:
    """One answer that is wanted. drafter: by name. top: tokens told beside the chosen one;
    None = no log-probabilities. stops: strings at which it ends."""

    ids: list[int]
    limit: int
    sampling: Sampling
    drafter: str
    seed: int
    top: int | None = None
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How an answer ended: "stop" or "length". text: all of it. seconds: what its passes took,
    with what its batch did for others meanwhile; waited, first: until it was read, until its
    first token."""

    finish: str
    text: str
    generation: Generation
    tokens: int
    waited: float
    first: float
    seconds: float


@dataclass(frozen=True)
class RequestFailed:
    """The answer cannot be given. mine: a fault of the server, not of the request."""

    reason: str
    mine: bool = True


Event = list[Said] | Ended | RequestFailed
Tell = Callable[[Event], None]


class Full(Exception):
    """The queue is full. wait: seconds after which to ask again."""

    def __init__(self, wait: int):
        super().__init__(f"the queue is full; ask again in {wait} s")
        self.wait = wait


@dataclass(eq=False)
class ActiveRequest:
    """A request on its way. tell is called in the decoding thread."""

    ask: CompletionRequest
    tell: Tell
    transcript: Transcript
    came: float = field(default_factory=time.perf_counter)
    began: float = 0.0
    first: float = 0.0
    gone: bool = False
    group: Group | None = None
    seat: Seat | None = None
    breaks: int = 0  # of its batch, with nobody at fault
    busy: float = 0.0  # seconds of its group before it joined, then its own


@dataclass
class Group:
    """A batch of one setting. seconds: what its steps have taken. said: the last word on
    drafts that were left out."""

    key: tuple[str, Sampling]
    drafter: Drafter
    batch: LiveBatch
    jobs: dict[int, ActiveRequest] = field(default_factory=dict)
    seconds: float = 0.0
    said: str = ""


@dataclass(frozen=True)
class WorkerLimits:
    """rows: decoded at a time. longest: tokens of a row. groups: settings at a time. queue:
    requests that may wait."""

    rows: int
    longest: int
    groups: int
    queue: int


class Worker(threading.Thread):
    """Decodes until it is closed. Every job that was taken is told an Ended or a Failed,
    unless its client left. What goes wrong with one job ends that job alone; if the thread
    itself ends, every job is told and further ones are refused."""

    def __init__(self, target: Target, drafters: list[str], limits: WorkerLimits, verify: str):
        super().__init__(name="decoding", daemon=True)
        self.target, self.limits, self.verify = target, limits, verify
        self._idle: dict[str, list[Drafter]] = {
            PLAIN: [],
            **{name: [resolve_drafter(name, target)] for name in drafters},
        }
        self._lock = threading.Condition()
        self._waiting: deque[ActiveRequest] = deque()
        self._groups: list[Group] = []
        self._owed: set[ActiveRequest] = (
            set()
        )  # an end: those that wait, run, or are between the two
        self._closing = False
        self._usual = 1.0  # seconds of an answer, a moving mean

    # -- called from other threads

    @property
    def counts(self) -> tuple[int, int]:
        """(requests that run, requests that wait)."""
        return sum(len(group.jobs) for group in list(self._groups)), len(self._waiting)

    def submit(self, ask: CompletionRequest, tell: Tell) -> ActiveRequest:
        """Take a request in. Raises Full when too many wait, UserError when the server ends or
        its thread has ended."""
        job = ActiveRequest(ask, tell, Transcript(self.target.tokenizer, ask.stops))
        with self._lock:
            if self._closing:
                raise UserError(ENDING)
            if len(self._waiting) >= self.limits.queue:
                wait = math.ceil(self._usual * len(self._waiting) / self.limits.rows)
                raise Full(min(max(wait, SHORTEST_WAIT), LONGEST_WAIT))
            self._waiting.append(job)
            self._owed.add(job)
            self._lock.notify()
        return job

    def cancel(self, job: ActiveRequest) -> None:
        """The client left: its row is free at the next cycle."""
        with self._lock:
            job.gone = True
            self._owed.discard(job)
            self._lock.notify()

    def close(self) -> None:
        """End now: what still runs is told so."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self.join()

    # -- the thread

    def run(self) -> None:
        """Decode until it is closed. Whatever ends it, nobody waits for it afterwards."""
        said = ENDING
        try:
            self._decode()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            said = f"the decoding thread ended ({type(error).__name__}); see the server's log"
        with self._lock:
            self._closing = True
            self._groups.clear()
            self._waiting.clear()
        for job in list(self._owed):
            self._tell(job, RequestFailed(said))

    def _decode(self) -> None:
        """One cycle of every group in turn."""
        while True:
            with self._lock:
                while not (self._closing or self._waiting or self._groups_busy()):
                    self._lock.wait()
                if self._closing:
                    return
                self._sweep()
            self._place()  # without the lock: a drafter may have to be read from disk
            for group in list(self._groups):
                if group.jobs or group.batch.busy:
                    failed = self._step(group)
                    if failed is not None:
                        self._break(group, failed)

    def _groups_busy(self) -> bool:
        return any(group.jobs or group.batch.busy for group in self._groups)

    def _sweep(self) -> None:
        """Requests whose clients left go."""
        if any(job.gone for job in self._waiting):
            self._waiting = deque(job for job in self._waiting if not job.gone)
        for group in self._groups:
            for job in group.jobs.values():
                if job.gone and job.seat is not None:
                    group.batch.leave(job.seat)

    def _place(self) -> None:
        """Seat waiting requests in their groups, in order, until one finds none."""
        while self._waiting and self.counts[0] < self.limits.rows:
            job = self._waiting[0]
            key = (job.ask.drafter, job.ask.sampling)
            group = next((group for group in self._groups if group.key == key), None)
            if group is None and len(self._groups) >= self.limits.groups:
                free = next((one for one in self._groups if not one.jobs), None)
                if free is None:
                    break
                self._groups.remove(free)
                self._idle[free.key[0]].append(free.drafter)
            self._waiting.popleft()
            group = group or self._open(key, job)
            if group is not None:
                self._join(group, job)

    def _open(self, key: tuple[str, Sampling], job: ActiveRequest) -> Group | None:
        """A new group; the request is told where there can be none."""
        try:
            drafter = self._drafter(key[0])
            try:
                batch = self._batch(drafter, key[1], self.limits.rows)
            except BaseException:
                self._idle[key[0]].append(drafter)  # not its fault, and dear to read again
                raise
        except Exception as error:
            self._tell(job, _failed("the drafter", error))
            return None
        group = Group(key, drafter, batch)
        self._groups.append(group)
        return group

    def _drafter(self, name: str) -> Drafter:
        idle = self._idle[name]
        if idle:
            return idle.pop()
        return NoDraft() if name == PLAIN else resolve_drafter(name, self.target)

    def _batch(self, drafter: Drafter, sampling: Sampling, rows: int) -> LiveBatch:
        room = LiveLimits(rows, self.limits.longest)
        return LiveBatch(self.target, drafter, sampling, room, 0, self.verify)

    def _join(self, group: Group, job: ActiveRequest) -> None:
        ask = job.ask
        job.began, job.busy = time.perf_counter(), group.seconds
        try:
            request = Request(ask.ids, ask.limit, id=ask.seed)
            job.seat = group.batch.join(request, lambda fresh: self._hear(job, fresh), ask.top)
        except Exception as error:
            self._tell(job, _failed("the request", error))
            return
        job.group = group
        group.jobs[job.seat.number] = job

    def _hear(self, job: ActiveRequest, fresh: Fresh) -> None:
        """What a pass gave a job. Raises nothing: its neighbours are in the midst of that pass."""
        if not job.first:
            job.first = time.perf_counter()
        try:
            said = [] if job.gone else job.transcript.push(fresh)
            if said:
                self._tell(job, said)
        except Exception as error:
            self._tell(job, _failed("the answer's text", error))
        if (job not in self._owed or job.transcript.stopped) and job.group and job.seat:
            job.group.batch.leave(job.seat)

    def _step(self, group: Group) -> RequestFailed | None:
        """One cycle of a group; what it failed of."""
        begin = time.perf_counter()
        try:
            ended = group.batch.step()
        except Exception as error:  # a row must not stay behind, whatever happened
            return _failed("the engine", error, mine=True)
        finally:
            group.seconds += time.perf_counter() - begin
        if ended and (said := group.batch.left_out()) not in ("", group.said):
            group.said = said
            print(f"serve: {group.key[0]}: {said}", file=sys.stderr)
        for seat in ended:
            job = group.jobs.pop(seat.number)
            if job not in self._owed:
                continue
            try:
                self._end(group, job, seat)
            except Exception as error:
                self._tell(job, _failed("the answer's text", error))
        return None

    def _break(self, group: Group, failed: RequestFailed) -> None:
        """Throw a batch away, and its drafter, which may hold half a cycle. A request that was
        alone in it goes on without a draft. Of several, each goes on alone for a few steps, so that
        one at fault fails by itself; the others share a new batch then and know nothing of it."""
        jobs, group.jobs = [job for job in group.jobs.values() if job in self._owed], {}
        try:
            if len(jobs) > 1:
                group.drafter = self._drafter(group.key[0])
                self._repair(group, jobs, failed)
                return
        except Exception as error:  # not even a drafter can be had
            failed = _failed("the engine", error, mine=True)
        self._groups.remove(group)
        for job in jobs:
            self._undrafted(group, job, failed)

    def _repair(self, group: Group, jobs: list[ActiveRequest], failed: RequestFailed) -> None:
        """A new batch for a group, with those of `jobs` in it that are sound and not at their
        end."""
        alone = [self._alone(group, job) for job in jobs]
        group.batch = self._batch(group.drafter, group.key[1], self.limits.rows)
        for job, own in zip(jobs, alone, strict=True):
            job.breaks += not any(alone)
            if own is not None:
                self._undrafted(group, job, own)
            elif job.breaks > MOST_BREAKS:
                self._tell(job, failed)
            elif job in self._owed:
                self._resume(group, job)

    def _undrafted(self, group: Group, job: ActiveRequest, failed: RequestFailed) -> None:
        """Let a job go on without a draft where its group's drafter may be what failed. It is
        told where nothing was drafted, or where there can be no such batch."""
        if job not in self._owed or group.key[0] == PLAIN:
            self._tell(job, failed)
            return
        key = (PLAIN, group.key[1])
        plain = next((one for one in self._groups if one.key == key), None) or self._open(key, job)
        if plain is not None:
            said = f"serve: {group.key[0]}: {failed.reason}; the request goes on without a draft"
            print(said, file=sys.stderr)
            job.busy += plain.seconds - group.seconds
            self._resume(plain, job)

    def _alone(self, group: Group, job: ActiveRequest) -> RequestFailed | None:
        """What a job fails of while nobody is beside it."""
        group.batch = self._batch(group.drafter, group.key[1], 1)
        self._resume(group, job)
        for _ in range(PROBATION):
            failed = self._step(group) if group.jobs else None
            if failed is not None:
                group.drafter = self._drafter(group.key[0])
                break
        group.jobs.clear()
        return failed

    def _resume(self, group: Group, job: ActiveRequest) -> None:
        assert job.seat is not None
        job.seat, job.group = group.batch.resume(job.seat), group
        group.jobs[job.seat.number] = job

    def _end(self, group: Group, job: ActiveRequest, seat: Seat) -> None:
        said = job.transcript.end()
        if said:
            self._tell(job, said)
        now = time.perf_counter()
        self._usual += 0.1 * (now - job.began - self._usual)
        ended = job.transcript.stopped or seat.generation.finish == "eos"
        self._tell(
            job,
            Ended(
                STOP if ended else LENGTH,
                job.transcript.text,
                seat.generation,
                job.transcript.tokens,
                job.began - job.came,
                job.first - job.came,
                group.seconds - job.busy,
            ),
        )

    def _tell(self, job: ActiveRequest, event: Event) -> None:
        """Say it to whoever asked; one who cannot be told counts as gone."""
        if job not in self._owed:
            return
        if isinstance(event, Ended | RequestFailed):
            self._owed.discard(job)
        try:
            job.tell(event)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            self.cancel(job)


def _failed(what: str, error: Exception, mine: bool = False) -> RequestFailed:
    """What a job is told of an error; a UserError is in words that its sender can use,
    anything else is our fault and goes to the log. mine: a UserError is our fault as well."""
    if isinstance(error, UserError):
        return RequestFailed(str(error), mine)
    traceback.print_exception(error, file=sys.stderr)
    return RequestFailed(f"{what} failed ({type(error).__name__}); see the server's log")
