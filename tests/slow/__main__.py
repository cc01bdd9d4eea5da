"""Run slow tests and keep their record, tests/slow.json: `python -m tests.slow [--minutes 20]`.

Without --minutes all of them run. With it those run that fit, by the seconds of the record:

1. red ones;
2. those whose imports changed since their last green, or that were never green. A change of a
   core file is in nearly every test's imports, and they do not all fit. So first, for every
   changed file that a test file itself imports or names, one test of it, the longest unseen and
   then the cheapest; then all others, again the longest unseen first. The first part looks at
   what was touched, the second sees to it that none waits for ever: with a tier of an hour of
   two cores, four runs of 20 minutes have seen it all.
3. the oldest green.

Two workers of one thread each. What is red runs a second time, alone, and is red when it fails
twice. The exit status is 1 when a test is red. With --ci only one whose imports are not those
of its last green counts: what it does with the very same code and pins, it does by chance or by
the machine, and no change of the code that is being checked can be to blame. Nor is one that was
never green: nobody knows since when. Both are said in a line of their own, stay red in the record
and come first in every next run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider.conf.commit import commit
from outrider.scripts.common.files import ROOT
from tests.slow import plugin
from tests.slow.closure import Closures
from tests.slow.record import Record, Rows, is_changed, seconds

RECORD = ROOT / "tests" / "slow.json"
LIMIT = (
    900  # seconds after which a test is red: three times what one should take, on a busy machine
)


@dataclass(frozen=True)
class SlowTest:
    """A slow test as the code is now."""

    id: str
    hash: str
    named: frozenset[str]  # files below the root that its file imports or names itself
    possible: bool = True  # whether what it needs is here (tests/conftest.py, NEEDS)


def order(
    tests: Iterable[SlowTest], rows: Rows, news: Callable[[str], set[str] | None]
) -> list[SlowTest]:
    """The tests in the order in which they should run. news: the files that changed since a
    commit, below the root; None where the commit is not known: any may have."""
    red, changed, same = [], [], []
    for test in tests:
        row = rows.get(test.id, {})
        is_red = row.get("result") == "red"
        (red if is_red else changed if is_changed(row, test.hash) else same).append(test)
    red.sort(key=lambda test: seconds(rows[test.id]))

    def waiting(test: SlowTest) -> tuple[str, float]:
        row = rows.get(test.id, {})
        return row.get("green", {}).get("date", ""), seconds(row)

    changed.sort(key=waiting)
    seen: set[str] = set()
    first, later = [], []
    for test in changed:
        last = rows.get(test.id, {}).get("green", {}).get("commit")
        since = news(last) if last else None
        touched = set(test.named) if since is None else test.named & since
        (first if touched - seen else later).append(test)
        seen |= touched
    return [*red, *first, *later, *sorted(same, key=waiting)]


def fitting(tests: Iterable[SlowTest], rows: Rows, budget: float) -> list[SlowTest]:
    """Those that fit into `budget` seconds of work, in order; one too long for what is left
    makes room for shorter ones behind it."""
    found = []
    for test in tests:
        if (takes := seconds(rows.get(test.id, {}))) <= budget:
            found.append(test)
            budget -= takes
    return found


def changed_since(last: str) -> set[str] | None:
    """The files that differ from a commit's, below the root; None where it is not there."""
    words = ["git", "diff", "--name-only", last.removesuffix("+"), "--"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines()) if done.returncode == 0 else None


def listed() -> list[SlowTest]:
    """Every slow test of the tree. Raises SystemExit where one cannot be collected."""
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.json"
        args = ["-m", "slow", "--collect-only", "-qq"]
        done = _pytest(args, {plugin.LIST: str(ids)}, subprocess.PIPE)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\nslow: the tests could not be collected")
        names: dict[str, bool] = json.loads(ids.read_text())
    closures = Closures(ROOT)

    def named(file: str) -> frozenset[str]:
        files = {*closures.named(ROOT / file), ROOT / file}
        return frozenset(str(one.relative_to(ROOT)) for one in files)

    of = {file: (closures.hash(file), named(file)) for file in {n.split("::")[0] for n in names}}
    return [SlowTest(name, *of[name.split("::")[0]], possible) for name, possible in names.items()]


