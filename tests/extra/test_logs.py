"""Logs of a served model as data: every form that is known, what is left out and why, masking
measured on planted secrets, the split by time, and what another model answered."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.jsonl import read_lines
from outrider.decode.models.load import TargetConfig, load_tokenizer
from outrider.scripts.extra.logs import LogOptions, LogsReport, ask, prepare
from outrider.scripts.extra.logs.forms import moment
from outrider.scripts.extra.masking.masker import Masker
from outrider.scripts.extra.masking.rules import iban, luhn, rules
from outrider.scripts.synthesis.config import SynthesizeConfig
from outrider.scripts.synthesize import synthesize
from outrider.train.texts.rows import ChatRow, raw_row

TINY = TargetConfig(kind="tiny")
RULES = rules()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


def chat(n: int, text: str = "") -> list[dict[str, str]]:
    return [{"role": "user", "content": text or f"What is number {n}?"}]


def reply(text: str = "It is a number.", end: str | None = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": end}
    return {"object": "chat.completion", "model": "tiny", "choices": [choice], **more}


def line(n: int, text: str = "", **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": chat(n, text),
        "response": reply(),
        "time": 1e9 + n,
        **more,
    }


def write(folder: Path, rows: list[Any], name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), "utf-8"
    )
    return path


def rows_of(report: LogsReport) -> list[dict[str, Any]]:
    paths = (report.train, report.later)
    return [json.loads(t) for p in paths for t in p.read_text("utf-8").splitlines()]


def prepared(folder: Path, rows: list[Any], tokenizer: Any, **options: Any) -> LogsReport:
    return prepare([write(folder, rows)], folder / "out", TINY, tokenizer, LogOptions(**options))


# -- forms


def streamed(text: str = "It is a number.") -> list[dict[str, Any]]:
    half = len(text) // 2
    parts = [{"role": "assistant"}, {"content": text[:half]}, {"content": text[half:]}, {}]
    return [
        {
            "object": "chat.completion.chunk",
            "model": "tiny",
            "choices": [{"index": 0, "delta": d, "finish_reason": None if d else "stop"}],
        }
        for d in parts
    ]


def events(chunks: list[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"


def request(n: int) -> dict[str, Any]:
    return {"model": "tiny", "messages": chat(n), "temperature": 0.7}


def requested(n: int, response: Any) -> dict[str, Any]:
    """A line with request and response."""
    return {"request": request(n), "response": response}


def native(n: int, tokenizer: Any) -> dict[str, Any]:
    prompt = tokenizer.apply_chat_template(chat(n), tokenize=False, add_generation_prompt=True)
    said = {"content": "It is a number.", "stop": True, "stop_type": "eos", "model": "tiny.gguf"}
    return {"request": {"prompt": prompt}, "response": {**said, "generation_settings": {}}}


def completion(n: int, tokenizer: Any) -> dict[str, Any]:
    prompt = tokenizer.apply_chat_template(chat(n), tokenize=False, add_generation_prompt=True)
    choice = {"index": 0, "text": "It is a number.", "finish_reason": "stop", "stop_reason": None}
    response = {"object": "text_completion", "model": "tiny", "choices": [choice]}
    return {"request": {"prompt": prompt, "model": "tiny"}, "response": response}


FORMS = {
    "request and response": lambda n, t: requested(n, reply()),
    "LiteLLM": lambda n, t: {
        "id": "c",
        "call_type": "acompletion",
        "stream": False,
        "startTime": 1e9 + n,
        "model": "tiny",
        "model_group": "tiny",
        "messages": chat(n),
        "response": reply(),
    },
    "LiteLLM's messages in an object": lambda n, t: {
        "model": "tiny",
        "messages": {"messages": chat(n)},
        "response": reply(),
    },
    "JSON within JSON": lambda n, t: {
        "msg": "request",
        "request": json.dumps(request(n)),
        "response": json.dumps(reply()),
    },
    "bodies within": lambda n, t: {
        "req": {"method": "POST", "body": request(n)},
        "res": {"status": 200, "body": reply()},
    },
    "batch in a line": lambda n, t: {
        "custom_id": f"r{n}",
        "body": request(n),
        "response": {"status_code": 200, "body": reply(), "request_id": "x"},
        "error": None,
    },
    "chunks": lambda n, t: requested(n, streamed()),
    "events": lambda n, t: requested(n, events(streamed())),
    "chunks as texts": lambda n, t: requested(n, [f"data: {json.dumps(c)}" for c in streamed()]),
    "completion": completion,
    "completion of token ids": lambda n, t: {
        **(made := completion(n, t)),
        "request": {"prompt": t(made["request"]["prompt"], add_special_tokens=False)["input_ids"]},
    },
    "llama.cpp's own": native,
    "parts of text": lambda n, t: {
        **line(n),
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": chat(n)[0]["content"]}]}
        ],
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, tmp_path: Path, tokenizer: Any) -> None:
    made = [FORMS[name](n, tokenizer) for n in range(5)]
    report = prepared(tmp_path, made, tokenizer)
    assert report.counts == {"usable": 5} and report.rows == {"train": 4, "later": 1}
    for n, row in enumerate(rows_of(report)):
        assert row["messages"] == [*chat(n), {"role": "assistant", "content": "It is a number."}]
        assert row["complete"] is True
    for path in (report.train, report.later):
        assert all(isinstance(raw_row("f", i, text), ChatRow) for i, text in read_lines(path))


def test_batch_of_two_files(tmp_path: Path, tokenizer: Any) -> None:
    requested = [{"custom_id": f"r{n}", "method": "POST", "body": request(n)} for n in range(6)]
    said = [
        {"id": "b", "custom_id": f"r{n}", "response": {"status_code": 200, "body": reply()}}
        for n in (4, 3, 2, 1, 0, 9)
    ]
    failed = {"custom_id": "r5", "response": {"status_code": 500, "body": {}}, "error": {"m": "x"}}
    paths = [
        write(tmp_path, requested, "in.jsonl"),
        write(tmp_path, [*said, failed], "out.jsonl"),
    ]
    report = prepare(paths, tmp_path / "o", TINY, tokenizer)
    assert report.counts["usable"] == 5
    assert report.named["a batch's answer whose request is in none of the files"] == ["out.jsonl:6"]
    assert report.named["the request failed"] == ["out.jsonl:7"]
    assert report.named["the answer is missing"] == ["in.jsonl:6"]


def test_a_custom_id_that_stands_twice_joins_nothing(tmp_path: Path, tokenizer: Any) -> None:
    requested = [{"custom_id": i, "body": request(n)} for n, i in enumerate("abca")]
    said = [{"custom_id": i, "response": {"body": reply()}} for i in "abc"]
    paths = [write(tmp_path, requested, "in.jsonl"), write(tmp_path, said, "out.jsonl")]
    report = prepare(paths, tmp_path / "o", TINY, tokenizer)
    assert report.counts == {"usable": 2, "its custom_id stands twice": 3}


def test_tool_calls_and_reasoning_of_a_stream(tmp_path: Path, tokenizer: Any) -> None:
    def part(**delta: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def call(**function: str) -> dict[str, Any]:
        return part(tool_calls=[{"index": 0, "id": "c1", "function": function}])

    chunks = [
        part(reasoning_content="I look "),
        part(reasoning_content="it up."),
        call(name="look", arguments='{"wo'),
        call(arguments='rd": "x"}'),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    made = [requested(n, chunks) for n in range(2)]
    row = rows_of(prepared(tmp_path, made, tokenizer))[0]
    answer = row["messages"][-1]
    assert answer["reasoning_content"] == "I look it up." and answer["content"] is None
    assert answer["tool_calls"][0]["function"] == {"name": "look", "arguments": {"word": "x"}}
    assert row["complete"]


@pytest.mark.parametrize(
    ("change", "complete"),
    [
        ({"response": reply(end="length")}, False),
        ({"response": reply(end=None)}, False),  # a stream that was broken off
        ({"stop": ["\n"]}, False),  # who ended it is not known
        ({"response": reply(), "stop": []}, True),
    ],
)
def test_whether_an_answer_is_whole(
    change: dict[str, Any], complete: bool, tmp_path: Path, tokenizer: Any
) -> None:
    report = prepared(tmp_path, [line(n) | change for n in range(2)], tokenizer)
    assert [row["complete"] for row in rows_of(report)] == [complete] * 2


@pytest.mark.parametrize(("reason", "complete"), [(None, True), ("\n\n", False), (2, True)])
def test_vllm_says_what_ended_an_answer(
    reason: Any, complete: bool, tmp_path: Path, tokenizer: Any
) -> None:
    made = []
    for n in range(2):
        one = line(n, stop=["\n\n"])
        one["response"]["choices"][0]["stop_reason"] = reason
        made.append(one)
    assert rows_of(prepared(tmp_path, made, tokenizer))[0]["complete"] is complete


# -- what is left out

SECRET = "sk-proj-" + "aB3" * 14
MISSING, OTHER = "the answer is missing", "another API's form"
CHUNK = "a chunk of its stream is of another form"


def turns(*messages: dict[str, Any]) -> dict[str, Any]:
    """A line that asks with these messages."""
    return {**line(89), "messages": [*messages]}


BAD: dict[str, tuple[Any, str]] = {
    "broken JSON": (f'{{"key": "{SECRET}', "is not JSON"),
    "not an object": ("[1, 2]", "is not an object {..}"),
    "a number": ("17", "is not an object {..}"),
    "a key twice": ('{"a": 1, "a": 2}', "has a key twice"),
    "NUL": ('{"a": "\\u0000", "b": "' + "\0" + '"}', "holds a NUL byte"),
    "nested deeply": ("[" * 100_000, "is nested too deeply"),
    "no answer": ({"model": "tiny", "messages": chat(90)}, MISSING),
    "no choices": (requested(91, reply() | {"choices": []}), MISSING),
    "choices by name": (
        requested(80, {"content": "x", "stop": True, "choices": {"a": 1}}),
        MISSING,
    ),
    "messages by name": ({"prompt": ["x"], "messages": {"a": 1}, "response": {}}, MISSING),
    "empty answer": (requested(92, reply("  ")), "the answer is empty"),
    "filtered": (requested(93, reply(end="content_filter")), "the answer was filtered"),
    "failed": (requested(94, {"error": {"message": SECRET}}), "the request failed"),
    "failed by status": (
        {"messages": chat(95), "status": "failure", "response": {}},
        "the request failed",
    ),
    "a chat row": (
        {"messages": [*chat(96), {"role": "assistant", "content": "x"}]},
        "a chat row, no log: it has no response (train on it with data.path)",
    ),
    "Anthropic": (
        requested(97, {"type": "message", "content": [{"type": "text", "text": "x"}]}),
        f"{OTHER} (Anthropic's Messages)",
    ),
    "Responses": (
        {"request": {"input": "x"}, "response": {"object": "response", "output": []}},
        f"{OTHER} (OpenAI's Responses)",
    ),
    "Gemini": ({"request": {"contents": []}, "response": {"candidates": []}}, f"{OTHER} (Gemini)"),
    "Ollama": (requested(98, {"message": {"content": "x"}, "done": True}), f"{OTHER} (Ollama)"),
    "embeddings": (
        {"request": {"input": "x"}, "response": {"data": [], "embeddings": []}},
        "no text was asked for (embeddings)",
    ),
    "something else": ({"level": "info"}, f"{OTHER} (no messages or prompt, no choices)"),
    "an unknown role": (turns({"role": SECRET, "content": "x"}), "a turn: unknown role .."),
    "a role with quotes of both kinds": (
        turns({"role": f"it's \"{SECRET}", "content": "x"}),
        "a turn: unknown role ..",
    ),
    "an image": (
        turns({"role": "user", "content": [{"type": "image_url"}]}),
        "a turn: content holds a part that is .., not text",
    ),
    "two users": (turns(*chat(1), *chat(2)), "a turn: role .. where .. is due"),
    "no user": (turns({"role": "system", "content": "x"}), "a turn: role .. where .. is due"),
    "half an emoji": (
        json.dumps(turns({"role": "user", "content": "\ud83d"})),
        "a turn: holds half of a surrogate pair",
    ),
    "redacted": (
        turns({"role": "user", "content": "redacted-by-litellm"}),
        "the log keeps no text (redacted)",
    ),
    "a broken stream": (requested(85, "data: {broken\n\n"), "a chunk of its stream is not JSON"),
    "a stream of bare texts": (requested(83, [{"choices": [{"delta": "Hello"}]}]), CHUNK),
    "a stream whose calls are no list": (
        requested(82, [{"choices": [{"delta": {"tool_calls": 5}}]}]),
        CHUNK,
    ),
    "a stream without choices": (
        requested(81, [{"choices": [{"delta": {}}]}, {"choices": True}]),
        "the answer is empty",
    ),
    "several prompts": (
        {"request": {"prompt": ["a", "b"]}, "response": reply()},
        "several prompts in one request, or none",
    ),
    "plain completion": (
        {"request": {"prompt": "Once upon", "model": "tiny"}, "response": reply()},
        "said without the chat template",
    ),
    "another model": (
        line(84) | {"model": "gpt-4", "response": reply(model="gpt-4")},
        "answered by another model",
    ),
    "asked before": (line(0, "  What is   number 0? "), "duplicates"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_left_out_is_named(name: str, tmp_path: Path, tokenizer: Any) -> None:
    bad, reason = BAD[name]
    report = prepared(tmp_path, [line(0), line(1), bad], tokenizer)
    assert report.counts == {"usable": 2, reason: 1}
    assert report.named == {reason: ["log.jsonl:3"]}
    said = (tmp_path / "out" / "logs.json").read_text() + "\n".join(report.lines())
    assert SECRET not in said and "log.jsonl:3" in said


def mutated(value: Any, r: random.Random, share: float) -> Any:
    """A value some of whose parts are something else."""
    junk = (None, True, 0, -1.5, "", "x", "data: 1", "{", "[]", [], [None], {}, {"role": 1}, [[{}]])
    if r.random() < share:
        return r.choice(junk)
    if isinstance(value, dict):
        return {k: mutated(v, r, share) for k, v in value.items() if r.random() > share / 2}
    if isinstance(value, list):
        return [mutated(v, r, share) for v in value]
    return value


def test_no_line_breaks_the_reader(tmp_path: Path, tokenizer: Any) -> None:
    r = random.Random(0)
    forms = [make(n, tokenizer) for n in range(40) for make in FORMS.values()]
    made = [mutated(form, r, share) for form in forms for share in (0.05, 0.2)]
    report = prepared(tmp_path, [line(1000), line(1001), *made], tokenizer, mask=False)
    batch = sum(isinstance(m, dict) and "custom_id" in m for m in made)
    # Every line is counted; the two halves of a batch's exchange are one.
    assert len(made) + 2 - batch / 2 <= sum(report.counts.values()) <= len(made) + 2
    assert report.counts["usable"] > 2


def test_all_of_them_at_once(tmp_path: Path, tokenizer: Any) -> None:
    bad = [b for b, _ in BAD.values()] * 30
    report = prepared(tmp_path, [line(0), line(1), *bad], tokenizer)
    assert report.counts["usable"] == 2 and sum(report.counts.values()) == 2 + len(bad)
    assert all(len(places) <= 20 for places in report.named.values())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "logs: .* holds nothing usable: it is empty; give"),
        ([{"a": 1}], "logs: .* holds nothing usable: 1 another API's form .*first log.jsonl:1"),
        ([line(1)], "logs: .* holds 1 usable line, two are needed"),
        ([line(1), line(1)], "logs: .* holds 1 usable line, two are needed: 1 duplicates"),
        (["[", json.dumps(line(1)), "]"], "logs: .* is one JSON array"),
        (
            [line(n) | {"model": "m", "response": reply(model="m")} for n in range(3)],
            "served: .* no answer is known to be the target's, 3 are of 'm' .* served=m",
        ),
    ],
)
def test_a_log_with_nothing_usable(
    rows: list[Any], message: str, tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prepared(tmp_path, rows, tokenizer)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_files_that_are_none(tmp_path: Path, tokenizer: Any) -> None:
    for path, why in ((tmp_path / "none.jsonl", "cannot read"), (tmp_path, ".* holds no")):
        with pytest.raises(UserError, match=f"^logs: {why}"):
            prepare([path], tmp_path / "out", TINY, tokenizer)
    with pytest.raises(UserError, match="^logs: empty"):
        prepare([], tmp_path / "out", TINY, tokenizer)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="^out: .* is a file"):
        prepare([write(tmp_path, [line(0), line(1)])], tmp_path / "file", TINY, tokenizer)


def test_names_of_the_served_model(tmp_path: Path, tokenizer: Any) -> None:
    """`openai/NAME`, a path, another case: still the same; and several names at once."""
    names = ["openai/Qwen-X", "/models/qwen-x.gguf", "alias", "other"]
    made = [line(n) | {"model": m, "response": reply(model=m)} for n, m in enumerate(names)]
    report = prepared(tmp_path, made, tokenizer, served=("Org/qwen-x", "ALIAS"))
    assert report.counts == {"usable": 3, "answered by another model": 1}
    assert report.models == dict.fromkeys(names, 1)


# -- what comes twice, and time


def test_a_chat_that_goes_on_is_one_row(tmp_path: Path, tokenizer: Any) -> None:
    first = chat(1)
    said = {"role": "assistant", "content": "It is a number."}
    second = [*first, said, *chat(2)]
    third = [*second, said, *chat(3)]
    made = [line(n) | {"messages": m} for n, m in enumerate((first, second, third))]
    made += [line(9), line(10) | {"messages": [*chat(9), said | {"content": "no"}, *chat(4)]}]
    report = prepared(tmp_path, made, tokenizer)
    assert report.counts == {"usable": 3, "held by a later request of the same chat": 2}
    longest = [row for row in rows_of(report) if len(row["messages"]) == 6]
    assert len(longest) == 1 and "2 rows hold earlier answers" in report.notes[0]


def test_duplicates_keep_the_first_answer(tmp_path: Path, tokenizer: Any) -> None:
    made = [
        line(0),
        line(1),
        line(1) | {"response": reply("another")},
        line(1, "what IS number 1?"),
    ]
    report = prepared(tmp_path, made, tokenizer)
    assert report.counts == {"usable": 3, "duplicates": 1}  # case counts: code is told by it
    assert "another" not in report.train.read_text() + report.later.read_text()


def test_split_by_time_not_by_place(tmp_path: Path, tokenizer: Any) -> None:
    order = list(range(20))
    random.Random(0).shuffle(order)
    report = prepared(tmp_path, [line(n) for n in order], tokenizer, later=0.25)
    requested = [r["messages"][0]["content"] for r in rows_of(report)]
    assert requested == [f"What is number {n}?" for n in range(20)]
    assert report.rows == {"train": 15, "later": 5}
    assert report.split_by == "time"
    assert report.split_at == "2001-09-09T01:46:55+00:00" == (rows_of(report)[15]["time"])


def test_equal_times_fall_on_one_side(tmp_path: Path, tokenizer: Any) -> None:
    made = [line(n) | {"time": 1e9 + (0 if n < 3 else 60)} for n in range(10)]
    report = prepared(tmp_path, made, tokenizer, later=0.2)
    assert report.rows == {"train": 3, "later": 7}


@pytest.mark.parametrize("times", [{}, {"time": 1e9}, {"time": "yesterday"}, {"time": True}])
def test_without_time_the_order_decides(
    times: dict[str, Any], tmp_path: Path, tokenizer: Any
) -> None:
    made = [{k: v for k, v in line(n).items() if k != "time"} | times for n in range(5)]
    report = prepared(tmp_path, made, tokenizer)
    assert report.split_by == "order" and report.split_at == "" and report.notes
    assert report.rows == {"train": 4, "later": 1}
    assert rows_of(report)[4]["messages"][0]["content"] == "What is number 4?"


def test_rows_without_a_time_follow_the_one_before(tmp_path: Path, tokenizer: Any) -> None:
    made = [line(n) for n in (3, 4, 1, 2)]
    del made[1]["time"]
    report = prepared(tmp_path, made, tokenizer)
    requested = [r["messages"][0]["content"][-2] for r in rows_of(report)]
    assert requested == ["1", "2", "3", "4"] and "1 rows without a time" in report.notes[0]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1_700_000_000, 1.7e9),
        (1_700_000_000_000, 1.7e9),
        (1_700_000_000_000_000, 1.7e9),
        ("1700000000.5", 1_700_000_000.5),
        ("2023-11-14T22:13:20Z", 1.7e9),
        ("2023-11-14 22:13:20", 1.7e9),
        ("2023-11-15T00:13:20+02:00", 1.7e9),
        ("", None),
        ("nan", None),
        (float("inf"), None),
        (-5, None),
        (0, None),
        (10**400, None),
        (True, None),
        ([], None),
        ("9999-99-99", None),
        ("0001-01-01T00:00:00Z", None),  # Go's zero time
        ("0001-01-01T00:00:00+14:00", None),
        ("9999-12-31T23:59:59-14:00", None),
    ],
)
def test_times(value: Any, seconds: float | None) -> None:
    assert moment(value) == seconds


# -- masking


def masked(*texts: str) -> list[str]:
    masker = Masker(RULES)
    masker.look(list(texts))
    return masker.chat().mask(list(texts))


def test_one_secret_one_stand_in(tmp_path: Path, tokenizer: Any) -> None:
    made = [
        line(0, "I am bob@x.org and not eve@x.org, so bob@x.org it is"),
        line(1, "bob@x.org again, in another chat", category="ask bob@x.org"),
    ]
    made[1]["response"] = reply("Hello bob@x.org!")
    one, two = rows_of(prepared(tmp_path, made, tokenizer))
    assert one["messages"][0]["content"] == "I am [EMAIL_1] and not [EMAIL_2], so [EMAIL_1] it is"
    assert [m["content"] for m in two["messages"]] == [
        "[EMAIL_1] again, in another chat",
        "Hello [EMAIL_1]!",
    ]
    assert two["category"] == "ask [EMAIL_1]"


def test_found_once_masked_everywhere(tmp_path: Path, tokenizer: Any) -> None:
    """A password that only one line names as such does not stay in the others."""
    made = [line(0, "password: hunter2Xyz"), line(1, "Why hunter2Xyz?"), line(2, "hunter2Xyzzy")]
    report = prepared(tmp_path, made, tokenizer)
    requested = [r["messages"][0]["content"] for r in rows_of(report)]
    assert requested == ["password: [SECRET_1]", "Why [SECRET_1]?", "hunter2Xyzzy"]
    assert (
        report.masked["letters with digits assigned to a name such as password, token or api_key"]
        == 1
    )


def test_masking_can_be_left_out(tmp_path: Path, tokenizer: Any) -> None:
    report = prepared(tmp_path, [line(0, "bob@x.org"), line(1)], tokenizer, mask=False)
    assert "bob@x.org" in report.train.read_text() and report.masked == {}
    assert json.loads((tmp_path / "out" / "logs.json").read_text())["rules"] == []


def test_rules_are_listed(tmp_path: Path, tokenizer: Any) -> None:
    prepared(tmp_path, [line(0), line(1)], tokenizer)
    listed = json.loads((tmp_path / "out" / "logs.json").read_text())["rules"]
    assert len(listed) == len(RULES)
    assert {r["source"] for r in listed} == {
        "detect-secrets",
        "phonenumbers",
        "own",
    }
    assert len({r["name"] for r in listed}) == len(listed)


def test_tool_arguments_and_tools_are_masked(tmp_path: Path, tokenizer: Any) -> None:
    function = {"name": "mail", "arguments": '{"to": "bob@x.org", "bob@x.org": 1}'}
    called = reply(end="tool_calls")
    called["choices"][0]["message"] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    tools = [{"type": "function", "function": {"name": "mail", "description": "for bob@x.org"}}]
    made = [line(n, response=called, tools=tools) for n in range(2)]
    report = prepared(tmp_path, made, tokenizer)
    assert "bob@x.org" not in report.train.read_text()
    assert json.loads(report.train.read_text().splitlines()[0])["tools"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "::",
        "1.2.3",
        "version 10.2.33 of std::vector<int>",
        "at 12:30:45 on 2024-01-02",
        "x = a[i] @ b.T",
        "user@host",
        "password: str, token: int = None",
        "the password is wrong",
        "api_key=os.environ['KEY']",
        "token = tokenizer(text)",
        "Dear Hiring Manager, Dear Sir or Madam,",
        "call me maybe, 3 times",
        "5 Star Hotel",
        "é" * 50,
        "\N{GRINNING FACE}" * 10,
        "[EMAIL_1] and [SECRET_2]",
        "0" * 5000,
        "a" * 5000,
        "/usr/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py",
        "3.14159265358979323846 and 1e-10",
    ],
)
def test_plain_text_stays(text: str) -> None:
    assert masked(text) == [text]


def test_hostile_texts_take_no_time() -> None:
    """Nothing here may take more than linear time; each text is 20,000 characters."""
    import time

    for part in (
        "a",
        "a@",
        "a.",
        "1-",
        "1 ",
        "A1",
        "-----BEGIN PRIVATE KEY-----",
        "://a:",
        "password:",
        "password-",
    ):
        for text in (part * (20_000 // len(part)), part + "\n" * 20_000):
            start = time.process_time()
            masked(text)
            assert time.process_time() - start < 1.2, text[:40]


def test_many_secrets_of_one_beginning() -> None:
    """Thousands of values that begin alike are looked up, not tried one by one."""
    import time

    start = time.process_time()
    texts = [f"write to customer{i}@example.org" for i in range(5000)]
    assert masked(*texts)[4321] == "write to [EMAIL_4322]"
    assert time.process_time() - start < 10


def test_addresses_within_other_signs() -> None:
    for before, after in (
        ("...", "."),
        ("-", "-"),
        ("'", "'"),
        ("<", ">"),
        ("to:", ","),
        ("(", ")"),
    ):
        assert masked(f"{before}first.last@mail.example.org{after}") == [
            f"{before}[EMAIL_1]{after}"
        ]


def test_check_digits() -> None:
    assert luhn("4111 1111 1111 1111") and not luhn("4111 1111 1111 1112")
    assert iban("GB82 WEST 1234 5698 7654 32") and not iban("GB83 WEST 1234 5698 7654 32")


FOUND = {
    "tokens": "use sk-proj-Ab3dEf6hIj9kLm2nOp5q please",
    "a private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabcd\n-----END RSA PRIVATE KEY-----",
    "a card": "pay with 4111 1111 1111 1111 today",
    "an IBAN": "to GB82 WEST 1234 5698 7654 32 please",
    "a number of a region": "call +49 30 901820 now",
    "detect-secrets": "key AKIAIOSFODNN7EXAMPLE here",
    "assigned": "api_key = 'a1b2c3d4e5'",
}


@pytest.mark.parametrize("name", FOUND)
def test_what_has_a_form_is_found(name: str) -> None:
    (found,) = masked(FOUND[name])
    assert "[" in found and found != FOUND[name]
    digits = [c for c in found if c.isdigit()]
    assert len(digits) <= 1, "the number of the stand-in alone"


def hooked(text: str) -> list[tuple[int, int]]:
    """A rule of a user's."""
    at = text.find("Ada Lovelace")
    return [] if at < 0 else [(at, at + len("Ada Lovelace"))]


