"""What decides which slow tests run, and what is kept of them."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.scripts.common.files import ROOT
from tests.slow import __main__ as slow
from tests.slow.closure import Closures
from tests.slow.record import Record, Rows, is_changed, merged


def tree(root: Path, **files: str) -> Closures:
    """A repository of files, "a__b" for a/b.py."""
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Closures(root)


USED = {
    "at the top": "import outrider.decode.used",
    "a name of it": "from outrider.decode.used import thing",
    "the module of a package": "from outrider.decode import used",
    "inside a function": "def f():\n    from outrider.decode.used import thing",
    "over another": "import outrider.train.other",
    "a file": 'path = ROOT / "decode" / "used.py"',
    "a file in one text": 'args = ["python", f"{ROOT}/decode/used.py"]',
    "run as a module": 'args = ["-m", "decode.used"]',
    "with a function": 'main = "decode.used:main"',
    "a program as text": 'CODE = """\nfrom outrider.decode.used import x\n"""',
}


@pytest.mark.parametrize("how", USED)
def test_a_change_of_what_a_test_uses_is_seen(tmp_path: Path, how: str) -> None:
    files = {
        "decode__used": "x = 1",
        "decode__apart": "x = 1",
        "train__other": "import outrider.decode.used",
    }
    hashes = [
        tree(tmp_path, **{"tests__test_a": USED[how], **files, **change}).hash("tests/test_a.py")
        for change in ({}, {"decode__apart": "x = 2"}, {"decode__used": "x = 2"})
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_data_counts_where_a_test_names_it_and_defaults_for_who_imports_conf(
    tmp_path: Path,
) -> None:
    def hashes(**data: str) -> list[str]:
        for name, text in data.items():
            path = tmp_path / "conf" / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        named, keyed, neither = (
            'ROOT / "conf" / "a.yaml"',
            "import outrider.conf.schema",
            "import outrider.decode.x",
        )
        closures = tree(
            tmp_path,
            tests__named=named,
            tests__keyed=keyed,
            tests__neither=neither,
            conf__schema="",
            decode__x='FILE = "conf/a.yaml"',
        )
        return [closures.hash(f"tests/{name}.py") for name in ("named", "keyed", "neither")]

    first, second, third = hashes(a="1", b="1"), hashes(a="2"), hashes(b="2")
    assert [a != b for a, b in zip(first, second, strict=True)] == [True, True, False]
    assert [a != b for a, b in zip(second, third, strict=True)] == [False, True, False]


def test_every_import_of_the_tree_is_followed() -> None:
    """A test of the whole path depends on the engine, the loop and its own helpers."""
    found = Closures(ROOT).of("tests/train/test_reliability.py")
    names = {str(path.relative_to(ROOT)) for path in found}
    assert {"train/loop.py", "decode/engine.py", "heads/registry.py", "conf/eagle.yaml"} <= names
    assert {"tests/helpers/faults.py", "tests/conftest.py", "constraints.txt"} <= names
    alone = {str(path.relative_to(ROOT)) for path in Closures(ROOT).of("tests/test_reports.py")}
    assert "decode/engine.py" not in alone


def green(commit: str, hash: str = "now", seconds: float = 10) -> dict[str, Any]:
    kept = {"hash": hash, "commit": commit, "date": commit}
    return {"result": "green", "seconds": seconds, "hash": hash, "green": kept}


def test_the_order_is_red_then_changed_then_the_oldest_green() -> None:
    rows: Rows = {
        "same young": green("5"),
        "same old": green("2"),
        "red slow": {**green("1"), "result": "red", "seconds": 20},
        "red fast": {**green("4"), "result": "red", "seconds": 5},
        "long unseen": green("1", "then"),
        "unseen": green("3", "then"),
        "touched": green("3", "then", 99),
        "touched, cheaper": green("3", "then", 3),
        "touched, dearer": green("3", "then", 4),
        "skipped": {"result": "skipped", "hash": "now"},
    }
    named = {"touched": {"a"}, "touched, cheaper": {"b"}, "touched, dearer": {"b", "same"}}
    tests = [slow.SlowTest(n, "now", frozenset(named.get(n, {n}))) for n in (*rows, "new")]
    # "new" was never run: it may know a file that no other does
    found = [t.id for t in slow.order(tests, rows, lambda commit: {"a", "b", "long"})]
    assert found == [
        *("red fast", "red slow"),
        *("new", "touched, cheaper", "touched"),
        *("long unseen", "touched, dearer", "unseen"),
        *("skipped", "same old", "same young"),
    ]
    # where a commit is gone, as after a rebase, any file may have changed
    assert [t.id for t in slow.order(tests, rows, lambda commit: None)][:4] == [
        *("red fast", "red slow", "new", "long unseen")
    ]


def test_what_fits_into_the_time() -> None:
    rows: Rows = {"long": {"seconds": 100}, "short": {"seconds": 5}}
    tests = [slow.SlowTest(name, "h", frozenset()) for name in ("long", "new", "short")]
    assert [t.id for t in slow.fitting(tests, rows, 40)] == ["new", "short"]  # new: 30 s
    assert [t.id for t in slow.fitting(tests, rows, float("inf"))] == ["long", "new", "short"]


def test_a_row_keeps_its_last_green() -> None:
    row = merged({}, {"result": "green", "seconds": 3.0, "hash": "a"}, {"commit": "c", "date": "1"})
    row = merged(row, {"result": "red", "seconds": 4.0, "hash": "b"}, {"commit": "d", "date": "2"})
    assert row["result"] == "red" and row["green"] == {"hash": "a", "commit": "c", "date": "1"}
    assert is_changed(row, "b") and not is_changed(row, "a")
    row = merged(row, {"result": "skipped", "hash": "b"}, {"commit": "e", "date": "3"})
    assert row["seconds"] == 4.0 and row["green"]["commit"] == "c" and not is_changed(row, "b")


def _write(path: Path, name: str) -> None:
    for i in range(40):
        with Record(path).changing() as rows:
            rows[f"{name} {i}"] = {"result": "green"}


def test_runs_beside_each_other_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    writers = [multiprocessing.Process(target=_write, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert len(Record(path).read()) == 80 and [p.name for p in tmp_path.iterdir()] == ["slow.json"]


TIER = r"""
import os
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", range(6))
def test_good(number):
    pass


