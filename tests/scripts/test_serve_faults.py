"""The decoding thread of `outrider serve`: whatever goes wrong with a request ends that request
alone, and nobody waits for ever."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.live import LiveBatch, LiveLimits
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.serve_http import worker as module
from outrider.scripts.serve_http.transcript import Transcript
from outrider.scripts.serve_http.worker import (
    CompletionRequest,
    Ended,
    Event,
    RequestFailed,
    Worker,
    WorkerLimits,
)

HONEST = [[3 + n, 4, 5, 6, 3 + n, 4, 5, 6] for n in range(3)]
POISON = 299
SECONDS = 60.0


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(kind="tiny", context=256), "float32", "cpu")


@dataclass
class Messages:
    """What a request is told; `end` waits for the last of it."""

    events: queue.Queue[Event] = field(default_factory=queue.Queue)

    def end(self) -> Ended | RequestFailed:
        while True:
            event = self.events.get(timeout=SECONDS)
            if isinstance(event, Ended | RequestFailed):
                assert self.events.empty(), "nothing comes behind the end"
                return event


@pytest.fixture
def working(target: Target) -> Iterator[Worker]:
    one = Worker(target, ["ngram", "none"], WorkerLimits(8, 128, 4, 32), "traversal")
    one.start()
    yield one
    one.close()


def ask(worker: Worker, ids: list[int], limit: int = 40, **keys: Any) -> Messages:
    message = Messages()
    given: dict[str, Any] = {"sampling": Sampling(), "drafter": "ngram", "seed": 0, **keys}
    worker.submit(CompletionRequest(ids, limit, **given), message.events.put)
    return message


def text_alone(target: Target, ids: list[int], limit: int = 40) -> str:
    out = generate(target, NoDraft(), [Request(ids, limit)], Sampling()).generations[0]
    return str(
        target.tokenizer.decode(
            out.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )


def all_right(target: Target, honest: list[Messages]) -> None:
    for ids, message in zip(HONEST, honest, strict=True):
        end = message.end()
        assert isinstance(end, Ended), end
        assert end.text == text_alone(target, ids)


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("no room"), MemoryError(), KeyError("x")]
)
def test_a_drafter_that_cannot_be_made_fails_its_request_alone(
    working: Worker, target: Target, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*args: Any) -> Any:
        raise error

    honest = [ask(working, ids) for ids in HONEST]
    monkeypatch.setattr(module, "resolve_drafter", broken)
    failed = ask(working, [3, 4, 5], sampling=Sampling(0.5)).end()  # a batch of its own
    assert (
        isinstance(failed, RequestFailed) and failed.mine and type(error).__name__ in failed.reason
    )
    all_right(target, honest)
    assert isinstance(ask(working, [3, 4, 5]).end(), Ended) and working.is_alive()


def test_a_setting_that_is_refused_costs_no_drafter(
    working: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one again takes seconds in which nobody's answer grows."""
    made: list[Any] = []
    monkeypatch.setattr(module, "resolve_drafter", lambda *args: made.append(args) or NGram())
    for _ in range(3):
        failed = ask(working, [3, 4], sampling=Sampling(1.0, top_k=10**6)).end()
        assert isinstance(failed, RequestFailed) and not failed.mine
    assert isinstance(ask(working, [3, 4, 5]).end(), Ended) and not made


def test_when_the_thread_itself_ends_everybody_is_message(
    working: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*args: Any) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(working, "_step", ends)
    for message in [ask(working, ids) for ids in HONEST[:1]]:
        end = message.end()
        assert isinstance(end, RequestFailed) and end.mine and "SystemExit" in end.reason
    working.join(SECONDS)
    assert not working.is_alive()
    with pytest.raises(UserError, match="ending"):
        ask(working, [3, 4])


class Odd(Transcript):
    """Fails by the stop string that it was given."""

    def push(self, fresh: Any) -> Any:
        if self._stops == ("early",):
            raise RuntimeError("the tokenizer fell")
        return super().push(fresh)

    def end(self) -> Any:
        if self._stops == ("late",):
            raise IndexError("the tokenizer fell")
        return super().end()


