"""An evaluation that is stopped keeps what it has measured and goes on by the same command."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.jsonl import records
from outrider.scripts import certify, evaluate, tune
from outrider.scripts.scoring import interleaved
from tests.helpers import pictures
from tests.helpers.commands import code_of
from tests.helpers.faults import fork, wait

SMALL = ("target=tiny", "dtype=float32", "max_new_tokens=16", "quiet=true", "device=cpu")
REQUESTED = ("drafters=[none,ngram]", "temperatures=[0,1]", "parity=0")
PROMPTS = 5


def prompts_file(folder: Path) -> Path:
    rows = [{"question_id": i, "turns": [f"ab ab {i} ab", "and?"]} for i in range(PROMPTS)]
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def requested(tmp_path: Path) -> tuple[str, ...]:
    return (*SMALL, *REQUESTED, f"prompts={prompts_file(tmp_path)}", f"out={tmp_path}/out")


def accepted(out: Path) -> list[Any]:
    """What does not depend on the clock: accepted lengths and answers of every temperature."""
    report = json.loads((out / "report.json").read_text())
    keys = ("name", "tokens", "cycles", "accepted_length", "acceptance_by_position")
    rows = [row for one in (report, *report["others"]) for row in one["drafters"]]
    return [[[row[key] for key in keys] for row in rows], records(out / "outputs.jsonl")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        pictures.left_out(patch)
        keys = (*SMALL, *REQUESTED, f"prompts={prompts_file(place)}", f"out={place}/out")
        assert code_of(evaluate.main, *keys) == 0
    return accepted(place / "out")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(drafter, turn) of every measured run; no pictures are drawn."""
    pictures.left_out(monkeypatch)
    seen: list[tuple[str, int]] = []
    note = interleaved.Contest.note

    def noted(self: Any, name: str, unit: Any, turn: int, *rest: Any) -> None:
        seen.append((name, turn))
        note(self, name, unit, turn, *rest)

    monkeypatch.setattr(interleaved.Contest, "note", noted)
    return seen


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None]) -> None:
    """`stop` is called in the midst of the run, when `count` answers have been noted."""
    note, left = interleaved.Contest.note, count

    def noted(self: Any, *given: Any) -> None:
        nonlocal left
        note(self, *given)
        left -= 1
        if not left:
            stop()

    monkeypatch.setattr(interleaved.Contest, "note", noted)


def ctrl_c() -> None:
    raise KeyboardInterrupt


def test_what_was_measured_is_not_measured_again(
    requested: tuple[str, ...],
    tmp_path: Path,
    measured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        stop_after(27, patch, ctrl_c)  # 20 of the first temperature, a prompt of the second
        assert code_of(evaluate.main, *requested) == 130
    assert "run the same command again to continue" in capsys.readouterr().err
    unfinished = tmp_path / "out/unfinished.jsonl"
    kept = Counter(line.get("name") for line in records(unfinished)[1:])
    assert kept == {"t0": PROMPTS, "t1": 1}
    measured.clear()
    assert code_of(evaluate.main, *requested) == 0
    assert len(measured) == (PROMPTS - 1) * 2 * 2, "four prompts, two turns, two drafters"
    names = [name for name, _ in measured[::2]]
    assert names == ["ngram"] * 2 + ["none"] * 2 + ["ngram"] * 2 + ["none"] * 2, "by turns, as ever"
    assert "going on with what is measured in" in capsys.readouterr().err
    assert accepted(tmp_path / "out") == uninterrupted
    assert not unfinished.exists()
    measured.clear()
    assert code_of(evaluate.main, *requested) == 0
    assert len(measured) == PROMPTS * 2 * 2 * 2, "a finished one is a new one"


def test_a_change_is_named_and_begins_anew(
    requested: tuple[str, ...],
    tmp_path: Path,
    measured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for count, keys in ((6, []), (5, ["seed=1", "drafters=[none,ngram@chain:2]"])):
        with monkeypatch.context() as patch:
            stop_after(count, patch, ctrl_c)
            assert code_of(evaluate.main, *requested, *keys) == 130
    assert "made with another drafters, seed; all is made anew" in capsys.readouterr().err
    assert len(records(tmp_path / "out/unfinished.jsonl")) == 2


def test_the_report_of_another_evaluation_is_not_replaced(
    requested: tuple[str, ...],
    tmp_path: Path,
    measured: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*requested, "temperatures=[0]", "max_new_tokens=2"]
    assert code_of(evaluate.main, *words) == 0
    report, seen = tmp_path / "out/report.json", len(measured)
    held = report.read_bytes()
    assert code_of(evaluate.main, *words, "drafters=[none]") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "exists" in said and "drafters" in said and "overwrite=true" in said
    assert report.read_bytes() == held and len(measured) == seen, "refused before any work"
    assert code_of(evaluate.main, *words, "quiet=true") == 0
    assert code_of(evaluate.main, *words, "drafters=[none]", "overwrite=true") == 0
    assert len(json.loads(report.read_text())["drafters"]) == 1


@pytest.mark.parametrize(
    ("main", "file", "held"),
    [
        (tune.main, "tune.json", '{"asked": {"seed": 7}}'),
        (certify.main, "certificate.json", "no JSON"),
    ],
)
def test_nor_is_what_other_long_work_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], main: Any, file: str, held: str
) -> None:
    (tmp_path / file).write_text(held)
    assert code_of(main, "target=tiny", "drafter=ngram", f"out={tmp_path}") == 2
    assert "overwrite=true" in capsys.readouterr().err and (tmp_path / file).read_text() == held


