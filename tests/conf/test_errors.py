"""What exceptions and processes say, in one line."""

from __future__ import annotations

from outrider.conf.errors import first_line, last_line


def test_one_line_of_what_was_said() -> None:
    assert first_line(ValueError("\n  first \nsecond")) == "first"
    assert first_line(ValueError()) == first_line(ValueError(" \n")) == "ValueError"
    assert last_line("first\n last \n\n") == "last" and last_line("\n") == "no output"
    assert len(first_line(ValueError("x" * 999))) == len(last_line("x" * 999)) == 300
