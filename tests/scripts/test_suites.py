"""Suites by name: every file describes a set whose form, written small, is read; the sha256 of
what was loaded is in the report; sets that cannot be had are told in a line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.scripts import evaluate
from outrider.scripts.data.suites import SuiteConfig, every_suite, load_suite
from tests.helpers.commands import code_of

# A row or two in the form of each published set.
ROWS: dict[str, list[dict[str, Any]]] = {
    "mtbench": [
        {"prompt": ["Write a haiku.", "Now a limerick."], "prompt_id": 81, "category": "writing"},
        {"prompt": ["2 + 2?", "And 3 + 3?"], "prompt_id": 111, "category": "math"},
    ],
    "gsm8k": [{"question": "Natalia sold 48 clips.", "answer": "#### 72"}],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": "def f(x):\n"}],
    "math500": [{"problem": "Solve $x$.", "subject": "Algebra", "unique_id": "t/1.json"}],
    "specbench": [{"question_id": 81, "category": "writing", "turns": ["Hello", "Again"]}],
    "speedbench": [{"question_id": "a1", "category": "coding", "turns": ["Sort."]}],
    "livecodebench": [{"question_content": "Read n.", "question_id": "1", "difficulty": "easy"}],
    "alpaca": [
        {"instruction": "Name a colour.", "input": "", "output": "red"},
        {"instruction": "Translate.", "input": "Hallo", "output": "hello"},
    ],
}


def described(name: str, path: Path | str = "") -> SuiteConfig:
    return replace(next(s for s in every_suite() if s.name == name), path=str(path))


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_the_form_of_the_set_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    written(tmp_path, name)
    found, suite = load_suite(described(name, tmp_path))
    assert len(found) == len(ROWS[name]) == suite["loaded"] < suite["expected"]
    first = found[0]
    assert len(first.turns) == (2 if name in ("mtbench", "specbench") else 1)
    if name == "alpaca":
        assert [p.turns for p in found] == [["Name a colour."], ["Translate.\n\nHallo"]]
    if name == "mtbench":
        assert [(p.id, p.category) for p in found] == [("81", "writing"), ("111", "math")]
    _, again = load_suite(described(name, tmp_path / f"{name}.jsonl"))
    assert again["sha256"] == suite["sha256"], "a file and the folder it lies in are one set"


@pytest.mark.parametrize(
    "suite, text, described",
    [
        (SuiteConfig("x", path="none-such"), None, "suite.path: none-such is not there"),
        (SuiteConfig("x", turns="q"), '{"a": "b"}', "suite: x has no column 'q' .its columns: a"),
        (SuiteConfig("x", turns="a"), "{", "could not be loaded"),
        (SuiteConfig("x", turns="a"), "", "suite: x: "),
    ],
)
def test_bad_sets_are_one_line(
    suite: SuiteConfig,
    text: str | None,
    described: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if text is not None:
        (tmp_path / "x.jsonl").write_text(text)
        suite = replace(suite, path=str(tmp_path / "x.jsonl"))
    with pytest.raises(UserError, match=described) as error:
        load_suite(suite)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 500


def run(*words: str) -> int:
    small = ("target=tiny", "dtype=float32", "device=cpu", "max_new_tokens=6", "quiet=true")
    return code_of(evaluate.main, *small, *words)


def test_the_report_holds_the_sha256_of_the_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "mtbench")
    keys = ["suite=mtbench", f"suite.path={path}", "drafters=[none,ngram]", "parity=0"]
    assert run(*keys, f"out={tmp_path / 'out'}") == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    source = report["settings"]["prompts"]
    assert source["path"] == "suite=mtbench" and source["suite"]["licence"] == "Apache-2.0"
    assert source["sha256"] == load_suite(described("mtbench", path))[1]["sha256"]
    assert "2 prompts of 80 published" in capsys.readouterr().err
    assert run("suite=mt-bench", f"out={tmp_path / 'x'}") == 2
    assert "suite=mt-bench: no such option; did you mean mtbench?" in capsys.readouterr().err
