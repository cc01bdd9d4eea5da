"""What the runs of engines write: the tables say what the JSON says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from outrider.scripts.lab.pages import serves
from outrider.scripts.lab.serving import llamacpp, llamacpp_cases, sampled
from outrider.scripts.reports.table import Table

REQUESTED = {
    "settings": {"temperature": 1.0, "at_a_time": [1], "alpha": 0.001},
    "engine": {"xllamacpp": "1"},
}
PAPER = {
    "verdict": "undecided",
    "reasons": ["x"],
    "server": {"url": "http://127.0.0.1:1", "kind": "llama.cpp", "drafted": 1234},
    "layers": [
        {"name": "greedy", "passed": True, "tokens": 96, "beyond_ties": 0},
        {"name": "sampling", "passed": True, "tokens": 2010, "p": 0.25, "tests": [{"p": 0.01}] * 3},
    ],
    "negative_controls": [{"rejected": True}, {"rejected": False}],
    "power": {"min_detectable": None},
    "notes": [],
    "untested": ["y"],
    "spent": {"asking": 61.2, "judging": 9.9},
}


def test_a_certificate_is_kept_without_address_and_single_tests() -> None:
    found = sampled.brief(PAPER)
    assert "127.0.0.1" not in json.dumps(found)
    assert found["layers"][1]["tests"] == 3 and found["layers"][1]["smallest"] == {"p": 0.01}
    row = {"case": "eagle3", "mode": "probabilistic", "draft_tokens": 3, **found}
    text = sampled.table({**REQUESTED, "cases": [row]}).markdown()
    assert "| 2,010 | 1,234 | 0 of 96 | 0.25 | 1 of 2 | – | 61, 10 | undecided |" in text


def test_the_gap_at_which_answers_part_stands_in_the_table() -> None:
    assert llamacpp_cases._gap([]) == ""
    assert llamacpp_cases._gap([{"gap": None}, {"gap": 0.0123}, {"gap": 0.002}]) == ", gap ≤ 0.012"


def test_what_was_not_run_is_not_claimed(tmp_path: Path) -> None:
    assert serves.table(tmp_path).markdown().count("\n") == 1  # heading and rule alone
    case = {
        "case": "eagle3",
        "target": "float32",
        "same_tokens": {"equal": 49, "answers": 50},
        "accepted_length": {"ours": {"mean": 1.25}, "engine": None},
    }
    report = {"engine": {"xllamacpp": "1"}, "cases": [case, {**case, "target": "q.gguf"}]}
    (tmp_path / "engines-llamacpp.json").write_text(json.dumps(report))
    text = serves.table(tmp_path).markdown()
    assert text.count("eagle3") == 1 and "| 49/50 | 1.250 | – | not run |" in text
    row = {"case": "eagle3", "mode": "greedy", "draft_tokens": 3, **sampled.brief(PAPER)}
    (tmp_path / "engines-llamacpp-sampled.json").write_text(json.dumps({"cases": [row]}))
    assert "greedy: undecided, 2,010 tokens, p = 0.25" in serves.table(tmp_path).markdown()


def test_a_table_in_markdown_says_which_columns_are_words() -> None:
    rows = [["a", "1", "x"], ["b", "2", "y"]]
    assert Table(("n", "k", "t"), rows, words=(0, -1)).markdown() == (
        "| n | k | t |\n|---|---:|---|\n| a | 1 | x |\n| b | 2 | y |"
    )
    assert Table(("n", "k"), []).markdown() == "| n | k |\n|---|---:|"
    assert Table(("n", "k"), [], words=()).markdown() == "| n | k |\n|---:|---:|"


def test_the_file_of_another_target_is_made_again(tmp_path: Path) -> None:
    made: list[str] = []
    stage: Any = SimpleNamespace(
        work=tmp_path,
        weights_sha256="new",
        export=lambda name, *keys: made.append(name),
    )
    (tmp_path / "target-float32").mkdir()
    about = {"engine_format": "gguf", "target": {"weights_sha256": "old"}}
    for sha256, count in (("old", 1), ("new", 1)):
        about["target"] = {"weights_sha256": sha256}
        (tmp_path / "target-float32/outrider.json").write_text(json.dumps(about))
        llamacpp.target_file(stage, "float32")
        assert len(made) == count
