"""The page of `outrider serve` in a real browser: a question asked, both columns end with the same
tokens at T = 0, nothing from elsewhere, nothing on the console.

Needs Debian's chromium and the extra `page` (Playwright); skipped where one of them is missing.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.decode.models.load import TargetConfig, load_target
from tests.helpers.own_server import serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A running browser, headless."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright (pip install -e '.[page]')"
    )
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


def test_one_answer_races_itself() -> None:
    target = load_target(TargetConfig(kind="tiny", context=512), "float32", "cpu")
    with chromium() as browser, serving(target, ["ngram", "none"], longest=500) as server:
        page = browser.new_page(viewport={"width": 420, "height": 900})
        said: list[str] = []
        requested: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))

        def until(condition: str) -> None:
            """Look until it holds: the page's policy lets no script poll by itself."""
            end = time.monotonic() + 120
            while not page.evaluate(condition):
                assert time.monotonic() < end, condition
                page.wait_for_timeout(50)

        def ask(question: str, temperature: str = "0") -> str:
            page.fill("#question", question)
            page.fill("#temperature", temperature)
            page.click("#ask")
            until("!document.querySelector('#ask').disabled")
            return str(page.text_content("#verdict"))

        page.goto(server.url)
        until("document.querySelector('#drafter').options.length > 0")
        assert ask("abc abc abc abc").startswith("✓ same tokens")
        plain, draft = (page.text_content(f"#{side}") for side in ("plain", "draft"))
        assert plain == draft != ""
        assert page.locator("#draft .d").count() > 0 == page.locator("#plain .d").count()
        figures = page.text_content("#draft-figures")
        assert re.search(r"tokens/s\d+\.\d", figures) and re.search(r"length[1-9]", figures)
        assert "two draws of one distribution differ" in ask("abc abc", temperature="0.9")
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        assert not said and all(url.startswith(server.url) for url in requested)
        for field, value in (("#limit", "480"), ("#question", "x"), ("#temperature", "0")):
            page.fill(field, value)
        page.click("#ask")
        until("document.querySelector('#plain').textContent.length > 0")
        page.click("#stop")
        until("document.querySelector('#verdict').textContent === 'Stopped.'")
        assert server.quiet(), "both rows are free"
        ask("y" * 600)
        assert "shorten" in page.text_content("#error")
