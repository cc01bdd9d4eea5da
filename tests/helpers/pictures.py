"""Reports without their drawings, for tests that look at the numbers: rendering takes longer
than decoding.
"""

from __future__ import annotations

import pytest

from outrider.scripts.reports import plots


def left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels are still laid out from the report, but not rendered."""
    monkeypatch.setattr(plots, "png", lambda figure, dpi=130: b"\x89PNG")
    monkeypatch.setattr(plots, "svg", lambda figure, salt: "<svg></svg>")
