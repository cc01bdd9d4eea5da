"""A bound process ends with its parent, together with what it started, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.conf import bound

# Starts a process of its own, as a compiler driver does, and says so by a file.
CHILD = """
import subprocess, sys
from pathlib import Path
from outrider.conf import bound
bound.end_with_parent(Path.cwd())
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
stage = Path(sys.argv[1] + ".tmp")
stage.write_text(str(inner.pid))
stage.rename(sys.argv[1])
inner.wait()
"""
PARENT = """
import os, signal, sys
from pathlib import Path
from outrider.conf import bound
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
bound.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ, Path(sys.argv[3]), 600.0)
"""


def until(done: Callable[[], bool]) -> None:
    for _ in range(3000):
        if done():
            return
        time.sleep(0.02)
    pytest.fail("waited in vain")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")  # a zombie that nobody waits for is gone too
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return not os.path.isdir("/proc/self") or not status.exists()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_its_parent(end: signal.Signals, tmp_path: Path) -> None:
    mark, work = tmp_path / "pid", tmp_path / "work"
    work.mkdir()
    (work / "half").write_text("x")
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    command = [sys.executable, "-c", PARENT, CHILD, str(mark), str(work)]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as parent:
        until(mark.exists)
        parent.send_signal(end)
    until(lambda: gone(int(mark.read_text())))
    if end != signal.SIGINT:  # where the parent lives on for a moment, the folder is its own
        until(lambda: not work.exists())


def test_it_is_killed_after_its_time_and_heard_before(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        bound.run([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, tmp_path, 0.2)
    failing = [sys.executable, "-c", "import sys; sys.exit('no\\n' * 100_000)"]
    code, said = bound.run(failing, os.environ, tmp_path, 600.0)
    assert code == 1 and said.startswith("no\n") and len(said) > 300_000
