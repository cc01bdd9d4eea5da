"""What a log file shows of long work: plain lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider.scripts.common import progress


@pytest.mark.parametrize("terminal", [False, True])
def test_a_log_gets_a_line_where_a_terminal_has_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    out = io.StringIO()
    with progress.Steps(console=Console(file=out, force_terminal=terminal)) as bar:
        shown = progress.by_name(bar)
        shown(3, 10, "greedy")
        shown(10, 10, "greedy")
    lines = [] if terminal else ["greedy: 3 of 10", "greedy: 10 of 10"]
    assert capsys.readouterr().err.splitlines() == lines and bool(out.getvalue()) == terminal
