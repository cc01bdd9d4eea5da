"""How `--help` is laid out."""

from __future__ import annotations

import pytest

from outrider.conf import usage
from outrider.conf.usage import HelpRow

DOC = """A paragraph that is wider than the terminal of whoever reads it, in one line.

    python scripts/evaluate.py target=smollm2 'drafters=[none, ngram]' \\
        out=reports/medusa seed=0

    g = sum over micro-batches and ranks of what is a formula and stays
"""


def test_what_fits_stays_as_it_is_written() -> None:
    assert usage.prose(DOC, 100) == DOC


def test_prose_and_commands_are_wrapped_and_formulas_stay() -> None:
    lines = usage.prose(DOC, 50).splitlines()
    formula = [line for line in lines if "formula" in line]
    assert formula == [DOC.splitlines()[-1]]
    assert all(len(line) <= 50 for line in lines if line not in formula)
    command = " ".join(line.strip(" \\") for line in lines if line.startswith("    "))
    assert "python scripts/evaluate.py target=smollm2 'drafters=[none, ngram]' out=" in command
    ends = [line.endswith("\\") for line in lines if line.startswith("    ")]
    assert ends == [True, True, False, False], "a command goes on behind a backslash"


def test_required_keys_come_first_and_words_stand_in_a_column() -> None:
    rows = [
        HelpRow("target.kind", "smollm2", "which"),
        HelpRow("target.layers", "2", "tiny: number of layers"),
        HelpRow("a_very_long_name_of_a_key_of_this_command", "1", "on the next line"),
        HelpRow("out", None, "folder " * 12),
        HelpRow("seed", "0", "of all draws"),
    ]
    lines = usage.tables(rows, {"target": ["smollm2", "tiny"]}, "smollm2", 60)
    assert lines[0] == "Required (KEY=VALUE):" and lines[1].startswith("  out  folder")
    assert all(line.startswith(" " * 7 + "folder") for line in lines[2:3])
    assert lines.index("  target=smollm2|tiny") < lines.index("  seed=0  of all draws")
    assert lines.index("  seed=0  of all draws") < lines.index("  target.kind=smollm2  which")
    assert "          on the next line" in lines
    assert lines[-1] == "  (target=tiny, for tests, has 1 more: target=tiny --help)"
    assert "  target.layers=2" in "\n".join(usage.tables(rows, {}, "tiny", 60))


def test_the_terminal_s_width_counts_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("72", 72), ("20", 50), ("300", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        assert usage.width() == width
