"""A real browser for tests that look at pages: Debian's chromium and the extra `page` (Playwright,
with no browser of its own). Where one of them is missing, the tests skip.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

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
