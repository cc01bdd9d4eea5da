"""Tokenizing by several processes: the same tokens, parts that outlive a kill, waiting without
a collective, and no second look at a full cache."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.conf.jsonl import read_lines
from outrider.decode.models.identity import cache_root
from outrider.decode.models.tiny import byte_tokenizer
from outrider.train import waiting
from outrider.train.config import DataConfig
from outrider.train.texts import batches, tokenizing, tokens
from outrider.train.texts.batches import JoinedRows, load_rows
from outrider.train.texts.rows import RowReading
from outrider.train.texts.tokenizing import Parts, Work, encoded
from outrider.train.waiting import turn
from tests.helpers.faults import fork, ranks, wait
from tests.helpers.training import chats

EOS = (2,)


@pytest.fixture(autouse=True)
def small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    for module in (tokenizing, batches):
        monkeypatch.setattr(module, "CHUNK", 8)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return chats(tmp_path / "d.jsonl", 60)


def load(path: Path, **keys: Any) -> JoinedRows:
    return load_rows(
        DataConfig(path=str(path), held_out=0.2, **keys), byte_tokenizer(), EOS, 260, 512
    )


def same(a: JoinedRows, b: JoinedRows) -> bool:
    names = ("ids", "loss", "offsets", "lines", "held")
    return all(getattr(a, n).equal(getattr(b, n)) for n in names) and a.bad == b.bad


def left(kind: str) -> list[str]:
    return sorted(p.name for p in (cache_root() / kind).glob("*/*"))


@pytest.mark.slow
def test_processes_change_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = data.read_text().splitlines()
    lines[17] = "{broken"
    data.write_text("\n".join(lines) + "\n")
    alone = load(data, cache=False, workers=1, max_bad_fraction=1)
    monkeypatch.setattr(tokenizing, "SECONDS", 0.0)
    many = load(data, workers=2, max_bad_fraction=1)
    assert same(alone, many) and many.bad == [f"{data}:18: {alone.bad[0].split(': ', 1)[1]}"]
    assert many.turns == alone.turns == (59, 59, 59) and not left("token-parts")


def test_finished_parts_are_kept_and_gone_afterwards(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle, also with a part damaged since: only what is missing is made."""
    want = load(data, cache=False)
    encode, calls = tokenizing.encode_chunk, []

    def counted(items: Any, work: Work) -> Any:
        calls.append(len(items))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return encode(items, work)

    monkeypatch.setattr(tokenizing, "encode_chunk", counted)
    with pytest.raises(KeyboardInterrupt):
        load(data)
    assert left("token-parts") == [f"part-{i:07d}.safetensors" for i in range(5)]
    (part,) = (cache_root() / "token-parts").glob("*/part-0000002.safetensors")
    whole = bytearray(part.read_bytes())
    whole[-3] ^= 1
    part.write_bytes(whole)
    calls[:] = [0] * 10
    assert same(load(data), want)
    assert calls[10:] == [8, 8, 8, 4], "the damaged part and the three that were missing"
    assert not left("token-parts") and len(list((cache_root() / "tokens").iterdir())) == 1


def test_a_full_cache_is_neither_hashed_nor_counted_again(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(data)
    want = (first.sha256(), first.counts(260), first.supervised, first.max_id, first.turns)

    def never(*_: Any) -> Any:
        raise AssertionError("read through again")

    for module in (tokens, batches):
        monkeypatch.setattr(module, "sha256_of", never)
    monkeypatch.setattr(batches, "encoded", never)
    monkeypatch.setattr("outrider.decode.models.identity.sha256_file", never)
    again = load(data)
    got = (again.sha256(), again.counts(260), again.supervised, again.max_id, again.turns)
    assert got[0] == want[0] and got[1].equal(want[1]) and got[2:] == want[2:]
    assert want[1].sum() == (first.loss & ~first.held.repeat_interleave(first.lengths)).sum()


def test_waiting_for_a_turn_is_bounded_and_can_be_interrupted(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PAUSE", 0.01)
    with turn("x", 0):
        with pytest.raises(UserError, match=r"data.wait: another process holds .*x.lock after"):
            with turn("x", 1e-4):
                raise AssertionError("held twice")

        def requested() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), turn("x", 0, requested):
            raise AssertionError("held twice")
    with turn("x", 1e-4):
        pass


def test_without_locks_everybody_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no locks here")

    monkeypatch.setattr(waiting.FileLock, "acquire", refuse)
    done = []
    with turn("x", 0):
        done.append(1)
    assert done


def test_ranks_meet_without_a_time_out(tmp_path: Path) -> None:
    """One rank prepares data for longer than a collective may take; the other looks at the
    store, and both go on."""

    def action() -> None:
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=2))
        for _ in range(2):
            if os.environ["RANK"] == "1":
                time.sleep(3)
            waiting.meet("rows", 1)
        dist.barrier()
        dist.destroy_process_group()

    assert [wait(child) for child in ranks(2, action, tmp_path / "said")] == [0, 0]


