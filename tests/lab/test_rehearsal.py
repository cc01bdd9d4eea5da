"""docs/path.md: every command of it is one, the rehearsal covers each, and a rehearsal that is
stopped goes on."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import CheckFailed, UserError
from outrider.conf.schema import compose
from outrider.heads.interop.engines import SGLANG, VLLM
from outrider.scripts import certify
from outrider.scripts.common.files import ROOT
from outrider.scripts.lab import rehearsal
from outrider.scripts.lab.rehearsing import engine, kills, page, stand_ins
from outrider.scripts.lab.rehearsing import walk as walking
from outrider.scripts.lab.rehearsing.stand_ins import Line
from outrider.scripts.serving.settings import sglang_flags
from outrider.train.config import EagleRun
from tests.golden.cases import HEADS_FOLDER, TARGET
from tests.helpers.commands import code_of
from tests.lab import test_readme as readme
from tests.scripts.test_certify import with_two_controls, without_exact_layer

STEPS, TEXT = page.steps(), page.PAGE.read_text()
GIVEN = stand_ins.load()
PLAN = stand_ins.plan(STEPS, GIVEN, Path("runs/rehearsal"))
WRITTEN = [(step.number, line) for step in STEPS for line in step.lines]


def check(words: list[str]) -> None:
    """That a command line is one. Raises UserError or AssertionError."""
    if words[0] in readme.OURS:
        readme.check(words)
    else:
        CHECKS[words[0]](words[1:])


def _vllm(words: list[str]) -> None:
    assert words[0] == "serve"
    if "--speculative-config" in words:
        said = json.loads(words[words.index("--speculative-config") + 1])
        assert said.keys() == {"model", "method", "num_speculative_tokens"}
        assert said["method"] in {drafter.how for drafter in VLLM.drafters.values()}


def _pip(words: list[str]) -> None:
    found = re.fullmatch(r"\.\[([\w,]+)\]", words[-1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found and set(found[1].split(",")) <= project["optional-dependencies"].keys()


CHECKS = {
    "vllm": _vllm,
    "llama-server": lambda words: engine.settings(("llama-server", *words), 1),
    "pip": _pip,
}


OTHERS = [line for _, line in WRITTEN if line.split()[0] not in readme.OURS]


@pytest.mark.parametrize("line", OTHERS, ids=lambda x: x[:40])
def test_every_command_of_the_page_is_one(line: str) -> None:
    """Those of ours are held by tests/lab/test_readme.py, as on every page."""
    check(shlex.split(line))


@pytest.mark.parametrize("line", [x for x in PLAN if x.words], ids=lambda x: x.written[:40])
def test_what_is_run_for_it_is_one(line: Line) -> None:
    check(list(line.words))


def test_the_rehearsal_covers_the_page_and_nothing_of_its_table_is_left_over() -> None:
    made = [line for part in GIVEN.prepare.values() for line in part]
    assert sorted([line for _, line in WRITTEN] + made) == sorted(line.written for line in PLAN)
    text = "\n".join(line.written for line in PLAN)
    assert not [words for words in GIVEN.replace if words not in text]
    unused = [s for s in GIVEN.left_out if not any(x.written.startswith(s) for x in PLAN)]
    numbers = {line.number for line in PLAN if line.kind == "run"}
    assert not unused and {*GIVEN.keys, *GIVEN.exit_codes} <= numbers
    # What needs GPUs is left out only where another engine's line is run in its place.
    for step in STEPS:
        kinds = {line.kind for line in PLAN if line.number == step.number}
        assert "left out" not in kinds or kinds & {"run", "serve"}, step
    assert {line.kind for line in PLAN} == {"run", "serve", "left out"}


def test_every_reader_ends_at_an_export_a_check_and_the_hub() -> None:
    verbs = [shlex.split(line)[1] for number, line in WRITTEN if number.startswith("D")]
    order = ["evaluate", "certify", "export", "serve", "check", "push"]
    places = [verbs.index(verb) for verb in order]
    assert places == sorted(places)
    text = page.PAGE.read_text()
    for number, title in re.findall(r"^### (\w+)\. (.+)$", text, re.M):
        part = text.partition(f"### {number}. {title}")[2].partition("\n##")[0]
        assert "**Prints**" in part or number == "D4", f"{number}: what does it print?"
        assert re.search(r"\bif it\b|\*\*[Ii]f |\bIf not\b|must give", part), (
            f"{number}: and if not?"
        )


def test_the_engines_own_lines_are_those_of_an_export() -> None:
    """The page drafts as many tokens as its recipe, which is what the card of an export says."""
    given = ["experiment=qwen3_8b_eagle3", "data.path=x", "out_dir=x"]
    recipe = compose("eagle", EagleRun, given)
    lines = {line.split()[0]: line for n, line in WRITTEN if n == "D4"}
    said = json.loads(shlex.split(lines["vllm"])[4])
    assert said["num_speculative_tokens"] == recipe.head.depth
    assert said["method"] == VLLM.drafters["eagle3"].how
    sglang = shlex.split(lines["python"])
    flags = shlex.split(" ".join(sglang_flags(recipe.head.depth, recipe.head.kind)))
    assert sglang[sglang.index(flags[0]) :][: len(flags)] == flags
    named = sglang[sglang.index("--speculative-algorithm") + 1]
    assert named == SGLANG.drafters["eagle3"].how and SGLANG.drafters["eagle3.1"].since in TEXT
    settings = engine.settings(tuple(shlex.split(lines["llama-server"])), 1)
    assert settings.draft_tokens == recipe.head.depth and settings.exact


SMALL = ("tokens=300", "max_new_tokens=16", "greedy_prompts=2", "greedy_tokens=8", "cases=10")


def certificate_of_the_page(out: Path, *keys: str) -> tuple[int, dict[str, Any]]:
    """Exit code and certificate of step D2 as it stands there, of a tiny target and a head of it:
    the rehearsal runs it greedily, since at T = 1 its length is that of what may be missed."""
    (line,) = (line for number, line in WRITTEN if number == "D2")
    real = {
        "target=hub target.name=Qwen/Qwen3-8B": f"target=local target.path={TARGET}",
        "runs/qwen3": str(HEADS_FOLDER / "eagle3"),
        "reports/certificate": str(out),
    }
    for said, other in real.items():
        assert said in line
        line = line.replace(said, other)
    code = code_of(certify.main, *shlex.split(line)[2:], *SMALL, "quiet=true", *keys)
    return code, json.loads((out / "certificate.json").read_text())


def test_the_certificate_of_the_page_is_sampled_at_its_own_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_two_controls(monkeypatch)  # and few biases: the slow one below has them all
    without_exact_layer(monkeypatch)
    code, paper = certificate_of_the_page(tmp_path / "c", "controls=none")
    assert (code, paper["settings"]["temperature"], paper["power"]["tokens"]) == (3, 1.0, 300)
    layers = {layer["name"]: layer["passed"] for layer in paper["layers"]}
    assert layers.keys() == {"exact", "greedy", "sampling", "passes"} and all(layers.values())
    assert paper["shape"]["kind"] == "chain" and "no negative control" in paper["reasons"][0]


@pytest.mark.slow
def test_the_certificate_of_the_page_runs_its_controls(tmp_path: Path) -> None:
    code, paper = certificate_of_the_page(tmp_path / "c", "detect=0.9")
    assert code in (0, 3) and len(paper["negative_controls"]) > 9
    assert all(layer["passed"] for layer in paper["layers"])


def test_blocks_comments_and_continuations_are_read(tmp_path: Path) -> None:
    text = "# T\n```\na \\\n    b\n\nc\n```\n## A. part\n### A1. one\n```text\nshown\n```\n```\nd\n```\n"
    (tmp_path / "p.md").write_text(text)
    found = page.steps(tmp_path / "p.md")
    assert [(s.number, s.title, s.lines) for s in found] == [
        ("0", "T", ("a b", "c")),
        ("A1", "one", ("d",)),
    ]
    (tmp_path / "p.md").write_text("```\na\n")
    with pytest.raises(ValueError, match="not closed"):
        page.steps(tmp_path / "p.md")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("llama-server -m x --mirostat 2", "^llama-server: --mirostat cannot be read here"),
        ("llama-server -md x -np 2", "cannot be read here"),
        ("llama-server -m x -np", "cannot be read here"),
        ("llama-server -m x --spec-type draft-medusa", "--spec-type: give one of draft-eagle3"),
    ],
)
def test_a_server_line_that_the_starter_cannot_keep_is_refused(line: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        engine.settings(tuple(shlex.split(line)), 1)


def commands(folder: Path, count: int) -> list[Line]:
    """Commands that append their number to a file."""
    code = "import sys, time; time.sleep(float(sys.argv[3])); open(sys.argv[1], 'a').write(sys.argv[2])"
    return [
        Line(f"A{n}", "t", f"c{n}", "run", ("python", "-c", code, str(folder / "did"), str(n), "0"))
        for n in range(count)
    ]


def walk(folder: Path) -> walking.Walk:
    return walking.Walk(folder / "work", {}, Path(sys.executable), 1, dict(os.environ))


def test_what_is_done_is_not_done_again_and_a_failure_is_named(tmp_path: Path) -> None:
    lines = commands(tmp_path, 3)
    seen: list[int] = []
    wrong = Line("A1", "t", "wrong", "run", ("python", "-c", "raise SystemExit(4)"))
    with pytest.raises(
        UserError, match=r"A1: `python -c raise SystemExit\(4\)` ended with exit code 4"
    ):
        walk(tmp_path).through([lines[0], wrong], lambda rows: seen.append(len(rows)))
    assert seen == [1]  # so far it is through
    rows = walk(tmp_path).through(lines)
    assert (tmp_path / "did").read_text() == "012" and [row["exit_code"] for row in rows] == [0] * 3
    assert walk(tmp_path).through(lines) == rows and (tmp_path / "did").read_text() == "012"
    again = [lines[0], lines[2], lines[1]]  # another order: what stands behind the first is redone
    walk(tmp_path).through(again)
    assert (tmp_path / "did").read_text() == "01221"


def test_a_head_that_comes_back_otherwise_fails_the_rehearsal() -> None:
    def row(step: str, **lengths: float) -> dict[str, Any]:
        named = {label.replace("_", "@"): value for label, value in lengths.items()}
        return {"step": step, "same": {"accepted_length": named}}

    rows = [row("D1", none=1.0, ngram=1.4, run_chain=1.25), {"step": "D7"}, row("D8", x_chain=1.25)]
    rehearsal.check_read_back(rows)
    with pytest.raises(CheckFailed, match=r"D8: accepted length \[1.5\]"):
        rehearsal.check_read_back([*rows[:2], row("D8", x_chain=1.5)])
    with pytest.raises(CheckFailed, match="D8"):
        rehearsal.check_read_back(rows[:2])


def test_a_server_runs_while_commands_ask_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started:
        def __init__(self, words: tuple[str, ...]) -> None:
            self.name, self.url, self.version = words[2], "http://127.0.0.1:9", "7"

        def __enter__(self) -> Started:
            said.append(f"up {self.name}")
            return self

        def __exit__(self, *_: object) -> None:
            said.append(f"down {self.name}")

    said: list[str] = []
    monkeypatch.setattr(engine, "running", lambda words, *_: Started(words))
    monkeypatch.setattr(
        walking.subprocess, "call", lambda words, env: said.append(" ".join(words[1:])) or 0
    )

    def run(number: str, *words: str) -> Line:
        return Line(number, "t", " ".join(words), "run", ("python", *words))

    lines = [
        Line("A1", "t", "one", "serve", ("llama-server", "-m", "one", "--port", "8000")),
        run("A2", "url=http://localhost:8000/v1"),
        run("A3", "url=http://localhost:8000"),
        run("A4", "alone"),
        Line("A5", "t", "two", "serve", ("llama-server", "-m", "two", "--port", "8080")),
        run("A6", "url=http://localhost:8080"),
    ]
    rows = walk(tmp_path).through(lines)
    address = "url=http://127.0.0.1:9"
    assert said == [
        *("up one", f"{address}/v1", address, "down one", "alone"),
        *("up two", address, "down two"),
    ]
    assert [row["engine"] for row in rows] == ["7", "7", "", "7"]
    said.clear()
    assert walk(tmp_path).through(lines) == rows and not said  # nor is a server started for nothing


REHEARSAL = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from outrider.scripts.common import files
from outrider.scripts.lab.rehearsing.walk import Line, Walk
folder = Path({folder!r})
walk = Walk(folder / "work", {{}}, Path(sys.executable), 1, dict(os.environ))
rows = walk.through([Line(*line[:4], tuple(line[4])) for line in {lines!r}])
for row in rows:
    row["same"] = {{"did": (folder / "did").read_text()}}
files.write_json(folder / "work" / "rehearsal.json", {{"steps": rows}})
"""


