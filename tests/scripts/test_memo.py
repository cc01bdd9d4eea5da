"""What long work keeps of itself: values by name, and steps that are done once."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.scripts.common.memo import Memo


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    def square(x: int) -> int:
        if x == 3:
            stop()
        made.append(x)
        return x * x

    place, seen = tmp_path / "memo", list[tuple[int, int]]()
    with pytest.raises(KeyboardInterrupt):
        Memo(place, {"a": 1}).each("squares", [1, 2, 3], square)
    again = Memo(place, {"a": 1})
    assert again.resumed and again.lines("squares") == [1, 4]
    with (place / "squares.jsonl").open("a") as file:
        file.write("[9")  # a crash in mid-line
    on_progress = lambda done, total, *_: seen.append((done, total))
    assert again.each("squares", [1, 2, 4], square, on_progress) == [1, 4, 16]
    assert made == [1, 2, 4] and seen == [(2, 3), (3, 3)]
    assert again.once("one", lambda: {"x": (1, 2)}) == {"x": [1, 2]}, "as it is read back"
    assert Memo(place, {"a": 1}).once("one", stop) == {"x": [1, 2]}
    alone = Memo(None)
    assert alone.once("one", lambda: 5) == alone.once("one", stop) == 5
    again.clear()
    assert not place.exists()


def test_another_key_begins_anew_and_names_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "memo"
    Memo(place, {"a": 1, "b": [2], "c": 3}).add("x", 1)
    assert Memo(place, {"a": 1, "b": [2], "c": 3}).resumed
    again = Memo(place, {"a": 1, "b": [3], "d": 3})
    assert not again.resumed and again.lines("x") == []
    message = f"note: {place} was made with another b, c, d; all is made anew\n"
    assert capsys.readouterr().err == message
    Memo(place, {"a": 1, "b": [3], "d": 4})
    assert not capsys.readouterr().err, "there was nothing to lose"


def test_a_folder_of_another_version_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "memo"
    Memo(place, {"a": 1}).add("x", 1)
    (place / "mine.txt").write_text("of the user's")
    (place / "key").write_text("an older form")
    again = Memo(place, {"a": 1})
    assert again.lines("x") == [] and not again.resumed
    message = f"note: {place} was made with another version; all is made anew\n"
    assert capsys.readouterr().err == message
    assert (place / "mine.txt").exists()
    again.add("x", 2)
    assert Memo(place, {"a": 1}).lines("x") == [2]


def test_a_damaged_file_is_named_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memo = Memo(tmp_path / "memo", {"a": 1})
    memo.add("other", 7)
    (tmp_path / "memo/x.jsonl").write_bytes(b"[1]\n\xff\xfe\n")
    assert memo.each("x", [1, 2], lambda x: x) == [1, 2]
    message = f"note: {tmp_path}/memo/x.jsonl is damaged; it is made again\n"
    assert capsys.readouterr().err == message and memo.lines("other") == [7]