def test_one_process_tokenizes_and_the_others_find_it(data: Path, tmp_path: Path) -> None:
    """Three processes at once; the one with the lock is killed in the middle, another goes on
    from its parts, and each chunk is made once but for the one that was under way."""
    log = tmp_path / "log"

    def action() -> None:
        encode = tokenizing.encode_chunk

        def slow(items: Any, work: Work) -> Any:
            with log.open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(0.1)
            return encode(items, work)

        tokenizing.encode_chunk = slow
        waiting.PAUSE = 0.02
        load(data, workers=1)

    children = [fork(action, tmp_path / f"said{i}") for i in range(3)]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not log.exists() or len(log.read_text().split()) < 4):
        time.sleep(0.01)
    victim = int(log.read_text().split()[0])
    os.kill(victim, signal.SIGKILL)
    codes = {child: wait(child) for child in children}
    assert codes.pop(victim) == -signal.SIGKILL and set(codes.values()) == {0}
    made = log.read_text().split()
    assert len(set(made)) == 2 and len(made) in (8, 9), "8 chunks"
    assert same(load(data), load(data, cache=False))


def test_of_many_processes_one_reads_what_is_new_here(data: Path, tmp_path: Path) -> None:
    """A full cache that was carried to another machine: data file and token file are hashed by
    one process, and by none at the next start."""
    load(data)
    for note in (cache_root() / "hashes.json", *(cache_root() / "checked").iterdir()):
        note.unlink()
    log = tmp_path / "log"
    log.write_text("")

    def action() -> None:
        import outrider.decode.models.identity as identity

        def noted(module: Any, name: str) -> None:
            real = getattr(module, name)

            def slow(*args: Any) -> Any:
                with log.open("a") as file:
                    file.write(f"{name}\n")
                time.sleep(0.3)
                return real(*args)

            setattr(module, name, slow)

        noted(identity, "sha256_file")
        noted(tokens, "sha256_of")
        waiting.PAUSE = 0.02
        load(data)

    for want in (["sha256_file", "sha256_of"], []):
        children = [fork(action, tmp_path / f"said{i}") for i in range(3)]
        assert [wait(child) for child in children] == [0, 0, 0]
        assert sorted(log.read_text().split()) == want
        log.write_text("")


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path: Path, data: Path) -> None:
    script = tmp_path / "many_tokens.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from outrider.decode.models.tiny import byte_tokenizer\n"
        "from outrider.train.texts import tokenizing\n"
        "from outrider.conf.jsonl import read_lines\n"
        "from outrider.train.texts.rows import RowReading\n"
        "if __name__ == '__main__':\n"
        "    tokenizing.SECONDS, tokenizing.CHUNK = 0.0, 8\n"
        "    work = tokenizing.Work(sys.argv[1], byte_tokenizer(), Reading(512), 0.0)\n"
        "    lines = list(read_lines(Path(sys.argv[1]))) * 200\n"
        "    parts = tokenizing.Parts(None)\n"
        "    found = tokenizing.encoded(lines, work, 2, parts, lambda: None)\n"
        "    for n, _ in enumerate(found):\n"
        "        print(n, flush=True)\n"
    )
    import subprocess

    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen(
        [sys.executable, str(script), str(data)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and parent.stdout.readline() == "0\n"
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(children) >= 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_runs(int(c)) for c in children):
        time.sleep(0.1)
    assert not any(_runs(int(child)) for child in children)


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _below(pid: int) -> list[int]:
    """The processes that a process of ours has started, and theirs."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    mine = [int(child) for child in text.split()]
    return [*mine, *(p for child in mine for p in _below(child))]


def test_what_a_part_refuses(data: Path, tmp_path: Path) -> None:
    """Another number of rows, a file that says nothing: made again. A full disk: not kept."""
    work = Work(str(data), byte_tokenizer(), RowReading(512, frozenset(EOS)), 0.0)
    parts = Parts(tmp_path / "parts")
    list(encoded(read_lines(data), work, 1, parts, lambda: None))
    assert parts.read(0, 8) is not None and parts.read(0, 7) is None and parts.read(99, 8) is None
    parts.path(1).write_bytes(b"")
    assert parts.read(1, 8) is None
    (tmp_path / "file").write_text("")
    nowhere = Parts(tmp_path / "file" / "parts")
    assert (
        sum(part.rows for part in encoded(read_lines(data), work, 1, nowhere, lambda: None)) == 60
    )


MANY = int(os.environ.get("OUTRIDER_CHATS", "50000"))  # 500,000 take five minutes
TOKENS = 100_000_000  # of the cache whose start-up is measured; made up, not tokenized


@pytest.mark.slow
def test_many_chats_by_two_ranks_killed_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real ranks on this machine's cores; all of the first attempt is killed, the second
    goes on where it was, and a third start finds everything done."""
    import subprocess

    from outrider.scripts.common.files import ROOT
    from tests.helpers.training import overrides

    monkeypatch.undo()
    cache = tmp_path / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    data = chats(tmp_path / "many.jsonl", MANY)
    keys = ("data.cache=true", "steps=1", "batch_size=4", "data.max_length=512")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        "train/medusa.py",
        *overrides(data, tmp_path / "run", *keys),
    ]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}

    def start(said: str) -> subprocess.Popen[bytes]:
        with (tmp_path / said).open("wb") as file:
            return subprocess.Popen(
                command, cwd=ROOT, env=env, stderr=file, stdout=file, start_new_session=True
            )

    def kept() -> dict[str, int]:
        """The parts that are there, and when each was written."""
        found = {}
        for path in (cache / "token-parts").glob("*/part-*"):
            with contextlib.suppress(OSError):  # the last start takes them away
                found[path.name] = path.stat().st_mtime_ns
        return found

    begun = time.monotonic()
    first = start("first")
    chunks = -(-MANY // tokenizing.CHUNK)
    parts: dict[str, int] = {}
    at = {"first part": 0.0}
    while len(parts) < chunks // 2 and first.poll() is None:
        time.sleep(0.1)
        parts = kept()
        at["first part"] = at["first part"] or (time.monotonic() - begun) * bool(parts)
    for pid in [first.pid, *_below(first.pid)]:  # the launcher's workers have groups of their own
        os.kill(pid, signal.SIGKILL)
    first.wait()
    at["killed"], found = time.monotonic() - begun, kept()
    begun, second, seen = time.monotonic(), start("second"), dict(found)
    while second.poll() is None:
        time.sleep(0.1)
        seen |= kept()
        if list(cache.glob("tokens/*.safetensors")):
            at.setdefault("second start, tokens written", time.monotonic() - begun)
    at["second start"] = time.monotonic() - begun
    again = [name for name in found if seen[name] != found[name]]
    begun, third = time.monotonic(), start("third")
    codes = second.wait(), third.wait()
    at["full cache"] = time.monotonic() - begun
    said = [(tmp_path / name).read_text()[-800:] for name in ("second", "third")]
    assert codes == (0, 0), said
    (path,) = (cache / "tokens").iterdir()
    rows = tokens.mapped(path)
    assert rows is not None
    met = chunks // 2 <= len(found) and len(rows[0]["held"]) == MANY and not again
    assert met, (at, len(found), chunks, again)


BEGIN = """
import hashlib, json, sys, time
bytes_hashed = 0
class Counted:
    def __init__(self, real, first):
        self.real = real
        self.update(first)
    def update(self, data):
        global bytes_hashed
        bytes_hashed += memoryview(data).nbytes
        self.real.update(data)
    def __getattr__(self, name):
        return getattr(self.real, name)
sha256, file_digest = hashlib.sha256, hashlib.file_digest
from pathlib import Path
from types import SimpleNamespace
from outrider.decode.models.tiny import byte_tokenizer
from outrider.train import facts
from outrider.train.config import DataConfig
from outrider.train.texts.batches import BatchPlan, load_rows
from outrider.train.texts.sharing import Limits
hashlib.sha256 = lambda data=b"", **_: Counted(sha256(), data)
def digest(file, name):
    global bytes_hashed
    bytes_hashed += Path(file.name).stat().st_size
    return file_digest(file, name)
hashlib.file_digest = digest
tokenizer = byte_tokenizer()
if len(sys.argv) > 2:
    while not Path(sys.argv[2]).exists():
        time.sleep(0.005)
spent, begun = time.process_time(), time.monotonic()
rows = load_rows(DataConfig(path=sys.argv[1], held_out=0.01), tokenizer, (2,), 260, 512)
plan = BatchPlan(rows, 64, 1, 0)
rows.counts(260), rows.sha256(), rows.tokens_sha256(), rows.supervised, rows.max_id
plan.waste(Limits(tokens=16384), 2)
first = [rows.batch(part) for part in plan.micro_batches(0, 0, 2, 0, 16384)]
print(json.dumps({"cpu": time.process_time() - spent, "wall": time.monotonic() - begun,
                  "hashed": bytes_hashed, "tokens": rows.ids.numel()}))
"""


@pytest.mark.slow
def test_start_up_with_a_full_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two ranks do with 100 million tokens between their start and the first batch: on a
    machine that has not read the cache yet one of them reads it once; later nobody does. The
    rows stand for what a data file of 1,000 chats became: tokenizing them would take hours."""
    import json
    import subprocess

    import numpy as np
    import torch

    from outrider.scripts.common.files import ROOT

    monkeypatch.undo()
    cache = tmp_path / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    data = chats(tmp_path / "d.jsonl", 1000)
    cfg = DataConfig(path=str(data), held_out=0.01)
    load_rows(cfg, byte_tokenizer(), (2,), 260, 512)
    (path,) = (cache / "tokens").iterdir()
    drawn = np.random.default_rng(0)
    with tokens.TokenWriter(path.parent) as writer:
        while writer.offsets[-1] < TOKENS:
            ends = drawn.integers(60, 341, 5000).cumsum()
            size, known = int(ends[-1]), len(writer.lines)
            made = {
                "ids": drawn.integers(0, 260, size).astype(np.int32),
                "loss": drawn.random(size) < 0.5,
                "held": drawn.random(5000) < 0.01,
                "offsets": np.concatenate([[0], ends]).astype(np.int64),
                "lines": np.arange(known + 1, known + 5001),
                "tally": np.zeros(0, np.int64),
            }
            writer.extend({name: torch.from_numpy(array) for name, array in made.items()})
        writer.write(path, {"bad": [], "turns": [len(writer.lines)] * 3})
        stored = path.stat().st_size
    for note in (cache / "hashes.json", *(cache / "checked").iterdir()):
        note.unlink()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    found: dict[str, list[dict[str, float]]] = {}
    for name in ("first on a machine", "later"):
        gun = tmp_path / name
        command = [sys.executable, "-c", BEGIN, str(data), str(gun)]
        both = [
            subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)
        ]
        time.sleep(20)  # imports
        gun.write_text("")
        found[name] = [json.loads(child.communicate()[0]) for child in both]
    first, later = found["first on a machine"], found["later"]
    hashed = sum(rank["hashed"] for rank in first)
    seconds = max(rank["cpu"] for rank in later), max(rank["cpu"] for rank in first)
    met = max(seconds) <= 1 and hashed < 1.1 * stored and max(r["hashed"] for r in later) < 1e6
    assert met, found
