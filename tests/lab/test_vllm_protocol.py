"""Accepted lengths as vLLM counts them: what is counted, that the script's figures are those of
the drafts themselves, and that it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import Interrupted
from outrider.conf.schema import compose
from outrider.decode.engine import Cycle, Generation
from outrider.scripts.common.pipeline import Deadline
from outrider.scripts.lab import vllm_protocol
from tests.helpers.chats import chats


def keys(tmp_path: Path, *more: str) -> list[str]:
    prompts = chats(tmp_path / "prompts.jsonl", rows=5)
    return [
        "target=tiny",
        "drafters=[ngram]",
        f"prompts={prompts}",
        f"out={tmp_path / 'out'}",
        "max_new_tokens=40",
        "batch_size=2",
        "dtype=float32",
        *more,
    ]


def test_a_draft_that_begins_before_the_end_counts_whole() -> None:
    # the stop token 9 is the second token of the cycle that begins at 3
    tokens = [1, 2, 3, 4, 9, 5, 6, 7, 8]
    cycles = [Cycle(3, a, (), False, start) for a, start in ((1, 1), (3, 3), (1, 7))]
    answer = Generation([0], tokens, cycles)
    first, second, third = cycles
    assert vllm_protocol.begun(answer, {9}, 256) == [first, second]
    assert vllm_protocol.begun(answer, {77}, 256) == cycles
    assert vllm_protocol.begun(answer, {77}, 7) == [first, second], "the limit ends it"
    found = vllm_protocol.pooled([[first, second], [third, Cycle(0, 0, (), False, 9)]])
    assert found["drafts"] == 3
    assert found["accepted_length"]["mean"] == pytest.approx(1 + 5 / 3)
    means = [place["mean"] for place in found["acceptance_by_position"]]
    assert means == pytest.approx([1, 1 / 3, 1 / 3]), "of all drafts, not of those that got there"


def test_its_figures_are_those_of_the_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    cycles_of = vllm_protocol.cycles_of

    def counted(*args: Any) -> Any:
        seen.append(cycles_of(*args))
        return seen[-1]

    monkeypatch.setattr(vllm_protocol, "cycles_of", counted)
    argv = keys(tmp_path)
    left = Deadline.left

    def over(end: Deadline) -> None:
        if len(seen) == 2:
            raise end.stopped(75)

    for stop in (True, False):  # once until its time is over, and on from there
        monkeypatch.setattr(Deadline, "left", over if stop else left)
        with pytest.raises(SystemExit) as end:
            vllm_protocol.main(argv)
        assert end.value.code == (75 if stop else 0)
        assert (tmp_path / "out" / "report.json").exists() is not stop
    assert len(seen) == 3, "five prompts in chunks of two, none twice"
    flat = [cycle for chunk in seen for row in chunk for cycle in row if cycle[0]]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (row,) = report["drafters"]
    assert row["drafts"] == len(flat) and max(proposed for proposed, _, _ in flat) == 3
    accepted = sum(taken for _, taken, _ in flat)
    assert row["accepted_length"]["mean"] == pytest.approx(1 + accepted / len(flat))
    means = [place["mean"] for place in row["acceptance_by_position"]]
    assert 1 + sum(means) == pytest.approx(row["accepted_length"]["mean"])
    text = vllm_protocol.table(report).markdown()
    assert f"| ngram | {row['accepted_length']['mean']:.3f}" in text


def test_a_drafter_is_named_without_a_shape(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="ngram@tree:8; every drafter is a chain of draft_tokens"):
        compose(
            "vllm_protocol",
            vllm_protocol.ProtocolConfig,
            keys(tmp_path, "drafters=[ngram@tree:8]"),
        )
    with pytest.raises(Interrupted, match="vllm_protocol: stopped"):
        Deadline(-1, "vllm_protocol").left()
