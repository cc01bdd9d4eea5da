"""The head of docs/new-head.md in a package of its own: trained, scored, refused by name where no
engine knows it. Packages that are no good cost a line with their name, and only who asks for them.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.conf import packages
from outrider.conf.schema import compose
from outrider.heads.checkpoint import load_head
from outrider.scripts import cli
from outrider.train.config import HeadRun, entry_of, keys_of
from tests.helpers.commands import code_of
from tests.helpers.packages import CODE, KEYS, blocks, installed, point, write
from tests.helpers.training import TINY, chats, tiny_target

PACKAGE = "outrider-turn 0.1"
MARK = "raise RuntimeError('imported')\n"


def command(module: str, words: list[str]) -> int:
    """The exit code of a command, run here."""
    return code_of(importlib.import_module(module).main, *words)


def keys(folder: Path, *more: str) -> list[str]:
    """A small run of the page's head."""
    target = ["target=tiny", *(f"target.{k}={v}" for k, v in TINY.items()), "device=cpu"]
    small = ["steps=4", "batch_size=4", "dtype=float32", "save_every=2", "log_every=1"]
    measured = ["eval.every=4", "eval.prompts=2", "eval.max_new_tokens=8", "eval.parity=2"]
    data = chats(folder / "data.jsonl")
    where = [f"data.path={data}", f"out_dir={folder / 'run'}", "data.held_out=0.2"]
    return ["head=turn", *target, *where, "data.cache=false", *small, *measured, *more]


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with installed(tmp_path / "site", monkeypatch):
        yield tmp_path


