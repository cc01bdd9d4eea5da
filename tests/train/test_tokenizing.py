"""Tokenizing by several processes, the file that it leaves, and ranks that wait for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.identity import cache_root
from outrider.decode.models.tiny import byte_tokenizer
from outrider.train import accelerator as waiting
from outrider.train.data import tokens
from outrider.train.data.batches import JoinedRows
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows
from tests.helpers.faults import ranks, wait
from tests.helpers.training import chats

EOS = (2,)


@pytest.fixture(autouse=True)
def small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "CHUNK", 8)


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


@pytest.mark.slow
def test_processes_change_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = data.read_text().splitlines()
    lines[17] = "{broken"
    data.write_text("\n".join(lines) + "\n")
    alone = load(data, cache=False, workers=1, max_bad_fraction=1)
    monkeypatch.setattr(tokens, "SECONDS", 0.0)
    many = load(data, workers=2, max_bad_fraction=1)
    assert same(alone, many) and many.bad == [f"{data}:18: {alone.bad[0].split(': ', 1)[1]}"]
    assert many.counted == alone.counted and many.counted["turns"] == 59


def test_a_stop_leaves_nothing_and_a_full_cache_is_not_read_through(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokens, "encode", stop)
        load(data)
    assert not [*(cache_root() / "tokens").glob("*")]
    first = load(data)
    (kept,) = (cache_root() / "tokens").iterdir()

    def never(*_: Any) -> Any:
        raise AssertionError("read through again")

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "totals", never)
        patch.setattr(tokens, "encoded", never)
        again = load(data)
    assert same(again, first) and again.counts(260).equal(first.counts(260))
    assert first.totals.tally.sum() == (
        (first.loss & ~first.held.repeat_interleave(first.lengths)).sum()
    )
    content = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(content[:-5])
    assert same(load(data), first), "a file that is cut is made again"


def test_ranks_wait_longer_than_a_collective_may(tmp_path: Path) -> None:
    """Rank 0 prepares data for longer than a collective may take; the other looks at the store,
    and goes on once it is there, also after a mistake of rank 0's."""

    def action() -> None:
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=2))
        rank, made = int(os.environ["RANK"]), tmp_path / "made"
        with waiting.main_first("rows"):
            if rank == 0:
                time.sleep(3)
                made.touch()
            assert made.exists()
        with pytest.raises(KeyError), waiting.main_first("rows"):
            raise KeyError
        dist.barrier()
        dist.destroy_process_group()

    assert [wait(child) for child in ranks(2, action, tmp_path / "said")] == [0, 0]
