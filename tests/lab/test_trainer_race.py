"""The race of the trainers: turns by CPU seconds, an entry that fails does not stop the others, and
the tables say what the report says."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.scripts.common.progress import silent
from outrider.scripts.lab.pages import trainers as page
from outrider.scripts.lab.trainer_race import PLACES, TrainerRaceConfig
from outrider.scripts.lab.trainers import turns
from outrider.scripts.lab.trainers.entries import NAMES, OURS, Entry, Work, entries, without_folders
from outrider.scripts.lab.trainers.turns import Rules, race

PROGRAM = """
import json, sys, time
from pathlib import Path

out, tokens, last, mode = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
(out / "facts.json").write_text(json.dumps({"program": "toy", "trained_parameters": 1}))
for step in range(1, 1 << 30):
    if step > last:
        if mode == "sleeps":
            time.sleep(1e6)
        print("no more data on line 7", flush=True)
        raise SystemExit(3)
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    with (out / "curve.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "tokens": step * tokens, "at": time.time()}) + "\\n")
    head = out / "heads" / f"step-{step}"
    head.mkdir(parents=True)
    (head / "weights").write_text(str(step))
"""


def raced(
    tmp_path: Path, programs: dict[str, tuple[int, int, str]], seconds: float = 1.0
) -> list[dict[str, Any]]:
    """Toys by name: tokens of a step, steps, what happens then."""
    script = tmp_path / "toy.py"
    script.write_text(textwrap.dedent(PROGRAM))
    some = [Entry(name, "toy", Path(sys.executable)) for name in programs]
    folders = [tmp_path / name for name in programs]
    commands = []
    for folder, (tokens, last, mode) in zip(folders, programs.values(), strict=True):
        folder.mkdir()
        commands.append([sys.executable, str(script), str(folder), str(tokens), str(last), mode])
    rules = Rules(seconds, [seconds / 2, seconds], 0.4, 1)
    return race(some, commands, folders, rules, silent)


def test_all_get_the_same_cpu_seconds_and_their_heads_are_kept(tmp_path: Path) -> None:
    some = {"slow": (10, 1 << 20, ""), "fast": (30, 1 << 20, "")}
    found = {row["entry"]: row for row in raced(tmp_path, some)}
    for name, row in found.items():
        assert 0 < row["peak_own_memory_mb"] <= row["peak_memory_mb"]
        assert not row["ended"] and 1.0 <= row["core_seconds"] < 2.0
        assert [mark["core_seconds"] for mark in row["marks"]] == [0.5, 1.0]
        for mark in row["marks"]:
            kept = tmp_path / name / "marks" / f"{mark['core_seconds']:g}" / "weights"
            assert int(kept.read_text()) == mark["step"] and mark["tokens"] > 0
            assert mark["made"] <= row["core_seconds"]
        counted, seconds = (sum(turn[i] for turn in row["turns"]) for i in (0, 1))
        size = row["tokens"] // row["steps"]
        assert counted % size == 0 and size <= row["tokens"] - counted < row["tokens"] / 2, (
            "what was done before the clock began does not count"
        )
        assert seconds == pytest.approx(row["core_seconds"], abs=0.1)
    times = [
        [json.loads(line)["at"] for line in (tmp_path / name / "curve.jsonl").open()]
        for name in some
    ]
    assert max(each[0] for each in times) < min(each[-1] for each in times), "by turns"
    ratio = page.speed(found["fast"]) / page.speed(found["slow"])
    assert 2.0 < ratio < 4.5, "three times the tokens a step"


def test_who_crashes_is_named_with_step_and_message_and_the_others_go_on(tmp_path: Path) -> None:
    some = {"crashes": (10, 4, "ends"), "goes_on": (10, 1 << 20, "")}
    found = {row["entry"]: row for row in raced(tmp_path, some)}
    assert found["crashes"]["ended"] == "ended with exit code 3; no more data on line 7"
    assert found["crashes"]["steps"] == 4
    assert not found["goes_on"]["ended"] and len(found["goes_on"]["marks"]) == 2


def test_who_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "IDLE", 0.7)
    some = {"hangs": (10, 3, "sleeps"), "goes_on": (10, 1 << 20, "")}
    found = {row["entry"]: row for row in raced(tmp_path, some)}
    assert found["hangs"]["ended"].startswith("did nothing for")
    assert not found["goes_on"]["ended"]


def test_an_entry_that_is_not_installed_is_named(tmp_path: Path) -> None:
    script, folder = tmp_path / "none.py", tmp_path / "a"
    folder.mkdir()
    some = [Entry("a", "toy", Path(sys.executable))]
    rules = Rules(1.0, [1.0], 0.4, 1)
    (row,) = race(some, [[sys.executable, str(script)]], [folder], rules, silent)
    assert row["ended"].startswith("ended with exit code 2") and "none.py" in row["ended"]
    assert row["steps"] == 0 and not row["marks"]


def test_nobody_is_left_running(tmp_path: Path) -> None:
    seen = []

    def stop(done: int, total: int, name: str = "", /) -> None:
        seen.append(done)
        raise KeyboardInterrupt

    script = tmp_path / "toy.py"
    script.write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "a").mkdir()
    command = [sys.executable, str(script), str(tmp_path / "a"), "10", str(1 << 20), ""]
    some = [Entry("a", "toy", Path(sys.executable))]
    with pytest.raises(KeyboardInterrupt):
        race(some, [command], [tmp_path / "a"], Rules(5.0, [5.0], 0.4, 1), stop)
    steps = (tmp_path / "a" / "curve.jsonl").read_text()
    assert seen and steps
    assert (tmp_path / "a" / "curve.jsonl").read_text() == steps


def test_every_entry_gets_the_same_work(tmp_path: Path) -> None:
    where = [tmp_path / name for name in ("target", "data.jsonl", "features", "rows")]
    work = Work(*where, 0.9, 3072, 4, 1024, 10)
    for each in entries(NAMES, tmp_path / "python"):
        folder = tmp_path / each.name
        folder.mkdir()
        command = each.command(work, folder, 0.002, 7)
        if each.program == OURS:
            keys = dict(word.split("=", 1) for word in command if "=" in word)
            assert keys["optim.lr"] == "0.002" and keys["seed"] == "7"
            assert keys["head.draft_vocab"] == "3072" and keys["batch_size"] == "4"
            assert float(keys["optim.warmup"]) * int(keys["steps"]) == 10
            assert set(each.more) <= set(command)
            continue
        given = json.loads((folder / "settings.json").read_text())
        assert (given["rate"], given["seed"], given["warmup"]) == (0.002, 7, 10)
        assert (given["draft_vocab"], given["rows"], given["tokens"]) == (3072, 4, 1024)
        assert Path(command[1]).is_file()


def row(name: str, seed: int, loss: float, pace: float, **more: Any) -> dict[str, Any]:
    held = {"loss_token": [loss] * 3, "loss_all": [loss + 0.5] * 3, "top1_token": [0.2] * 3}
    marks = [
        {"core_seconds": s, "step": s, "tokens": int(pace * s), "made": s, "held_out": held}
        for s in (30, 60)
    ]
    return {
        "entry": name,
        "program": f"{name} 1",
        "changes": [],
        "trained_parameters": 100,
        "core_seconds": 60.0,
        "steps": 60,
        "tokens": int(pace * 60),
        "turns": [[pace * 10, 10.0]] * 6,
        "peak_memory_mb": 1500,
        "peak_own_memory_mb": 1000,
        "marks": marks,
        "ended": "",
        "rate": 1e-3,
        "seed": seed,
        **more,
    }


def report(race: list[list[dict[str, Any]]]) -> dict[str, Any]:
    decoded = [
        {
            "group": "race",
            "seed": each["seed"],
            "entry": each["entry"],
            "cycles": {s: [[2 if each["entry"] == OURS else 1] * 5] * 4 for s in ("chain", "tree")},
        }
        for rows in race
        for each in rows
    ]
    names = [each["entry"] for each in race[0]]
    return {
        "settings": {"minutes": 1.0, "variant_minutes": 1.0, "seeds": [0, 1]},
        "best_rates": dict.fromkeys(names, 1e-3),
        "sweep": [],
        "race": race,
        "variants": [],
        "decoded": decoded,
        "their_validation": [],
    }


def test_the_tables_say_what_the_report_says() -> None:
    found = report([[row(OURS, s, 4.0 + s, 200), row("peer", s, 5.0, 100)] for s in (0, 1)])
    cost, learned, accepted, *_ = [table.markdown() for table in page.tables(found)]
    assert "| peer 1 | 100 | 0.001 | 100 (100 to 100) | 2.00 [2.00, 2.00] |" in cost
    assert "| outrider | 12000 (12000 to 12000) | 4.500 / 4.500 / 4.500 |" in learned
    assert "| peer | 1.000 [1.000, 1.000] | +1.000 [+1.000, +1.000] |" in accepted


def test_who_stopped_is_listed_and_the_tables_do_without(tmp_path: Path) -> None:
    gone = row("peer", 0, 5.0, 100, ended="ended with exit code 1; no such flag", marks=[])
    found = report([[row(OURS, 0, 4.0, 200), gone]])
    shown = "\n".join(table.markdown() for table in page.tables(found))
    assert "| peer | 0.001 | 60 | ended with exit code 1; no such flag |" in shown
    assert "peer 1" not in shown
    alone = report([[row(OURS, 0, 4.0, 200, ended="no disk", marks=[]), row("peer", 0, 5.0, 100)]])
    assert "| peer 1 |" in page.tables(alone)[0].markdown()


def test_the_report_names_no_folder_of_a_machine() -> None:
    given = "python scripts/lab/trainer_race.py chats=/home/a/c.jsonl minutes=6 'out=/tmp/a b'"
    assert without_folders(given, PLACES) == (
        "python scripts/lab/trainer_race.py chats=c.jsonl minutes=6 'out=a b'"
    )


def test_a_loss_that_is_no_number_wins_nothing() -> None:
    assert page.first_loss(row("a", 0, float("nan"), 1)) > page.first_loss(row("b", 0, 9.0, 1))


def test_what_is_not_there_and_that_ours_must_take_part() -> None:
    words = ["chats=a", "features=b", "prompts=c"]
    named = compose("trainer_race", TrainerRaceConfig, words).absent()
    assert [line.partition(":")[0] for line in named][:3] == ["chats", "features", "prompts"]
    words.append("entries=[speculators]")
    with pytest.raises(UserError, match="entries: the others are compared with outrider"):
        compose("trainer_race", TrainerRaceConfig, words)


def test_single_keys_stand_beside_ours_at_equal_minutes_and_equal_tokens() -> None:
    found = report([[row(OURS, s, 4.0, 200) for s in (0,)]])
    changed = row("muon", 0, 5.0, 100, changes=["muon"])
    later = {**changed["marks"][0]["held_out"], "loss_token": [3.0] * 3}
    changed["marks"][1]["held_out"] = later
    ours = row(OURS, 0, 4.0, 200)
    ours["marks"][1]["held_out"] = later
    slow = row("slow", 0, 9.0, 1, steps=7, core_seconds=60.4, marks=[])
    found["variants"] = [[ours, changed, slow]]
    found["settings"]["variant_seeds"] = [0]
    cycles = {name: [[2 if name == "muon" else 1] * 5] * 4 for name in (OURS, "muon")}
    found["decoded"] += [
        {"group": "variants", "seed": 0, "entry": name, "cycles": {"chain": c, "tree": c}}
        for name, c in cycles.items()
    ]
    *_, table, stopped = page.tables(found)
    assert "| slow | 0.001 | 7 | saved no head in 60 CPU seconds |" in stopped.markdown()
    shown = table.markdown()
    assert "| step 1, at 6,000 tokens |" in shown, "of the one that has read least"
    assert "| as it is | – | 3.000 / 3.000 / 3.000 | 4.000 (4.000 to 4.000) | – | – |" in shown
    assert "| muon | 0.50 [0.50, 0.50] | 3.000 / 3.000 / 3.000 | 3.000 (3.000 to 3.000) |" in shown
    assert shown.count("+1.000 [+1.000, +1.000]") == 2


def test_another_checkout_stands_beside_this_one() -> None:
    both = [
        row(page.BEFORE, 0, 1.0, 100, peak_own_memory_mb=2000),
        row(OURS, 0, 1.0, 150, peak_own_memory_mb=1000),
    ]
    gone = [both[0], row(OURS, 0, 1.0, 1, ended="ended with exit code 2; no such key")]
    heads = {"medusa": both, "eagle1": gone}
    commits = {page.BEFORE: "abc", OURS: "def"}
    shown = page.pair_table({"heads": heads, "commits": commits}).markdown()
    assert "| medusa | 100 | 150 | 1.50 [1.50, 1.50] | 2,000 | 1,000 | 0.50 |" in shown
    assert "| eagle1 | outrider: ended with exit code 2; no such key | – |" in shown
    assert page.pair_line("eagle1", gone) == (
        "eagle1, outrider: stopped: ended with exit code 2; no such key"
    )


def test_another_checkout_runs_its_own_code(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name / "outrider").mkdir(parents=True)
        (tmp_path / name / "outrider" / "__init__.py").write_text(f"WHO = {name!r}\n")
    script = tmp_path / "who.py"
    script.write_text("import os, outrider; print(outrider.WHO, os.getcwd())\n")
    folder = tmp_path / "there"
    entry = Entry("before", "toy", Path(sys.executable), root=folder)
    rules = Rules(1.0, [], 0.4, 1)
    (found,) = race([entry], [[sys.executable, str(script)]], [folder], rules, silent)
    assert f"there {folder}" in found["ended"]
