"""What a log file shows of long work: plain lines, not too many, with the time left."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from outrider.scripts.common.meter import Meter
from outrider.scripts.common.progress import Steps, clock


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


def test_short_work_and_terminals_and_quiet_get_none(capsys: Any) -> None:
    bar, watch = steps()
    with bar:
        task = bar.add_task("short", total=3)
        for _ in range(3):
            watch.now += 9.0
            bar.advance(task)
    for more, quiet in (({"force_terminal": True}, False), ({}, True)):
        watch = Watch()
        bar = Steps(console=Console(file=io.StringIO(), **more), now=watch, quiet=quiet)
        with bar:
            task = bar.add_task("long", total=3)
            watch.now += 100.0
            bar.advance(task)
    assert capsys.readouterr().err == ""


def test_a_transient_bar_leaves_nothing_in_a_log() -> None:
    out = io.StringIO()
    with Steps(console=Console(file=out), transient=True) as bar:
        bar.advance(bar.add_task("x", total=1))
    assert out.getvalue() == ""


def test_work_that_goes_on_takes_its_pace_from_what_it_does_itself(capsys: Any) -> None:
    bar, watch = steps()
    with bar:
        task = bar.add_task("greedy", total=100, completed=80)
        watch.now = 60.0
        bar.update(task, completed=85)
        bar.update(task, completed=86)
    assert capsys.readouterr().err == "greedy: 85 of 100, 1:00 min so far, about 3:00 min left\n"


def test_times_are_short() -> None:
    assert [clock(s) for s in (0.4, 59.4, 60, 3599, 3600, 9000)] == [
        "0 s",
        "59 s",
        "1:00 min",
        "59:59 min",
        "1:00 h",
        "2:30 h",
    ]


def test_a_block_without_a_single_answer_stops_no_meter() -> None:
    meter = Meter(total=10, done=0, guess=50)
    with meter:
        meter.block(2)
        meter.add(500)
        meter.block(3)
    task = meter.bar.tasks[0]
    assert task.completed == 3 and task.fields["note"].endswith("tokens/s")
    assert meter.rate() > 0
