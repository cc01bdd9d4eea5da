"""Files are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from outrider.conf import disk


def test_a_file_is_replaced_in_a_folder_that_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    for text in ("first", "", "käse\r\n\u2028end", "x" * 100_000):
        disk.write_text(path, text)
        assert path.read_bytes() == text.encode()
    disk.write_bytes(path, b"")
    assert path.read_bytes() == b"" and os.listdir(path.parent) == ["a.json"]


@pytest.mark.parametrize("fault", ["write", "rename"])
def test_what_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a"
    disk.write_text(path, "old")
    if fault != "write":
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"), disk.whole(path) as stage:
        stage.write_text("new")
        if fault == "write":
            fail()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_the_longest_name_and_a_block_within_a_block(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    with disk.whole(path) as stage:
        stage.write_text("outer")
        disk.write_text(path, "inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer" and os.listdir(tmp_path) == [path.name]
