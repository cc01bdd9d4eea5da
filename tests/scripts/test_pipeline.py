"""Commands of a job as a user would type them, in a clone and without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.scripts import demo
from outrider.scripts.common import files
from outrider.scripts.common.pipeline import Command, Pipeline


def test_without_a_clone_there_are_no_scripts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    score = Command("scores", ["scripts/evaluate.py", "target=tiny"], [], tmp_path)
    train = Command("learns", ["train/eagle.py", "steps=1"], [], tmp_path, processes=2)
    assert score.line == "python scripts/evaluate.py target=tiny"
    assert train.line.startswith("accelerate launch ")
    monkeypatch.setattr(files, "ROOT", tmp_path)
    assert score.line == "outrider evaluate target=tiny"
    assert train.line == "outrider train eagle steps=1 --launch 2"


def test_the_demo_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"none": 1.0, "ngram": 1.5, "runs/demo/hydra_heads@chain:2": 1.2}
    rows["runs/demo/eagle3@chain:2+ngram"] = 1.3
    report = {"drafters": [{"name": k, "speedup": {"mean": v}} for k, v in rows.items()]}
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    assert demo.next_commands(report) == [
        "  .venv/bin/outrider chat target=smollm2 drafter=runs/demo/eagle3@chain:2+ngram",
        "  .venv/bin/outrider serve target=smollm2 'drafters=[runs/demo/eagle3@chain:2+ngram]'",
        "  .venv/bin/outrider export target=smollm2 drafter=runs/demo/eagle3 format=vllm "
        "out=exports/demo",
    ]


def test_its_last_lines_keep_their_brackets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    row = {"accepted_length": {"mean": 1.5}, "speedup": {"mean": 1.2, "low": 1.1, "high": 1.3}}
    names = [demo.NGRAM, f"{demo.EAGLE}:2", f"{demo.HYDRA_HEADS}:2", demo.UNION]
    for name, best in (("t0", 1.4), ("unlike", 0.9)):
        rows = [{**row, "name": name} for name in names]
        rows[-1] = {**rows[-1], "speedup": {"mean": best, "low": best - 0.1, "high": best + 0.1}}
        files.write_json(tmp_path / f"reports/demo/{name}/report.json", {"drafters": rows})
    monkeypatch.setattr(demo.Pipeline, "run", lambda *_: None)
    monkeypatch.setattr(demo, "where_it_went", lambda *_: demo.Table((), []))
    with pytest.raises(SystemExit) as end:
        demo.main(["fast=true"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "'drafters=[runs/demo/hydra_heads@chain:2+ngram@3]'" in said
    like, unlike = (line for line in said.splitlines() if "1.50 · " in line)
    assert "like its data" in like and "1.50 · 1.40× [1.30, 1.50]" in like
    assert "unlike it" in unlike and "1.50 · 0.90× [0.80, 1.00]" in unlike


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

    monkeypatch.setattr(demo, "swap", stop)
    with pytest.raises(SystemExit):
        demo.main(["fast=true"])
    assert seen == [str(root if clone else here)]


def test_a_step_keeps_its_seconds_and_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, left = tmp_path / "big.py", tmp_path / "left"
    script.write_text(f"open({str(left)!r}, 'w').write(str(len(b'x' * 600_000_000)))\n")
    step = Command("it is big", [str(script)], [], left)
    job = Pipeline("demo", tmp_path)
    assert job.spent(step)["peak_bytes"] == 0
    job.run([step])
    spent = job.spent(step)
    assert spent["seconds"] > 0 and spent["cpu_seconds"] > 0 and 6e8 < spent["peak_bytes"] < 1e12
    monkeypatch.setattr(demo, "REPORTS", tmp_path)
    shown = demo.where_it_went(job, [step])
    gib = f"{spent['peak_bytes'] / 2**30:.1f}"
    assert [row[0] for row in shown.rows] == ["it is big", "all"]
    assert [row[-1] for row in shown.rows] == [gib, gib]


def test_what_an_earlier_demo_left_is_set_aside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    earlier = demo.RUNS / "steps"
    earlier.mkdir(parents=True)
    (demo.RUNS / "budget").write_text("full\n")
    (demo.RUNS / "questions.jsonl").write_text("24 of them")
    demo.swap("full", demo.FULL)
    kept = Path(f"{demo.RUNS}-full-before")
    assert (kept / "questions.jsonl").read_text() == "24 of them"
    assert "of an earlier demo; set aside as runs/demo-full-before" in capsys.readouterr().out
    assert not earlier.exists() and (demo.RUNS / "budget").read_text() == "full\n"

    earlier.mkdir()
    demo.swap("full", demo.FULL)
    assert earlier.exists(), "the same demo goes on"
    demo.swap("fast", demo.FAST)
    assert not earlier.exists() and Path(f"{demo.RUNS}-full/steps").exists()
    demo.swap("full", demo.FULL)
    assert earlier.exists() and not capsys.readouterr().out
    earlier.with_name("budget.json").write_text('{"conversations": 288}')
    demo.swap("full", demo.FULL)
    assert Path(f"{demo.RUNS}-full-before-1/steps").exists() and not earlier.exists()
    demo.swap("fast", demo.FAST)
    Path(f"{demo.RUNS}-fast/by_hand").mkdir(parents=True)
    demo.swap("full", demo.FULL)
    assert Path(f"{demo.RUNS}-fast-1").exists(), "nothing is overwritten"