UNTIL_KILLED = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[3]).exists():
    time.sleep(0.01)
open(sys.argv[1], "a").write(sys.argv[2])
"""


def test_it_is_killed_once_in_every_command_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command waits for its kill, however slow the machine: that leaves a mark."""
    killing = kills._kill

    def killed(process: Any) -> None:
        running = process.poll() is None
        killing(process)
        if running:
            (tmp_path / kills._now(tmp_path / "work")["written"]).touch()

    monkeypatch.setattr(kills, "_kill", killed)
    monkeypatch.setattr(kills, "LEAST", 0.0)
    did = str(tmp_path / "did")
    lines = [
        (
            f"A{n}",
            "t",
            f"c{n}",
            "run",
            ("python", "-c", UNTIL_KILLED, did, str(n), f"{tmp_path}/c{n}"),
        )
        for n in range(3)
    ]
    script = REHEARSAL.format(root=str(ROOT), folder=str(tmp_path), lines=lines)
    alone = [{"written": f"c{n}", "seconds": 0.0, "same": {"did": "012"}} for n in range(3)]
    (tmp_path / "alone.json").write_text(json.dumps({"steps": alone}))
    told = (tmp_path / "out.json", tmp_path / "alone.json", [sys.executable, "-c", script])
    code = kills.compare(*told, tmp_path / "work", commands(tmp_path, 3))
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["written"] for row in report["kills"]] == ["c0", "c1", "c2"] and code == 0
    assert report["differences"] == [] and report["commands"] == 3
    other = [*alone[:2], {**alone[2], "same": {"did": "other"}}]
    assert kills.differences(alone, other) == ["c2"]
    with pytest.raises(UserError, match="against: .* is no rehearsal"):
        kills.compare(told[0], tmp_path / "none.json", told[2], tmp_path / "work", [])
