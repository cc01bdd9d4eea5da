"""The demo: its commands as a user would type them, what it goes on with, its last screen."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import Interrupted, UserError
from outrider.scripts import demo
from outrider.scripts.common import files
from outrider.scripts.common.prompts import load_prompts


def test_without_a_clone_there_are_no_scripts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    score = demo.Step("scores", ["scripts/evaluate.py", "target=tiny"], tmp_path)
    train = demo.Step("learns", ["train/eagle.py", "steps=1"], tmp_path)
    assert score.line == "python scripts/evaluate.py target=tiny"
    assert train.line == "python train/eagle.py steps=1"
    monkeypatch.setattr(files, "ROOT", tmp_path)
    assert score.line == "outrider evaluate target=tiny"
    assert train.line == "outrider train eagle steps=1"


def scored(budget: demo.Budget, doubted: str = "", **speeds: float) -> dict[str, Any]:
    """A report of all rows of the demo, each 1.5 tokens a pass and twice as fast as plain, or of
    the given speed by the start of what it is to a reader. doubted: that of a row whose speed
    cannot be believed."""
    rows = []
    for name, (title, _) in budget.rows().items():
        speed = next((v for word, v in speeds.items() if title.startswith(word)), 2.0)
        interval = {"mean": speed, "low": speed - 0.1, "high": speed + 0.1}
        row = {"name": name, "kind": "head", "accepted_length": {"mean": 1.5}}
        doubts = ["too fast"] if title == doubted else []
        rows.append({**row, "speedup": interval, "doubts": doubts})
    return {"drafters": rows}


def test_a_processor_without_bfloat16_gets_half(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype, budget in (("bfloat16", demo.FULL), ("float32", demo.HALF)):
        monkeypatch.setattr("outrider.decode.models.arithmetic.dtype_on", lambda _, d=dtype: d)
        assert demo.budget_here() == budget
        assert ("bfloat16" in capsys.readouterr().out) == (budget == demo.HALF)


def test_its_last_screen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both temperatures, the engines that load a head, and commands that keep their brackets."""
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "begin", lambda _: None)
    monkeypatch.setattr(demo, "run", lambda _: None)
    monkeypatch.chdir(tmp_path)
    like = {**scored(demo.FAST, n=1.1, EAGLE=1.4), "others": [scored(demo.FAST, EAGLE=1.3)]}
    unlike = scored(demo.FAST, "n-grams, untrained", EAGLE=0.9)
    for name, report in (("like", like), ("unlike", unlike)):
        files.write_json(tmp_path / f"reports/demo-fast/{name}/report.json", report)
    with pytest.raises(SystemExit) as end:
        demo.main(["fast=true"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "'drafters=[runs/demo-fast/hydra_heads@chain:2]'" in said
    (eagle,) = (line for line in said.splitlines() if "EAGLE-3 head  " in line)
    speeds = ["1.40× [1.30, 1.50]", "1.30× [1.20, 1.40]", "0.90× [0.80, 1.00]"]
    places = [eagle.index(part) for part in (*speeds, "vLLM, SGLang, llama.cpp")]
    assert places == sorted(places)
    assert all("vLLM" not in line for line in said.splitlines() if "Hydra heads  " in line)
    assert "▸ Hydra heads " in said
    assert "2.00× [1.90, 2.10] ✗" in said and "IN DOUBT" in said


def test_the_demo_marks_no_row_that_is_slower_than_plain_decoding() -> None:
    slow = {"n": 0.96, "EAGLE": 0.7, "Hydra": 0.8, "Hydra heads and": 0.9}
    for speeds, marked in ((slow, None), (slow | {"EAGLE": 1.2}, 1)):
        report = scored(demo.FULL, **speeds)
        both = demo.what_it_brought(demo.FULL, {**report, "others": [report]}, report)
        assert both.best == marked
        assert any("NOT faster" in note for note in both.notes) == (marked is None)


@pytest.mark.parametrize("clone", [True, False])
def test_the_demo_writes_where_a_user_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clone: bool
) -> None:
    root, here = tmp_path / "root", tmp_path / "here"
    root.mkdir()
    here.mkdir()
    if clone:
        (root / "pyproject.toml").touch()
    monkeypatch.setattr(files, "ROOT", root)
    monkeypatch.chdir(here)
    seen: list[str] = []

    def stop(*_: object) -> None:
        seen.append(os.getcwd())
        raise SystemExit(7)

    monkeypatch.setattr(demo, "begin", stop)
    with pytest.raises(SystemExit):
        demo.main(["fast=true"])
    assert seen == [str(root if clone else here)]


def test_a_step_is_done_once_and_its_end_is_told(tmp_path: Path) -> None:
    def step(name: str, code: str) -> demo.Step:
        script, left = tmp_path / f"{name}.py", tmp_path / name
        script.write_text(f"import sys\nopen({str(left)!r}, 'a').write('x')\n{code}\n")
        return demo.Step(name, [str(script)], left)

    first, second = step("first", ""), step("second", "sys.exit(0)")
    demo.run([first])
    demo.run([first, second])
    assert first.leaves.read_text() == second.leaves.read_text() == "x"
    with pytest.raises(Interrupted, match="the same command goes on"):
        demo.run([step("stopped", "sys.exit(75)")])
    with pytest.raises(UserError, match="exit code 2"):
        demo.run([first, step("wrong", "sys.exit(2)")])
    with pytest.raises(UserError, match="exit code 0"):
        demo.run([replace(step("nothing", ""), leaves=tmp_path / "never")])


def test_a_stopped_step_saves_what_it_has(tmp_path: Path) -> None:
    """Ctrl-C at the demo: its step is asked to stop and waited for."""
    script, left = tmp_path / "some.py", tmp_path / "left"
    script.write_text(f"""
import os, signal, sys, time
def save(*_):
    time.sleep(1)
    sys.exit(open({str(left)!r}, "w").write("saved") and 75)
signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
""")
    # a shell that starts the tests in the background lets them ignore Ctrl-C
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            demo.run([demo.Step("some", [str(script)], left)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.read_text() == "saved"


def test_the_demo_goes_on_with_its_own_files_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    demo.begin(demo.FULL)
    (demo.FULL.runs / "eagle3").mkdir()
    demo.begin(demo.FULL)
    demo.begin(demo.FAST)
    with pytest.raises(UserError, match="^runs/demo: .*rename or remove it and reports.demo"):
        demo.begin(replace(demo.FULL, hydra_steps=1))
    (demo.FULL.runs / "budget.json").unlink()
    with pytest.raises(UserError, match="^runs/demo: "):
        demo.begin(demo.FULL)


def test_nothing_is_trained_on_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    demo.begin(demo.FULL)
    learned = load_prompts(demo.FULL.runs / "chats.jsonl")
    assert len(learned) == demo.FULL.conversations
    asked = [*load_prompts(demo.QUESTIONS), *load_prompts("scripts/prompts/demo.jsonl")]
    assert not {p.turns[0] for p in learned} & {turn for p in asked for turn in p.turns}
