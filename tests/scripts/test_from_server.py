"""Answers from a server: a real process on loopback that misbehaves by schedule; the file must
not show it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.jsonl import read_lines
from outrider.decode.models.load import TargetConfig
from outrider.decode.models.tiny import byte_tokenizer
from outrider.scripts.common.files import ROOT
from outrider.scripts.data.config import SynthesizeConfig
from outrider.scripts.data.from_server import Regenerator
from outrider.scripts.data.questions import Questions
from outrider.scripts.data.run import synthesize
from outrider.scripts.data.server import read_answer
from outrider.train.data.rows import read_row
from tests.helpers.unruly_server import FAULTS

KEY = "sk-very-secret-0123456789"


@contextlib.contextmanager
def serving(folder: Path, **schedule: Any) -> Iterator[str]:
    """A server process; its base_url."""
    path = folder / "schedule.json"
    path.write_text(json.dumps({"model": "tiny", **schedule}))
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "unruly_server.py"), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def config(folder: Path, url: str, **changes: Any) -> SynthesizeConfig:
    keys: dict[str, Any] = {"prompts": str(folder / "asked.jsonl"), "concurrency": 8}
    keys["out"] = str(folder / "a.jsonl")
    return SynthesizeConfig(
        target=TargetConfig(kind="tiny", vocab=260),
        backend="openai",
        **{**keys, "base_url": url, "timeout": 120.0, "retries": 1, **changes},
    )


def requested(folder: Path, count: int = 40) -> list[list[str]]:
    """A file of conversations with one to three user turns; what is asked."""
    folder.mkdir(exist_ok=True)
    turns = [[f"question {i}.{t}" for t in range(1 + i % 3)] for i in range(count)]
    with (folder / "asked.jsonl").open("w") as file:
        for i, row in enumerate(turns):
            chat = [{"role": "system", "content": "be brief"}] if i % 5 == 0 else []
            for text in row:
                chat += [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": "what another model said"},
                ]
            file.write(json.dumps({"messages": chat}) + "\n")
    return turns


@pytest.fixture(autouse=True, scope="module")
def one_context() -> Iterator[None]:
    """To read the certificates of the system takes longer than such a run, which needs none of
    them.
    """
    made = ssl.create_default_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", lambda *_, **__: made)
        yield


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a server without faults."""
    folder = tmp_path_factory.mktemp("calm")
    requested(folder)
    with serving(folder, gather=8) as url:  # as many at a time as asked for
        synthesize(config(folder, url))
    return (folder / "a.jsonl").read_bytes()


def test_rows_are_the_questions_in_order_with_the_servers_answers(
    tmp_path: Path, calm: bytes
) -> None:
    rows = [json.loads(line) for line in calm.splitlines()]
    assert [
        [m["content"] for m in r["messages"] if m["role"] == "user"] for r in rows
    ] == requested(tmp_path)
    assert [r["messages"][0]["role"] == "system" for r in rows] == [i % 5 == 0 for i in range(40)]
    said = [m["content"] for r in rows for m in r["messages"] if m["role"] == "assistant"]
    assert len(said) == 79 and "what another model said" not in said and len(set(said)) == 79
    assert all(r["complete"] for r in rows)
    (tmp_path / "data.jsonl").write_bytes(calm)
    for number, line in read_lines(tmp_path / "data.jsonl"):
        assert read_row(line, f"data:{number}"), "training reads them"


