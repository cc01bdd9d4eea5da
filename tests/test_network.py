"""The guard of the network itself: a connection turns a test red."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from outrider.scripts.common.files import ROOT
from outrider.train.log import no_reports

AWAY = ("192.0.2.1", 80)  # an address for documentation: nobody has it


def udp() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gate:
        gate.sendto(b"x", AWAY)


def test_a_connection_is_blocked_and_noted(attempts: Any) -> None:
    for attempt in (
        lambda: socket.create_connection(("2001:db8::1", 80), 1),
        lambda: socket.getaddrinfo("example.org", 80),
        lambda: socket.gethostbyname("example.org"),
        udp,
        lambda: asyncio.run(asyncio.wait_for(asyncio.open_connection(*AWAY), 1)),
    ):
        with pytest.raises(OSError, match="no network beyond loopback"):
            attempt()
        (line,) = attempts.take()
        assert "192.0.2.1:80" in line or "2001:db8::1" in line or "example.org" in line


SWALLOWING = f"import socket\ntry:\n  socket.create_connection({AWAY}, 1)\nexcept OSError:\n  pass\nprint('on')"


def test_children_and_grandchildren_are_guarded(attempts: Any) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SWALLOWING!r}], check=True)"
    for env in (None, {}, {"PYTHONPATH": str(ROOT)}):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert done.stdout == "on\n"
        (line,) = attempts.take()
        assert "192.0.2.1:80" in line
    with pytest.raises(AssertionError, match="without the network guard"):
        subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)


def test_wandb_reports_nothing_of_itself_where_it_is_offline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mode, variable, quiet in (
        ("offline", "", True),
        ("online", "offline", False),
        (None, "disabled", True),
        (None, "", False),
    ):
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
        monkeypatch.setenv("WANDB_MODE", variable)
        no_reports(mode)
        assert os.environ["WANDB_ERROR_REPORTING"] == ("false" if quiet else "true")