def run(tests: list[SlowTest], workers: int, until: float, record: Record, again: bool) -> set[str]:
    """Run tests into the record; none begins after `until`, in seconds since 1970. Returns the
    ids of those that ran. Raises SystemExit where pytest itself fails."""
    about = {
        "record": str(record.path),
        "hashes": {test.id: test.hash for test in tests},
        "commit": commit(":!tests/slow.json", ":!docs") or "unknown",
        "until": min(until, time.time() + 1e6),  # JSON knows no infinity
        "limit": LIMIT,
        "again": again,
    }
    with tempfile.TemporaryDirectory() as folder:
        ids, file, ran = (Path(folder) / name for name in ("ids", "run.json", "ran"))
        ids.write_text("".join(f"{test.id}\n" for test in tests))
        ran.touch()
        file.write_text(json.dumps({**about, "ran": str(ran)}))
        args = ["-n", str(workers), "--maxschedchunk=1", "-m", "slow", f"@{ids}"]
        done = _pytest(args, {plugin.RUN: str(file)})
        names = set(ran.read_text().splitlines())
    if done.returncode not in (0, 1, 5):  # all green, some red, none begun
        raise SystemExit(f"slow: pytest ended with {done.returncode}")
    return names


def _pytest(
    args: list[str], env: dict[str, str], out: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.slow.plugin", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, cwd=ROOT, env=env, stdout=out, text=True, check=False)


def said(tests: list[SlowTest], rows: Rows) -> str:
    """What is left unseen, by the commit of the last green."""
    unseen = [test for test in tests if is_changed(rows.get(test.id, {}), test.hash)]
    absent = sum(not test.possible for test in unseen)
    since = Counter(
        (green.get("date", "never"), green.get("commit", "green"))
        for green in (rows.get(test.id, {}).get("green", {}) for test in unseen)
    )
    lines = [f"  {n} since {' '.join(when)}" for when, n in sorted(since.items())]
    first = f"slow: {len(unseen)} of {len(tests)} not green with the code as it is"
    first += f", {absent} of them because what they need is not here" if absent else ""
    return "\n".join([first, *lines])


def main(argv: list[str]) -> int:
    """Choose, run, try again, say. The exit status as the docstring above says."""
    parser = argparse.ArgumentParser(prog="python -m tests.slow")
    parser.add_argument("--minutes", type=float, help="of wall clock; all tests without")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ci", action="store_true", help="red with the same imports is a notice")
    parser.add_argument("--unseen", action="store_true", help="none that ran with this very code")
    parser.add_argument("--list", action="store_true", help="say what would run, run nothing")
    parser.add_argument("files", nargs="*", help="only tests whose id begins so")
    given = parser.parse_args(argv)
    tests, record = listed(), Record(RECORD)
    record.keep({test.id for test in tests})
    rows = record.read()
    chosen = [test for test in order(tests, rows, changed_since) if test.possible]
    if given.files:
        chosen = [test for test in chosen if test.id.startswith(tuple(given.files))]
    if given.unseen:
        chosen = [test for test in chosen if rows.get(test.id, {}).get("hash") != test.hash]
    time_left = 60 * given.minutes if given.minutes else float("inf")
    chosen = fitting(chosen, rows, time_left * given.workers)
    takes = sum(seconds(rows.get(test.id, {})) for test in chosen)
    print(f"slow: {len(chosen)} of {len(tests)} tests, {takes / 60:.0f} minutes of one core")
    if given.list:
        print("\n".join(test.id for test in chosen))
        return 0
    begin = time.time()
    ran = _run_twice(chosen, given.workers, begin + time_left, record) if chosen else []
    return _verdict(tests, ran, record.read(), given.ci, time.time() - begin)


def _run_twice(
    chosen: list[SlowTest], workers: int, until: float, record: Record
) -> list[SlowTest]:
    """Run, and what is red once more, for half of the time again at most. Returns those that
    ran."""
    begin = time.time()
    names = run(chosen, workers, until, record, again=False)
    ran, rows = [test for test in chosen if test.id in names], record.read()
    if red := [test for test in ran if rows[test.id]["result"] == "red"]:
        print(f"slow: {len(red)} red, once more")
        run(red, 1, time.time() + (until - begin) / 2, record, again=True)
    return ran


def _verdict(tests: list[SlowTest], ran: list[SlowTest], rows: Rows, ci: bool, took: float) -> int:
    """Print what came of it, the summary last; the exit status."""
    red = [test for test in ran if rows[test.id]["result"] == "red"]
    guilty = [
        test for test in red if "green" in rows[test.id] and is_changed(rows[test.id], test.hash)
    ]
    for test in red:
        why = "its imports changed since it was green"
        if "green" not in rows[test.id]:
            why = "it never was green"
        elif test not in guilty:
            why = "with the very code it was green with: chance, or this machine"
        print(f"slow: RED twice: {test.id}: {why}")
    print(said(tests, rows))
    results = Counter(rows[test.id]["result"] for test in ran)
    counted = ", ".join(f"{n} {result}" for result, n in sorted(results.items())) or "none ran"
    print(f"slow: {counted} in {took / 60:.1f} minutes; {len(guilty)} red by what changed")
    return int(bool(guilty if ci else red))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