def test_takes_its_worker_along():
    os._exit(3)


def test_half():
    raise ValueError("half a pair \ud83d")


def test_second_time():
    seen = Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first


def test_hangs():
    time.sleep(60)


@pytest.mark.needs_llamacpp
def test_served():
    raise AssertionError("not here")


def test_skipped():
    pytest.skip("not today")


def test_expected():
    pytest.xfail("known")
"""


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a slow tier of its own; a test has two seconds."""
    (tmp_path / "conftest.py").write_text(
        "import tests.conftest\n"
        "tests.conftest.NEEDS = {'needs_llamacpp': (lambda: False, 'absent')}\n"
        "from tests.conftest import *  # noqa: F403\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  needs_llamacpp\n")
    (tmp_path / "test_tier.py").write_text(TIER)
    monkeypatch.setattr(slow, "ROOT", tmp_path)
    monkeypatch.setattr(slow, "RECORD", tmp_path / "slow.json")
    monkeypatch.setattr(slow, "LIMIT", 2)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    return tmp_path


def results(tier: Path) -> dict[str, str]:
    rows = json.loads((tier / "slow.json").read_text())
    return {name.partition("::test_")[2]: row["result"] for name, row in rows.items()}


def test_a_run_writes_down_all_whatever_dies(tier: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also beside a worker that dies, a report of half a surrogate pair and a test that hangs."""
    assert slow.main([]) == 1
    want = {f"good[{n}]": "green" for n in range(6)} | {"second_time": "green", "expected": "green"}
    want |= {"takes_its_worker_along": "red", "half": "red", "hangs": "red", "skipped": "skipped"}
    assert results(tier) == want
    rows = json.loads((tier / "slow.json").read_text())
    assert "second_try" in rows["test_tier.py::test_second_time"]
    assert "second_try" not in rows["test_tier.py::test_good[0]"]
    said = capfd.readouterr().out.splitlines()
    assert said[-1].startswith("slow: 8 green, 3 red, 1 skipped in ")
    assert said[-1].endswith("; 0 red by what changed")
    assert sum(line.endswith("it never was green") for line in said) == 3
    assert "slow: 4 of 13 not green with the code as it is, 1 of them because" in said[-3]
    assert said[-2] == "  4 since never green"

    assert slow.main(["--list"]) == 0
    first = [line.partition("::test_")[2] for line in capfd.readouterr().out.splitlines()[1:4]]
    assert set(first) == {"takes_its_worker_along", "half", "hangs"}
    assert slow.main(["--list", "--unseen"]) == 0
    assert capfd.readouterr().out.startswith("slow: 0 of 13 tests")


def test_only_red_by_what_changed_fails_a_landing(capsys: pytest.CaptureFixture[str]) -> None:
    rows: Rows = {
        "chance": {**green("1"), "result": "red"},
        "changed": {**green("1", "then"), "result": "red", "hash": "now"},
        "fine": green("1"),
        "new": {"result": "red", "hash": "now"},
    }
    tests = {name: slow.SlowTest(name, "now", frozenset()) for name in rows}

    def code(*names: str, ci: bool) -> int:
        return slow._verdict([*tests.values()], [tests[name] for name in names], rows, ci, 60)

    assert code("fine", "chance", ci=True) == 0 and code("fine", "chance", ci=False) == 1
    assert "RED twice: chance: with the very code it was green with" in capsys.readouterr().out
    assert code("changed", ci=True) == 1 and code("fine", ci=True) == 0
    said = capsys.readouterr().out
    assert "RED twice: changed: its imports changed since it was green" in said
    assert said.endswith("slow: 1 green in 1.0 minutes; 0 red by what changed\n")
    assert code("new", ci=True) == 0 and code("new", ci=False) == 1
    assert "RED twice: new: it never was green" in capsys.readouterr().out


def test_a_tier_that_cannot_be_collected_is_no_green_one(tier: Path) -> None:
    (tier / "test_broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(SystemExit, match="could not be collected"):
        slow.main([])


def test_no_test_begins_when_the_time_is_up(tier: Path) -> None:
    tests = [slow.SlowTest("test_tier.py::test_good[0]", "now", frozenset())]
    assert slow.run(tests, 1, time.time() - 1, Record(slow.RECORD), again=False) == set()
    assert not slow.RECORD.exists()