def test_faults_that_pass_leave_no_trace_in_the_file(
    tmp_path: Path, calm: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every fault on a first and on a second request."""
    requested(tmp_path)
    faults = {f"question {i}.0": [fault] for i, fault in enumerate(FAULTS)}
    faults |= {f"question {20 + i}.{(20 + i) % 3}": [fault] for i, fault in enumerate(FAULTS)}
    with serving(tmp_path, faults=faults) as url:
        synthesize(config(tmp_path, url, timeout=1.0, concurrency=16, retries=6))
    assert (tmp_path / "a.jsonl").read_bytes() == calm
    said = capfd.readouterr().err
    assert "40 conversations" in said and "tried again after" in said
    assert "100.0% of the answers" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_stopped_asks_nothing_twice(
    tmp_path: Path, calm: bytes, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The answers that overtook another one are on file too."""
    from tests.helpers import faults as processes

    requested(tmp_path)
    path, real, seen = tmp_path / "a.jsonl", Regenerator._row, list[int]()

    async def counted(self: Regenerator, n: int) -> Any:
        if len(seen) == 17:
            os.kill(os.getpid(), number)
        seen.append(n)
        return await real(self, n)

    def stopped() -> None:
        monkeypatch.setattr(Regenerator, "_row", counted)
        synthesize(config(tmp_path, slow, timeout=30.0, concurrency=2))

    with serving(tmp_path, faults={"question 3.0": ["slow"]}) as slow:
        if number == signal.SIGKILL:
            assert processes.wait(processes.fork(stopped)) == -number
        else:
            with pytest.raises(Interrupted, match="same command again") as stop:
                stopped()
            assert stop.value.code == 75
    monkeypatch.undo()
    left = path.read_bytes().splitlines()
    assert {*left} < {*calm.splitlines()} and 12 <= len(left) < 20
    with serving(tmp_path) as url:  # another port: the address may change
        asked = list[int]()

        async def again(self: Regenerator, n: int) -> Any:
            asked.append(n)
            return await real(self, n)

        monkeypatch.setattr(Regenerator, "_row", again)
        synthesize(config(tmp_path, url))
        assert path.read_bytes() == calm and len(asked) == 40 - len(left)
        synthesize(config(tmp_path, url))  # nothing to do
        assert len(asked) == 40 - len(left)
        with pytest.raises(UserError, match="num_conversations: .* holds 40, 3 asked"):
            synthesize(config(tmp_path, url, num_conversations=3))
        with pytest.raises(UserError, match="seed 0, now 1; max_new_tokens 4096, now 9"):
            synthesize(config(tmp_path, url, seed=1, max_new_tokens=9))
    assert path.read_bytes() == calm


@pytest.mark.parametrize(
    "schedule, changes, message",
    [
        ({}, {"model": "big"}, "model: .* serves tiny and does not serve 'big'"),
        ({"models": "307"}, {}, "base_url: .* redirects to http://127.0.0.1:1/elsewhere"),
        ({}, {"base_url": "http://127.0.0.1:9/v1"}, "base_url: nothing usable at"),
        ({"always": "500"}, {}, "asked.jsonl:.*500.*above max_failed"),
        ({"always": "slow"}, {"timeout": 0.3}, r"no answer within 0\.3 s.*max_failed"),
    ],
)
def test_a_server_that_cannot_serve_is_told_in_one_line(
    tmp_path: Path, calm: bytes, schedule: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    requested(tmp_path)
    keys = {"retries": 0, **changes}
    with serving(tmp_path, **schedule) as url, pytest.raises(UserError, match=message) as error:
        synthesize(config(tmp_path, url, **keys))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    with serving(tmp_path) as url:  # no failure counts: the next run asks all of them again
        synthesize(config(tmp_path, url))
    assert (tmp_path / "a.jsonl").read_bytes() == calm


def test_questions_without_an_answer_are_named_and_left_out(
    tmp_path: Path, calm: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    requested(tmp_path)
    kinds = ["400", "tool-call", "no-text", "control", "garbage", "500"]
    chosen = dict(zip((2, 9, 14, 20, 21, 30), kinds, strict=True))
    faults = {f"question {i}.0": [fault] * 3 for i, fault in chosen.items()}
    with serving(tmp_path, faults=faults) as url:
        with pytest.raises(UserError, match=r"jsonl:\d+: .*2 of 40 .*above max_failed=0.04"):
            synthesize(config(tmp_path, url, max_failed=0.04, concurrency=1, retries=0))
        synthesize(config(tmp_path, url, max_failed=0.2, retries=0))
    want = [line for i, line in enumerate(calm.splitlines()) if i not in chosen]
    assert (tmp_path / "a.jsonl").read_bytes().splitlines() == want
    assert "6 questions without an answer, the first" in capfd.readouterr().err


def test_the_key_comes_from_the_environment_and_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    requested(tmp_path, 6)
    monkeypatch.setenv("MY_KEY", KEY)
    faults = {"question 1.0": ["500"], "question 2.0": ["400"]}  # their bodies repeat the key
    with serving(tmp_path, key=KEY, faults=faults) as url:
        synthesize(config(tmp_path, url, api_key_env="MY_KEY", max_failed=0.5))
        with pytest.raises(UserError, match="refuses the key") as error:
            monkeypatch.setenv("MY_KEY", KEY + "-old")
            synthesize(config(tmp_path, url, api_key_env="MY_KEY"))
    out = capfd.readouterr()
    shown = out.out + out.err + str(error.value) + (tmp_path / "a.jsonl.meta.json").read_text()
    assert KEY not in shown and "***" in shown and KEY not in (tmp_path / "a.jsonl").read_text()


def test_token_ids_of_the_server_are_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested(tmp_path, 6)
    with serving(tmp_path) as url:
        synthesize(config(tmp_path, url, extra_body={"return_token_ids": True}))
        assert "100.0% of the answers" in capfd.readouterr().err

        def shorter(reply: Any) -> Any:
            reply["usage"]["completion_tokens"] //= 4
            return read_answer(reply)

        monkeypatch.setattr("outrider.scripts.data.from_server.read_answer", shorter)
        (tmp_path / "b").mkdir()
        synthesize(config(tmp_path, url, out=str(tmp_path / "b" / "a.jsonl")))
    assert "another tokenizer" in capfd.readouterr().err


def test_rows_of_tokens_are_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested(tmp_path, 6)
    with serving(tmp_path) as url:
        synthesize(config(tmp_path, url, tokens=True))
        for row in map(json.loads, (tmp_path / "a.jsonl").open()):
            ids = [t for t, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on]
            said = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
            text = byte_tokenizer().decode(ids, skip_special_tokens=True)
            assert text == "".join(said) and row["loss_mask"][0] == 0

        def without(reply: Any) -> Any:
            return replace(read_answer(reply), token_ids=None)

        monkeypatch.setattr("outrider.scripts.data.from_server.read_answer", without)
        with pytest.raises(UserError, match="tokens: the server returns no token ids"):
            synthesize(config(tmp_path, url, out=str(tmp_path / "b.jsonl"), tokens=True))


def test_every_request_has_a_seed_of_its_own_that_the_run_decides(tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "the same"}\n' * 3)
    answers = []
    with serving(tmp_path) as url:
        for number, seed in enumerate((0, 0, 1)):
            out = tmp_path / f"{number}.jsonl"
            synthesize(config(tmp_path, url, out=str(out), seed=seed))
            answers.append([json.loads(x)["messages"][1]["content"] for x in out.open()])
    assert answers[0] == answers[1] and len({*answers[0], *answers[2]}) == 6


def test_rows_that_cannot_be_asked_are_named(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "b"}
    chats = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, answer],
        [{"role": "user", "content": "a"}, {"role": "tool", "content": "x"}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}],
    ]
    lines = [json.dumps({"messages": chat}) for chat in chats] + ["{"]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(lines))
    found = Questions(path)
    assert found.asked == [(1, (chats[0][:2], None))] and [n for n, _ in found.bad] == [2, 3, 4]
    for content, said in (
        ("\n".join(lines), r"asked.jsonl:2: holds tool turns.*; 3 of 4 questions are malformed"),
        ("{}\n", "holds no question"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=said):
            synthesize(config(tmp_path, "http://127.0.0.1:9/v1"))
