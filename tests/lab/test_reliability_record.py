"""The figures of `make slow`: rows merge, carry where they come from, and the page shows
what the JSON holds.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from outrider.scripts.lab.pages import reliability


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_RELIABILITY", str(tmp_path / "results" / "r.json"))
    return tmp_path / "results" / "r.json"


def many(start: int) -> None:
    for i in range(start, start + 20):
        reliability.record(f"row{i:02d}", what=f"fault {i}", result="1/1", met=True)


def test_rows_merge_also_from_several_processes(out: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=many, args=(i,)) for i in (0, 20)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert list(reliability.read()) == [f"row{i:02d}" for i in range(40)]
    reliability.record("row07", what="fault 7", result="19/20", met=False, trials=20)
    rows = json.loads(out.read_text())
    assert len(rows) == 40 and rows["row07"]["trials"] == 20 and rows["row08"]["result"] == "1/1"
    assert rows["row07"]["command"].endswith("test_rows_merge_also_from_several_processes")
    assert {"date", "commit", "machine"} <= set(rows["row07"])
    table = reliability.table(rows).markdown()
    assert "| fault 7 | 19/20 (**missed**) |" in table and "| fault 8 | 1/1 |" in table
    assert [p.name for p in out.parent.iterdir()] == ["r.json"]


def test_a_test_writes_nothing_into_the_tree_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTRIDER_RELIABILITY", raising=False)
    monkeypatch.setattr(reliability.tempfile, "gettempdir", lambda: str(tmp_path))
    before = reliability.RESULTS.read_bytes()
    reliability.record("row", what="fault", result="1/1", met=True)
    assert list(reliability.read()) == ["row"] and reliability.RESULTS.read_bytes() == before


def test_the_committed_rows_are_whole_and_name_no_machine_of_ours() -> None:
    rows = reliability.read(reliability.RESULTS)
    for name, row in rows.items():
        assert {"what", "result", "met", "date", "commit", "command", "machine"} <= set(row), name
    text = json.dumps(rows)
    assert "/tmp" not in text and "/home" not in text and "/root" not in text
