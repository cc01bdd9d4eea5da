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
    assert known is None or commit.commit("no such file") == known.removesuffix("+")
    assert commit.commit(root=tmp_path) is None
    monkeypatch.setattr(commit, "ROOT", tmp_path)
    assert commit.commit() is None
    monkeypatch.setenv("PATH", "")
    assert commit.commit() is None
