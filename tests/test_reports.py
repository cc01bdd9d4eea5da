"""A report of a test reaches the terminal whatever text it holds, also from a worker of xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outrider.scripts.common.files import ROOT

HALF = r"""
import logging
import sys

import pytest

HALF = "\ud83d"


def test_message():
    raise ValueError(f"message {HALF}")


def test_log():
    logging.getLogger("library").warning("log %s", HALF)


def test_output():
    print(f"output {HALF}")
    print(f"error {HALF}", file=sys.stderr)


def test_skipped():
    pytest.skip(f"reason {HALF}")
"""


def test_half_a_surrogate_pair_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    (tmp_path / "test_half.py").write_text(HALF)
    (tmp_path / "test_unreadable.py").write_text('raise ValueError("collected \\ud83d")\n')
    command = [sys.executable, "-m", "pytest", "-n", "2", "-rA", "-p", "xdist"]
    command += ["--continue-on-collection-errors", f"--rootdir={tmp_path}", str(tmp_path)]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env = inherited | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "INTERNALERROR" not in said, said
    assert "1 failed, 2 passed, 1 skipped" in said, said
    for words in ("message", "log", "reason", "collected"):
        assert f"{words} \\ud83d" in said, said
