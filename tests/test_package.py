"""What is installed: a wheel that holds `outrider` and nothing else, beside a user's own files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outrider.scripts.common.files import ROOT
from tests.helpers.chats import chats

FOLDERS = ("conf", "decode", "heads", "train", "scripts")
COMMAND = ["-c", "from outrider.scripts.cli import main; main()"]  # what `outrider` runs
CLASH = 'raise SystemExit("a file of the user\'s own")\n'


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this tree. The build writes beside the sources, so it gets a copy."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__")
    for folder in (*FOLDERS, "outrider"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=skip)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    flags = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *flags, "-w", str(out), str(source)]
    subprocess.run(command, check=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture
def user(tmp_path) -> Path:
    """A folder with files named as ours are, where the user works."""
    for name in FOLDERS:
        (tmp_path / f"{name}.py").write_text(CLASH)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").write_text(CLASH)
    chats(tmp_path / "data.jsonl")
    return tmp_path


def _python(wheel: Path, user: Path, *args: str) -> str:
    """What Python prints, both ways, in the user's folder, with the wheel's files installed."""
    site = user / "site"
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *args], cwd=user, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_wheel_holds_one_name(wheel) -> None:
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"outrider"}
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    missing = {file for file in listed if f"outrider/{file}" not in names}
    assert missing <= {"scripts/slurm.sbatch"}, "what a program reads at run time belongs in it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [[*COMMAND, "train", "medusa"], ["-m", "outrider.train.medusa"]]
)
def test_a_step_is_trained_beside_files_of_the_same_names(wheel, user, command) -> None:
    keys = ["target=tiny", "data.path=data.jsonl", "steps=1", "out_dir=run"]
    out = _python(wheel, user, *command, *keys)
    assert "done: run/head, step 1" in out
    assert (user / "run/head/head.safetensors").exists()


@pytest.mark.slow
def test_python_side_of_an_installed_wheel(wheel, user) -> None:
    out = _python(wheel, user, "-c", "import outrider.api as a; print(a.__file__, a.generate)")
    assert out.startswith(str(user / "site" / "outrider"))
