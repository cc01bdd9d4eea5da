"""The race picture and the coloured answer of a report: which prompt is shown, who wrote each
token, and what the page makes of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.engine import Cycle, Generation, Timing
from outrider.scripts.reports import page
from outrider.scripts.reports import race as picture
from outrider.scripts.scoring.contest import Contest, ScoredAnswer, System, TimedRun
from outrider.scripts.scoring.race import race
from outrider.scripts.scoring.score import Scores
from tests.helpers.browser import chromium, shot

BOTH = "fast+ngram"
QUESTIONS = {"a": "Why <tides>?", "b": "Why rain?", "c": "Why?"}


class Letters:
    """A tokenizer: token n is the n-th letter, 100 and 101 together one of another script."""

    def decode(self, ids: list[int], **_: Any) -> str:
        text = "".join("\ufffd" if i == 100 else "ж" if i == 101 else chr(97 + i) for i in ids)
        return text.replace("\ufffdж", "ж")


def system(name: str, nodes: int, **facts: Any) -> System:
    shape = "chain" if nodes else "none"
    return System(name, name, name, shape, nodes, nodes, lambda r, s: None, facts=facts)  # type: ignore[arg-type,return-value]


def generation(*passes: tuple[int, ...], tokens: list[int] | None = None) -> Generation:
    """passes: a number per accepted token, as `race` has them, without the bonus token."""
    cycles, start = [], 1
    for accepted in passes:
        cycles.append(Cycle(3, len(accepted), (0,) * len(accepted), False, start, accepted))
        start += len(accepted) + 1
    ids = tokens or [i % 26 for i in range(start)]
    return Generation([1], ids, cycles, [False] * len(ids), "length")


SYSTEMS = [system("none", 0), system("fast", 3), system(BOTH, 3, parts=["fast", "ngram"])]
PLAIN = [()] * 8


def contest(prompts: dict[str, tuple[float, Generation]]) -> Contest:
    """prompts: id -> (seconds of the union, its answer). Plain decoding takes 8 s of every one
    and `fast` 4 s."""
    found = Contest()
    for prompt, (spent, answer) in prompts.items():
        for name, seconds, one in (
            ("none", 8.0, generation(*PLAIN)),
            ("fast", 4.0, generation((1, 1), (1, 1), (), ())),
            (BOTH, spent, answer),
        ):
            found.answers.append(ScoredAnswer(name, prompt, 0, "chat", one))
            timing = Timing(prefill_s=1.0, total_s=1.0 + seconds, cycles=len(one.cycles))
            found.timed_runs.append(TimedRun(name, (prompt,), 0, timing, len(one.token_ids)))
    return found


UNION = generation((1, 2), (3,), (2, 2))


@pytest.fixture
def measured() -> Contest:
    return contest({"a": (3.0, UNION), "b": (2.0, UNION), "c": (6.0, UNION)})


def reported(measured: Contest, systems: list[System] = SYSTEMS) -> dict[str, Any]:
    names = {one.name for one in systems}
    measured.answers = [one for one in measured.answers if one.drafter in names]
    measured.timed_runs = [one for one in measured.timed_runs if one.drafter in names]
    scores = Scores(measured, systems)
    report = {
        "created": "2026-01-01T00:00:00+00:00",
        "command": "x",
        "target": {"name": "toy"},
        "settings": {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "dtype": "float32",
            "batch_size": 1,
            "num_prompts": 3,
            "prompts": {"path": "p.jsonl", "sha256": "1" * 64},
        },
        "environment": {"versions": {"python": "3"}},
        "drafters": [{**scores.row(one), "lossless": None} for one in systems],
        "pairs": scores.pairs(),
        "plain_pass_ms": scores.steadiness(),
        "skipped": [],
        "skipped_turns": [],
    }
    report["race"] = race(report, measured, systems, QUESTIONS, Letters())
    return report


def test_an_ordinary_prompt_is_raced(measured: Contest) -> None:
    found = reported(measured)["race"]  # 24 s against 11: of 2.7, 4.0 and 1.3 the first is nearest
    assert (found["prompt_id"], found["category"]) == ("a", "chat")
    assert found["question"] == "Why <tides>?" and found["drafter"] == BOTH
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    seconds = {name: lane["seconds"] for name, lane in lanes.items()}
    assert seconds == {"none": 8.0, "fast": 4.0, BOTH: 3.0}
    assert lanes["none"]["passes"] == [[0]] * 8
    assert lanes["fast"]["passes"] == [[1, 1, 0], [1, 1, 0], [0], [0]]
    assert lanes[BOTH]["passes"] == [[1, 2, 0], [3, 0], [2, 2, 0]]
    assert lanes[BOTH]["drafters"] == ["fast", "ngram"] and lanes[BOTH]["tokens"] == 9
    assert found["answer"] == [
        *(["a", 0], ["b", 1], ["c", 2], ["d", 0], ["e", 3], ["f", 0], ["gh", 2], ["i", 0])
    ]
    json.dumps(found, allow_nan=False)


def test_short_answers_and_loops_are_raced_only_where_nothing_else_is() -> None:
    loop = generation(*[(1,)] * 14, tokens=[0, *[1, 2, 3, 4, 5, 6, 7] * 4])
    short = generation((1,))
    for others in ({}, {"b": (4.0, generation(*[(1,)] * 14))}):
        found = reported(contest({"a": (3.0, loop), **others, "c": (2.0, short)}))["race"]
        assert found["prompt_id"] == ("b" if others else "a")


def test_what_a_stop_token_cut_is_shown_as_far_as_it_was_kept() -> None:
    cut = Generation([1], [0, 1, 2], [Cycle(3, 3, (0,) * 3, True, 1, (2, 1, 1))], [False] * 3)
    found = reported(contest({"a": (0.5, cut)}))["race"]
    assert found["lanes"][-1]["passes"] == [[2, 1]]
    assert found["answer"] == [["a", 0], ["b", 2], ["c", 1]]


def test_a_character_of_two_tokens_is_its_last_ones() -> None:
    answer = generation((1,), (1,), tokens=[0, 1, 100, 101, 2])
    assert reported(contest({"a": (0.5, answer)}))["race"]["answer"] == [
        *(["a", 0], ["bж", 1], ["c", 0])
    ]


def test_prompts_of_a_batch_share_the_time_of_their_passes() -> None:
    measured = contest({"a": (3.0, UNION), "b": (3.0, generation((1, 2), (2, 2)))})
    runs = {run.drafter: run for run in measured.timed_runs}
    measured.timed_runs = [
        TimedRun(name, ("a", "b"), 0, run.timing, 2 * run.tokens) for name, run in runs.items()
    ]
    for run in measured.timed_runs:
        run.timing.cycles = 8 if run.drafter == "none" else 5
    report = reported(measured)
    seconds = {lane["name"]: lane["seconds"] for lane in report["race"]["lanes"]}
    passes = 3 if report["race"]["prompt_id"] == "a" else 2
    shared = {"none": 8.0, "fast": 4.0 * 4 / 5, BOTH: 3.0 * passes / 5}
    assert seconds == pytest.approx(shared)
    report["settings"]["batch_size"] = 2
    assert "share the time of their passes" in page.page(report)


def test_of_a_server_only_the_time_is_known(measured: Contest) -> None:
    server = system("fast", 3, totals_alone=True)
    report = reported(measured, [SYSTEMS[0], server, SYSTEMS[2]])
    lane = next(lane for lane in report["race"]["lanes"] if lane["name"] == "fast")
    assert lane["passes"] is None and lane["seconds"] == 4.0
    shown = next(lane for lane in picture.drawn(report).lanes if lane.label == "fast")  # type: ignore[union-attr]
    assert [path.count("M") for _, path in shown.paths] == [1] and "passes" not in shown.words
    assert reported(measured, [SYSTEMS[0], server])["race"] is None, "no token's writer is known"


def test_without_a_row_that_drafts_there_is_no_race(measured: Contest) -> None:
    report = reported(measured, SYSTEMS[:1])
    assert report["race"] is None and "<h2" in page.page(report)
    assert "side by side" not in page.page(report)
    del report["race"]
    assert picture.drawn(report) is None, "as in reports of version 0.1"


def test_the_page_leads_with_the_race_and_one_answer(measured: Contest) -> None:
    report = reported(measured)
    text = page.page(report)
    places = [text.index(one) for one in ("<h1", "One prompt, side by side", "One answer in")]
    places += [text.index(one) for one in ('class="cards"', "<h2>Scores", "<table")]
    assert places == sorted(places)
    one = picture.drawn(report)
    assert one is not None
    assert [(lane.label, lane.result) for lane in one.lanes] == [
        (BOTH, "2.67× · 2.7 tokens/s"),
        ("fast", "2.00× · 2.0 tokens/s"),
        ("plain decoding", "1.0 tokens/s"),
    ]
    assert one.lanes[0].words.endswith(
        "8 tokens in 3.00 s and 3 target passes; 5 tokens from the draft"
    )
    assert [lane.height for lane in one.lanes] == [3, 3, 1]
    wide = max(
        int(x) for lane in one.lanes for _, d in lane.paths for x in re.findall(r"M(\d+)", d)
    )
    assert wide == round(picture.FAR * 7 / 8), "the slowest row ends at the right"
    assert text.count("<mark") == 4 and text.count('role="img"') >= 3
    counts = [words for _, words in one.counts]
    assert counts == [
        "1 accepted from fast",
        "3 accepted from ngram",
        "1 accepted from several drafters",
        "4 of the target's own",
    ]
    named = {color: words for color, words in one.legend if color}
    assert list(named.values())[1:] == ["accepted from ngram", "accepted from several drafters"]


def test_text_of_a_model_is_never_markup(measured: Contest) -> None:
    report = reported(measured)
    report["race"]["answer"] = [["<script>", 0], ["</mark><b>", 1]]
    text = page.page(report)
    assert (
        "<script" not in text
        and "<b>" not in text.partition('class="answer"')[2].partition("</div>")[0]
    )
    assert "&lt;script&gt;" in text and "Why &lt;tides&gt;?" in text


def test_a_crowd_is_cut_to_the_fastest_and_plain_decoding(measured: Contest) -> None:
    report = reported(measured)
    fast = next(lane for lane in report["race"]["lanes"] if lane["name"] == "fast")
    row = next(row for row in report["drafters"] if row["name"] == "fast")
    for i in range(12):
        report["drafters"].append({**row, "name": f"n{i}", "label": f"n{i}"})
        report["race"]["lanes"].append({**fast, "name": f"n{i}", "seconds": 20.0 + i})
    one = picture.drawn(report)
    assert one is not None and len(one.lanes) == picture.MOST
    assert one.lanes[-1].label == "n4" and one.lanes[2].label == "plain decoding"
    assert "7 slower rows stand in the table alone." in one.notes


def test_a_member_without_a_row_has_a_short_name_and_a_colour(measured: Contest) -> None:
    report = reported(measured)
    for lane in report["race"]["lanes"]:
        lane["drafters"] = [
            name.replace("ngram", "/srv/runs/a@chain:2") for name in lane["drafters"]
        ]
    one = picture.drawn(report)
    assert one is not None
    assert [words for _, words in one.counts][1] == "3 accepted from a@chain:2"
    assert len({color for color, _ in one.counts}) == 4


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_the_race_in_a_browser(
    measured: Contest, browser: Any, tmp_path: Path, theme: str, width: int
) -> None:
    report = reported(measured)
    report["drafters"][1]["label"] = "a_name_without_a_place_to_break_it_that_is_long@chain:2"
    (tmp_path / "report.html").write_text(page.page(report))
    visit = browser.new_page(viewport={"width": width, "height": 740}, color_scheme=theme)
    said: list[str] = []
    visit.on("console", lambda message: said.append(message.text))
    visit.goto((tmp_path / "report.html").as_uri())
    assert visit.evaluate("document.documentElement.scrollWidth") <= width
    ends = visit.locator(".race li").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect().bottom)"
    )
    assert len(ends) == 3 and max(ends) <= 740, "all speeds stand on the first screen"
    strip = visit.get_by_role("img", name=re.compile(r"fast\+ngram: 8 tokens in 3.00 s"))
    assert strip.count() == 1 and strip.bounding_box()["width"] > 0.7 * (min(width, 1120) - 100)
    assert visit.get_by_role("region", name=f"Answer with {BOTH}").inner_text() == "abcdefghi"
    visit.keyboard.press("Tab")
    assert visit.evaluate("document.activeElement.className") == "answer"
    names = visit.locator(".panel td:first-child:not(.facts td)").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect().width)"
    )
    assert width > 600 or max(names) <= width / 2, (
        "the column of names stands still and must not hide the others"
    )
    shot(visit, f"report-{theme}-{width}")
    assert not said
