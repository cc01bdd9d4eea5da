"""Single-edit mutants: what is edited and what is left alone, the choice, the table, and a
mutant that is caught.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.mutants import MODULES, MutantsConfig, chosen
from scripts.mutants import main as command
from scripts.proofs.mutants import page as mutants_page
from scripts.proofs.mutants import unit_tests
from scripts.proofs.mutants.mutate import choose, mutants

SOURCE = '''"""A module."""
import math

LIMIT = 3


class Thing:
    size: int = 0

    def grow(self, by: int = 1) -> int:
        """Text with 1 + 1."""
        if by < 0:
            raise ValueError(f"{by - 1} is below 0")
        self.size += by  # größer
        return max(self.size, self.size * 2 if by else LIMIT)
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "thing.py").write_text(SOURCE)
    return tmp_path


def test_edits_are_single_valid_and_keep_to_code(root: Path) -> None:
    found = mutants(root, "thing.py")
    texts = {(m.operator, m.new) for m in found}
    assert ("comparison", "if by <= 0:") in texts
    assert ("arithmetic", "self.size -= by # größer") in texts
    assert ("statement", "pass # größer") in texts
    assert ("opposite", "return min(self.size, self.size * 2 if by else LIMIT)") in texts
    assert ("condition", "return max(self.size, LIMIT if by else self.size * 2)") in texts
    assert ("arguments", "return max(self.size * 2 if by else LIMIT, self.size)") in texts
    assert ("constant", "def grow(self, by: int = 2) -> int:") in texts
    for m in found:
        before = m.apply(root)
        after = (root / "thing.py").read_bytes()
        assert before == SOURCE.encode() != after and ast.parse(after.decode())
        assert after == before[: m.start] + m.text.encode() + before[m.stop :]
        (root / "thing.py").write_bytes(before)
        assert m.scope == "Thing.grow" and "Text with" not in m.old and "raise" not in m.old
        assert m.statement[0] <= m.line <= m.statement[1]


def test_a_mutant_is_known_by_its_text_wherever_its_line_moves(root: Path) -> None:
    before = {m.key: m.line for m in mutants(root, "thing.py")}
    (root / "thing.py").write_text("# one more line\n" + SOURCE)
    assert {m.key: m.line - 1 for m in mutants(root, "thing.py")} == before


def test_the_choice_is_repeatable_and_takes_the_operators_in_turn(root: Path) -> None:
    pool = mutants(root, "thing.py")
    some = choose(pool, 6, 0)
    assert some == choose(list(pool), 6, 0) and len({m.operator for m in some}) == 6
    assert len(choose(pool, 1000, 0)) <= len(pool)
    assert not mutants(root, "thing.py", ["Thing.shrink"])


def test_mutants_are_spread_evenly_over_the_modules() -> None:
    """Every function that is named exists, and every module has unit tests."""
    assert unit_tests.TESTS.keys() == MODULES.keys()
    found = Counter(m.file for m in chosen(MutantsConfig(mutants=10 * len(MODULES))))
    assert sum(found.values()) == 10 * len(MODULES)
    for name, scopes in MODULES.items():
        there = mutants(Path(__file__).parents[2], name, scopes)
        # What a short module has not got, the others share.
        assert found[name] in (10, 11, 12) or found[name] == len(there) < 10, name
        known = {m.scope for m in there}
        assert not scopes or len(known) >= len(scopes) - 1, name  # one may hold nothing to edit


def row(name: str, **found: str) -> dict:
    layers = {k: {"layer": "wrong", "why": v} for k, v in found.items()}
    return {"file": "a.py", "key": name, **dict.fromkeys(mutants_page.LAYERS), **layers}


def test_table_counts_what_each_layer_rejects() -> None:
    rows = [
        row("seen by all", enumeration="x", tests="x", certificate="x"),
        row("seen by tests", tests="x"),
        row("slower", tests="x"),
        row("the same"),
        row("a gap"),
        row("an old line"),
        row("an old gap") | {"again": {"tests": {"layer": "wrong", "why": "FAILED test_x"}}},
        row("a blind spot", tests="x")
        | {"again": {"certificate": {"layer": "greedy", "why": "y"}}},
    ]
    reasons = {
        "an old line": {"kind": "gone", "reason": "no clamp"},
        "an old gap": {"kind": "not the law", "reason": "..."},
        "slower": {"kind": "not the law", "reason": "..."},
        "the same": {"kind": "equivalent", "reason": "..."},
    }
    found = mutants_page.summary(rows, reasons)
    counts = found["all"]
    assert (counts["judged"], counts["something"]) == (7, 4)
    assert (counts["law"], counts["law by certificate"]) == (4, 1)
    assert found["open"] == ["a gap"] and found["missed"] == ["seen by tests"]
    assert found["since"] == ["an old line", "an old gap", "a blind spot"]
    now = found["now"]
    assert (now["judged"], now["something"]) == (6, 5)
    assert (now["law"], now["law by certificate"]) == (4, 2)
    again = {"environment": {"commit": "def"}}
    found |= {"command": "c", "environment": {"commit": "abc"}, "tokens": 20000, "mutants": rows}
    page = mutants_page.page(found | {"again": again})
    assert "| **all** | 8 | 1 | 1 | 4 | 1 | 4 of 7 (57.1 %) |" in page
    assert "- `an old line`: no clamp" in page and "- `an old gap`: tests, FAILED test_x" in page
    assert "`def`: 3 are rejected since. With them: 5 of 6 (83.3 %)" in page
    assert "again at commit" not in mutants_page.page(found)
    with pytest.raises(ValueError, match="kind"):
        mutants_page.summary(rows, {"a gap": {"kind": "odd"}})


@pytest.mark.slow
def test_mutants_of_the_random_numbers_are_caught(tmp_path: Path) -> None:
    """The whole command on two mutants and one layer; a second call has nothing left to do."""
    words = [
        "modules=[decode/rng.py]",
        "mutants=2",
        "layers=[tests]",
        f"out={tmp_path / 'm.json'}",
        f"state={tmp_path / 'state'}",
        "quiet=true",
    ]
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            command(words)
        assert end.value.code == 0
    found = json.loads((tmp_path / "m.json").read_text())
    assert [m["tests"]["layer"] for m in found["mutants"]] == ["wrong", "wrong"]