def test_it_trains_resumes_is_scored_and_is_refused_by_engines(
    turn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        command("outrider.train.head", keys(turn, "head.heads=3", "steps=2", "eval.every=0")) == 0
    )
    assert command("outrider.train.head", keys(turn, "head.heads=3", "head.lean=0.25")) == 2
    assert "head.lean" in capsys.readouterr().err, "what is learned may not change"
    assert command("outrider.train.head", keys(turn, "head.heads=3")) == 0, (
        "the parity gate holds too"
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "resuming" in said, said
    target = tiny_target()
    head: Any = load_head(turn / "run/head", target)
    assert head.kind == "turn" and head.cfg.heads == 3 and head.cfg.lean == 0.0

    tiny = ["target=tiny", *(f"target.{k}={v}" for k, v in TINY.items()), "dtype=float32"]
    prompts = turn / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the rider {i}"}) + "\n" for i in range(3)))
    report = [
        f"drafters=[none,{turn}/run@chain,{turn}/run@tree:3@adaptive]",
        f"out={turn / 'report'}",
    ]
    requested = [f"prompts={prompts}", "max_new_tokens=8", "device=cpu"]
    assert command("outrider.scripts.evaluate", [*tiny, *report, *requested]) == 0
    rows = json.loads((turn / "report/report.json").read_text())
    assert [row["label"] for row in rows["drafters"]][1:] == ["run@chain", "run@tree:3@adaptive"]
    assert [gate["passed"] for gate in rows["parity"].values()] == [True], "a gate for each head"

    capsys.readouterr()
    words = [*tiny[:-1], f"drafter={turn}/run", "format=vllm", f"out={turn / 'vllm'}"]
    assert command("outrider.scripts.export", words) == 2
    message = capsys.readouterr().err
    assert "no engine knows turn heads" in message and not (turn / "vllm").exists()
    assert len(message.strip().splitlines()) == 1


def test_every_command_finds_it_and_says_its_keys(
    turn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = blocks()["yaml"].splitlines()[0].lstrip("# ")
    assert cli.options("head")["turn"] == about and "turn" in listed(capsys, "ls", "heads")
    assert cli.trainer("turn") == (cli.trainers()["head"], ["head=turn"])
    assert "outrider_turn" not in sys.modules, "whoever lists it does not import it"
    assert command("outrider.train.head", ["--help"]) == 0
    assert "turn" in capsys.readouterr().out and "outrider_turn" not in sys.modules
    assert command("outrider.train.head", ["head=turn", "--help", "all"]) == 0
    said = capsys.readouterr().out
    assert re.search("head.lean=0.0 +share of the feature that a fresh head leaves out", said)
    assert "\n  head.draft_vocab=60" in said and "\n  epochs=" in said
    requested = keys(turn, "head.leen=1", "optim.lr=-1", "head.heads=0")
    assert command("outrider.train.head", requested) == 2
    said = capsys.readouterr().err
    assert "3 problems" in said and "head.leen: no such key; did you mean head.lean?" in said
    assert command("outrider.train.medusa", keys(turn)) == 2
    assert "head.kind: 'turn' should be 'medusa'" in capsys.readouterr().err


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `outrider` prints."""
    cli.speak([*words])
    return capsys.readouterr().out


def test_a_kind_of_ours_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a package says of its name; and nobody who asks for one imports a package."""
    points = "medusa = outrider_turn:Turn\nturn = outrider_turn:Turn"
    files = {CODE: MARK, "outrider_turn/conf/head/medusa.yaml": "kind: turn\n"}
    given = keys(tmp_path)[1:]
    with installed(tmp_path / "site", monkeypatch, files, points):
        assert compose("medusa", keys_of("medusa"), given).head.kind == "medusa"
        run = compose("head", HeadRun, ["head=medusa", *given])
        assert type(run) is keys_of("medusa") is entry_of("medusa")[1] and run.head.kind == "medusa"
        assert "outrider_turn" not in sys.modules


NAMED = f"error: head=turn: package {PACKAGE} "
BROKEN: dict[str, tuple[dict[str, str | None], str | None, str]] = {
    "raises": ({CODE: MARK}, None, f"{NAMED}cannot be imported (imported)"),
    "names nothing": ({}, "turn = ::: ", f"{NAMED}has no conf/head/turn.yaml"),
    "calls it otherwise": (
        {
            CODE: blocks()["python"].replace(
                'kind, Config, Saved, Drafts = "turn"', 'kind, Config, Saved, Drafts = "tern"'
            )
        },
        None,
        f"{NAMED}names outrider_turn:Turn, whose kind is 'tern'",
    ),
    "has no keys": (
        {CODE: blocks()["python"] + "\n\nTurn.Config = dict\n"},
        None,
        f"{NAMED}names outrider_turn:Turn, whose Config is no HeadConfig",
    ),
    "has no YAML": ({KEYS: None}, None, f"{NAMED}has no conf/head/turn.yaml"),
    "has a damaged YAML": ({KEYS: "kind: [turn\n"}, None, "error: "),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_package_that_is_no_good_costs_a_line(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, points, message = BROKEN[how]
    with installed(tmp_path / "site", monkeypatch, files, points):
        assert command("outrider.train.head", keys(tmp_path)) == 2
        said = capsys.readouterr()
        assert said.err.startswith(message) and len(said.err.strip().splitlines()) == 1, said.err
        assert "turn" in said.err and not (tmp_path / "run").exists()
        assert command("outrider.train.head", ["--help"]) == 0, "and nobody else"
        assert compose("medusa", keys_of("medusa"), keys(tmp_path)[1:]).head.kind == "medusa"
        assert "medusa" in cli.options("head")


def test_nothing_that_a_package_calls_itself_reaches_the_terminal_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "\x1b[2Jturn"
    files = {f"outrider_turn/conf/head/{odd}.yaml": "# \x1b[2J\nkind: turn\n", KEYS: None}
    with installed(tmp_path / "site", monkeypatch, files, f"{odd} = outrider_turn:Turn\n{point()}"):
        assert [one.kind for one in packages.packaged()] == ["turn"]
        listed(capsys, "ls", "heads")
        assert command("outrider.train.head", keys(tmp_path)) == 2
        assert command("outrider.train.head", ["head=", *keys(tmp_path)[1:]]) == 2
        assert "\x1b" not in capsys.readouterr().err


def test_two_packages_with_one_kind_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "site", name="outrider-turn-two")
    with installed(tmp_path / "site", monkeypatch):
        assert command("outrider.train.head", keys(tmp_path)) == 2
        message = f"head=turn: packages {PACKAGE} and outrider-turn-two 0.1 both bring it"
        assert message in capsys.readouterr().err
        assert len(packages.packaged()) == 2
