"""scripts/lab/prove.py: sections merge into one JSON, go on where they stopped, and the page shows
what the JSON holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.scripts.lab import prove
from outrider.scripts.lab.pages import lossless_page


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        prove.main(["quiet=true", *words])
    return int(stop.value.code or 0)


def test_the_committed_figures_meet_the_bar() -> None:
    known = json.loads(lossless_page.RESULTS.read_text())
    assert known["enumeration"]["cases"] >= 2000 and known["enumeration"]["max_error"] <= 1e-12
    assert known["enumeration"]["traversal_accepts_less"]["chains"] == 0
    assert known["engine"]["max_error"] <= 1e-9
    assert known["controls"]["rejected"] == known["controls"]["controls"] >= 12
    text = json.dumps(known)
    assert "/tmp" not in text and "/home" not in text and "/root" not in text


def test_sections_merge_and_go_on(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "code_sha256", lambda: "the code is edited while tests run")
    out, state = tmp_path / "l.json", tmp_path / "s"
    words = (f"out={out}", f"state={state}", "only=[enumeration]")
    assert run(*words, "cases=7") == 0
    assert run(*words, "cases=9") == 0  # the first block served both
    found = json.loads(out.read_text())["enumeration"]
    assert found["cases"] == 9 and found["max_error"] <= 1e-12
    assert found["command"].startswith("python")
    assert len((state / "enumeration" / "enumeration.jsonl").read_text().splitlines()) == 1
    capsys.readouterr()
    for name, key in (("certificates", "certificates"), ("magic", "only")):
        assert run(*words[:2], f"only=[{name}]") == 2
        assert capsys.readouterr().err.startswith(f"error: {key}: ")


def test_a_certificate_is_slimmed_and_shown(tmp_path: Path) -> None:
    paper = {
        "verdict": "undecided",
        "reasons": ["few drafts", "more"],
        "created": "now",
        "command": "python",
        "controls": {"from": "this run"},
        "negative_controls": [
            {"name": "typical acceptance", "layer": "sampling", "p": 1e-9, "tokens": 900}
        ],
        "power": {"tokens": 5000, "min_detectable": 0.05},
        "shape": {},
        "versions": {},
        "layers": [
            {"name": "sampling", "p": 0.3, "alpha": 1e-4, "histograms": {}, "distribution": []}
        ],
        "settings": {
            "drafter": "x@tree",
            "temperature": 0.6,
            "top_p": 0.9,
            "dtype": "float32",
            "out": "/somewhere",
            "quiet": True,
        },
        "identities": {"target": {"name": "m", "path": "/somewhere"}, "drafter": {}},
    }
    (tmp_path / "certificate.json").write_text(json.dumps(paper))
    out = tmp_path / "l.json"
    assert run("only=[certificates]", f"certificates=[{tmp_path}]", f"out={out}") == 0
    known = json.loads(out.read_text())["certificates"]
    assert "/somewhere" not in json.dumps(known["rows"]) and "histograms" not in json.dumps(known)
    line = (
        "| x@tree | T = 0.6, top-p 0.9, float32 | 5,000 | 0.3 (0.0001) | 5.0% | "
        "p = 1.0e-09 after 900 | – | undecided: few drafts |"
    )
    assert line in lossless_page.render({"certificates": known}).splitlines()


def test_a_bias_counts_as_found_where_every_seed_finds_it() -> None:
    run = {
        "tokens": 20_000,
        "p": 1e-9,
        "rejected": True,
        "by": "x",
        "share_of_places": 0.1,
        "total_variation_there": 0.2,
        "mean_total_variation": 0.02,
    }
    doubtful = run | {"seeds": {"first": 1, "p": [1e-9, 0.4], "rejected": 1}}
    more = run | {"tokens": 90_000, "p": 0.0}
    said = lossless_page.places({"a": run, "b": doubtful, "c": doubtful, "c, more tokens": more})
    lines = said.splitlines()
    assert lines[2].endswith("| 1e-09 after 20,000 | 20,000 | x |")
    assert lines[3].endswith("| 1e-09 after 20,000 | more than were drawn | x |")
    assert "1e-09 after 20,000; below 1e-300 after 90,000 | 90,000 |" in lines[4]
    assert "*B* under seeds 1 to 2, 20,000 tokens each: 1 of 2 rejected" in said
