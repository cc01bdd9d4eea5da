"""What a rank leaves behind when its run ends, however that comes about."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.conf.errors import Interrupted, UserError
from outrider.train import signals
from tests.helpers.faults import at_call, ranks, train, wait
from tests.helpers.training import chats


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats(tmp_path_factory.mktemp("data") / "data.jsonl", 24)


def threads() -> list[str]:
    """Names of the threads of this process, those of libraries included."""
    return [
        Path(f"/proc/self/task/{task}/comm").read_text().strip()
        for task in os.listdir("/proc/self/task")
    ]


def mistake() -> None:
    raise UserError("a mistake")


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("event", [lambda: None, mistake, sigterm], ids=["end", "mistake", "stop"])
def test_the_process_group_is_gone(data: Path, tmp_path: Path, event: Callable[[], None]) -> None:
    """Its threads hold Python's tensors. One that lets go of them while the interpreter ends
    aborts the process, whose work is done and saved: torchrun then reports a failure."""
    said = tmp_path / "said"

    def action() -> None:
        try:
            at_call(2, event, lambda: train(data, tmp_path / "run"))()
        except (UserError, Interrupted) as end:
            print(type(end).__name__)
        print("left:", *(name for name in threads() if "gloo" in name))

    codes = [wait(child) for child in ranks(2, action, said)]
    message = [(tmp_path / f"said.{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], message
    assert [text.splitlines()[-1] for text in message] == ["left:"] * 2, message


@pytest.mark.parametrize("over", [True, False])
def test_a_launcher_that_ends_the_ranks_stops_nothing_that_is_saved(
    monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """It sends SIGTERM to the others as soon as one has left, however long ago the user's was."""
    ended: list[int] = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    with signals.Stop() as stop:
        stop.requested, stop.over, stop._heard = signal.SIGTERM, over, -2 * signals.ECHO
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == ([] if over else [75])
