"""scripts/lab/hub_stand_in.py as a process of its own, before the real client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants

from outrider.scripts.common.files import ROOT
from tests.helpers.hub import at

COMMAND = [sys.executable, "-m", "outrider.scripts.lab.hub_stand_in"]


def started(folder: Path, *words: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [*COMMAND, str(folder), *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    return process, process.stdout.readline().strip().removeprefix("HF_ENDPOINT=")


def test_what_was_pushed_outlives_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    process, url = started(tmp_path / "hub")
    try:
        at(url, monkeypatch)
        api = HfApi(token="write-me")
        api.create_repo("me/x", private=True)
        steps = [CommitOperationAdd("a.safetensors", b"large"), CommitOperationAdd("b.md", b"b")]
        commit = api.create_commit("me/x", steps, commit_message="two files").oid
    finally:
        process.kill()
        process.wait()
    process, url = started(tmp_path / "hub", "port=0")
    try:
        at(url, monkeypatch)
        api = HfApi(token="read-me")
        assert api.model_info("me/x").sha == commit
        place = api.hf_hub_download("me/x", "a.safetensors", cache_dir=tmp_path / "cache")
        assert Path(place).read_bytes() == b"large" and commit in place
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("words", [[], ["FOLDER", "prot=1"], ["FOLDER", "port=a"]])
def test_a_wrong_command_line_is_said(words: list[str]) -> None:
    done = subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: write FOLDER")
