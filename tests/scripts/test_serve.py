"""`outrider serve`: the official client understands it, its answers are the engine's own, whole and
streamed, alone and in a batch, and no request leaves a row behind."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import LEFT, Engine, Request, Row, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts import serve
from outrider.scripts.common.prompts import chat_ids
from tests.helpers.commands import code_of
from tests.helpers.own_server import MODEL, Running, serving

DRAFTERS = ["ngram", "none"]
QUESTION: Any = [{"role": "user", "content": "abc abc abc abc"}]


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
    assert running.quiet(), "a row was left behind"


def alone(target: Target, ids: list[int], limit: int, sampling: Sampling, seed: int = 0) -> Any:
    run = generate(target, NoDraft(), [Request(ids, limit, id=seed)], sampling)
    return run.generations[0]


def text_of(target: Target, tokens: list[int]) -> str:
    return str(target.tokenizer.decode(tokens, skip_special_tokens=True))


# -- the official client


def test_chat_is_the_engine_s_own_answer(client: openai.OpenAI, target: Target) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and model.drafters == DRAFTERS  # type: ignore[attr-defined]
    ids = chat_ids(target.tokenizer, QUESTION)
    own = alone(target, ids, 20, Sampling())
    for drafter in DRAFTERS:
        got = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=20,
            extra_body={"drafter": drafter, "return_token_ids": True},
        )
        choice: Any = got.choices[0]
        assert choice.message.content == text_of(target, own.token_ids)
        assert choice.token_ids == own.token_ids
        assert choice.finish_reason == ("stop" if own.finish == "eos" else "length")
        assert got.usage is not None and got.usage.prompt_tokens == len(ids)
        assert got.usage.completion_tokens == len(own.token_ids)
        said = got.speculation  # type: ignore[attr-defined]
        assert said["drafter"] == drafter and (said["drafted"] > 0) == (drafter == "ngram")
        assert said["accepted"] == sum(choice.drafted)


@pytest.mark.parametrize("stop", [None, "found"])
def test_a_stream_says_the_same(client: openai.OpenAI, target: Target, stop: str | None) -> None:
    keys: dict[str, Any] = {"model": MODEL, "prompt": "abc abc abc abc", "temperature": 0}
    keys |= {"max_tokens": 30, "extra_body": {"return_token_ids": True}}
    whole: Any = client.completions.create(**keys)
    if stop:  # of two letters, which several tokens may make
        text = whole.choices[0].text
        stop = next(text[i : i + 2] for i in range(8, 28) if text.find(text[i : i + 2]) == i)
        keys["stop"] = ["never there", stop]
        whole = client.completions.create(**keys)
        assert whole.choices[0].text == text[: text.find(stop)]
        assert whole.choices[0].finish_reason == "stop"
    parts: Any = list(client.completions.create(**keys, stream=True))
    choices = [choice for part in parts for choice in part.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [token for c in choices for token in c.token_ids] == whole.choices[0].token_ids
    assert [one for c in choices for one in c.drafted] == whole.choices[0].drafted
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert parts[-1].usage == whole.usage
    assert parts[-1].speculation["accepted"] == whole.speculation["accepted"]
    assert whole.usage.completion_tokens == len(whole.choices[0].token_ids)


def test_log_probabilities_are_those_of_the_target(client: openai.OpenAI, target: Target) -> None:
    prompt = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    got: Any = client.completions.create(
        model=MODEL,
        prompt=prompt,
        temperature=0.7,
        seed=5,
        max_tokens=20,
        logprobs=3,
        extra_body={"return_token_ids": True},
    ).choices[0]
    with torch.no_grad():
        logits = target.model(torch.tensor([[*prompt, *got.token_ids]])).logits[0].float()
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    assert len(got.logprobs.top_logprobs) == len(rows) > 5
    told = zip(got.token_ids, got.logprobs.token_logprobs, got.logprobs.top_logprobs, strict=True)
    for (token, value, top), row in zip(told, rows, strict=True):
        assert abs(value - float(row[token])) < 1e-3
        assert {*top} == {f"token_id:{best}" for best in row.topk(3).indices.tolist()}


def test_a_sampled_answer_is_the_same_alone_and_in_a_batch(
    running: Running, target: Target
) -> None:
    """Each drafter's: the draft takes part in the draws."""

    def body(seed: int, drafter: str) -> dict[str, Any]:
        keys = {"model": MODEL, "prompt": [3 + seed, 4, 5, 3 + seed, 4, 5], "max_tokens": 24}
        return keys | {
            "temperature": 0.9,
            "top_p": 0.9,
            "seed": seed,
            "drafter": drafter,
            "return_token_ids": True,
        }

    asked = [body(seed, drafter) for seed in range(6) for drafter in DRAFTERS]
    other = {**body(9, "ngram"), "temperature": 0.5}  # another setting waits for its lane

    async def together() -> list[Any]:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as web:
            posts = (web.post("/v1/completions", json=one) for one in [*asked, other])
            return [reply.json() for reply in await asyncio.gather(*posts)]

    found = asyncio.run(together())
    with httpx.Client(base_url=running.url, timeout=60) as web:
        for one, reply in zip([*asked, other], found, strict=True):
            again = web.post("/v1/completions", json=one).json()
            assert again["choices"][0]["token_ids"] == reply["choices"][0]["token_ids"]
    ids = [reply["choices"][0]["token_ids"] for reply in found]
    plain = alone(target, asked[3]["prompt"], 24, Sampling(0.9, top_p=0.9), 1)
    assert ids[3] == plain.token_ids and len({tuple(one) for one in ids}) > 6


