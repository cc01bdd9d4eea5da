"""certify url=... quick=true against servers that answer badly, by mistake or on purpose: one line
and an exit code, in the time that was given, and nothing passes that was not judged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import table_server
from tests.helpers.table_server import LIMIT, Twist
from tests.scripts.test_quick_server import WORDS, certify

KINDS = tuple(table_server.OWNERS)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in WORDS))
    return path


def answers(change: Callable[[list[int]], list[int]]) -> Twist:
    """The tokens of every answer, changed."""

    def twist(who: Any, body: dict[str, Any] | None, value: Any) -> Any:
        if body is None or "tokenize" in who.path:
            return value
        for holder, name in (
            (value, "tokens"),
            (value, "output_ids"),
            (choice(value), "token_ids"),
        ):
            if name in holder and "return_logprob" not in body:
                holder[name] = change(holder[name])
        return value

    return twist


def choice(value: Any) -> dict[str, Any]:
    return value["choices"][0] if "choices" in value else {}


def scores(change: Callable[[dict[str, float]], dict[str, float]]) -> Twist:
    """The likeliest tokens of every place where a text is scored, {id: log-probability}, changed."""

    def twist(who: Any, body: dict[str, Any] | None, value: Any) -> Any:
        if body is None:
            return value
        if "completion_probabilities" in value:
            (row,) = value["completion_probabilities"]
            found = change({str(r["id"]): r["logprob"] for r in row["top_logprobs"]})
            row["top_logprobs"] = [{"id": int(t), "logprob": v} for t, v in found.items()]
        if "input_top_logprobs" in value.get("meta_info", {}):
            about = value["meta_info"]
            changed = [
                row
                and [[v, int(t), None] for t, v in change({str(t): v for v, t, _ in row}).items()]
                for row in about["input_top_logprobs"]
            ]
            about["input_top_logprobs"] = changed
            own = about["input_token_logprobs"]
            about["input_token_logprobs"] = [
                [v if v is None else change({str(t): v}).get(str(t), v), t, None] for v, t, _ in own
            ]
        one = choice(value)
        if "prompt_logprobs" in one:
            one["prompt_logprobs"] = [
                row
                and {
                    t: {"logprob": v}
                    for t, v in change({t: r["logprob"] for t, r in row.items()}).items()
                }
                for row in one["prompt_logprobs"]
            ]
        if "logprobs" in one and body["max_tokens"] == 1:
            given = one["logprobs"]
            named = [
                {t.removeprefix("token_id:"): v for t, v in r.items()}
                for r in given["top_logprobs"]
            ]
            given["top_logprobs"] = [
                {f"token_id:{t}": v for t, v in change(r).items()} for r in named
            ]
        return value

    return twist


def run(
    kind: str, twist: Twist, prompts: Path, out: Path, capsys: Any, *keys: str, **how: Any
) -> tuple[int, dict[str, Any], str]:
    """Exit code, quick.json, and the one line that says what came of it."""
    with table_server.spoken(kind, twist=twist, **how) as url:
        code, paper = certify(url, out, prompts, "retries=0", *keys)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    (line,) = (printed.out if paper else printed.err).strip().splitlines()
    return code, paper, line


def test_an_empty_body(prompts, tmp_path, capsys) -> None:
    twist = lambda who, body, value: value if body is None or "tokenize" in who.path else b""
    code, paper, line = run("sglang", twist, prompts, tmp_path, capsys)
    assert code == 2 and not paper and "no JSON" in line


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_no_token(kind: str, prompts, tmp_path, capsys) -> None:
    code, paper, line = run(kind, answers(lambda ids: []), prompts, tmp_path, capsys)
    assert code == 2 and not paper and "all came back empty" in line


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_that_are_none(
    kind: str, value: float, prompts, tmp_path, capsys
) -> None:
    """NaN, all impossible, infinitely probable, all certain."""
    twist = scores(lambda row: dict.fromkeys(row, value))
    code, paper, line = run(kind, twist, prompts, tmp_path, capsys)
    assert code == 2 and not paper and "log-probabilities that are none" in line


def test_log_probabilities_of_an_answer_that_are_none(prompts, tmp_path, capsys) -> None:
    """They are left aside, and every place is scored by itself."""

    def twist(who: Any, body: dict[str, Any] | None, value: Any) -> Any:
        if body and body.get("max_tokens", 1) > 1 and "logprobs" in choice(value):
            given = choice(value)["logprobs"]
            given["top_logprobs"] = [dict.fromkeys(row, math.nan) for row in given["top_logprobs"]]
        return value

    code, paper, _ = run("other", twist, prompts, tmp_path, capsys, "tokens=450")
    assert code == 0 and paper["judged"] > 400
    assert 0.5 < paper["temperature"][0]["likely"] < 2, "NaN would stand here"


def test_errors_after_ten_requests(prompts, tmp_path, capsys) -> None:
    count = [0]

    def twist(who: Any, body: dict[str, Any] | None, value: Any) -> Any:
        count[0] += 1
        if count[0] <= 10:
            return value
        return who._send({"error": "out of memory"}, 500)

    code, paper, line = run("vllm", twist, prompts, tmp_path, capsys)
    assert code == 2 and not paper and "500" in line and "server's log" in line


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_of_one_token(kind: str, prompts, tmp_path, capsys) -> None:
    """Nothing is left to chance, so nothing was tested."""
    seven = scores(lambda row: {"7": 0.0})
    only = answers(lambda ids: [7] * len(ids))

    def twist(who: Any, body: dict[str, Any] | None, value: Any) -> Any:
        value = only(who, body, seven(who, body, value))
        if body and "return_logprob" in body:
            about, ids = value["meta_info"], body["input_ids"]
            about["input_token_logprobs"] = [[0.0, token, None] for token in ids]
        if body and "logprobs" in choice(value):
            given = choice(value)["logprobs"]
            given["top_logprobs"] = [{"token_id:7": 0.0} for _ in given["top_logprobs"]]
        return value

    code, paper, line = run(kind, twist, prompts, tmp_path, capsys, "tokens=450")
    assert code == 3 and paper["verdict"] == "undecided" and "leave no choice" in line


def test_long_lists_of_log_probabilities(prompts, tmp_path, capsys) -> None:
    """600 tokens at every place where 20 were asked for."""
    more = {str(10_000 + i): -40.0 - i / 1000 for i in range(600)}
    twist = scores(lambda row: row | more)
    code, paper, _ = run("vllm", twist, prompts, tmp_path, capsys, "tokens=450")
    assert code == 0 and paper["seconds"] < 60


def test_an_endless_list_of_log_probabilities(prompts, tmp_path, capsys) -> None:
    more = b'{"choices": [{"prompt_logprobs": [' + b"0.0," * (1 << 22) + b"null]}]}"
    twist = lambda who, body, value: more if body and "prompt_logprobs" in body else value
    code, paper, line = run("vllm", twist, prompts, tmp_path, capsys)
    assert code == 2 and not paper and "endless" in line


@pytest.mark.parametrize("kind", KINDS)
def test_a_temperature_that_is_ignored(kind: str, prompts, tmp_path, capsys) -> None:
    hot = lambda rng, logs, heat, cut, *rest: table_server.sound(rng, logs, 1.6, cut, *rest)
    code, paper, line = run(
        kind, lambda who, body, value: value, prompts, tmp_path, capsys, "tokens=600", draw=hot
    )
    assert code == 1 and not paper["temperature_honoured"] and line.startswith("NOT as asked")


def hangs(where: Callable[[Any, dict[str, Any] | None], bool]) -> Twist:
    """A byte now and then, for 30 seconds."""

    def twist(who: Any, body: dict[str, Any] | None, value: Any) -> Any:
        if not where(who, body):
            return value
        who.send_response(200)
        who.send_header("Content-Length", "1000")
        who.end_headers()
        for _ in range(60):
            try:
                who.wfile.write(b" ")
                who.wfile.flush()
            except OSError:
                return None
            time.sleep(0.5)
        return None

    return twist


@pytest.mark.parametrize(
    "where, code, said",
    [
        (lambda who, body: who.path == "/v1/models", 2, "went by"),
        (lambda who, body: body is not None and "max_tokens" in body, 2, "went by"),
        (lambda who, body: body is not None and "prompt_logprobs" in body, 2, "went by"),
        (lambda who, body: who.path == "/metrics", 3, "undecided"),
    ],
    ids=["models", "answers", "scores", "metrics"],
)
def test_a_server_that_hangs(where, code: int, said: str, prompts, tmp_path, capsys) -> None:
    """No longer than it was given, and a moment to judge and to leave. Of the 10 seconds 4 are
    for the tests and 2 for the counters: 4 for the answers, also of a busy machine."""
    began = time.monotonic()
    keys = ("seconds=10", "tokens=64", "retries=2")
    found, _, line = run("vllm", hangs(where), prompts, tmp_path, capsys, *keys)
    assert found == code and said in line
    assert time.monotonic() - began < 18


def test_answers_longer_than_asked(prompts, tmp_path, capsys) -> None:
    code, paper, line = run("vllm", answers(lambda ids: ids * 40), prompts, tmp_path, capsys)
    assert code == 2 and not paper and f"asked {LIMIT} tokens" in line


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_that_are_none(kind: str, prompts, tmp_path, capsys) -> None:
    code, paper, line = run(
        kind, answers(lambda ids: [10**30, *ids[1:]]), prompts, tmp_path, capsys
    )
    assert code == 2 and not paper and "another form" in line


@pytest.mark.parametrize("token", [-1, 10**30])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_tokens_that_are_none(kind: str, token: int, prompts, tmp_path, capsys) -> None:
    twist = scores(lambda row: row | {str(token): -50.0})
    code, paper, line = run(kind, twist, prompts, tmp_path, capsys)
    assert code == 2 and not paper
    assert "token ids that are none" in line or "by text" in line
