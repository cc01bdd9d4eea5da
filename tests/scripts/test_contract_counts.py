"""The counts of an export's contract: a file whose numbers are none is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.scripts.exporting import contract, contract_check
from outrider.scripts.scoring.servers import Address
from tests.helpers.odd_server import odd

ASKED = {"format": contract.FORMAT, "max_new_tokens": 8, "draft_tokens": 2, "stop": [0]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"accepted": [1]},
        {"accepted": None},
        {"accepted": "ab"},
        {"accepted": [1, "1"]},
        {"accepted": [1, -9]},
        {"accepted": [1, 1.0]},
        {"accepted": [1, True]},
        {"accepted": [3, 0]},
        {"tokens": None},
        {"proposed": [2, None]},
    ],
)
def test_a_contract_whose_counts_are_none(tmp_path: Path, wrong: dict[str, Any]) -> None:
    sound = {"ids": [5], "tokens": [1, 2], "text": "", "proposed": [2, 1], "accepted": [1, 0]}
    for row, taken in ((sound, True), (sound | wrong, False)):
        message = {**ASKED, "prompts": [sound, row]}
        (tmp_path / contract.NAME).write_text(json.dumps(message))
        if taken:
            assert contract.load(tmp_path).items() >= message.items()
            continue
        with pytest.raises(UserError, match="^expected: .*: prompt 2 holds .*; export the head"):
            contract.load(tmp_path)


@pytest.mark.parametrize("rivals", [None, [], [[]] * 2, [[[3, 0.5]], [[3]]], [[[3, "1"]]] * 2])
def test_a_contract_whose_rivals_are_none(tmp_path: Path, rivals: Any) -> None:
    sound = {"ids": [5], "tokens": [1, 2], "text": "", "proposed": [1], "accepted": [0]}
    noise = {"most": 0.1, "usual": 0.02, "places": 2}
    for row, taken in (
        (sound | {"rivals": [[[3, 0.5]]] * 2}, True),
        (sound | {"rivals": rivals}, False),
    ):
        message = {**ASKED, "rounding": noise, "prompts": [row]}
        (tmp_path / contract.NAME).write_text(json.dumps(message))
        if taken:
            assert contract.load(tmp_path).items() >= message.items()
            continue
        with pytest.raises(UserError, match="^expected: .*: prompt 1 holds rivals .*; export the"):
            contract.load(tmp_path)


SGLANG = {"spec_accept_token_num": 6, "spec_draft_token_num": 9, "spec_verify_ct": 3}


@pytest.mark.parametrize(
    ("counts", "served", "said"),
    [
        (SGLANG, True, "accepted draft tokens: 6 of 9, expected 6 of 9"),
        (SGLANG | {"spec_accept_token_num": 0}, False, "accepted draft tokens: 0 of 9"),
        ({}, False, "acceptance: the server tells none"),
        (SGLANG | {"spec_verify_ct": "3"}, False, "acceptance: the server tells none"),
    ],
)
def test_sglang_tells_its_counts_with_every_answer(
    counts: dict[str, Any], served: bool, said: str
) -> None:
    """It has no counters that are read, and what it served was never seen as served."""
    asked = {"ids": [3], "tokens": [5] * 10, "text": "", "proposed": [3] * 3, "accepted": [2] * 3}
    wanted = {
        "prompts": [asked],
        "stop": [2],
        "max_new_tokens": 10,
        "draft_tokens": 3,
        "cycles": 3,
        "accepted_length": {"mean": 3.0, "low": 2.5, "high": 3.5},
        "acceptance_by_position": [],
    }
    about = {"finish_reason": {"type": "length"}, **counts}
    answer = {"output_ids": [5] * 10, "text": "", "meta_info": about}
    with odd(lambda body: answer, "sglang") as server:
        found = contract_check.checked(wanted, Address(server.url))
    assert found["served"] == served and said in "\n".join(contract_check.summary(found))
