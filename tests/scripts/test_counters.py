"""Counters of running servers, which may be endless, fall, be there in part or hold no numbers:
nothing is claimed from them, and what is wrong is named."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.scripts import check
from outrider.scripts.scoring.counters import read_counters, rise
from outrider.scripts.scoring.servers import Address, Endpoint
from tests.helpers.servers import endless, odd, vllm

LINE = "vllm:spec_decode_num_{}_total {}\n"
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 260}


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


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (counted(9, 40, 20), counted(10, 20, 21), "draft_tokens fell from 40 to 20"),
        (counted(9, 40, 20), counted(9, 40, 0), "accepted_tokens fell from 20 to 0"),
        (counted(9, 40, 20), page(drafts=12), "lack draft_tokens and accepted_tokens"),
        (page(drafts=2), page(drafts=12), "lack draft_tokens and accepted_tokens"),
        (counted(9, 40, 20), "", "are gone"),
        (counted(9, 40, 20), None, "are gone"),
        (counted(9, 40, 20), page(drafts=10, draft_tokens="NaN", accepted_tokens=21), "fell"),
    ],
)
def test_counters_that_fell_or_are_missing_are_named(
    before: str | None, after: str | None, said: str
) -> None:
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
        async with Endpoint(Address(url, timeout=20)) as door:
            return await door.metrics(), door.unread

    with odd(lambda body: vllm([5]), metrics=endless) as server:
        found, why = asyncio.run(looked(server.url))
        assert found is None and "/metrics" in why and "endless" in why


# --- check against such servers


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")


def turns(*pages: str) -> Callable[[], str]:
    """One page after another, the last one for ever."""
    left: Iterator[str] = itertools.chain(pages, itertools.repeat(pages[-1]))
    return lambda: next(left)


def greedy_of(target: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    from outrider.decode.drafters import NoDraft
    from outrider.decode.engine import Request, generate

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        wanted = [Request(body["prompt"], body["max_tokens"])]
        (found,) = generate(target, NoDraft(), wanted, Sampling()).generations
        return vllm(found.token_ids, found.finish == "eos")

    return answer


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (counted(9, 40, 20), counted(5, 20, 10), "fell from"),
        (page(drafts=1), page(drafts=4), "lack draft_tokens"),
    ],
)
def test_a_check_says_what_is_wrong_with_the_counters(
    target: Any, tmp_path: Path, capsys, before: str, after: str, said: str
) -> None:
    from outrider.decode.ngram import NGram
    from outrider.scripts.exporting import contract

    made = contract.expected(target, NGram(), [[5, 6, 5, 6, 5], [7, 8, 9]], 3, 8)
    place = tmp_path / contract.NAME
    place.write_text(json.dumps(made.json()))
    with odd(greedy_of(target), metrics=turns(before, after)) as server:
        with pytest.raises(SystemExit) as stop:
            check.main([f"url={server.url}", f"expected={place}"])
    message = capsys.readouterr().out
    assert (
        stop.value.code == 1
        and said in message
        and "serves what was trained" not in message.replace("does not serve what was trained", "")
    )
    assert "answers: 2 of 2 as expected" in message and "-" not in message.splitlines()[1]
