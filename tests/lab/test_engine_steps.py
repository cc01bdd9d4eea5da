"""What a cycle of llama.cpp costs by draft tokens: told apart in a streamed answer, summed to
break-even lengths, measured without a head of anybody's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from outrider.scripts.extra.llamacpp import process, server
from outrider.scripts.lab.serving import shared, steps
from outrider.scripts.lab.serving.steps import Event
from outrider.scripts.serving import costs
from tests.helpers.commands import code_of

SHAPE = {"layers": 8, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 260}
STEP, DRAFTED, CHECKED = 10.0, 1.0, {1: 10.0, 2: 25.0, 3: 20.0}  # ms: of K + 1 tokens


def test_a_cycle_ends_where_the_next_draft_begins() -> None:
    events = [
        Event(1, 0, 0.0),
        Event(2, 3, 40.0),  # nothing accepted
        Event(3, 6, 78.0),  # one accepted: two tokens of one cycle
        Event(4, 6, 80.0),
        Event(5, 9, 120.0),
        Event(6, 11, 150.0),  # at the end of the answer fewer are drafted
    ]
    assert steps.cycles(events, 3) == [40.0, 40.0, 40.0]
    plain = [Event(1, 0, 0.0), Event(2, 0, 10.0), Event(4, 0, 35.0), Event(5, 0, 45.0)]
    assert steps.cycles(plain, 0) == [10.0, 10.0]  # two tokens in one event are not a step
    assert steps.cycles([], 2) == []


def test_drafting_is_read_from_the_log() -> None:
    line = (
        "statistics draft-eagle3: #calls(b,g,a) = {0} {1} {1}, #gen drafts = {1}, #acc drafts = 0, "
        "#gen tokens = {2:6d}, #acc tokens = 0, #mean acc len = 1.00, #acc rate/pos = (0.000), "
        "dur(b,g,a) = 0.002, {3:.3f}, 0.010 ms\n"
    )
    log = line.format(1, 10, 30, 15.0) + "other\n" + line.format(2, 20, 60, 90.0) + "end"
    assert steps.drafted(log) == pytest.approx(1.5)
    assert steps.drafted("no such line") == 0.0


class Page(BaseHTTPRequestHandler):
    """llama.cpp as `job` says: a cycle of K draft tokens takes CHECKED[K + 1] + K ms."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        depth, limit = self.server.depth, body["n_predict"]  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        ms, drafts = 0.0, 0
        for number in range(1, limit + 1):
            said = {"predicted_n": number, "predicted_ms": ms, "draft_n": drafts}
            self.wfile.write(b"data: " + json.dumps({"timings": said}).encode() + b"\n\n")
            now = min(depth, limit - number - 1)
            ms += (CHECKED[now + 1] if now else STEP) + now * DRAFTED
            drafts += now

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Every server that is asked for; a page answers in its place."""
    started: list[Any] = []

    @contextmanager
    def running(
        python: Path, settings: server.LlamaServerSettings, *_: object
    ) -> Iterator[process.Running]:
        started.append((python, settings))
        page = HTTPServer(("127.0.0.1", 0), Page)
        page.depth = settings.draft_tokens  # type: ignore[attr-defined]
        Thread(target=page.serve_forever, args=(0.01,), daemon=True).start()
        log = tmp_path / "log"
        log.write_text("#gen tokens =     10, x dur(b,g,a) = 0.1, 10.0, 0.1 ms\n")
        yield process.Running(f"http://127.0.0.1:{page.server_port}", "9", log, "AVX2 = 1")
        page.shutdown()
        page.server_close()

    monkeypatch.setattr(server, "running", running)
    return started


def run(tmp_path: Path, *more: str) -> int:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "go"}\n')
    keys = ["target=tiny", *(f"target.{k}={v}" for k, v in SHAPE.items()), f"prompts={prompts}"]
    keys += [f"work={tmp_path / 'work'}", f"out={tmp_path / 'out.json'}", "max_new_tokens=12"]
    return code_of(steps.main, *keys, "weights=[bfloat16]", "draft_tokens=[1,2]", *more)


def test_break_even_lengths_without_a_trained_head(
    tmp_path: Path, fake: list[Any], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    real = shared.environment
    there = {".venv-llamacpp/bin/python": Path("wheel")}
    monkeypatch.setattr(shared, "environment", lambda *a: there.get(a[0]) or real("absent", a[1]))
    assert run(tmp_path, "rounds=2") == shared.SKIPPED  # no build for this CPU
    said = capsys.readouterr()
    assert "not there: llamacpp_native (engine: absent is not there; `make .venv-ll" in said.err
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["settings"]["builds"] == {"llamacpp": "AVX2 = 1"}
    assert report["settings"]["trained"] is False and report["missing"]
    plain, one, two = report["cases"]
    assert (plain["draft_tokens"], plain["break_even"]["median"]) == (0, 1.0)
    assert one["cycle_ms"] == {"median": 26.0, "low": 26.0, "high": 26.0}
    assert one["break_even"]["median"] == 2.6 and one["verify_in_steps"]["median"] == 2.5
    assert two["break_even"]["median"] == 2.2 and two["draft_ms"]["median"] == 2.0
    assert "| llama.cpp | bfloat16 | 10.0 | never: 2.60 (26.0 ms) | 2.20 (22.0 ms) |" in said.out
    assert "| 2 tokens | 3 tokens |\n" in said.out and "| 10.0 | 2.50 | 2.00 |" in said.out
    known = costs.load(tmp_path / "work/costs-llamacpp-bfloat16.json").curve()
    assert [known(1, k) for k in range(3)] == pytest.approx([10.0, 26.0, 22.0])
    assert len(fake) == 6 and all(python == Path("wheel") for python, _ in fake)
    assert not any(how.exact for _, how in fake)
    assert run(tmp_path, "rounds=2") == shared.SKIPPED and len(fake) == 6  # kept
    assert run(tmp_path, "rounds=3") == shared.SKIPPED and len(fake) == 9  # gone on from


def test_a_build_that_is_not_there_is_said(tmp_path: Path, fake: list[Any], capsys) -> None:
    keys = ("engine=nowhere/python",)
    assert run(tmp_path, *keys) == 2
    assert "nowhere/python is not there; `make" in capsys.readouterr().err
    assert run(tmp_path, "engine=README.md", "drafters=[a,b]") == 2
    assert "drafters: 2 are named" in capsys.readouterr().err
    assert run(tmp_path, "engine=README.md", "drafters=[nowhere]") == shared.SKIPPED
    assert "not there: nowhere" in capsys.readouterr().err and not fake


def test_an_answer_too_short_to_time(tmp_path: Path, fake: list[Any], capsys) -> None:
    assert run(tmp_path, "engine=README.md", "max_new_tokens=1") == 2
    assert "max_new_tokens: no whole cycle was timed" in capsys.readouterr().err
