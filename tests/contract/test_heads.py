"""Every head keeps the contract, and so does the one of docs/new-head.md, in a package of
its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.heads.registry import kinds
from tests.contract import checks
from tests.contract.__main__ import main
from tests.contract.cases import CASES
from tests.helpers.packages import blocks, installed

LONGEST = 42  # lines of the page's head


def test_every_head_of_the_table_is_a_case() -> None:
    assert {case.config.kind for case in CASES.values()} == set(kinds())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check", checks.EVERY, ids=lambda check: check.__name__)
def test_contract(check, name: str) -> None:  # type: ignore[no-untyped-def]
    check(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_saved_head_drafts_the_same_and_another_starts_from_it(name: str, tmp_path: Path) -> None:
    for check in checks.ON_DISK:
        check(CASES[name], tmp_path / check.__name__)


def test_the_head_of_the_page_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with installed(tmp_path / "site", monkeypatch):
        line = next(line for line in blocks()["sh"].splitlines() if "tests.contract" in line)
        main(line.split()[3:])
        said = capsys.readouterr().out.splitlines()
        assert said == [f"[ok] {c.__name__}" for c in (*checks.EVERY, *checks.ON_DISK)]
    assert len(blocks()["python"].splitlines()) <= LONGEST
