"""`outrider serve`: the official client understands it, its answers are the engine's own, and no
request leaves a row behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.live import LiveBatch, LiveLimits
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts import serve
from outrider.scripts.common.prompts import chat_ids
from outrider.scripts.serve_http.requested import BadRequest, Service, wanted
from outrider.scripts.serve_http.transcript import Transcript
from outrider.scripts.serve_http.worker import WorkerLimits
from tests.helpers.own_server import MODEL, Running, quiet, serving

DRAFTERS = ["ngram", "none"]
QUESTION = [{"role": "user", "content": "abc abc abc abc"}]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(kind="tiny", context=512), "float32", "cpu")


@pytest.fixture(scope="module")
def running(target: Target) -> Iterator[Running]:
    with serving(target, DRAFTERS) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as one:
        yield one
    assert quiet(running.worker), "a row was left behind"


def alone(target: Target, ids: list[int], limit: int, sampling: Sampling, seed: int = 0) -> Any:
    run = generate(target, NoDraft(), [Request(ids, limit, id=seed)], sampling)
    return run.generations[0]


def text_of(target: Target, tokens: list[int]) -> str:
    return str(
        target.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )


# -- the batch


def test_rows_that_join_and_leave_keep_their_tokens(target: Target) -> None:
    ids = [[3 + i, 4, 5, 3 + i, 4, 5, 6] for i in range(7)]
    for sampling in (Sampling(), Sampling(0.9, top_p=0.9)):
        wanted_tokens = [
            generate(target, NGram(), [Request(p, 24, id=n)], sampling).generations[0].token_ids
            for n, p in enumerate(ids)
        ]
        batch = LiveBatch(target, NGram(), sampling, LiveLimits(3, 64))
        got: dict[int, list[int]] = {n: [] for n in range(len(ids))}
        seats = {}
        ended = []
        for step in range(200):
            if step % 3 == 0 and len(seats) < len(ids):
                n = len(seats)
                seats[n] = batch.join(
                    Request(ids[n], 24, id=n), lambda f, to=got[n]: to.extend(f.tokens)
                )
            if step == 7:
                batch.leave(seats[1])
            ended += batch.step()
            if len(seats) == len(ids) and not batch.busy:
                break
        assert sorted(s.number for s in ended) == list(range(len(ids))) and not batch.rows
        assert seats[1].generation.finish == "left"
        assert got[1] == wanted_tokens[1][: len(got[1])]
        assert [got[n] for n in got if n != 1] == [wanted_tokens[n] for n in got if n != 1]


def test_distributions_are_those_of_the_target_alone(target: Target) -> None:
    found: list[Any] = []
    ids = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    batch = LiveBatch(target, NGram(), Sampling(0.7), LiveLimits(2, 64))
    batch.join(Request(ids, 20, id=5), found.append, top=3)
    batch.join(Request(ids[:4], 20, id=6), lambda fresh: None)
    while batch.busy:
        batch.step()
    tokens = [t for fresh in found for t in fresh.tokens]
    distributions = [distribution for fresh in found for distribution in fresh.distributions]
    with torch.no_grad():
        logits = target.model(torch.tensor([[*ids, *tokens]])).logits[0].float()
    rows = logits.log_softmax(-1)[len(ids) - 1 : -1]
    assert len(distributions) == len(tokens) > 5
    for token, distribution, row in zip(tokens, distributions, rows, strict=True):
        assert abs(distribution.logprob - float(row[token])) < 1e-3
        best = row.topk(3)
        assert [t for t, _ in distribution.top] == best.indices.tolist()


def test_a_seat_that_is_refused_leaves_nothing(target: Target) -> None:
    batch = LiveBatch(target, NoDraft(), Sampling(), LiveLimits(1, 8))
    for prompt in ([], [3] * 8, [10**6]):
        with pytest.raises(UserError):
            batch.join(Request(prompt, 4), lambda fresh: None)
    assert not batch.busy and batch.step() == []


# -- the official client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_chat_is_the_engine_s_own_answer(client: openai.OpenAI, target: Target) -> None:
    ids = chat_ids(target.tokenizer, QUESTION)
    own = alone(target, ids, 20, Sampling())
    for drafter in DRAFTERS:
        got = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=20,
            extra_body={"drafter": drafter, "return_token_ids": True},
        )
        choice = got.choices[0]
        assert choice.message.content == text_of(target, own.token_ids)
        assert choice.token_ids == own.token_ids  # type: ignore[attr-defined]
        assert choice.finish_reason == ("stop" if own.finish == "eos" else "length")
        assert got.usage is not None and got.usage.prompt_tokens == len(ids)
        assert got.usage.completion_tokens == len(own.token_ids)
        said = got.speculation  # type: ignore[attr-defined]
        assert said["drafter"] == drafter and (said["drafted"] > 0) == (drafter == "ngram")
        assert said["accepted"] == sum(said["accepted_by_position"])


def test_a_stream_says_the_same(client: openai.OpenAI, target: Target) -> None:
    keys: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**keys, max_completion_tokens=24)
    usage, text, finish = None, "", None
    stream = client.chat.completions.create(
        **keys, max_completion_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason and usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_completions_with_stop_and_logprobs(
    client: openai.OpenAI, target: Target, stream: bool
) -> None:
    prompt = "abc abc abc abc"
    ids = list(target.tokenizer(prompt)["input_ids"])
    own = alone(target, ids, 30, Sampling())
    text = text_of(target, own.token_ids)
    stop = next(text[i : i + 2] for i in range(8, 28) if text.find(text[i : i + 2]) == i)
    got = client.completions.create(
        model=MODEL,
        prompt=prompt,
        temperature=0,
        max_tokens=30,
        stop=["never there", stop],
        logprobs=2,
        stream=stream,
    )
    parts = list(got) if stream else [got]
    said = "".join(c.text for part in parts for c in part.choices)  # type: ignore[union-attr]
    assert said == text[: text.find(stop)]
    last = parts[-1].choices[-1]  # type: ignore[union-attr]
    assert last.finish_reason == "stop"
    with torch.no_grad():
        logits = target.model(torch.tensor([[*ids, *own.token_ids]])).logits[0].float()
    rows = logits.log_softmax(-1)[len(ids) - 1 :]
    found = [p for part in parts for c in part.choices for p in c.logprobs.token_logprobs]  # type: ignore[union-attr]
    offsets = [p for part in parts for c in part.choices for p in c.logprobs.text_offset]  # type: ignore[union-attr]
    assert found and offsets == sorted(offsets) and max(offsets) <= len(said)
    for token, value, row in zip(own.token_ids, found, rows, strict=False):
        assert abs(value - float(row[token])) < 1e-3


def test_chat_logprobs(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
    )
    content = got.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and len(content) == got.usage.completion_tokens  # type: ignore[union-attr]
    for entry in content:
        assert entry.logprob <= 0 and entry.logprob == entry.top_logprobs[0].logprob  # greedy


def test_a_seed_gives_the_same_answer_and_another_another(
    client: openai.OpenAI, target: Target
) -> None:
    def ask(seed: int | None) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0.9,
            top_p=0.9,
            seed=seed,
            max_tokens=24,
            extra_body={"return_token_ids": True, "drafter": "none"},
        ).choices[0]

    first, again, other = ask(7), ask(7), ask(8)
    assert first.token_ids == again.token_ids != other.token_ids
    ids = chat_ids(target.tokenizer, QUESTION)
    assert first.token_ids == alone(target, ids, 24, Sampling(0.9, top_p=0.9), 7).token_ids
    assert ask(None).token_ids != ask(None).token_ids


@pytest.mark.parametrize(
    "keys, status, param, word",
    [
        ({"model": "gpt-4"}, 404, "model", "not served here"),
        ({"temperature": -1}, 400, "temperature", "outside [0,"),
        ({"temperature": 1e-40}, 400, "temperature", "must be 0"),
        ({"temperature": "hot"}, 400, "temperature", "is no number"),
        ({"temperature": True}, 400, "temperature", "is no number"),
        ({"top_p": 0}, 400, "top_p", "must lie in"),
        ({"top_p": 1.5}, 400, "top_p", "outside"),
        ({"max_tokens": 0}, 400, "max_tokens", "outside"),
        ({"max_tokens": 10**6}, 400, "max_tokens", "both together hold"),
        ({"max_tokens": 2.5}, 400, "max_tokens", "no whole number"),
        ({"seed": 1 << 70}, 400, "seed", "outside"),
        ({"stop": ["a"] * 5}, 400, "stop", "at most 4"),
        ({"stop": [""]}, 400, "stop", "empty"),
        ({"stop": "x" * 2000}, 400, "stop", "longer than"),
        ({"stop": 5}, 400, "stop", "text"),
        ({"n": 2}, 400, "n", "not supported"),
        ({"presence_penalty": 1.0}, 400, "presence_penalty", "not supported"),
        ({"logprobs": True, "top_logprobs": 99}, 400, "top_logprobs", "outside"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        ({"extra_body": {"temprature": 1}}, 400, "temprature", "did you mean temperature?"),
        ({"extra_body": {"drafter": "runs/x"}}, 400, "drafter", "choose among ngram, none"),
        ({"messages": []}, 400, "messages", "one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages", "role"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages", "give text"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "messages", "shorten"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream=true"),
    ],
)
def test_mistakes_are_openai_errors(
    client: openai.OpenAI, keys: dict[str, Any], status: int, param: str, word: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **keys})
    error = refused.value
    assert error.status_code == status and error.param == param
    assert word in error.message and "Traceback" not in error.message


@pytest.mark.parametrize(
    "body, status, word",
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 413, "larger"),
        (b"[" * 5000, 400, "body"),
        (b"[1]", 400, "one JSON object"),
        (b"\xff{}", 400, "UTF-8"),
        (b'{"model": "tiny", "model": "tiny"}', 400, "a key twice"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "is no number"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', 400, "is no number"),
        (b'{"model": "tiny", "prompt": ""}', 400, "empty"),
        (b'{"model": "tiny", "prompt": []}', 400, "prompt"),
        (b'{"model": "tiny", "prompt": [1, 2, 99999]}', 400, "outside"),
        (b'{"model": "tiny", "prompt": [true]}', 400, "prompt"),
        (b'{"model": "tiny", "prompt": ["a", "b"]}', 400, "prompt"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "half"),
        (b'{"model": "tiny", "prompt": "a", "x": 1}', 400, "no such key"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', 400, r"'\ud800': no such key"),
        (b'{"model": "tiny", "prompt": "a", "x\\n": 1}', 400, "no such key"),
        (b'{"model": "\\ud800"}', 404, "not served here"),
        (b'{"model": "tiny", "prompt": "a", "drafter": "\\udfff"}', 400, "drafter"),
        (b'{"model": "tiny", "prompt": "a", "stop": "\\udfff", "n": 2}', 400, "not supported"),
        (b'{"model": "tiny", "prompt": "a", "suffix": "\\ud800"}', 400, "not supported"),
        *(
            (b'{"model": "tiny", "prompt": "a", "%s": true}' % key, 400, key.decode())
            for key in (
                b"n",
                b"best_of",
                b"presence_penalty",
                b"frequency_penalty",
                b"max_tokens",
                b"seed",
                b"top_k",
                b"top_p",
                b"min_p",
                b"logprobs",
                b"repetition_penalty",
            )
        ),
        (b'{"model": "tiny", "prompt": "a", "presence_penalty": false}', 400, "presence_penalty"),
        (b'{"model": "tiny", "prompt": "a", "echo": 0}', 400, "echo"),
        (b'{"model": "tiny", "prompt": "a", "stream": 1}', 400, "stream"),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, ""),
    ],
)
def test_broken_bodies(running: Running, body: bytes, status: int, word: str) -> None:
    head = {"content-type": "application/json"}
    with httpx.Client(base_url=running.url) as web:
        reply = web.post("/v1/completions", content=body, headers=head)
    error = reply.json()["error"]
    assert reply.status_code == status and word in error["message"], error
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 500


def test_other_ways_in(running: Running) -> None:
    with httpx.Client(base_url=running.url) as web:
        assert web.get("/health").json() == {"status": "ok"}
        assert web.get("/nowhere").json()["error"]["message"] == "/nowhere: no such path"
        assert web.get("/nowhere/%ff%ed%a0%80").status_code == 404
        assert web.get("/v1/models/%ff%ed%a0%80").status_code == 404
        assert web.get("/v1/completions").status_code == 405
        notices = web.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert notices.status_code == 415
        assert web.get("/v1/models", headers={"host": "evil.example"}).status_code == 400
        page = web.get("/")
        assert page.status_code == 200 and "default-src 'none'" in str(page.headers)


def test_an_api_key_is_requested_for(target: Target) -> None:
    with serving(target, ["none"], key="secret-é") as server:
        with httpx.Client(base_url=server.url) as web:
            for given in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic secret"}):
                reply = web.get("/v1/models", headers=given)
                assert reply.status_code == 401
                assert reply.json()["error"]["code"] == "invalid_api_key"
            right = {b"authorization": "Bearer secret-é".encode("latin-1")}
            assert web.get("/v1/models", headers=right).status_code == 200
            assert web.get("/health").status_code == 200


@pytest.mark.parametrize("host", ["[", "[::1", "a b", "a:b:c", "x" * 5000, "é"])
def test_a_host_that_is_no_host(target: Target, host: str) -> None:
    """Where other machines connect by any name, the name is never taken apart."""
    with serving(target, ["none"], key="secret", local=False) as server:
        with httpx.Client(base_url=server.url) as web:
            for path in ("/nowhere", "/health/", "/v1/models"):
                reply = web.get(path, headers={b"host": host.encode()})
                assert reply.status_code in (307, 400, 401, 404), reply.text


# -- many at a time


def test_a_full_queue_says_when_to_come_back(target: Target) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 200, "temperature": 0}

    async def flood(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as web:
            posts = (web.post("/v1/completions", json=body) for _ in range(12))
            return list(await asyncio.gather(*posts))

    with serving(target, ["none"], WorkerLimits(1, 256, 1, 2)) as server:
        replies = asyncio.run(flood(server.url))
        assert quiet(server.worker)
    codes = [reply.status_code for reply in replies]
    assert set(codes) == {200, 429} and codes.count(200) >= 2
    full = next(reply for reply in replies if reply.status_code == 429)
    assert 1 <= int(full.headers["retry-after"]) <= 60
    assert full.json()["error"]["type"] == "rate_limit_error"
    assert (
        len(
            {
                reply.text.split('"text":')[1].split(",")[0]
                for reply in replies
                if reply.status_code == 200
            }
        )
        == 1
    )


def test_a_client_that_leaves_frees_its_row(running: Running) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 240, "stream": True}
    with httpx.Client(base_url=running.url) as web:
        with web.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
    begin = time.monotonic()
    assert quiet(running.worker) and time.monotonic() - begin < 50
    host, port = running.url.removeprefix("http://").split(":")
    for stream in (False, True):
        raw = json.dumps({**body, "max_tokens": 60, "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as mute:  # asks and never reads
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            mute.sendall(head.encode() + raw)
            time.sleep(0.2)
            assert quiet(running.worker), "its row ends while it is still connected"


def test_an_engine_that_fails_fails_its_requests_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("seeded defect")

    with serving(target, DRAFTERS) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            ask: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 5}
            with monkeypatch.context() as patch:
                patch.setattr(LiveBatch, "_score", broken)
                with pytest.raises(openai.InternalServerError, match="RuntimeError"):
                    client.completions.create(**ask)
                with pytest.raises(openai.APIError, match="RuntimeError"):
                    list(client.completions.create(**ask, temperature=0.5, stream=True))
            assert client.completions.create(**ask).choices[0].finish_reason
        assert quiet(server.worker)


def test_a_drafter_that_fails_costs_a_request_its_draft_alone(target: Target) -> None:
    class Broken(NoDraft):
        def propose(self, *args: Any) -> Any:
            raise RuntimeError("seeded defect")

    with serving(target, DRAFTERS) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            ask: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 12, "seed": 1}
            plain = client.completions.create(**ask, temperature=0, extra_body={"drafter": "none"})
            server.worker._idle["ngram"] = [Broken()]
            found = client.completions.create(**ask, temperature=0)
            assert found.choices[0].text == plain.choices[0].text
            assert found.speculation["drafted"] == 0  # type: ignore[attr-defined]
        assert quiet(server.worker)


def test_metrics_speak_vllm(running: Running, client: openai.OpenAI) -> None:
    from outrider.scripts.serving.counters import read_counters

    def page() -> str:
        return httpx.get(f"{running.url}/metrics").text

    before = read_counters(page()) or {"drafts": 0, "accepted_tokens": 0}
    got = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=24
    )  # type: ignore[arg-type]
    after = read_counters(page())
    assert after is not None and after["drafts"] > before["drafts"]
    said = got.speculation  # type: ignore[attr-defined]
    assert after["accepted_tokens"] - before["accepted_tokens"] == said["accepted"]
    for name in ("num_requests_running", "num_requests_waiting", "generation_tokens_total"):
        assert f'vllm:{name}{{model_name="{MODEL}"}}' in page()
    assert "vllm:time_to_first_token_seconds_bucket" in page()


# -- text


def test_a_transcript_never_shows_the_beginning_of_a_stop(target: Target) -> None:
    from outrider.decode.live import Fresh

    random.seed(3)
    for _ in range(300):
        text = "".join(random.choice("ab🙂é\n") for _ in range(random.randrange(1, 30)))
        stops = [
            "".join(random.choice("ab🙂") for _ in range(random.randrange(1, 4))) for _ in range(2)
        ]
        ids = list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = ids[: random.randrange(1, len(ids) + 1)]  # a character may be cut
        text = text_of(target, ids)
        transcript, shown, tokens = Transcript(target.tokenizer, stops), "", []
        left = list(ids)
        while left and not transcript.stopped:
            size = random.randrange(1, 5)
            part, left = left[:size], left[size:]
            said = transcript.push(Fresh(part, [False] * len(part), []))
            tokens += [s.token for s in said]
            shown += "".join(s.text for s in said)
            assert not any(stop in shown for stop in stops)
        said = transcript.end()
        tokens += [s.token for s in said]
        shown += "".join(s.text for s in said)
        assert tokens == ids[: len(tokens)] and (transcript.stopped or tokens == ids)
        cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
        assert shown == transcript.text == text[:cut]
        assert transcript.stopped == (cut < len(text))


def test_every_key_is_read(target: Target) -> None:
    service = Service(MODEL, ("ngram", "none"), 100, 32, target.vocab_size, target.tokenizer)
    body = {"model": MODEL, "prompt": [3, 4], "user": "me", "n": 1, "echo": False, "top_k": -1}
    found = wanted(
        json.dumps({**body, "seed": -3, "temperature": 0, "top_p": 0.3}).encode(), False, service
    )
    assert found.ask.seed == -3 and found.ask.sampling == Sampling() and found.ask.limit == 32
    with pytest.raises(BadRequest, match="messages"):
        wanted(b'{"model": "tiny"}', True, service)


# -- the command


def test_a_taken_port_is_message(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SystemExit) as end:
            serve.main(["target=tiny", f"port={other.getsockname()[1]}"])
    assert end.value.code == 2 and "cannot be listened on" in capsys.readouterr().err


def test_the_check_of_an_export_passes_against_it(running: Running, target: Target) -> None:
    from outrider.scripts.serving import contract
    from outrider.scripts.serving.asking import Address
    from outrider.scripts.serving.contract_check import checked

    prompts = [
        chat_ids(target.tokenizer, [{"role": "user", "content": f"{w} " * 4}])
        for w in ("ab", "cd", "xyz")
    ]
    drafter = NGram()
    made = contract.expected(target, drafter, prompts, drafter.max_depth, 24)
    found = checked(made, Address(running.url))
    assert found["equal"] == 3 and found["served"], found
    assert (
        found["acceptance"]["accepted"]["server"] == found["acceptance"]["accepted"]["expected"] > 0
    )
    made["prompts"][1]["tokens"][0] += 1
    assert not checked(made, Address(running.url))["served"]
