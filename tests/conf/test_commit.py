"""Which commit a figure names."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.conf import commit


def test_a_commit_is_named_and_none_outside_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = commit.commit()
    assert known is None or len(known.removesuffix("+")) == 12
    assert commit.commit(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert commit.commit() is None