# -- what is refused


MISTAKES: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "gpt-4"}, 404, "model"),
    ({"temperature": True}, 400, "temperature"),
    ({"max_tokens": 10**6}, 400, "max_tokens"),
    ({"seed": 1 << 70}, 400, "seed"),
    ({"drafter": "runs/x"}, 400, "choose among ngram, none"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, 400, "function name"),
    ({"messages": [{"role": "user", "content": "x", "name": "Ada"}]}, 400, "does not show name"),
    ({"messages": [{"role": "user", "content": "half \ud800"}]}, 400, "half"),
    ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "shorten"),
]
BROKEN = [
    b"",
    b"[" * 5000,
    b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    b'{"model": "tiny", "prompt": [1, 2, 99999]}',
    b'{"model": "tiny", "prompt": "a", "\\ud800": 1}',
    b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
]


def test_a_mistake_is_one_line(running: Running) -> None:
    head = {"content-type": "application/json"}

    def refused(path: str, body: bytes) -> tuple[int, str]:
        reply = httpx.post(f"{running.url}/v1/{path}", content=body, headers=head)
        said = reply.json()["error"]["message"]
        assert "\n" not in said and len(said) < 300
        return reply.status_code, said

    for keys, status, word in MISTAKES:
        body = json.dumps({"model": MODEL, "messages": QUESTION, **keys}).encode()
        code, said = refused("chat/completions", body)
        assert code == status and word in said, (keys, said)
    assert {refused("completions", body)[0] for body in BROKEN} == {400}


def test_other_ways_in(running: Running) -> None:
    with httpx.Client(base_url=running.url) as web:
        assert web.get("/health").status_code == 200
        assert web.get("/nowhere").status_code == 404
        form = web.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert form.status_code == 415
        assert web.get("/v1/models", headers={"host": "evil.example"}).status_code == 400
        assert "default-src 'none'" in web.get("/").text


# -- whatever happens, rows are freed


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(
    running: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 240, "stream": stream, "seed": 1}
    seats, leave = list[Row](), Engine.leave
    monkeypatch.setattr(Engine, "leave", lambda batch, s: (seats.append(s), leave(batch, s)))
    if stream:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as reply:
            next(reply.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json=body, timeout=0.05)
    assert running.quiet() and {seat.generation.finish for seat in seats} == {LEFT}


def test_more_than_there_are_rows_wait_their_turn(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 60, "temperature": 0}

    async def flood(url: str, count: int) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as web:
            posts = (web.post("/v1/completions", json=body) for _ in range(count))
            return list(await asyncio.gather(*posts))

    with serving(target, ["none"], rows=2) as server:
        replies = asyncio.run(flood(server.url, 7))
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
        monkeypatch.setattr(serve, "QUEUE", 0)
        (full,) = asyncio.run(flood(server.url, 1))
        assert full.status_code == 503 and "queue is full" in full.text and server.quiet()


def test_an_engine_that_fails_fails_its_requests_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("seeded defect")

    with serving(target, DRAFTERS) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            ask: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 5}
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "_score", broken)
                with pytest.raises(openai.InternalServerError, match="RuntimeError"):
                    client.completions.create(**ask)
                with pytest.raises(openai.APIError, match="RuntimeError"):
                    list(client.completions.create(**ask, temperature=0.5, stream=True))
            assert client.completions.create(**ask).choices[0].finish_reason
        assert server.quiet()


# -- the command, and who asks it


def test_a_taken_port_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code = code_of(serve.main, "target=tiny", f"port={other.getsockname()[1]}")
    assert code == 2 and "cannot be listened on" in capsys.readouterr().err
