"""The score table: figures worked out by hand, pairing by prompt, fair turns, and what is counted apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decode.engine import Cycle, Generation, Timing
from scripts.lib import more_plots, page, plots, table
from scripts.lib.contest import Answer, Contest, Lane, Lap
from scripts.lib.score import Scores, output_lines


def lane(name: str, nodes: int) -> Lane:
    return Lane(name, name, name, "chain" if nodes else "none", nodes, nodes, lambda requests, s: None)  # type: ignore[arg-type,return-value]


def cycles(*accepted: int, proposed: int = 2, cut_last: bool = False) -> list[Cycle]:
    found, start = [], 1
    for i, a in enumerate(accepted):
        found.append(Cycle(proposed, a, (0,) * a, cut_last and i == len(accepted) - 1, start))
        start += a + 1
    return found


def answer(name: str, prompt: str, turn: int, found: list[Cycle], category: str) -> Answer:
    tokens = list(range(1 + sum(c.accepted + 1 for c in found)))
    return Answer(name, prompt, turn, category, Generation([1, 2], tokens, found, [False] * len(tokens), "length"))


def timing(decode: float, prefill: float = 1.0, passes: int = 1) -> Timing:
    return Timing(prefill, 0.1 * decode, 0.6 * decode, 0.1 * decode, 0.1 * decode, prefill + decode, passes)


@pytest.fixture
def contest() -> Contest:
    """Two prompts; `fast` takes a third of the time of `none` on the first and half on the second."""
    c = Contest()
    for name, seconds, lists in (("none", (6.0, 4.0), ((0,) * 6, (0,) * 4)), ("fast", (2.0, 2.0), ((1, 2, 0), (2, 0)))):
        for prompt, spent, accepted in zip("ab", seconds, lists, strict=True):
            found = cycles(*accepted, proposed=0 if name == "none" else 2)
            a = answer(name, prompt, 0, found, "chat" if prompt == "a" else "code")
            c.answers.append(a)
            c.laps.append(Lap(name, (prompt,), 0, timing(spent, passes=len(found)), len(a.generation.token_ids)))
    return c


def test_a_row_by_hand(contest: Contest) -> None:
    lanes = [lane("none", 0), lane("fast", 2)]
    none, fast = (Scores(contest, lanes).row(x) for x in lanes)
    assert fast["accepted_length"]["mean"] == pytest.approx((2 + 3 + 1 + 3 + 1) / 5)
    assert none["accepted_length"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert [p["unconditional"] for p in fast["acceptance_by_position"]] == pytest.approx([3 / 5, 2 / 5])
    assert [p["conditional"] for p in fast["acceptance_by_position"]] == pytest.approx([3 / 5, 2 / 3])
    assert [p["trials"] for p in fast["acceptance_by_position"]] == [5, 3]
    assert none["tokens"] == fast["tokens"] == 12 and fast["cycles"] == 5
    assert fast["tokens_per_second"] == pytest.approx(10 / 4) and none["tokens_per_second"] == pytest.approx(1.0)
    assert fast["speedup"]["mean"] == pytest.approx(2.5) and 2 <= fast["speedup"]["low"] <= fast["speedup"]["high"] <= 3
    assert fast["end_to_end"]["speedup"]["mean"] == pytest.approx((12 / 6) / (12 / 12))
    assert fast["draft_ms"] == pytest.approx(1000 * 0.4 / 5) and fast["verify_ms"] == pytest.approx(1000 * 3.2 / 5)
    assert sum(fast["ms_per_token"].values()) == pytest.approx(1000 * 4 / 10)


def test_a_category_seen_once_claims_no_interval(contest: Contest) -> None:
    row = Scores(contest, [lane("none", 0), lane("fast", 2)]).row(lane("fast", 2))["by_category"]["chat"]
    assert row["accepted_length"]["mean"] == 2.0 and row["accepted_length"]["low"] is None
    assert row["speedup"]["mean"] == pytest.approx(3.0) and row["speedup"]["high"] is None


def test_pairs_are_paired(contest: Contest) -> None:
    """A difference that is the same for every prompt has no spread, however far the prompts lie apart."""
    for prompt, accepted in (("a", (0, 1, 0)), ("b", (1, 0))):
        contest.answers.append(answer("slow", prompt, 0, cycles(*accepted), "chat"))
        contest.laps.append(Lap("slow", (prompt,), 0, timing(4.0), 7))
    scores = Scores(contest, [lane("none", 0), lane("fast", 2), lane("slow", 2)])
    pairs = {(p["a"], p["b"]): p for p in scores.pairs()}
    assert set(pairs) == {("none", "fast"), ("none", "slow"), ("fast", "slow")}
    assert "accepted_length_difference" not in pairs["none", "fast"]
    assert pairs["fast", "slow"]["accepted_length_difference"]["mean"] == pytest.approx(2.0 - 7 / 5)


def test_cut_and_loop_cycles_are_reported_apart() -> None:
    c = Contest()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 4  # the 8-gram is seen for the third time at token 24
    found = [Cycle(2, 1, (0,), i == 15, 2 * i) for i in range(16)]
    generation = Generation([1], tokens, found, [False] * 32, "length")
    c.answers = [Answer(n, "a", 0, "chat", generation) for n in ("none", "x")]
    c.laps = [Lap(n, ("a",), 0, timing(1.0), 32) for n in ("none", "x")]
    row = Scores(c, [lane("none", 0), lane("x", 2)]).row(lane("x", 2))
    assert row["cut_cycles"] == {"cycles": 1, "draft_tokens_accepted": 1}
    assert row["loop_cycles"]["cycles"] == 3 and row["loop_cycles"]["accepted_length"] == 2.0
    assert row["cycles"] == 12
    line = output_lines(c)[1]
    assert line["cut"] == [15] and line["loop"] == [12, 13, 14] and sum(line["cycles"]) == 32


def test_a_cycle_cut_by_a_stop_token_commits_what_is_there() -> None:
    found = [Cycle(2, 2, (0, 0), False, 1), Cycle(2, 1, (0,), True, 4)]
    generation = Generation([1], [5, 6, 7, 8, 9], found, [False] * 5, "eos")  # the stop token was a draft token
    assert output_lines(Contest([Answer("x", "a", 0, "chat", generation)]))[0]["cycles"] == [3, 1]


def test_turns_of_a_prompt_are_one_unit() -> None:
    c = Contest()
    for name, seconds in (("none", 2.0), ("fast", 1.0)):
        for turn, prompts in ((0, ("a", "b")), (1, ("b",))):
            for p in prompts:
                c.answers.append(answer(name, p, turn, cycles(0, 0), "chat"))
            c.laps.append(Lap(name, prompts, turn, timing(seconds), 3 * len(prompts)))
    scores = Scores(c, [lane("none", 0), lane("fast", 2)])
    assert scores.units() == [("a", "b")]
    assert scores.work("none", scores.units(), False) == ([6.0], [4.0])


@pytest.fixture
def report(contest: Contest) -> dict[str, Any]:
    lanes = [lane("none", 0), lane("fast", 2)]
    scores = Scores(contest, lanes)
    same = {"checked": 2, "equal": 1, "within_rounding": 1, "beyond_rounding": 0, "not_looked_up": 0, "differences": []}
    return {
        "created": "2026-01-01T00:00:00+00:00",
        "command": "python scripts/evaluate.py <out>",
        "target": {"name": "toy", "path": "/p", "weights_sha256": "0" * 64},
        "settings": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "dtype": "float32", "batch_size": 1,
                     "num_prompts": 2, "prompts": {"path": "p.jsonl", "sha256": "1" * 64}},
        "environment": {"versions": {"python": "3"}, "threads": 1},
        "drafters": [{**scores.row(x), "lossless": same} for x in lanes],
        "pairs": scores.pairs(),
        "plain_pass_ms": scores.steadiness(),
        "skipped": [{"name": "<runs/x>", "reason": "gone"}],
        "skipped_turns": [],
    }  # fmt: skip


def test_the_page_stands_alone(report: dict[str, Any]) -> None:
    text = page.page(report)
    more = more_plots.present(more_plots.EVALUATE, report)
    assert text.count("<svg") == len(plots.PANELS) + len(more) and more
    for outside in ("<script", "<link", "src=", "@import", "<img", 'href="http'):
        assert outside not in text
    assert "&lt;runs/x&gt;" in text and "<runs/x>" not in text
    assert "fast makes toy 2.50× as fast" in text and "NaN" not in text
    ids = [piece.split('"')[0] for piece in text.split(' id="')[1:]]
    assert len(ids) == len(set(ids)), "two drawings share an id"


def test_the_headline_claims_only_what_was_measured(report: dict[str, Any]) -> None:
    report["drafters"][1]["speedup"] = {"mean": 1.1, "low": 0.9, "high": 1.3}
    assert "not clearly faster" in page.headline(report)[0]


def test_a_busy_machine_is_not_believed(report: dict[str, Any], contest: Contest) -> None:
    assert report["plain_pass_ms"] == {"low": 1000.0, "median": 1000.0, "high": 1000.0, "steady": True}
    contest.laps[0].timing.total_s += 30.0
    report["plain_pass_ms"] = Scores(contest, [lane("none", 0), lane("fast", 2)]).steadiness()
    assert not report["plain_pass_ms"]["steady"] and "too busy" in page.headline(report)[0]
    assert any(line.startswith("UNSTEADY") for line in table.notes(report))


def test_the_table_in_markdown(report: dict[str, Any]) -> None:
    lines = table.markdown(report).splitlines()
    assert len(lines) == 4 and all(line.count("|") == lines[0].count("|") for line in lines)
    assert "| fast | 2.00" in lines[3] and "1/2 +1≈" in lines[3]
    report["drafters"][1]["lossless"]["beyond_rounding"] = 1
    assert any("NOT LOSSLESS" in line for line in table.notes(report))


def test_the_report_is_plain_json(report: dict[str, Any]) -> None:
    json.loads(json.dumps(report, allow_nan=False))
    assert plots.overview(report, "x")[:4] == b"\x89PNG"
