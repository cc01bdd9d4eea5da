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
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.jsonl import read_lines
from outrider.decode.models.load import TargetConfig
from outrider.scripts.common.files import ROOT
from outrider.scripts.data import ledger
from outrider.scripts.data import server as openai_server
from outrider.scripts.data.from_server import Regenerator
from outrider.scripts.data.questions import turns_of
from outrider.scripts.synthesize import SynthesizeConfig, synthesize
from outrider.train.data.rows import ChatRow, raw_row
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
    keys: dict[str, Any] = {
        "prompts": str(folder / "asked.jsonl"),
        "concurrency": 8,
        "timeout": 120.0,
        "backoff": 0.02,
    }
    return SynthesizeConfig(
        out=str(folder / "a.jsonl"),
        target=TargetConfig(kind="tiny", vocab=260),
        backend="openai",
        base_url=url,
        **{**keys, **changes},
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
    with serving(folder, gather=8) as url:
        synthesize(config(folder, url))
        with urllib.request.urlopen(url.removesuffix("/v1") + "/peak") as reply:
            assert int(reply.read()) == 8, "as many at a time as asked for"
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
    read = [raw_row("data", *line) for line in read_lines(tmp_path / "data.jsonl")]
    assert all(isinstance(row, ChatRow) for row in read), "training reads them"


def test_a_misbehaving_server_leaves_no_trace_in_the_file(
    tmp_path: Path, calm: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every fault on a first and on a second request, some rows with a chain of them."""
    requested(tmp_path)
    faults = {f"question {i}.0": [fault] for i, fault in enumerate(FAULTS)}
    faults |= {
        f"question {20 + i}.{(20 + i) % 3}": [fault, "500"] for i, fault in enumerate(FAULTS)
    }
    faults["question 39.0"] = ["reset", "garbage", "truncated", "500", "cut", "no-http"]
    with serving(tmp_path, faults=faults) as url:
        synthesize(config(tmp_path, url, timeout=1.0, concurrency=16, retries=40))
    assert (tmp_path / "a.jsonl").read_bytes() == calm
    said = capfd.readouterr().err
    assert "40 conversations" in said and "tried again after" in said
    assert "100.0% of the answers" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.jsonl",
        "a.jsonl.meta.json",
        "asked.jsonl",
        "schedule.json",
    ]


def stop_after(monkeypatch: pytest.MonkeyPatch, rows: int, number: int) -> None:
    real, seen = Regenerator._ask, []

    async def counted(self: Regenerator, n: int) -> Any:
        found = await real(self, n)
        seen.append(n)
        if len(seen) == rows:
            os.kill(os.getpid(), number)
        return found

    monkeypatch.setattr(Regenerator, "_ask", counted)


def test_interrupted_run_continues_to_the_same_file(
    tmp_path: Path, calm: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested(tmp_path)
    path = tmp_path / "a.jsonl"
    overtaken = {"question 3.0": ["slow"]}
    with serving(tmp_path, faults=overtaken) as url:
        with monkeypatch.context() as patch:
            stop_after(patch, 17, signal.SIGTERM)
            with pytest.raises(Interrupted, match="the same command continues") as stop:
                synthesize(config(tmp_path, url, timeout=30.0))
        assert stop.value.code == 75
        left = path.read_bytes() if path.exists() else b""
        assert calm.startswith(left) and len(left.splitlines()) <= 3
    with serving(tmp_path) as url:  # another port: the address may change
        synthesize(config(tmp_path, url, num_conversations=20))
        assert path.read_bytes() == b"".join(calm.splitlines(keepends=True)[:20])
        synthesize(config(tmp_path, url))
        assert path.read_bytes() == calm
        synthesize(config(tmp_path, url))  # nothing to do
        with pytest.raises(UserError, match="num_conversations: .* holds 40, 3 asked"):
            synthesize(config(tmp_path, url, num_conversations=3))
        with pytest.raises(UserError, match="seed 0, now 1; max_new_tokens 4096, now 9"):
            synthesize(config(tmp_path, url, seed=1, max_new_tokens=9))
    assert path.read_bytes() == calm


def test_killed_between_file_and_record(
    tmp_path: Path, calm: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested(tmp_path)
    real, written = ledger.write_json, []

    def dying(path: Path, value: Any) -> None:
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device", str(path))
        real(path, value)

    monkeypatch.setattr(ledger, "write_json", dying)
    monkeypatch.setattr("outrider.scripts.data.from_server.COMMIT_SECONDS", 0.02)
    with serving(tmp_path, delay=0.02) as url:
        with pytest.raises(OSError, match="No space"):
            synthesize(config(tmp_path, url))
        monkeypatch.setattr(ledger, "write_json", real)
        path = tmp_path / "a.jsonl"
        assert calm.startswith(path.read_bytes())
        with path.open("ab") as file:
            file.write(b'{"messages": [{"ro')  # and a line that a kill cut short
        synthesize(config(tmp_path, url))
    assert path.read_bytes() == calm
    path.write_bytes(calm.replace(b"horse", b"mouse", 1))
    with pytest.raises(UserError, match="was changed since"), serving(tmp_path) as url:
        synthesize(config(tmp_path, url))


@pytest.mark.parametrize(
    "schedule, changes, message",
    [
        ({}, {"model": "big"}, "model: .* does not serve 'big'; it serves tiny"),
        (
            {"models": "500"},
            {"retries": 1},
            "base_url: nothing usable at .* 2 tries.*start the server",
        ),
        ({"models": "307"}, {}, "base_url: .* redirects to http://127.0.0.1:1/elsewhere"),
        ({"key": KEY}, {}, "api_key_env: .* refuses the key .401"),
        (
            {"always": "500"},
            {"retries": 1},
            "8 questions in a row without an answer.*asked.jsonl:.*500.*goes on",
        ),
        (
            {"always": "drip"},
            {"retries": 0, "timeout": 0.3},
            "in a row .*no whole answer within timeout=0.3 s",
        ),
        (
            {"always": "429"},
            {"timeout": 1.0, "backoff": 0.2},
            "in a row .*429.*and nothing else for",
        ),
        (
            {"always": "endless"},
            {"num_conversations": 1, "retries": 0, "max_failed": 1.0, "timeout": 20.0},
            "endless",
        ),
    ],
)
def test_a_server_that_cannot_serve_is_message_in_one_line(
    tmp_path: Path, schedule: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    requested(tmp_path)
    with serving(tmp_path, **schedule) as url, pytest.raises(UserError, match=message) as error:
        synthesize(config(tmp_path, url, **{"max_failed": 0.5, **changes}))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    with serving(tmp_path) as url:  # nothing of it counts: the next run asks all of them again
        synthesize(config(tmp_path, url, num_conversations=changes.get("num_conversations", 12)))
    rows = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(rows) == changes.get("num_conversations", 12)


def test_no_server_at_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    requested(tmp_path, 2)
    with pytest.raises(
        UserError, match="base_url: nothing usable at http://127.0.0.1:9/v1 .no connection.*start"
    ):
        synthesize(config(tmp_path, "http://127.0.0.1:9/v1"))
    assert "the next try" not in capfd.readouterr().err, "nobody waits for what was never there"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["asked.jsonl"]


def test_a_server_that_dies_in_the_middle(tmp_path: Path, calm: bytes) -> None:
    requested(tmp_path)
    for after, message in ((70, "and what follows it"), (30, "questions in a row")):
        for name in ("a.jsonl", "a.jsonl.meta.json"):
            (tmp_path / name).unlink(missing_ok=True)
        with serving(tmp_path, dies_after=after) as url:
            with pytest.raises(UserError, match=message):
                synthesize(config(tmp_path, url, retries=1, max_failed=1.0, concurrency=4))
        left = (tmp_path / "a.jsonl").read_bytes()
        assert 0 < len(left.splitlines()) < 40 and calm.startswith(left)
    with serving(tmp_path) as url:
        synthesize(config(tmp_path, url))
    assert (tmp_path / "a.jsonl").read_bytes() == calm


def test_questions_without_an_answer_are_named_and_left_out(tmp_path: Path, calm: bytes) -> None:
    requested(tmp_path)
    kinds = [["400"], ["413"], ["422"], ["tool-call"], ["no-text"], ["control"], ["500"] * 3]
    chosen = dict(zip((2, 5, 9, 14, 20, 21, 30), kinds, strict=True))
    faults = {f"question {i}.0": fault for i, fault in chosen.items()}
    with serving(tmp_path, faults=faults) as url:
        with pytest.raises(
            UserError, match=r"jsonl:\d+: .*5 of 40 questions have no answer, above max_failed=0.1"
        ):
            synthesize(config(tmp_path, url, retries=2, max_failed=0.1))
    for name in ("a.jsonl", "a.jsonl.meta.json"):
        (tmp_path / name).unlink(missing_ok=True)
    with serving(tmp_path, faults=faults) as url:
        synthesize(config(tmp_path, url, retries=2, max_failed=0.2))
    want = [line for i, line in enumerate(calm.splitlines()) if i not in chosen]
    assert (tmp_path / "a.jsonl").read_bytes().splitlines() == want
    record = json.loads((tmp_path / "a.jsonl.meta.json").read_text())
    assert [line for line, _ in record["failed"]] == [i + 1 for i in chosen]
    reasons = ["status 400", "status 413", "status 422"]
    reasons += ["tool call", "empty", "control token", "500, no"]
    assert all(a in b for a, (_, b) in zip(reasons, record["failed"], strict=True)), record


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
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    requested(tmp_path, 6)
    with serving(tmp_path) as url:
        synthesize(config(tmp_path, url, extra_body={"return_token_ids": True}))
        assert "100.0% of the answers have the server's tokens" in capfd.readouterr().err
        cfg = config(tmp_path, url)
        cfg = replace(cfg, out=str(tmp_path / "b.jsonl"))
        real = openai_server.read_answer

        def shorter(reply: Any) -> Any:
            reply["usage"]["completion_tokens"] //= 4
            return real(reply)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(openai_server, "read_answer", shorter)
            synthesize(cfg)
    said = capfd.readouterr().err
    assert "0.0% of the answers" in said and "the server's model has another tokenizer" in said


ROWS = {
    b'{"prompt": "a"}': ["a"],
    b'{"turns": ["a", "b"]}': ["a", "b"],
    b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}': ["a"],
    b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}': [
        "s",
        "a",
    ],
    b"{": "is not JSON",
    b"[]": "not a JSON object",
    b'{"prompt": ""}': "prompt holds an empty turn",
    b'{"messages": [{"role": "tool", "content": "x"}]}': "tool turns",
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": '
    b'"s"}]}': "system turn may only",
}


def test_forms_of_questions(tmp_path: Path) -> None:
    for line, want in ROWS.items():
        if isinstance(want, list):
            assert [t["content"] for t in turns_of(line)] == want
        else:
            with pytest.raises(ValueError, match=want):
                turns_of(line)
    (tmp_path / "asked.jsonl").write_bytes(b"\n".join(ROWS))
    with pytest.raises(
        UserError, match=r"asked.jsonl:5: is not JSON.*; 5 of 9 questions are malformed"
    ):
        synthesize(config(tmp_path, "http://127.0.0.1:9/v1"))
    (tmp_path / "asked.jsonl").write_bytes(b"{}\n")
    with pytest.raises(UserError, match="holds no question"):
        synthesize(config(tmp_path, "http://127.0.0.1:9/v1"))
    with pytest.raises(UserError, match="prompts: cannot read"):
        synthesize(config(tmp_path, "http://127.0.0.1:9/v1", prompts=str(tmp_path / "none")))