@pytest.mark.parametrize("when", ["early", "late"])
def test_text_that_cannot_be_made_fails_its_request_alone(
    working: Worker, target: Target, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(module, "Transcript", Odd)
    honest = [ask(working, ids) for ids in HONEST]
    failed = ask(working, [3, 4, 5], stops=(when,)).end()
    assert isinstance(failed, RequestFailed) and failed.mine
    all_right(target, honest)


def test_a_request_that_the_batch_cannot_take_fails_alone(working: Worker, target: Target) -> None:
    honest = [ask(working, ids) for ids in HONEST]
    for ids in ([3, "x"], None, [1 << 70], [3] * 500):
        assert isinstance(ask(working, ids).end(), RequestFailed)  # type: ignore[arg-type]
    all_right(target, honest)


def test_a_client_that_cannot_be_message_costs_nobody_anything(
    working: Worker, target: Target
) -> None:
    def deaf(event: Event) -> None:
        raise RuntimeError("its loop has ended")

    honest = [ask(working, ids) for ids in HONEST]
    working.submit(CompletionRequest([3, 4, 5], 40, Sampling(), "ngram", 0), deaf)
    all_right(target, honest)
    assert isinstance(ask(working, [3, 4, 5]).end(), Ended)


class Poisoned(NGram):
    """Fails with a batch that holds a certain prompt."""

    def __init__(self, moment: str):
        super().__init__()
        self.moment, self.ill = moment, False

    def reset(self, rows: int, max_len: int) -> None:
        self.ill = False
        super().reset(rows, max_len)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.ill |= any(POISON in prompt.tolist() for prompt in prompts)
        self.fail("read")
        super().begin(prompts, sampling)

    def propose(self, *args: Any) -> Any:
        self.fail("draft")
        return super().propose(*args)

    def fail(self, moment: str) -> None:
        if self.ill and moment == self.moment:
            raise (
                UserError("row 3: no distribution")
                if moment == "draft"
                else RuntimeError("seeded defect")
            )


@pytest.mark.parametrize("moment", ["read", "draft"])
def test_a_request_whose_drafter_fails_goes_on_without_a_draft(
    target: Target, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """And its neighbours know nothing of it."""
    monkeypatch.setattr(module, "resolve_drafter", lambda *args: Poisoned(moment))
    worker = Worker(target, ["ngram"], WorkerLimits(8, 128, 2, 32), "traversal")
    worker.start()
    try:
        honest = [ask(worker, ids) for ids in HONEST]
        for _ in range(6):  # more often than a batch may break with nobody at fault
            end = ask(worker, [POISON, 4, 5]).end()
            assert isinstance(end, Ended), end
            assert end.text == text_alone(target, [POISON, 4, 5])
        all_right(target, honest)
    finally:
        worker.close()


def test_a_request_that_the_target_cannot_do_fails_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = LiveBatch._score

    def failing(self: LiveBatch, *args: Any) -> Any:
        if any(POISON in row.request.prompt for row in self.rows):
            raise RuntimeError("seeded defect")
        return score(self, *args)

    monkeypatch.setattr(LiveBatch, "_score", failing)
    worker = Worker(target, ["ngram"], WorkerLimits(8, 128, 2, 32), "traversal")
    worker.start()
    try:
        honest = [ask(worker, ids) for ids in HONEST]
        for drafter in ("ngram", "ngram"):
            failed = ask(worker, [POISON, 4, 5], drafter=drafter).end()
            assert isinstance(failed, RequestFailed) and failed.mine
        all_right(target, honest)
    finally:
        worker.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_a_draft_that_is_not_finite_ends_nobody(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: float,
    sampling: Sampling,
) -> None:
    """A head whose logits are, as soon as a certain token is read, in a batch of three."""
    draft = load_target(TargetConfig(kind="tiny", layers=1, context=256), "float32", "cpu")

    class Wild(DraftModel):
        def logits(self, state: Tensor) -> Tensor:
            found = super().logits(state)
            return torch.full_like(found, value) if self.ill else found

        def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
            self.ill = any(POISON in prompt.tolist() for prompt in prompts)
            super().begin(prompts, sampling)

    monkeypatch.setattr(module, "resolve_drafter", lambda *args: Wild(draft, 3))
    broken: list[Any] = []
    monkeypatch.setattr(Worker, "_break", lambda *args: broken.append(args))
    worker = Worker(target, ["ngram"], WorkerLimits(8, 128, 2, 32), "traversal")
    worker.start()
    try:
        some = [ask(worker, ids, sampling=sampling) for ids in [*HONEST, [POISON, 4, 5]]]
        assert all(isinstance(one.end(), Ended) for one in some) and not broken
    finally:
        worker.close()
    said = capsys.readouterr().err
    assert ("hold NaN or infinity and were left out" in said) == (not sampling.greedy)


def test_a_batch_that_breaks_with_nobody_at_fault_ends(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crowded(NGram):
        """Fails wherever two rows are."""

        def propose(self, budget: Tensor, *args: Any) -> Any:
            if len(budget) > 1:
                raise RuntimeError("seeded defect")
            return super().propose(budget, *args)

    monkeypatch.setattr(module, "resolve_drafter", lambda *args: Crowded())
    worker = Worker(target, ["ngram"], WorkerLimits(8, 128, 2, 32), "traversal")
    hold = _held(worker, monkeypatch)
    worker.start()
    try:
        message = [ask(worker, ids) for ids in HONEST]
        hold()
        assert all(isinstance(one.end(), RequestFailed) for one in message)
        end = ask(worker, HONEST[0]).end()
        assert isinstance(end, Ended) and end.text == text_alone(target, HONEST[0])
    finally:
        worker.close()


def _held(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Nothing is placed until the function that this gives is called."""
    place = worker._place
    monkeypatch.setattr(worker, "_place", lambda: None)
    return lambda: monkeypatch.setattr(worker, "_place", place)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_an_answer_goes_on_in_another_batch(target: Target, sampling: Sampling) -> None:
    """`resume`: the same tokens where they are certain, drawn ones with numbers of their own."""
    whole = generate(target, NGram(), [Request(HONEST[0], 30, id=5)], sampling).generations[0]
    got: list[int] = []
    batch = LiveBatch(target, NGram(), sampling, LiveLimits(2, 64))
    seat = batch.join(Request(HONEST[0], 30, id=5), lambda fresh: got.extend(fresh.tokens))
    for _ in range(4):
        batch.step()
    before = list(got)
    batch = LiveBatch(target, NGram(), sampling, LiveLimits(2, 64))
    seat = batch.resume(seat)
    other = batch.join(Request(HONEST[1], 30, id=6), lambda fresh: None)
    ended = []
    while batch.busy:
        ended += batch.step()
    assert {s.number for s in ended} == {seat.number, other.number}
    assert got == seat.generation.token_ids and len(got) == 30
    assert before and got[: len(before)] == whole.token_ids[: len(before)]
    assert (got == whole.token_ids) == (sampling == Sampling())
