"""The picture of the README: the page of a running `outrider serve`, after one question.

    outrider serve target=smollm2 'drafters=[runs/eagle3@tree]' dtype=float32
    python -m outrider.scripts.lab.pages.picture http://127.0.0.1:8000 docs/page.png "Why tides?"

Needs Debian's chromium and the extra `page` (Playwright). The picture is written when both
columns have ended and told the same tokens; exit code 2 if they did not.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, SECONDS = 1180, 700, 300
SAME = "✓ same tokens"


def take(url: str, out: Path, question: str) -> str:
    """Ask `question` on the page at `url` and write what it shows then; the page's verdict.
    Raises UserError without a browser, or where the two columns part."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UserError("picture: no chromium on this machine; apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise UserError("picture: needs Playwright; pip install -e '.[page]'") from None
    with sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = one.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(url)
        _until(page, "document.querySelector('#drafter').options.length > 0")
        page.fill("#question", question)
        page.click("#ask")
        _until(page, "!document.querySelector('#ask').disabled")
        verdict = str(page.text_content("#verdict") or page.text_content("#error"))
        if not verdict.startswith(SAME):
            raise UserError(f"{url}: the page says {verdict!r}; ask at T = 0 in float32")
        out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(out), full_page=True)
        one.close()
    return verdict


def _until(page: Any, condition: str) -> None:
    """Look until a condition of the page holds: its policy lets no script poll by itself."""
    end = time.monotonic() + SECONDS
    while not page.evaluate(condition):
        if time.monotonic() > end:
            raise UserError(f"picture: the page was not done after {SECONDS} s; {condition}")
        page.wait_for_timeout(100)


def main(words: list[str]) -> int:
    """Exit code 2 for a mistake."""
    if len(words) != 3:
        print("error: picture: give URL OUT.png QUESTION", file=sys.stderr)
        return 2
    try:
        print(take(words[0], Path(words[1]), words[2]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
