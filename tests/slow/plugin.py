"""The plugin of pytest (`-p tests.slow.plugin`) that lists slow tests, or writes down what came of
them: each at its end, by the process that hears of all, so that a worker that dies takes only
its own test along.

The run is described by a JSON file named in $OUTRIDER_SLOW:
record, hashes, commit: as tests/slow/record.py says; until: when no further test begins, in
seconds since 1970; limit: seconds after which a test is red, so that none hangs for ever; ran:
the file that gets the ids of those that ended, a line each; again: whether it is the second try.
To list, $OUTRIDER_SLOW_LIST names the file for the ids, with whether what each needs is here.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.slow.record import Record, merged

RUN, LIST = "OUTRIDER_SLOW", "OUTRIDER_SLOW_LIST"


@functools.cache
def run() -> dict[str, Any]:
    """What the environment says of this run; {} where nothing is recorded."""
    path = os.environ.get(RUN)
    return json.loads(Path(path).read_text()) if path else {}


def pytest_configure(config: pytest.Config) -> None:
    if run() and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(run()), "slow-recorder")


def pytest_collection_finish(session: pytest.Session) -> None:
    if LIST in os.environ:
        possible = {item.nodeid: item.get_closest_marker("skip") is None for item in session.items}
        Path(os.environ[LIST]).write_text(json.dumps(possible))


class Recorder:
    """Writes down every test that ended. Where workers run them, only in the process above."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.record = Record(Path(about["record"]))
        self.reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        heard = self.reports[report.nodeid]
        heard.append(report)
        # a worker that died leaves one report of no phase
        if report.when in ("setup", "call"):
            return
        del self.reports[report.nodeid]
        if report.nodeid in self.about["hashes"]:
            self._write(report.nodeid, heard)

    def _write(self, name: str, heard: list[pytest.TestReport]) -> None:
        result = "green"
        if any(r.skipped and not hasattr(r, "wasxfail") for r in heard):
            result = "skipped"
        if any(r.failed for r in heard):
            result = "red"
        run: dict[str, Any] = {"result": result, "hash": self.about["hashes"][name]}
        if any(r.when == "call" for r in heard):
            run["seconds"] = round(sum(r.duration for r in heard), 1)
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
        with self.record.changing() as rows:
            before = rows.get(name, {})
            rows[name] = merged(before, run, {"commit": self.about["commit"], "date": date})
            if self.about["again"] and result == "green":
                rows[name]["second_try"] = date
        with open(self.about["ran"], "a") as file:
            file.write(f"{name}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> bool | None:
    """No test begins when the time is up; one that did not begin is not reported."""
    return True if run() and time.time() > run()["until"] else None


def _limited() -> Generator[None, Any, Any]:
    if not run() or threading.current_thread() is not threading.main_thread():
        return (yield)
    limit = int(run()["limit"])

    def late(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"took more than {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    return (yield from _limited())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    return (yield from _limited())