def test_a_head_that_was_trained_on_is_measured_anew(tmp_path: Path) -> None:
    from outrider.heads.checkpoint import save_head
    from outrider.heads.registry import head_class
    from outrider.scripts.scoring.systems import systems_of
    from tests.helpers.training import tiny_target

    target, kind = tiny_target(), head_class("medusa")
    head = kind.for_target(target, kind.Config(heads=2, draft_vocab=0))
    found = []
    for _ in range(2):
        save_head(head, tmp_path / "run/head", target.identity)
        systems = systems_of(["none", f"{tmp_path}/run@chain", "hf_generate"], target)
        found.append([system.files for system in systems])
        next(head.parameters()).data += 1
    assert found[0] != found[1] and found[0][0] == found[0][2] == []
    assert {Path(name).name for name, *_ in found[0][1]} == {"head.json", "head.safetensors"}


def test_a_lost_server_stays_lost() -> None:
    def part(**more: Any) -> interleaved.Contest:
        answers = [
            interleaved.ScoredAnswer(name, "p", 0, "c", interleaved.Generation([1], [2]))
            for name in ("none", "x@http://h")
        ]
        return interleaved.Contest(answers, **more)

    lost = [{"name": "x@http://h", "reason": "gone"}]
    parts = (part(), part(lost=lost))
    read = [interleaved.READ.validate_python(json.loads(json.dumps(asdict(one)))) for one in parts]
    assert read == list(parts)
    again = interleaved.Contest.joined(read)
    assert [one.drafter for one in again.answers] == ["none", "none"]
    assert again.lost == lost


def test_kill_and_sigterm_in_the_middle(
    requested: tuple[str, ...], tmp_path: Path, measured: list[Any], uninterrupted: list[Any]
) -> None:
    """A process of its own: killed when a prompt is measured, started again, stopped at the
    next."""
    part = tmp_path / "out/unfinished.jsonl"

    def slowed() -> int:
        run = interleaved.Runner.run

        def slow(*given: Any) -> Any:
            time.sleep(0.15)
            return run(*given)

        interleaved.Runner.run = slow  # type: ignore[method-assign]
        return code_of(evaluate.main, *requested)

    for number, (end, code) in enumerate(((signal.SIGKILL, -9), (signal.SIGTERM, 75)), 1):
        words = tmp_path / f"said{number}.txt"
        child = fork(slowed, words)
        while not (part.exists() and len(part.read_text().splitlines()) > number):
            assert os.waitpid(child, os.WNOHANG) == (0, 0), words.read_text()
            time.sleep(0.01)
        os.kill(child, end)
        found, said = wait(child), words.read_text()
        assert found == code, said
    assert "run the same command again to continue" in said and "going on with" in said
    kept = len(part.read_text().splitlines()) - 1
    assert 2 <= kept < PROMPTS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as a forked child has, else all is made anew
    try:
        assert code_of(evaluate.main, *requested) == 0
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == (2 * PROMPTS - kept) * 2 * 2
    assert accepted(tmp_path / "out") == uninterrupted