def wrong(text: str) -> list[Any]:
    return [(0, len(text) + 1)]


def test_a_function_of_the_users_masks_as_well(tmp_path: Path, tokenizer: Any) -> None:
    made = [line(0, "I am Ada Lovelace, bob@x.org"), line(1, "Who was Ada Lovelace?")]
    own = f"{__name__}:hooked"
    report = prepared(tmp_path, made, tokenizer, mask=own)
    requested = [r["messages"][0]["content"] for r in rows_of(report)]
    assert requested == ["I am [MASKED_1], [EMAIL_1]", "Who was [MASKED_1]?"]
    assert report.masked[own] == 2
    record = json.loads((tmp_path / "out" / "logs.json").read_text())
    assert (
        record["settings"]["hook"]
        and {"name": own, "source": "hook", "stand_in": "MASKED"} in (record["rules"])
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "^mask: no_such_module:f: No module named .* PYTHONPATH"),
        (f"{__name__}:absent", "is no function"),
        (f"{__name__}:wrong", r"gave \(0, .*\) for a text of .* is \(start, end\) within"),
    ],
)
def test_a_hook_that_is_none(name: str, message: str, tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=message):
        prepared(tmp_path, [line(0), line(1)], tokenizer, mask=name)
    assert not (tmp_path / "out" / "logs.json").exists()


