"""The page of `outrider serve` in a real browser: a question asked, both columns end, the same
tokens at T = 0, nothing from elsewhere, nothing on the console.

Needs Debian's chromium and the extra `page` (Playwright, with no browser of its own).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.decode.models.load import TargetConfig, load_target
from outrider.scripts.serve_http import app
from outrider.scripts.serve_http.worker import WorkerLimits
from tests.helpers.browser import chromium, shot
from tests.helpers.own_server import Running, serving


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    target = load_target(TargetConfig(kind="tiny", context=512), "float32", "cpu")
    with serving(target, ["ngram", "none"], WorkerLimits(4, 500, 4, 16)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


class Visit:
    """A page with what it said on the console and what it asked for."""

    def __init__(self, browser: Any, url: str, **keys: Any):
        self.page = browser.new_page(viewport={"width": 1180, "height": 900}, **keys)
        self.said: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(url)
        self.until("document.querySelector('#drafter').options.length > 0")

    def until(self, condition: str) -> None:
        """Look until a condition of the page holds: its policy lets no script poll by itself."""
        end = time.monotonic() + 120
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(50)

    def ask(self, question: str, temperature: float = 0, limit: int = 60) -> str:
        """The verdict, when both columns have ended."""
        self.page.fill("#question", question)
        self.page.fill("#temperature", str(temperature))
        self.page.fill("#limit", str(limit))
        self.page.click("#ask")
        self.until("!document.querySelector('#ask').disabled")
        assert self.page.text_content("#error") == ""
        return str(self.page.text_content("#verdict"))

    def answered(self, *answers: dict[str, Any], drafter: str = "ngram") -> None:
        """From now on the server names one drafter and gives these answers: of the model alone,
        then of the drafter. An answer: its `speculation`; drafted: a bool for every token."""
        model = {"id": "toy", "max_model_len": 512, "drafters": [drafter, "none"]}
        self.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
        texts = [stream(**one) for one in answers]

        def reply(route: Any) -> None:
            alone = route.request.post_data_json["drafter"] == "none"
            route.fulfill(body=texts[0 if alone else 1], content_type="text/event-stream")

        self.page.route("**/v1/chat/completions", reply)
        self.page.reload()
        self.until("document.querySelector('#drafter').options.length === 1")

    def tops(self, *ids: str) -> list[float]:
        """Where elements begin, in pixels from the top of the window."""
        top = "document.getElementById('{}').getBoundingClientRect().top"
        return [self.page.evaluate(top.format(one)) for one in ids]

    def widths(self, *ids: str) -> list[float]:
        width = "document.getElementById('{}').getBoundingClientRect().width"
        return [self.page.evaluate(width.format(one)) for one in ids]

    def shot(self, name: str) -> None:
        """A picture, where pictures are wanted."""
        shot(self.page, name)


def stream(drafted: str, seconds: float, proposed: int, word: str = " tide") -> str:
    """A streamed answer: a token for every letter of `drafted`, d where it was accepted from the
    draft. proposed: draft tokens in all."""
    tokens = [{"id": i, "text": word, "drafted": one == "d"} for i, one in enumerate(drafted)]
    accepted = drafted.count("d")
    speculation = {
        "drafted": proposed,
        "accepted": accepted,
        "cycles": len(drafted) - accepted - 1,
        "tried_by_position": [proposed],
        "accepted_by_position": [accepted],
        "seconds": seconds,
    }
    said = [{"choices": [{"tokens": tokens}]}, {"choices": [], "speculation": speculation}]
    return "".join(f"data: {json.dumps(one)}\n\n" for one in said) + "data: [DONE]\n\n"


ALONE = {"drafted": "o" * 40, "seconds": 4.0, "proposed": 0}
TWICE = {"drafted": "o" + "od" * 19 + "o", "seconds": 2.5, "proposed": 38}
LONG_NAME = (
    "runs/demo-of-something/eagle3_with_a_long_name@chain:2+runs/another/medusa@tree:4+ngram"
)


def test_both_columns_end_with_the_same_tokens(running: Running, browser: Any) -> None:
    visit = Visit(browser, running.url)
    for number in range(3):
        verdict = visit.ask(f"abc {number} abc {number} abc {number}")
        assert verdict.startswith("✓ same tokens"), verdict
        plain, draft = (visit.page.text_content(f"#{side}") for side in ("plain", "draft"))
        assert plain == draft != ""
    assert visit.page.locator("#draft .d").count() > 0 == visit.page.locator("#plain .d").count()
    assert "position 1" in visit.page.text_content("#bars")
    figures = visit.page.text_content("#draft-figures")
    assert re.search(r"tokens/s\d+\.\d", figures) and re.search(r"accepted length[1-9]", figures)
    assert re.search(r"accepted length1\.00", visit.page.text_content("#plain-figures"))
    verdict = visit.ask("abc abc", temperature=0.9)
    assert "two draws of one distribution differ" in verdict
    assert not visit.said and all(url.startswith(running.url) for url in visit.requested)
    visit.shot("light")


def test_dark_narrow_and_by_keyboard(running: Running, browser: Any) -> None:
    visit = Visit(browser, running.url, color_scheme="dark")
    visit.page.set_viewport_size({"width": 420, "height": 900})
    ground = "getComputedStyle(document.body).backgroundColor"
    assert visit.page.evaluate(ground) == "rgb(22, 23, 26)"
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 420
    reached = []
    for _ in range(9):
        visit.page.keyboard.press("Tab")
        reached.append(visit.page.evaluate("document.activeElement.id"))
    assert [r for r in reached if r][:5] == ["question", "drafter", "temperature", "limit", "ask"]
    assert {"plain", "draft"} <= set(reached), "a long answer can be scrolled by keyboard"
    visit.page.focus("#question")
    visit.page.fill("#question", "abc abc abc")
    visit.page.keyboard.press("Control+Enter")
    visit.until("document.querySelector('#verdict').textContent.includes('same')")
    visit.shot("dark")
    named = visit.page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".every(one => one.labels.length || one.textContent.trim())"
    )
    assert named and not visit.said


@pytest.mark.parametrize("width, height", [(390, 664), (360, 640)])
def test_a_phone_shows_the_speeds_without_scrolling(
    running: Running, browser: Any, width: int, height: int
) -> None:
    visit = Visit(browser, running.url)
    visit.page.set_viewport_size({"width": width, "height": height})
    visit.answered(ALONE, TWICE, drafter=LONG_NAME)
    visit.ask("Why tides?")
    assert visit.page.evaluate("window.scrollY") == 0
    visible = visit.page.locator("#speeds li").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect().bottom <= innerHeight)"
    )
    assert visible == [True, True]
    assert visit.page.locator("#speeds li").all_text_contents() == [
        f"With {LONG_NAME}16.0 tokens/s",
        "The model alone10.0 tokens/s",
    ]
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert len(set(visit.widths("form", "plain-card", "draft-card", "speeds", "drafter"))) == 1
    visit.shot(f"phone-{width}")


def test_the_faster_one_comes_first(running: Running, browser: Any) -> None:
    visit = Visit(browser, running.url)
    visit.page.set_viewport_size({"width": 390, "height": 800})
    for seconds, first in ((2.5, "draft"), (5.0, "plain"), (2.5, "draft")):
        visit.answered(ALONE, {**TWICE, "seconds": seconds})
        visit.ask("Why tides?")
        plain, draft = visit.tops("plain-card", "draft-card")
        assert (draft < plain) == (first == "draft")
        top = visit.page.locator("#speeds li").first.text_content()
        assert top.startswith("With" if first == "draft" else "The model alone")


def test_the_verdict_claims_no_speed_that_the_draft_did_not_bring(
    running: Running, browser: Any
) -> None:
    visit = Visit(browser, running.url)
    nothing = {"drafted": "o" * 40, "seconds": 3.125}
    one = {"drafted": "o" * 38 + "do", "seconds": 3.125, "proposed": 30}
    for draft, words in (
        ({**nothing, "proposed": 0}, "nothing was drafted, so there is no gain to time"),
        ({**nothing, "proposed": 30}, "no draft token was accepted, so there is no gain to time"),
        (one, "1.03 tokens a pass bring at most 1.03× the speed; other work blurred the clock"),
        (TWICE, "1.60× the speed on this one answer"),
        ({**TWICE, "seconds": 4.4}, "0.91× the speed on this one answer"),
    ):
        visit.answered(ALONE, draft)
        assert visit.ask("Why tides?") == f"✓ same tokens; {words}"
        assert "1.28" not in visit.page.text_content("#verdict")
        assert visit.ask("Why tides?", temperature=0.7).startswith(words[0].upper() + words[1:])


def test_stop_frees_both_rows_and_a_refusal_is_shown(running: Running, browser: Any) -> None:
    from tests.helpers.own_server import quiet

    visit = Visit(browser, running.url)
    visit.page.fill("#limit", "480")
    visit.page.fill("#question", "x")
    visit.page.click("#ask")
    visit.until("document.querySelector('#plain').textContent.length > 0")
    visit.page.click("#stop")
    visit.until("document.querySelector('#verdict').textContent === 'Stopped.'")
    assert quiet(running.worker)
    visit.page.fill("#question", "y" * 600)
    visit.page.click("#ask")
    visit.until("document.querySelector('#error').textContent !== ''")
    assert "shorten" in visit.page.text_content("#error")
    assert all("400" in line for line in visit.said), "the browser itself notes the refusal"


def test_the_page_is_one_file_that_loads_nothing() -> None:
    text = app.PAGE.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=\"(?!data:)", text) and "http://" not in text
    assert "https://" not in text and "innerHTML" not in text, "text of a model is never markup"
    assert json.dumps(text)  # plain UTF-8
