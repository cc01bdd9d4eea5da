"""One head for a target: its commands are real, follow each other, and stop and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import Interrupted
from outrider.conf.schema import compose
from outrider.scripts import certify, evaluate, export, fit, synthesize, tune
from outrider.scripts.common.pipeline import Command, Deadline, Pipeline
from outrider.scripts.lab import target_head
from outrider.train import cache_features, eagle

MAINS = {
    "synthesize": synthesize.main,
    "cache_features": cache_features.main,
    "eagle": eagle.main,
    "export": export.main,
    "tune": tune.main,
    "evaluate": evaluate.main,
    "certify": certify.main,
    "fit": fit.main,
}


def steps(tmp_path: Path, *more: str) -> target_head.Steps:
    keys = [f"out={tmp_path / 'runs'}", f"reports={tmp_path / 'reports'}", *more]
    return target_head.Steps(compose("target_head", target_head.TargetHeadConfig, keys))


def done(_: Pipeline, command: Command) -> int:
    """In place of a command: what it leaves, a row of a chat where it is data."""
    command.leaves.parent.mkdir(parents=True, exist_ok=True)
    command.leaves.write_text(json.dumps({"row": 1}) + "\n" + json.dumps({"row": 2}) + "\n")
    return 0


@pytest.mark.parametrize("target", ["qwen25_coder", "tiny"])
def test_every_command_is_taken_by_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(Pipeline, "_call", done)
    taken: list[tuple[str, Any]] = []

    def call(pipeline: Pipeline, command: Command) -> int:
        main: Any = MAINS[Path(command.argv[0]).stem]
        taken.append((command.argv[0], compose(main.config_name, main.schema, command.argv[1:])))
        assert all(path.exists() for path in command.reads), command.title
        return done(pipeline, command)

    monkeypatch.setattr(Pipeline, "_call", call)
    made = steps(tmp_path, f"kind={target}")
    Pipeline("job", made.out).run(made.all())
    assert {cfg.target.kind for _, cfg in taken} == {target}
    scripts = [Path(script).stem for script, _ in taken]
    order = ["synthesize"] * 2 + ["cache_features", "eagle", "export", "tune"]
    assert scripts == [*order, "evaluate", "evaluate", "certify", "synthesize", "fit"]
    known = dict(zip(scripts, (cfg for _, cfg in taken), strict=True))
    assert known["eagle"].head.draft_vocab == 8192 and known["eagle"].epochs == 6
    assert not (known["eagle"].head.norm_before_fc or known["eagle"].head.norm_output)
    assert known["fit"].start == known["evaluate"].drafters[2].partition("@")[0]
    before = len(taken)
    Pipeline("job", made.out).run(made.all())
    assert len(taken) == before, "all of it is done"


def test_keys_of_one_script_and_the_ranks_of_a_training(tmp_path: Path) -> None:
    made = steps(tmp_path, "processes=2", "also={eagle: ['epochs=1','seed=3'], fit: ['minutes=1']}")
    training = made.training()
    assert training.argv[-2:] == ["epochs=1", "seed=3"], "given behind those of the step"
    launch = "accelerate launch --config_file conf/launch/ddp.yaml --num_processes 2"
    assert training.line.startswith(f"{launch} train/eagle.py target=qwen25_coder ")
    assert made.features().line.startswith("python scripts/cache_features.py ")
    assert "epochs=1" not in made.features().argv


def test_a_domain_is_cut_behind_what_is_learned(tmp_path: Path) -> None:
    path = tmp_path / "sql.jsonl"
    path.write_text("".join(f"{n}\n" for n in range(12)))
    train, later = target_head.cut(path)
    assert train.read_text().split() == [str(n) for n in range(10)]
    assert later.read_text().split() == ["10", "11"]


def test_the_work_stops_when_its_minutes_are_over_and_goes_on(tmp_path: Path) -> None:
    script, left, hour = tmp_path / "some.py", tmp_path / "left", tmp_path / "hour"
    script.write_text(
        "import os, sys, time\n"
        "time.sleep(3600 * os.path.exists(sys.argv[2]))\n"
        "open(sys.argv[1], 'w').write('y')\n"
    )
    command = Command("some", [str(script), str(left), str(hour)], [], left)
    hour.touch()
    with pytest.raises(Interrupted, match="the same command goes on") as stop:
        Pipeline("job", tmp_path / "job", minutes=0.01).run([command])
    assert stop.value.code == 75 and not left.exists()
    hour.unlink()
    pipeline = Pipeline("job", tmp_path / "job")
    pipeline.run([command])
    assert left.read_text() == "y"
    pipeline.end = Deadline(-1, "job")
    with pytest.raises(Interrupted):
        pipeline.run([command, Command("other", [str(script)], [], tmp_path / "other")])
