"""Questions to a server, without one and without a clock: waits, order, windows, counts, and
what is synced when.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.decode.models.tiny import byte_tokenizer
from outrider.scripts.data import run
from outrider.scripts.data import server as openai_server
from outrider.scripts.data.from_server import AHEAD, Regenerator
from outrider.scripts.data.ledger import Ledger
from outrider.scripts.data.questions import Questions
from outrider.scripts.data.server import (
    Again,
    AnswerRefused,
    GivenUp,
    OpenAIServer,
    ServerAnswer,
    read_answer,
)
from outrider.scripts.synthesize import SynthesizeConfig

pause = asyncio.sleep  # the real one

# one request
# -----------------------------------------------------------------------------


class Scripted(OpenAIServer):
    """Every request meets the next trouble of its text, then succeeds. seen: (second, text) of
    each try.
    """

    def __init__(
        self, troubles: dict[str, list[Exception]], clock: SimpleNamespace, **keys: Any
    ) -> None:
        super().__init__(
            "http://h/v1", "", timeout=1000.0, backoff=1.0, connections=4, **{"retries": 6, **keys}
        )
        self.script, self.clock, self.seen, self._heard = troubles, clock, list[Any](), clock.now
        self.waits: list[float] = []
        self.on_trouble = lambda reason, wait: self.waits.append(wait)

    async def _once(self, method: str, path: str, body: Any) -> Any:
        self.seen.append((self.clock.now, body))
        if self.script.get(body):
            raise self.script[body].pop(0)
        return {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that moves when somebody sleeps, after everybody else had a turn; every wait is
    drawn at its longest.
    """
    clock = SimpleNamespace(now=100.0)

    async def sleep(seconds: float) -> None:
        until = clock.now + seconds
        for _ in range(9):
            await pause(0)
        clock.now = max(clock.now, until)

    monkeypatch.setattr(
        openai_server, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time)
    )
    monkeypatch.setattr(openai_server, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(openai_server, "random", SimpleNamespace(uniform=lambda low, high: high))
    return clock


def test_waits_double_up_to_a_limit_and_the_server_may_ask_for_more(clock: SimpleNamespace) -> None:
    server = Scripted({"a": [Again("status 500")] * 8}, clock, retries=8)
    assert asyncio.run(server.chat("a")).text == "yes"  # type: ignore[arg-type]
    assert server.waits == [2, 4, 8, 16, 32, 60, 60, 60]
    assert clock.now == 100 + sum(server.waits)
    server = Scripted({"a": [Again("status 503", 90.0), Again("status 503", 0.5)]}, clock)
    asyncio.run(server.chat("a"))  # type: ignore[arg-type]
    assert server.waits == [90, 4], "the longer one of both"
    server = Scripted({"a": [Again("status 500")] * 3}, clock, retries=2)
    with pytest.raises(GivenUp, match="status 500, 3 tries"):
        asyncio.run(server.chat("a"))  # type: ignore[arg-type]


def test_a_rate_limit_pauses_every_request_and_uses_up_no_try(clock: SimpleNamespace) -> None:
    server = Scripted({"a": [Again("status 429", 50.0, limited=True)] * 4}, clock, retries=0)
    began: list[Any] = []

    def summary(reason: str, wait: float) -> None:
        if not began:  # another question comes while the first one waits
            began.append(asyncio.get_running_loop().create_task(server.chat("b")))  # type: ignore[arg-type]

    async def both() -> None:
        server.on_trouble = summary
        await server.chat("a")  # type: ignore[arg-type]
        await began[0]

    asyncio.run(both())
    assert [at for at, text in server.seen if text == "a"] == [100, 150, 200, 250, 300]
    assert [at for at, text in server.seen if text == "b"][0] >= 150


def test_what_each_status_means() -> None:
    server = OpenAIServer("http://h/v1", "", 1.0, 0, 0.0, 1)

    def meaning(status: int, path: str = "/chat/completions", **headers: str) -> Exception:
        with pytest.raises((Again, AnswerRefused, UserError)) as found:
            server._judged(
                status, {k.replace("_", "-"): v for k, v in headers.items()}, b"no", path
            )
        return found.value

    for status in (408, 409, 425, 429, 500, 502, 503, 504, 520, 529, 599):
        error = meaning(status, retry_after="7")
        assert isinstance(error, Again) and error.wait == 7 and error.limited == (status == 429), (
            status
        )
    assert all(isinstance(meaning(status), AnswerRefused) for status in (400, 405, 413, 422))
    assert all(isinstance(meaning(status), UserError) for status in (301, 307, 401, 403, 404))
    assert isinstance(meaning(404, "/models"), AnswerRefused), "some servers have no list"


def test_forms_of_answers() -> None:
    def read(
        reason: Any = "stop",
        content: Any = " yes ",
        message: Any = (),
        choice: Any = (),
        **more: Any,
    ) -> ServerAnswer:
        found = {
            "message": {"content": content, **dict(message)},
            "finish_reason": reason,
            **dict(choice),
        }
        return read_answer({"choices": [found], **more})

    assert read() == ServerAnswer(" yes ", True, -1, None)
    assert not read("length").finished and not read(None).finished, "unknown is not finished"
    assert read(usage={"completion_tokens": 5}).tokens == 5
    assert read(usage={"completion_tokens": "5"}).tokens == -1
    assert read(choice={"token_ids": [1, 2]}).token_ids == [1, 2]
    assert read(choice={"token_ids": [1, 2.5]}).token_ids is None
    for error, keys in (
        (AnswerRefused, {"reason": "content_filter"}),
        (AnswerRefused, {"message": {"tool_calls": [{}]}}),
        (AnswerRefused, {"content": " \n"}),
        (AnswerRefused, {"content": None}),
        (Again, {"reason": "abort"}),
        (Again, {"content": ["yes"]}),
    ):
        with pytest.raises(error):
            read(**keys)


# many questions
# -----------------------------------------------------------------------------


class Fake:
    """A server in this process. reply: text of the question -> text of the answer; may raise,
    or wait.
    """

    def __init__(self, reply: Callable[[str], Awaitable[str]]) -> None:
        self.reply, self.bodies = reply, list[dict[str, Any]]()

    async def chat(self, body: dict[str, Any]) -> ServerAnswer:
        self.bodies.append(body)
        return ServerAnswer(await self.reply(body["messages"][-1]["content"]), True, -1, None)

    async def alive(self) -> bool:
        return True


def failing(
    *numbers: int, error: type[Exception] = AnswerRefused
) -> Callable[[str], Awaitable[str]]:
    async def reply(text: str) -> str:
        if int(text) in numbers:
            raise error(f"no answer to {text}")
        return f"answer {text}"

    return reply


def write(folder: Path, lines: list[bytes | int]) -> None:
    """The file of questions; a number is a question that names itself."""
    (folder / "asked.jsonl").write_bytes(
        b"".join(b'{"prompt": "%d"}\n' % x if isinstance(x, int) else x + b"\n" for x in lines)
    )


def ask(
    folder: Path,
    reply: Callable[[str], Awaitable[str]],
    total: int = 0,
    share: float = 1.0,
    concurrency: int = 1,
    seed: int = 0,
) -> tuple[Fake, Ledger]:
    """Ask the first `total` questions of the file in `folder`, or go on."""
    server, questions, ledger = (
        Fake(reply),
        Questions(folder / "asked.jsonl"),
        Ledger(folder / "a.jsonl", {}),
    )
    ledger.open()
    cfg = SynthesizeConfig(out="x", seed=seed, max_failed=share, concurrency=concurrency)
    work = Regenerator(
        cfg,
        questions,
        ledger,
        total or len(questions),
        byte_tokenizer(260),
        server=server,  # type: ignore[arg-type]
    )
    asyncio.run(work.run())
    return server, ledger


def requested(folder: Path) -> list[int]:
    """The questions whose rows are on file; every row holds its own answer."""
    rows = [json.loads(line)["messages"] for line in (folder / "a.jsonl").read_text().splitlines()]
    assert all(row[1]["content"] == f"answer {row[0]['content']}" for row in rows)
    return [int(row[0]["content"]) for row in rows]


def test_answers_that_overtake_wait_in_a_window(tmp_path: Path) -> None:
    write(tmp_path, [*range(50)])
    begun: list[int] = []

    async def reply(text: str) -> str:
        begun.append(int(text))
        if text == "0":  # the last one to be answered of all that may be asked before it is
            before = -1
            while before != len(begun):
                before = len(begun)
                for _ in range(50):
                    await pause(0)
            assert max(begun) == 2 * AHEAD - 1
        return f"answer {text}"

    ask(tmp_path, reply, concurrency=2)
    assert requested(tmp_path) == [*range(50)]


def test_every_request_has_a_seed_of_its_own_that_the_run_decides(tmp_path: Path) -> None:
    write(tmp_path, [7, 7, 7])
    seeds = []
    for seed in (0, 0, 1):
        for name in ("a.jsonl", "a.jsonl.meta.json"):
            (tmp_path / name).unlink(missing_ok=True)
        seeds.append([body["seed"] for body in ask(tmp_path, failing(), seed=seed)[0].bodies])
    assert seeds[0] == seeds[1] and len({*seeds[0], *seeds[2]}) == 6


def test_malformed_lines_count_and_do_not_shift_the_others(tmp_path: Path) -> None:
    write(tmp_path, [0, b"{", 1, 2, b"", 3, 4, b"[]", 5, 6, 7])
    with pytest.raises(
        UserError, match=r"asked.jsonl:6: no answer to 3; 3 of 10 questions .*max_failed=0.29"
    ):
        ask(tmp_path, failing(3), share=0.29)
    _, ledger = ask(tmp_path, failing(3), share=0.3)
    assert requested(tmp_path) == [0, 1, 2, 4, 5, 6, 7] and ledger.failed == [[6, "no answer to 3"]]


# on disk
# -----------------------------------------------------------------------------


def test_rows_are_on_disk_before_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def syncing(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        events.append(("sync", "its stage" if name.startswith(".tmp-a.jsonl.meta.json") else name))
        fsync(handle)

    def renaming(a: Any, b: Any) -> None:
        events.append(("rename", Path(b).name))
        replace(a, b)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", renaming)
    ledger = Ledger(tmp_path / "a.jsonl", {})
    ledger.open()
    ledger.append([{"messages": []}], 1)
    record = [("sync", "its stage"), ("rename", "a.jsonl.meta.json")]
    assert events == [*record, ("sync", "a.jsonl"), *record]


def test_other_questions_or_another_tokenizer_are_other_settings(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text("{}\n")
    cfg = SynthesizeConfig(out="x", prompts=str(own), backend="openai")
    found = []
    for numbers, vocab in (([1, 2], 260), ([1, 3], 260), ([1, 2], 270)):
        write(tmp_path, [*numbers])
        questions = Questions(tmp_path / "asked.jsonl")
        found.append(run._settings(cfg, questions, byte_tokenizer(vocab), "tiny"))
    assert found[0] != found[1] and found[0] != found[2]
    assert run._settings(cfg, questions, byte_tokenizer(270), "big") != found[2]
