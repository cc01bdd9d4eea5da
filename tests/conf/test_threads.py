"""Threads that wait spin where the processors are idle, and sleep where somebody shares them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.conf import threads


def loads(monkeypatch: pytest.MonkeyPatch, running: list[int], cpus: int = 2) -> None:
    """The system says so many running threads, look after look."""
    left = list(running)

    def read_text(path: Path) -> str:
        assert str(path) == "/proc/loadavg"
        return f"0.00 0.01 0.05 {left.pop(0) if len(left) > 1 else left[0]}/153 32100\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(threads, "PAUSE", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)


@pytest.mark.parametrize(
    ("running", "cpus", "found"),
    [
        ([1], 2, {}),
        ([2], 2, threads.SLEEPY),
        ([9, 1, 1, 1, 1, 1, 1], 2, {}),  # somebody who was gone again
        ([1, 3, 2, 2, 2, 1, 2], 2, threads.SLEEPY),
        ([8], 64, {}),
        ([9], 64, threads.SLEEPY),
    ],
)
def test_threads_sleep_where_others_run(
    running: list[int], cpus: int, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, running, cpus)
    assert threads.waiting({}) == found


def test_several_processes_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, [1])
    assert threads.waiting({}, processes=2) == threads.SLEEPY


@pytest.mark.parametrize("name", threads.CHOSEN)
def test_what_the_user_has_chosen_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, [9])
    assert threads.waiting({name: "active"}, processes=2) == {}


def test_a_system_that_does_not_say_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert threads.waiting({}) == {}
