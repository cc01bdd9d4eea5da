"""Optional parts are asked for by name: what is missing is one line, what is broken a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.conf.errors import UserError
from outrider.scripts.common.extra import extra


def test_a_part_that_is_there_is_imported() -> None:
    assert extra("logs", "logs").LATER == "later.jsonl"


def test_a_part_that_is_missing_is_named_with_the_key() -> None:
    with pytest.raises(UserError, match="^logs: needs scripts/extra/nothing, which is not"):
        extra("nothing", "logs")
    with pytest.raises(UserError, match="^url: needs scripts/extra/nothing/at/all, which"):
        extra("nothing.at.all", "url")


def test_a_broken_import_within_a_part_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import outrider.scripts.extra

    (tmp_path / "broken.py").write_text("import no_such_library\n")
    monkeypatch.setattr(outrider.scripts.extra, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "outrider.scripts.extra.broken", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        extra("broken", "x")