def test_without_the_library_a_line_says_what_to_install(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "detect_secrets.core.plugins.util", None)
    with pytest.raises(UserError, match=r"^mask: .*pip install 'outrider\[logs\]'.*mask=false"):
        prepared(tmp_path, [line(0), line(1)], tokenizer)
    assert prepared(tmp_path, [line(0), line(1)], tokenizer, mask=False).counts["usable"] == 2


def test_an_unknown_region(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="^regions: 'XX'"):
        prepared(tmp_path, [line(0), line(1)], tokenizer, regions=("US", "XX"))


# -- the folder


def test_again_does_nothing_and_other_settings_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    made = [line(n) for n in range(6)]
    report = prepared(tmp_path, made, tokenizer)
    stamp = report.train.stat().st_mtime_ns
    assert prepared(tmp_path, made, tokenizer) == report
    assert report.train.stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="^out: .* other settings .*later 0.2, now 0.5"):
        prepared(tmp_path, made, tokenizer, later=0.5)
    with pytest.raises(UserError, match="^out: .* other settings .*logs"):
        prepared(tmp_path, made[:-1], tokenizer)
    write(tmp_path, made)
    report.train.write_text("")
    with pytest.raises(UserError, match="^out: .* was changed since it was written"):
        prepared(tmp_path, made, tokenizer)
    (tmp_path / "out" / "logs.json").write_text("{}")
    with pytest.raises(UserError, match="^out: .* is damaged"):
        prepared(tmp_path, made, tokenizer)


