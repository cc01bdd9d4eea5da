"""The demo: its commands compose, are done once, and go on where they stopped."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.schema import compose
from outrider.scripts import cli, demo
from outrider.scripts.common import files
from outrider.scripts.common.prompts import load_prompts
from outrider.train.config import keys_of


def test_its_steps_are_commands_that_compose() -> None:
    for budget in (demo.FULL, demo.HALF, demo.FAST):
        for step in demo.steps(budget):
            verb, *words = step.words
            if verb == "train":
                file, head = cli.trainer(words[0]) or ("", [])
                words = [*head, *words[1:]]
                name, schema = Path(file).stem, keys_of(Path(file).stem)
            else:
                name, schema = verb, cli.schema_of(verb)
            compose(name, schema, words)
            assert any(
                str(step.leaves).startswith(w.partition("=")[2]) for w in words if "out" in w
            )


def step(folder: Path, name: str, code: str) -> demo.Step:
    left = folder / name
    return demo.Step(name, [f"open({str(left)!r}, 'a').write('x')\n{code}"], left)


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is a text of Python in place of a command."""
    monkeypatch.setattr(demo, "OUTRIDER", "import sys; exec(sys.argv[1])")


def test_a_step_is_done_once_and_its_end_is_told(tmp_path: Path, python: None) -> None:
    first, second = step(tmp_path, "first", ""), step(tmp_path, "second", "sys.exit(0)")
    assert [*demo.run([first])] == ["first"]
    assert [*demo.run([first, second])] == ["second"]  # what it did now
    assert first.leaves.read_text() == second.leaves.read_text() == "x"
    with pytest.raises(Interrupted, match="the same command goes on"):
        demo.run([step(tmp_path, "stopped", "sys.exit(75)")])
    with pytest.raises(UserError, match="exit code 2"):
        demo.run([first, step(tmp_path, "wrong", "sys.exit(2)")])
    with pytest.raises(UserError, match="exit code 0"):
        demo.run([replace(step(tmp_path, "nothing", ""), leaves=tmp_path / "never")])


def test_a_whole_run_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of both temperatures and both sets of questions, with intervals, and the cost."""
    monkeypatch.chdir(tmp_path)

    def table(temperature: float, mean: float) -> dict[str, Any]:
        speed = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
        row = {"accepted_length": speed, "speedup": speed, "doubts": [], "lossless": None}
        rows = [{"name": name, **row} for name in ("none", "ngram@chain:3")]
        return {"settings": {"temperature": temperature}, "drafters": rows}

    for kind, others in (("like", [table(1.0, 1.2)]), ("unlike", [])):
        report = {**table(0.0, 1.5 if others else 1.3), "others": others}
        files.write_json(demo.FAST.reports / kind / "report.json", report)
    found = demo.figures(demo.FAST, {"some": {"command": "outrider ls", "seconds": 30.0}})
    (run,) = found["runs"]
    told = [(r["questions"], r["temperature"], r["speedup"]["mean"]) for r in run["rows"]]
    assert told == [
        ("like its data", 0, 1.5),
        ("like its data", 1, 1.2),
        ("unlike its data", 0, 1.3),
    ]
    assert run["all"]["minutes"] == 0.5 and run["all"]["peak_bytes"] > 0
    assert {"command", "created", "environment", "steps"} < found.keys()


def test_a_stopped_step_saves_what_it_has(tmp_path: Path, python: None) -> None:
    """Ctrl-C at the demo: its step is asked to stop and waited for."""
    left = tmp_path / "left"
    code = f"""
import os, signal, sys, time
def save(*_):
    time.sleep(1)
    sys.exit(open({str(left)!r}, "w").write("saved") and 75)
signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
    # a shell that starts the tests in the background lets them ignore Ctrl-C
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            demo.run([demo.Step("some", [code], left)])
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
