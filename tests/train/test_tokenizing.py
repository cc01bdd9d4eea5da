"""Tokenizing by several processes: the same tokens, parts that outlive a kill, waiting without
a collective, and no second look at a full cache."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.decode.models.identity import cache_root
from outrider.decode.models.tiny import byte_tokenizer
from outrider.train import waiting
from outrider.train.config import DataConfig
from outrider.train.data import batches, tokenizing, tokens
from outrider.train.data.batches import JoinedRows, load_rows
from outrider.train.data.tokenizing import Work
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
