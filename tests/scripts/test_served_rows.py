"""A running server as a row of the table: the same answers as plain decoding here, its accepted
length from its own counters. One that does what no server should costs its own row at most, and
nothing is claimed of what it did not tell, or from counters that are endless, fall or lack."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts import check, evaluate
from outrider.scripts.data.server import AnswerRefused
from outrider.scripts.exporting import contract
from outrider.scripts.scoring import server_forms
from outrider.scripts.scoring.counters import read_counters, rise
from outrider.scripts.scoring.served import ServedSystem, accepted, cycles_of, risen
from outrider.scripts.scoring.server_forms import LLAMACPP, OTHER, VLLM, Reply, ServerRequest
from outrider.scripts.scoring.servers import Endpoint
from tests.helpers.commands import code_of
from tests.helpers.servers import endless, llamacpp, odd, vllm
from tests.helpers.speculating_server import serving

SHAPE = {"layers": 2, "hidden": 32, "vocab": 260}
KEYS = [f"target.{key}={value}" for key, value in SHAPE.items()]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")


def test_a_server_stands_in_the_table(target: Target, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in ("go", "hay", "sun")))
    with serving(target, target) as right, serving(target, None) as plain:
        keys = ["target=tiny", *KEYS, f"prompts={prompts}", f"out={tmp_path / 'out'}", "parity=0"]
        keys += [f"drafters=[none,spec@{right},plain@{plain}/v1]", "max_new_tokens=16"]
        keys += ["dtype=float32", "batch_size=2", "quiet=true"]
        assert code_of(evaluate.main, *keys) == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    rows = {row["label"]: row for row in report["drafters"]}
    assert list(rows) == ["none", "spec", "plain"]
    assert rows["spec"]["accepted_length"]["mean"] > 2  # it drafts with the target itself
    assert rows["plain"]["accepted_length"]["mean"] == 1
    for row in (rows["spec"], rows["plain"]):
        assert row["tokens"] == rows["none"]["tokens"] and row["tokens_per_second"] > 0
        assert row["acceptance_by_position"] == []  # where its cycles end is not seen
        assert row["lossless"]["equal"] == row["lossless"]["checked"] == 3
        assert row["verify_ms"] is None


def test_cycles_are_as_many_as_the_totals_say() -> None:
    (cycles,) = cycles_of([[5] * 11], [6])
    assert [c.accepted for c in cycles] == [1, 2, 1, 2] and cycles[0].start == 1
    assert cycles_of([[5]], [0]) == [[]] and len(cycles_of([[5] * 4], [9])[0]) == 1
    message = [Reply([1, 2], "", False, 3, 1), Reply([1, 2, 3], "", True, 3, 2)]
    assert accepted(message, None, [[1, 2], [1, 2, 3]]) == [1, 2]
    silent = [Reply([1] * 10, "", False), Reply([1] * 30, "", False)]
    assert accepted(silent, 20, [[1] * 10, [1] * 30]) == [5, 15]
    assert accepted(silent, None, [[1] * 10, [1] * 30]) is None


# --- servers that do what no server should


def run(
    served: ServedSystem, limit: int = 8, sampling: Sampling | None = None, seed: int = 0
) -> Any:
    return served([Request([1, 2], limit, id=7)], sampling or Sampling(), seed)


def test_a_server_that_stops_at_once(target: Target) -> None:
    (eos,) = target.eos_ids
    with odd(lambda body: llamacpp(body, [], "eos"), "llamacpp") as server:
        found = run(ServedSystem(target, "x", server.url))
    (one,) = found.generations
    assert one.token_ids == [eos] and one.finish == "eos" and one.cycles == []
    assert found.timing.decode_s == 0 and found.timing.cycles == 0
    with (
        odd(lambda body: llamacpp(body, []), "llamacpp") as server,
        pytest.raises(UserError, match="without token ids"),
    ):
        run(ServedSystem(target, "x", server.url))


WRONG = [
    (lambda body: vllm(None), "vllm", "without token ids"),
    (lambda body: vllm([5, 260]), "vllm", "token 260"),
    (lambda body: vllm([5] * 9), "vllm", "9 came back"),
    (lambda body: llamacpp(body, [5, 6], temperature=0.8), "llamacpp", "temperature=0.8"),
]


def test_an_answer_that_cannot_stand_beside_ours_is_named(target: Target) -> None:
    for answer, owner, said in WRONG:
        with odd(answer, owner) as server, pytest.raises(UserError, match=said) as message:
            run(ServedSystem(target, "x", server.url))
        assert "drafters: x:" in str(message.value) and "\n" not in str(message.value)


def test_counts_that_are_none_are_no_answer() -> None:
    """Fewer accepted than none would make cycles of no token."""
    body = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    question = server_forms.answer(LLAMACPP, "m", [3], ServerRequest(4))
    read, reply = question.read, llamacpp(body, [5, 6])
    assert read(reply).accepted == 0
    for count in (-5, math.nan, "3", None):
        with pytest.raises(ValueError, match="ids"):
            read({**reply, "timings": {"draft_n": 9, "draft_n_accepted": count}})


def test_counters_that_tell_nothing_are_not_zero() -> None:
    up, down = counted(9, 99, 90), counted(9, 99, 5)
    assert risen(OTHER, down, up) == 85 and risen(OTHER, "", "") is risen(OTHER, None, up) is None
    assert risen(VLLM, "", "") == 0  # it counts what it drafts


def test_log_probabilities_that_are_none_are_refused() -> None:
    for row in ({1: math.nan}, {1: 0.5}, {1: -0.1, 2: -0.1}, {-1: -0.1}, {1: -math.inf}):
        with pytest.raises(AnswerRefused):
            server_forms.sound(row)


# --- counters

LINE = "vllm:spec_decode_num_{}_total {}\n"


def page(**counts: Any) -> str:
    return "".join(LINE.format(name, count) for name, count in counts.items())


def counted(drafts: int, draft_tokens: int, accepted_tokens: int) -> str:
    return page(drafts=drafts, draft_tokens=draft_tokens, accepted_tokens=accepted_tokens)


def test_what_counters_rose_by() -> None:
    place = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {}\n'
    found = rise(counted(1, 2, 1) + place.format(1), counted(4, 8, 3) + place.format(3))
    assert found.why == "" and found.rose == {
        "drafts": 3,
        "draft_tokens": 6,
        "accepted_tokens": 2,
        "accepted_by_position": [2],
    }
    fresh = rise("", counted(4, 8, 3))  # they appear with the first draft
    assert fresh.rose is not None and fresh.rose["draft_tokens"] == 8
    negative = rise("", counted(-1, -40, -20)).rose
    assert negative is not None and negative["draft_tokens"] == 0
    for silent in ((None, None), ("", ""), ("x 1\n", "x 2\n"), (None, counted(4, 8, 3))):
        found = rise(*silent)
        assert found.rose is None and found.why == ""


def test_counters_that_fell_or_are_missing_are_named() -> None:
    for before, after, said in (
        (counted(9, 40, 20), counted(10, 20, 21), "counters fell"),
        (counted(9, 40, 20), page(drafts=12), "lack draft_tokens and accepted_tokens"),
        (counted(9, 40, 20), None, "are gone"),
    ):
        found = rise(before, after)
        assert found.rose is None and said in found.why and "\n" not in found.why


def test_pages_that_are_none_are_read_in_no_time() -> None:
    long = f'a_accepted_tokens_per_pos{{position="{"9" * 5000}"}} 3\n'
    assert read_counters(long + page(drafts=3)) == {"drafts": 3, "accepted_by_position": []}
    for word in ("accepted_tokens_per_pos{", "spec_decode_num_drafts{"):
        assert read_counters(word * 400_000) is None
    assert read_counters(page(drafts="9" * 1500)) == {"drafts": 0, "accepted_by_position": []}


def test_an_endless_page_is_left_after_a_while() -> None:
    async def looked(url: str) -> tuple[str | None, str]:
        async with Endpoint(url, timeout=20) as door:
            return await door.metrics(), door.unread

    with odd(lambda body: vllm([5]), metrics=endless) as server:
        found, why = asyncio.run(looked(server.url))
        assert found is None and "/metrics" in why and "endless" in why


def test_a_check_says_what_is_wrong_with_the_counters(target: Target, tmp_path, capsys) -> None:
    def answer(body: dict[str, Any]) -> Any:
        requests = [Request(body["prompt"], body["max_tokens"])]
        (found,) = generate(target, NoDraft(), requests, Sampling()).generations
        return vllm(found.token_ids, found.finish == "eos")

    wanted = contract.expected(target, NGram(), [[5, 6, 5, 6, 5], [7, 8, 9]], 3, 8)
    (tmp_path / contract.NAME).write_text(json.dumps(asdict(wanted)))
    pages = itertools.chain([counted(9, 40, 20)], itertools.repeat(counted(5, 20, 10)))
    with odd(answer, metrics=lambda: next(pages)) as server:
        code = code_of(check.main, f"url={server.url}", f"expected={tmp_path}")
    said = capsys.readouterr().out
    assert code == 1 and "counters fell" in said and "2 of 2 as expected" in said


def test_every_question_is_read_anew_and_seeds_fit(target: Target) -> None:
    def answer(body: dict[str, Any]) -> Any:
        time.sleep(0.002 * body["max_tokens"])
        return vllm([5] * body["max_tokens"])

    with odd(answer) as server:
        run(ServedSystem(target, "x", server.url), sampling=Sampling(1.0), seed=1 << 60)
    salts = [body["cache_salt"] for body in server.requested]
    assert len(salts) == 2 and len(set(salts)) == 2
    assert all(0 <= body["seed"] < 1 << 31 for body in server.requested)
