"""The counts of an export's contract: a file whose numbers are none is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.scripts.serving import contract


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
        message = {"format": contract.FORMAT, "prompts": [sound, row]}
        (tmp_path / contract.NAME).write_text(json.dumps(message))
        if taken:
            assert contract.load(tmp_path) == message
            continue
        with pytest.raises(UserError, match="^expected: .*: prompt 2 holds .*; export the head"):
            contract.load(tmp_path)
