"""A packed file given as JSONL is told what it is, and the way that works."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from outrider.conf.errors import UserError
from outrider.conf.jsonl import read_lines
from outrider.decode.models.tiny import byte_tokenizer
from outrider.scripts.data.questions import Questions
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows

ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
LINES = (json.dumps(ROW) + "\n").encode() * 8
PACKED = {
    "rows.jsonl.gz": gzip.compress(LINES),
    "rows.jsonl.zst": b"\x28\xb5\x2f\xfd\x04\x00" + bytes(9),
    "rows.parquet": b"PAR1" + bytes(40) + b"PAR1",
}


def test_packed_files_are_named_with_the_way_that_works(tmp_path: Path) -> None:
    for name, content in PACKED.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^data.path: .*{name} is ") as said:
            list(read_lines(path))
        assert f"data=hub data.path={tmp_path}" in str(said.value)
        with pytest.raises(UserError, match=f"^prompts: .*{name} is ") as said:
            Questions(path)
        assert "data=hub" not in str(said.value)


def test_the_way_that_works_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows.jsonl.gz").write_bytes(PACKED["rows.jsonl.gz"])
    cfg = DataConfig(kind="hub", path=str(folder), held_out=0.0, cache=False)
    assert load_rows(cfg, byte_tokenizer(), {2}, 260, 64).lines.numel() == 8