# -- answers of another model


def config(folder: Path, **changes: Any) -> SynthesizeConfig:
    keys: dict[str, Any] = {"max_new_tokens": 6, "batch": 2, "dtype": "float32"}
    return SynthesizeConfig(
        out=str(folder / "out"), target=TINY, logs=str(folder / "log.jsonl"), **(keys | changes)
    )


def mixed(count: int = 7) -> list[dict[str, Any]]:
    """Every second answer is another model's; the first chat has two turns and a system text."""
    made = [
        line(n) | ({} if n % 2 else {"model": "gpt-4", "response": reply("No.", model="gpt-4")})
        for n in range(count)
    ]
    said = {"role": "assistant", "content": "No."}
    made[0]["messages"] = [{"role": "system", "content": "Be brief!"}, *chat(70), said, *chat(71)]
    return made


def test_other_answers_are_requested_again_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, mixed())
    synthesize(config(tmp_path))
    whole = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    rows = [json.loads(t) for n in ("train", "later") for t in whole[f"{n}.jsonl"].splitlines()]
    assert len(rows) == 7 and b'"No."' not in whole["train.jsonl"] + whole["later.jsonl"]
    assert [r["messages"][-1]["content"] == "It is a number." for r in rows] == [
        bool(n % 2) for n in range(7)
    ]
    record = json.loads(whole["logs.json"])["report"]
    assert record["counts"]["asked again"] == 4

    other = tmp_path / "other"
    other.mkdir()
    write(other, mixed())
    real, calls = ask.block, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(ask, "block", interrupted)
    with pytest.raises(Interrupted, match="holds 2 of 4 answers; the same command continues"):
        synthesize(config(other))
    assert not (other / "out" / "train.jsonl").exists()
    synthesize(config(other))
    assert len(calls) == 3
    for name in ("train.jsonl", "later.jsonl", "answers.jsonl"):
        assert (other / "out" / name).read_bytes() == whole[name]


