"""Tokens on disk: data that do not fit into memory, streamed data sets, full disks and damaged
files.
"""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from safetensors import safe_open

from outrider.conf.errors import UserError
from outrider.conf.jsonl import records
from outrider.train.data.batches import BatchPlan
from tests.helpers.training import chats
from tests.train.test_train_data import load


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
    read.
    """
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = chats(tmp_path / "d.jsonl", 50)
    want = load(path)
    folder = parquet(tmp_path / "data", records(path))
    streamed = load(folder, kind="hub", streaming=True, cache=True)
    assert (
        streamed.totals.sha256 == want.totals.sha256 and streamed.where(3) == f"{folder}[train]:3"
    )
    assert [
        t.equal(getattr(want, n))
        for n in ("ids", "loss", "offsets", "held")
        for t in [getattr(streamed, n)]
    ]
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
    monkeypatch.setattr("outrider.train.data.tokens.encoded", None)
    assert load(folder, kind="hub", streaming=True, cache=True).totals.sha256 == want.totals.sha256
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    changed = records(path)
    changed[7]["messages"][1]["content"] += "!"
    (folder / "train-00000-of-00003.parquet").unlink()
    parquet(tmp_path / "other", changed)
    (tmp_path / "other" / "train-00000-of-00003.parquet").rename(
        folder / "train-00000-of-00003.parquet"
    )
    assert (
        load(folder, kind="hub", streaming=True, cache=True).totals.sha256 != want.totals.sha256
    ), "read again: other bytes"
    with (folder / "train-00001-of-00003.parquet").open("r+b") as broken:
        broken.seek(20)
        broken.write(b"\xff" * 200)
    with pytest.raises(UserError, match=r"data.name: .*cannot (be read beyond row \d+|load)"):
        load(folder, kind="hub", streaming=True, cache=True)
