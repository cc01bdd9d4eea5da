"""Tokens on disk: data that do not fit into memory, streamed data sets, full disks and damaged
files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import datasets
import pytest
from safetensors import safe_open

from outrider.conf.errors import UserError
from outrider.scripts.common.files import ROOT
from outrider.train.config import DataConfig
from outrider.train.texts import tokens
from outrider.train.texts.batches import BatchPlan
from tests.helpers.training import WORDS, chats
from tests.train.test_train_data import load


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def parquet(folder: Path, rows: list[dict], files: int = 3) -> Path:
    folder.mkdir()
    for i in range(files):
        part = rows[i * len(rows) // files : (i + 1) * len(rows) // files]
        datasets.Dataset.from_list(part).to_parquet(
            str(folder / f"train-{i:05d}-of-{files:05d}.parquet")
        )
    return folder


def test_streamed_rows_are_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, hence the same batches and the same meaning of a run, however they were
    read; spilled or not.
    """
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = chats(tmp_path / "d.jsonl", 50)
    want = load(path)
    folder = parquet(tmp_path / "data", records(path))
    monkeypatch.setattr("outrider.train.texts.tokens.SPILL", 300)
    streamed = load(folder, kind="hub", streaming=True, cache=True)
    assert streamed.sha256() == want.sha256() and streamed.where(3) == f"{folder}[train]:3"
    assert [
        t.equal(getattr(want, n))
        for n in ("ids", "loss", "offsets", "held")
        for t in [getattr(streamed, n)]
    ]
    for part in (1, 100, 1 << 20):
        monkeypatch.setattr("outrider.train.texts.batches.PART", part)
        train = want.loss & ~want.held.repeat_interleave(want.lengths)
        assert streamed.counts(260).equal(want.ids[train].long().bincount(minlength=260))
    steps = range(2 * BatchPlan(want, 4, 3, 7).per_epoch)
    assert [BatchPlan(streamed, 4, 3, 7).batch(k) for k in steps] == [
        BatchPlan(want, 4, 3, 7).batch(k) for k in steps
    ]
    saved = sorted((tmp_path / "cache" / "tokens").iterdir())
    assert len(saved) == 1, "nothing spilled is left behind"
    with safe_open(saved[0], "pt") as file:
        assert file.get_tensor("ids").equal(want.ids) and file.get_tensor("loss").equal(want.loss)
    monkeypatch.setattr("outrider.train.texts.batches._tokenize", None)
    assert load(folder, kind="hub", streaming=True, cache=True).sha256() == want.sha256()
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    changed = records(path)
    changed[7]["messages"][1]["content"] += "!"
    (folder / "train-00000-of-00003.parquet").unlink()
    parquet(tmp_path / "other", changed)
    (tmp_path / "other" / "train-00000-of-00003.parquet").rename(
        folder / "train-00000-of-00003.parquet"
    )
    assert load(folder, kind="hub", streaming=True, cache=True).sha256() != want.sha256(), (
        "read again: other bytes"
    )
    with (folder / "train-00001-of-00003.parquet").open("r+b") as broken:
        broken.seek(20)
        broken.write(b"\xff" * 200)
    with pytest.raises(UserError, match=r"data.name: .*cannot (be read beyond row \d+|load)"):
        load(folder, kind="hub", streaming=True, cache=True)
    assert (
        DataConfig(kind="jsonl", path="x", streaming=True)
        .validate()[0]
        .startswith("streaming: only for data=hub")
    )
    assert (
        DataConfig(kind="hub", path="x", streaming=True, cache=False)
        .validate()[0]
        .startswith("streaming: needs")
    )


