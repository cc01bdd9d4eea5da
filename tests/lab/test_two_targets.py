"""The table of targets beside each other: it shows what reports say, and names what none says."""

from __future__ import annotations

from typing import Any

from outrider.scripts.lab.pages import two_targets


def row(label: str, speed: float, name: str = "") -> dict[str, Any]:
    length = {"mean": 1.5, "low": 1.4, "high": 1.6}
    ratio = {"mean": speed / 10, "low": speed / 11, "high": speed / 9}
    found = {"name": name or label, "label": label, "tokens_per_second": speed}
    return {**found, "speedup": ratio, "accepted_length": length}


ABOUT: dict[str, Any] = {
    "created": "2026-11-23T12:07:23+00:00",
    "environment": {"processor": "a CPU"},
    "settings": {"dtype": "bfloat16", "num_prompts": 72},
}
SERVED = "http://127.0.0.1:1"


def test_the_fastest_of_a_kind_is_shown_and_what_is_missing_is_named() -> None:
    small = {
        "drafters": [row("none", 10.0), row("eagle3", 15.0), row("eagle3+ngram", 17.0)],
        **ABOUT,
    }
    server = row("llamacpp", 20.0, f"llamacpp@{SERVED}")
    drafted = row("llamacpp-eagle3-k2", 25.0, f"llamacpp-eagle3-k2@{SERVED}")
    small["drafters"] += [server, drafted, row("hf_generate", 7.0)]
    whole = two_targets.table({"unseen-t0": small})
    assert whole.head[1].startswith("SmolLM2-135M") and len(whole.head) == 4
    text = whole.markdown()
    assert "| EAGLE-3 | 1.50 [1.40, 1.60] | 15.0 | 1.50× [1.36, 1.67] |" in text
    assert "| llama.cpp, 16 bits | – | 20.0 |" in text
    assert "| llama.cpp, 16 bits, with the head | 1.50 [1.40, 1.60] | 25.0 |" in text
    assert "Q4_K_M" not in text, "no row without a figure"
    assert "SmolLM2-135M in bfloat16, 72 prompts, a CPU, 2026-11-23" in whole.notes[0]
    missing = whole.notes[-1]
    assert "not measured: n-gram on SmolLM2-135M, EAGLE-3 fitted to SQL on SmolLM2" in missing
    assert "to SQL on SmolLM2-135M, llama.cpp, Q4_K_M on SmolLM2-135M" in missing
    assert missing.endswith("all of Qwen2.5-Coder-1.5B")


def test_targets_stand_beside_each_other_whatever_report_has_a_row() -> None:
    small = {"drafters": [row("none", 10.0), row("ngram", 12.0)], **ABOUT}
    bf16 = [row("none", 5.0), row("eagle3@chain", 8.0), row("eagle3@tree", 9.0)]
    q4 = [row("none", 5.5), row("llamacpp-q4_k_m", 11.0, f"llamacpp-q4_k_m@{SERVED}")]
    known: dict[str, Any] = {"unseen-t0": small}
    known |= {"qwen25-more-t0": {"drafters": bf16, **ABOUT}, "qwen25-t0": {"drafters": q4, **ABOUT}}
    whole = two_targets.table(known)
    lines = {cells[0]: cells for cells in whole.rows}
    assert lines["plain decoding"][2::3] == ["10.0", "5.0"], "the preferred report's"
    assert lines["EAGLE-3"][1:4] == ["–", "–", "–"] and lines["EAGLE-3"][5] == "9.0"
    assert lines["llama.cpp, Q4_K_M"][5] == "11.0"
    assert "EAGLE-3 on SmolLM2-135M" in whole.notes[-1]
    assert "n-gram on Qwen2.5-Coder-1.5B" in whole.notes[-1]


def test_a_fitted_head_stands_in_its_own_row() -> None:
    later = {"drafters": [row("none", 5.0), row("fit_sql@chain:5", 11.0)], **ABOUT}
    later["drafters"] += [row("fit_sql@chain:2+ngram@3", 12.0), row("eagle3@chain:5", 7.0)]
    known: dict[str, Any] = {"qwen25-fit-t0": later}
    known["qwen25-more-t0"] = {"drafters": [row("none", 5.0), row("eagle3", 8.0)], **ABOUT}
    whole = two_targets.table(known)
    lines = {cells[0]: cells for cells in whole.rows}
    assert lines["EAGLE-3 fitted to SQL"][2] == "12.0", "the fastest"
    assert lines["EAGLE-3"][2] == "8.0", "of questions that nothing was fitted to"
    assert "later questions in SQL" in "; ".join(whole.notes)
    del known["qwen25-fit-t0"]
    assert "later questions in SQL" not in "; ".join(two_targets.table(known).notes)


def test_a_row_of_other_prompts_is_named() -> None:
    def report(path: str, count: int, label: str) -> dict[str, Any]:
        settings = ABOUT["settings"] | {"prompts": {"path": path}, "num_prompts": count}
        return ABOUT | {"settings": settings, "drafters": [row("none", 5.0), row(label, 8.0)]}

    known = {"qwen25-more-t0": report("unseen", 24, "eagle3")}
    known["qwen25-generate-t0"] = report("demo", 10, "hf_generate")
    notes = "; ".join(two_targets.table(known).notes)
    assert "`generate` of transformers on Qwen2.5-Coder-1.5B: 10 other prompts" in notes
    assert notes.count("other prompts") == 1
    known["qwen25-generate-t0"] = report("unseen", 24, "hf_generate")
    assert "other prompts" not in "; ".join(two_targets.table(known).notes)
