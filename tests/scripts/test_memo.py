"""What long work keeps of itself: values by name, under one key."""

from __future__ import annotations

from pathlib import Path

from outrider.scripts.common.memo import Memo


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    place = tmp_path / "memo.jsonl"
    first = Memo(place, {"a": 1})
    assert not first.resumed
    for value in (1, {"x": (2, 3)}):
        first.add("x", value)
    first.add("y", 9)
    with place.open("a") as file:
        file.write('{"name": "x", "va')  # a crash in mid-line
    again = Memo(place, {"a": 1})
    assert again.resumed and again.lines("x") == [1, {"x": [2, 3]}]
    again.add("x", 4)
    assert Memo(place, {"a": 1}).lines("x")[2:] == [4] and again.lines("y") == [9]
    again.clear()
    assert not place.exists()
    alone = Memo(None)
    alone.add("x", 5)
    assert alone.lines("x") == [5]
