"""Reports without their drawings, for tests that look at the numbers: rendering takes longer
than decoding.
"""

from __future__ import annotations

import pytest

from outrider.scripts.reports import plots


def left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "drawn", lambda report: dict.fromkeys(plots.PANELS, b"\x89PNG"))
