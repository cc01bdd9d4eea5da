"""The score table: figures worked out by hand, pairing by prompt, fair turns, and what is
counted apart.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from outrider.decode import stats
from outrider.decode.engine import Cycle, Generation, Timing
from outrider.scripts.reports import page, plots, score_table
from outrider.scripts.reports.table import Table
from outrider.scripts.scoring.interleaved import Contest, ScoredAnswer, System, TimedRun
from outrider.scripts.scoring.score import Scores, output_lines


def system(name: str, nodes: int) -> System:
    return System(
        name, name, name, "chain" if nodes else "none", nodes, nodes, lambda requests, s: None
    )  # type: ignore[arg-type,return-value]


def cycles(*accepted: int, proposed: int = 2, cut_last: bool = False) -> list[Cycle]:
    found, start = [], 1
    for i, a in enumerate(accepted):
        found.append(Cycle(proposed, a, cut_last and i == len(accepted) - 1, start))
        start += a + 1
    return found


def answer(name: str, prompt: str, turn: int, found: list[Cycle], category: str) -> ScoredAnswer:
    tokens = list(range(1 + sum(c.accepted + 1 for c in found)))
    return ScoredAnswer(
        name,
        prompt,
        turn,
        category,
        Generation([1, 2], tokens, found, [False] * len(tokens), "length"),
    )


def timing(decode: float, prefill: float = 1.0, passes: int = 1) -> Timing:
    phases = (0.1 * decode, 0.6 * decode, 0.1 * decode, 0.1 * decode)
    return Timing(prefill, *phases, prefill + decode, passes)


@pytest.fixture
def contest() -> Contest:
    """Two prompts; `fast` takes a third of the time of `none` on the first and half on the
    second.
    """
    c = Contest()
    for name, seconds, lists in (
        ("none", (6.0, 4.0), ((0,) * 6, (0,) * 4)),
        ("fast", (2.0, 2.0), ((1, 2, 0), (2, 0))),
    ):
        for prompt, spent, accepted in zip("ab", seconds, lists, strict=True):
            found = cycles(*accepted, proposed=0 if name == "none" else 2)
            a = answer(name, prompt, 0, found, "chat" if prompt == "a" else "code")
            c.answers.append(a)
            tokens, took = len(a.generation.token_ids), timing(spent, passes=len(found))
            c.timed_runs.append(TimedRun(name, (prompt,), took, tokens, tokens - 1))
    return c


def test_a_row_by_hand(contest: Contest) -> None:
    systems = [system("none", 0), system("fast", 2)]
    none, fast = (Scores(contest, systems).row(x) for x in systems)
    assert fast["accepted_length"]["mean"] == pytest.approx((2 + 3 + 1 + 3 + 1) / 5)
    assert none["accepted_length"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert [p["unconditional"] for p in fast["acceptance_by_position"]] == pytest.approx(
        [3 / 5, 2 / 5]
    )
    assert [p["conditional"] for p in fast["acceptance_by_position"]] == pytest.approx(
        [3 / 5, 2 / 3]
    )
    assert [p["trials"] for p in fast["acceptance_by_position"]] == [5, 3]
    assert none["tokens"] == fast["tokens"] == 12 and fast["cycles"] == 5
    assert fast["tokens_per_second"] == pytest.approx(10 / 4)
    assert none["tokens_per_second"] == pytest.approx(1.0)
    assert fast["speedup"]["mean"] == pytest.approx(2.5)
    assert 2 <= fast["speedup"]["low"] <= fast["speedup"]["high"] <= 3
    # with a second of prefill: 3 passes in 3 s where plain has 6 in 7, 2 in 3 where it has 4 in 5
    longer = (3 * (3 / 3) / (7 / 6) + 2 * (3 / 2) / (5 / 4)) / 5
    assert fast["end_to_end"]["speedup"]["mean"] == pytest.approx((12 / 5) / (12 / 10) / longer)
    assert fast["draft_ms"] == pytest.approx(1000 * 0.4 / 5)
    assert fast["verify_ms"] == pytest.approx(1000 * 3.2 / 5)


def test_a_category_seen_once_claims_no_interval(contest: Contest) -> None:
    row = Scores(contest, [system("none", 0), system("fast", 2)]).row(system("fast", 2))[
        "by_category"
    ]["chat"]
    assert row["accepted_length"]["mean"] == 2.0 and row["accepted_length"]["low"] is None


def test_a_pair_is_doubted_with_either_of_its_rows(contest: Contest) -> None:
    scores = Scores(contest, [system("none", 0), system("fast", 2)])
    (pair,) = scores.pairs({"none": [], "fast": []})
    assert (pair["a"], pair["b"]) == ("none", "fast") and "(2)" in pair["doubts"][0]
    (pair,) = scores.pairs({"none": [], "fast": ["x"]})
    assert pair["doubts"][0] == "the speed of fast is in doubt"


def test_cut_and_loop_cycles_are_reported_apart() -> None:
    c = Contest()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 4  # the 8-gram is seen for the third time at token 24
    found = [Cycle(2, 1, i == 15, 2 * i) for i in range(16)]
    generation = Generation([1], tokens, found, [False] * 32, "length")
    c.answers = [ScoredAnswer(n, "a", 0, "chat", generation) for n in ("none", "x")]
    c.timed_runs = [TimedRun(n, ("a",), timing(1.0), 32, 31) for n in ("none", "x")]
    row = Scores(c, [system("none", 0), system("x", 2)]).row(system("x", 2))
    assert row["cut_cycles"] == {"cycles": 1, "draft_tokens_accepted": 1}
    assert row["loop_cycles"]["cycles"] == 3 and row["loop_cycles"]["accepted_length"] == 2.0
    assert row["cycles"] == 12
    line = output_lines(c)[1]
    assert sum(line["cycles"]) == 32


def test_a_cycle_cut_by_a_stop_token_commits_what_is_there() -> None:
    found = [Cycle(2, 2, False, 1), Cycle(2, 1, True, 4)]
    # the stop token was a draft token
    generation = Generation([1], [5, 6, 7, 8, 9], found, [False] * 5, "eos")
    (line,) = output_lines(Contest([ScoredAnswer("x", "a", 0, "chat", generation)]))
    assert line["cycles"] == [3, 1]


def test_a_difference_is_taken_prompt_by_prompt() -> None:
    """What two drafters share, however prompts differ, is no doubt about which is better."""
    one, other = ([cycles(k % 3 + more) for k in range(30)] for more in (0, 1))
    found = stats.paired_difference(other, one)
    assert (found.mean, found.low, found.high) == pytest.approx((1, 1, 1))


def test_turns_of_a_prompt_are_one_unit() -> None:
    c = Contest()
    for name, seconds in (("none", 2.0), ("fast", 1.0)):
        for turn, prompts in ((0, ("a", "b")), (1, ("b",))):
            for p in prompts:
                c.answers.append(answer(name, p, turn, cycles(0, 0), "chat"))
            tokens = 3 * len(prompts)
            run = TimedRun(name, ("a", "b"), timing(seconds), tokens, tokens - len(prompts))
            c.timed_runs.append(run)
    scores = Scores(c, [system("none", 0), system("fast", 2)])
    assert scores.units == [("a", "b")]
    assert scores.work("none") == stats.Work([6.0], [2.0], [2.0])


@pytest.fixture
def report(contest: Contest) -> dict[str, Any]:
    same = {"checked": 2, "equal": 1, "within_rounding": 1, "beyond_rounding": 0}
    systems = [system("none", 0), system("fast", 2)]
    made = Scores(contest, systems).report(dict.fromkeys(("none", "fast"), same))
    for row in made["drafters"]:
        row["doubts"] = []
    return made | {
        "created": "2026-01-01T00:00:00+00:00",
        "command": "python scripts/evaluate.py <out>",
        "target": {"name": "toy", "path": "/p", "weights_sha256": "0" * 64},
        "settings": {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "dtype": "float32",
            "batch_size": 1,
            "num_prompts": 2,
            "prompts": {"path": "p.jsonl", "sha256": "1" * 64},
        },
        "environment": {"versions": {"python": "3"}, "threads": 1},
        "skipped": [{"name": "<runs/x>", "reason": "gone"}],
    }


def test_the_page_stands_alone(report: dict[str, Any]) -> None:
    report["settings"]["prompts"]["path"] = "<b>{{ 7 * 7 }}</b>"
    text = page.page(report, plots.drawn(report))
    assert text.count('src="data:image/png;base64,') == text.count("src=") == len(plots.PANELS)
    for outside in ("<script", "<link", "@import", 'href="http'):
        assert outside not in text
    assert "&lt;runs/x&gt;" in text and "<runs/x>" not in text and "NaN" not in text
    assert "&lt;b&gt;{{ 7 * 7 }}&lt;/b&gt;" in text
    speed = report["drafters"][1]["speedup"]
    assert f"fast: 2.50× [{speed['low']:.2f}, " in text


def test_answers_that_part_are_counted_in_the_table(report: dict[str, Any]) -> None:
    fast = score_table.table(report).rows[1]
    assert fast[0] == "fast" and fast[2].startswith("2.00") and fast[-1] == "1/2 +1≈"
    assert any(line.startswith("+k≈ (none, fast)") for line in score_table.notes(report))
    report["settings"]["num_prompts"] = 1
    assert any("1 prompts have 2 turns" in line for line in score_table.notes(report))
    report["drafters"][1]["lossless"]["beyond_rounding"] = 1
    assert any("NOT LOSSLESS" in line for line in score_table.notes(report))


def test_a_log_has_no_width() -> None:
    file, cells = io.StringIO(), ["a [bold]", "1.40 [1.32, 1.50]", "x" * 60]
    Table(("drafter", "length", "why"), [cells]).show(Console(file=file, width=60))
    assert all(cell in file.getvalue() for cell in cells)
