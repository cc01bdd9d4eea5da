"""The comparison of a converted target with its file: what it counts, what it sees, and where it
goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.conf.errors import Interrupted
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.pipeline import Deadline
from outrider.scripts.lab import answer_speed, conversion
from tests.helpers.interop import biased_qwen2

PROMPTS = [[5, 77, 200, 31], [9, 8, 7], [100, 101, 102, 103]]


def rows_of(target: Any) -> list[dict[str, Any]]:
    """Greedy answers of the target itself, as a server of its file gives them."""
    requests = [Request(prompt, 12, id=i) for i, prompt in enumerate(PROMPTS)]
    run = generate(target, NoDraft(), requests, Sampling(0.0), eos_ids=())
    found = zip(PROMPTS, run.generations, strict=True)
    return [{"prompt": prompt, "tokens": list(answer.token_ids)} for prompt, answer in found]


def test_a_sound_model_agrees_and_a_broken_one_does_not(tmp_path: Path) -> None:
    target = biased_qwen2()
    rows, clock = rows_of(target), Deadline(60, "conversion")
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    found = conversion.compared(target, Memo(tmp_path / "memo"), rows, clock)
    sound, biases, *bases = found
    assert sound["equal"] == sound["places"] == 36
    assert sound["largest_gap"] == 0 and not sound["gaps"]
    assert biases["share"] < 0.6 and biases["largest_gap"] > 0.5
    # heads of 8 numbers and 16 positions turn little: some places see it
    assert bases[-1]["share"] < 0.9 and bases[-1]["largest_gap"] > 0.5
    after = target.model.state_dict()
    assert all(value.equal(after[name]) for name, value in before.items()), "mended again"
    assert conversion.compared(target, Memo(tmp_path / "memo"), rows, clock) == found
    rows[0]["tokens"][3] += 1
    (gap,) = [gap for first, gap in conversion.read_along(target.model, rows[0])[3:4]]
    assert gap > 0


def test_it_stops_between_two_answers_and_goes_on(tmp_path: Path) -> None:
    target, memo = biased_qwen2(), Memo(tmp_path / "memo")
    rows, asked = rows_of(target), []

    def left() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise Interrupted("over", code=75)

    clock: Any = SimpleNamespace(left=left)
    with pytest.raises(Interrupted):
        conversion.compared(target, memo, rows, clock)
    assert len(memo.lines("read-0")) == 2
    assert len(conversion.compared(target, memo, rows, clock)) == len(conversion.CHANGES)
    assert len(asked) == 3 + 1 + 3 * (len(conversion.CHANGES) - 1), "none is read twice"
    with pytest.raises(Interrupted):
        Deadline(-1, "conversion").left()


def test_both_ways_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[str, int, int]] = []

    def way(name: str) -> Any:
        def answer(_: Any, prompts: list[list[int]], limit: int) -> int:
            turns.append((name, len(prompts), limit))
            return len(prompts) * limit

        return answer

    monkeypatch.setattr(answer_speed, "ours", way("ours"))
    monkeypatch.setattr(answer_speed, "theirs", way("theirs"))
    cfg: Any = SimpleNamespace(concurrent=[1, 2], tokens=200, least=120, turns=2)
    rows = answer_speed.measured(cfg, biased_qwen2(), "", PROMPTS)
    assert turns[:4] == [(name, 1, 200) for name in ("ours", "theirs", "theirs", "ours")]
    assert turns[4] == ("ours", 2, 120) and [row["concurrent"] for row in rows] == [1, 2]
    assert all(len(row["ours"]) == len(row["llama.cpp"]) == 2 for row in rows)