def test_tokens_that_do_not_fit_into_memory_do_not_have_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's peak while rows are collected stays below twice what may be held, however many
    there are.
    """
    monkeypatch.setattr(tokens, "SPILL", 1 << 16)
    monkeypatch.setattr(tokens, "PART", 1 << 16)
    row, mask = [7] * 500, [True] * 500
    peaks = []
    for count in (400, 4000):
        with tokens.TokenWriter(tmp_path) as writer:
            tracemalloc.start()
            for i in range(count):
                writer.add(row, mask, i, False)
            writer.write(tmp_path / "t.safetensors", {})
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + 17 * 3600 * 2 + (1 << 16) and peaks[0] < 2_000_000
    found = tokens.mapped(tmp_path / "t.safetensors")
    assert (
        found is not None
        and found[0]["ids"].numel() == 2_000_000
        and bool((found[0]["ids"] == 7).all())
    )
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize("spilled", [False, True])
def test_a_full_disk_costs_the_cache_but_not_what_fits_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spilled: bool
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = chats(tmp_path / "d.jsonl", 20)
    if spilled:
        monkeypatch.setattr(tokens, "SPILL", 100)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr("os.fsync", full)
    if spilled:
        with pytest.raises(UserError, match="data.cache: the tokens do not go to .*No space left"):
            load(path, cache=True)
    else:
        assert load(path, cache=True).sha256() == load(path).sha256()
    assert not list((tmp_path / "cache" / "tokens").iterdir())


def test_damaged_token_files_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with tokens.TokenWriter(None) as writer:
        writer.add([1, 2, 3], [False, True, True], 1, False)
        writer.add([4], [True], 2, True)
        writer.write(path, {"bad": []})
    whole = path.read_bytes()
    found = tokens.mapped(path)
    assert (
        found is not None
        and found[0]["offsets"].tolist() == [0, 3, 4]
        and found[0]["held"].tolist() == [0, 1]
    )
    head = int.from_bytes(whole[:8], "little")
    for i in [*range(8), *range(8, 8 + head, 7), *range(8 + head, len(whole), 3)]:
        damaged = bytearray(whole)
        damaged[i] ^= 0x10
        path.unlink()
        path.write_bytes(damaged)
        again = tokens.mapped(path)
        assert (
            again is None
            or {k: t.tolist() for k, t in again[0].items()}
            == {k: t.tolist() for k, t in found[0].items()}
            or i in lines_of(whole, head)
        ), i
    for size in (0, 4, 8, 20, 8 + head, len(whole) - 1):
        path.unlink()
        path.write_bytes(whole[:size])
        assert tokens.mapped(path) is None


def lines_of(whole: bytes, head: int) -> range:
    """Where the line numbers lie, which name rows in messages and are no part of the hash."""
    begin, end = json.loads(whole[8 : 8 + head])["lines"]["data_offsets"]
    return range(8 + head + begin, 8 + head + end)


@pytest.mark.slow
def test_memory_stays_bounded_while_a_data_set_streams(tmp_path: Path) -> None:
    """4 and 16 million tokens through a real process: what it holds of its own (anonymous
    memory, not the pages of files), which for the larger one must stay below the data and
    below a fixed bound."""
    text = " ".join(WORDS[i * i % len(WORDS)] for i in range(500))[:2000]
    folders = []
    for count in (64, 2000, 8000):
        folders.append(tmp_path / str(count))
        folders[-1].mkdir()
        for i in range(4):
            part = datasets.Dataset.from_list(
                [{"text": f"{n:06d}{text[6:]}"} for n in range(i, count, 4)]
            )
            part.to_parquet(str(folders[-1] / f"train-{i}.parquet"), batch_size=250)
    env = {**os.environ, "OUTRIDER_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROBE, *map(str, folders)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, small, large = json.loads(done.stdout)
    met = (
        large["held"] - small["held"] <= (large["file"] - small["file"]) // 2
        and large["held"] <= 64 << 20
    )
    assert met and large["tokens"] == 16_000_000, (small, large)


PROBE = """
import json, sys, threading
from pathlib import Path
from outrider.decode.models.identity import cache_root
from outrider.decode.models.tiny import byte_tokenizer
from outrider.train.config import DataConfig
from outrider.train.texts.batches import BatchPlan, load_rows

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    global peak
    while not over.wait(0.01):
        peak = max(peak, anonymous())

tokenizer, before, found = byte_tokenizer(), 0, []
for path in sys.argv[1:]:  # the first one warms up
    peak, over = 0, threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    rows = load_rows(DataConfig(kind="hub", path=path, streaming=True, max_length=2048), tokenizer, (2,), 260, 2048)
    plan = BatchPlan(rows, 8, 4, 0)
    for step in range(100):
        rows.batch(plan.batch(step))
    rows.counts(260)
    over.set()
    thread.join()
    size = max(p.stat().st_size for p in (cache_root() / "tokens").iterdir())
    found.append({"tokens": rows.ids.numel(), "file": size, "held": peak - before})
    del rows, plan
    before = before or anonymous()
print(json.dumps(found))
"""
