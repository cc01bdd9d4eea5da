"""What a log file shows of long work: plain lines, not too many, with the time left."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from outrider.scripts.common.progress import Steps


class Watch:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def steps(**more: Any) -> tuple[Steps, Watch]:
    watch = Watch()
    return Steps(console=Console(file=io.StringIO(), **more), now=watch, every=30.0), watch


def test_a_log_gets_a_line_now_and_then(capsys: Any) -> None:
    bar, watch = steps()
    with bar:
        task = bar.add_task("system a", total=10, name="scoring")
        for done in range(10):
            bar.update(task, description=f"system {done}", note=f"prompt {done}")
            watch.now += 20.0
            bar.advance(task)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "scoring: 2 of 10 (prompt 1), 40 s so far, about 2:40 min left"
    assert len(lines) == 5 and lines[-1] == "scoring: 10 of 10 (prompt 9), 3:20 min so far"


def test_work_that_goes_on_takes_its_pace_from_what_it_does_itself(capsys: Any) -> None:
    bar, watch = steps()
    with bar:
        task = bar.add_task("greedy", total=100, completed=80)
        watch.now = 60.0
        bar.update(task, completed=85)
        bar.update(task, completed=86)
    assert capsys.readouterr().err == "greedy: 85 of 100, 1:00 min so far, about 3:00 min left\n"