def test_what_cannot_be_requested_again_is_named(tmp_path: Path) -> None:
    made = [line(n) for n in range(3)]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    made[2] = line(2, model="gpt-4", response=reply("No.", model="gpt-4")) | {
        "messages": [
            *chat(2),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "17", "tool_call_id": "c"},
        ]
    }
    made.append(line(3, model="gpt-4", response=reply("No.", model="gpt-4")))
    write(tmp_path, made)
    synthesize(config(tmp_path))
    report = json.loads((tmp_path / "out" / "logs.json").read_text())["report"]
    assert report["named"]["no answer when asked again"] == ["log.jsonl:3"]


def test_again_false_leaves_them_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, mixed())
    synthesize(config(tmp_path, again=False))
    said = capsys.readouterr()
    assert "4 answered by another model" in said.err and "log.jsonl:1" in said.err
    assert "train.jsonl" in said.out


def test_a_server_answers_again(tmp_path: Path) -> None:
    from tests.scripts.test_from_server import serving

    write(tmp_path, mixed())
    with serving(tmp_path) as url:
        synthesize(config(tmp_path, backend="openai", base_url=url, max_cut=1.0))
    report = json.loads((tmp_path / "out" / "logs.json").read_text())["report"]
    assert report["counts"] == {"usable": 7, "asked again": 4}
