"""No test connects beyond this machine, nor does a process that it starts: see
tests/guard/sitecustomize.py.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chats import chats

ROOT = Path(__file__).resolve().parents[1]
GUARD = ROOT / "tests" / "guard"
_spec = importlib.util.spec_from_file_location("network_guard", GUARD / "sitecustomize.py")
assert _spec and _spec.loader
guard = importlib.util.module_from_spec(_spec)
OWNER = "OUTRIDER_NET_OWNER"  # the process whose tests the note is about
_spec.loader.exec_module(guard)


class Attempts:
    """The connections that were tried, read once each."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0

    def take(self) -> list[str]:
        """The attempts since the last call."""
        data = self.path.read_bytes()
        found, self.at = data[self.at :], len(data)
        return found.decode(errors="replace").splitlines()


def guarded(env: Mapping[str, str]) -> dict[str, str]:
    """An environment whose Python processes are guarded."""
    path = [
        str(GUARD),
        *(p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(GUARD)),
    ]
    return {**env, "PYTHONPATH": os.pathsep.join(path), guard.LOG: os.environ[guard.LOG]}


def _guard_children() -> None:
    """Every child gets the guard, also one with an environment of its own."""
    real = subprocess.Popen.__init__

    @functools.wraps(real)
    def started(self: Any, args: Any, *rest: Any, **keys: Any) -> None:
        if keys.get("env") is not None:
            keys["env"] = guarded(keys["env"])
        words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        if len(words) > 1 and "python" in str(words[0]) and str(words[1]) in ("-I", "-E", "-S"):
            raise AssertionError(f"{words[1]} would start Python without the network guard")
        real(self, args, *rest, **keys)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]


if os.environ.get(OWNER) != str(os.getpid()):  # a note for each process that runs tests
    os.environ[OWNER] = str(os.getpid())
    _handle, os.environ[guard.LOG] = tempfile.mkstemp(prefix="outrider-network-", suffix=".log")
    os.close(_handle)
    os.environ.update(guarded(os.environ))
    _guard_children()
    guard.install()
_attempts = Attempts(Path(os.environ[guard.LOG]))


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


NEEDS = {
    "gpu": (has_gpu, "torch sees no GPU"),
    "needs_llamacpp": (
        lambda: (ROOT / ".venv-llamacpp/bin/python").exists(),
        "no .venv-llamacpp: `make .venv-llamacpp/.installed` builds it",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a test needs and this machine lacks is a reason to skip it, said by a marker."""
    for name, (is_here, reason) in NEEDS.items():
        needing = [item for item in items if item.get_closest_marker(name)]
        if needing and not is_here():
            for item in needing:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and their children
    too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported is here to stay: collecting garbage, which a training run does at its
    end, need not look through it again and again. A run of six tiny steps takes a fifth so."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def attempts() -> Attempts:
    """For tests of the guard: what they take does not count against them."""
    return _attempts


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A small chat file."""
    return chats(tmp_path / "data.jsonl")


def _tiny(**shape: Any) -> Any:
    import torch

    from outrider.decode.models.load import TargetConfig, load_target

    return load_target(TargetConfig(kind="tiny", **shape), torch.float64)


@pytest.fixture(scope="module")
def target() -> Any:
    """A tiny target in float64."""
    return _tiny()


@pytest.fixture(scope="module")
def other() -> Any:
    """A smaller one with other weights."""
    return _tiny(layers=1, seed=5)


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    """A test is red when it, or a process it started, tried to connect beyond this machine,
    whatever came of it.
    """
    yield
    if found := _attempts.take():
        pytest.fail("tried to reach the network:\n" + "\n".join(found), pytrace=False)


SHORT_NAMES = frozenset({"conf", "decode", "heads", "train", "scripts"})


@pytest.fixture(autouse=True)
def one_import_name() -> Iterator[None]:
    """A test is red when one of our packages was loaded by its short name: `decode.engine` and
    `outrider.decode.engine` are two modules, and a class of one is none of the other."""
    yield
    if found := SHORT_NAMES & sys.modules.keys():
        for name in found:
            del sys.modules[name]
        pytest.fail(f"imported by a short name: {sorted(found)}; write outrider.NAME")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What was tried after the last test, and the end of the note."""
    if found := _attempts.take():
        print("tried to reach the network:\n" + "\n".join(found))
        session.exitstatus = 1
    _attempts.path.unlink(missing_ok=True)
