"""A file that holds no lines of JSON is refused by what it is, with the way that works."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.conf.errors import UserError
from outrider.conf.jsonl import read_lines
from outrider.decode.models.tiny import byte_tokenizer
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows

ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
OTHERS = {
    "rows.jsonl.gz": gzip.compress((json.dumps(ROW) + "\n").encode() * 8),
    "rows.jsonl.zst": b"\x28\xb5\x2f\xfd\x04\x00" + bytes(9),
    "rows.parquet": b"PAR1" + bytes(40) + b"PAR1",
    "rows.json": b"\xef\xbb\xbf\n" + json.dumps([ROW]).encode(),
}


def test_what_holds_no_lines_is_refused_and_the_way_that_is_named_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in OTHERS.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^data.path: .*{name} is ") as said:
            list(read_lines(path))
        assert f"data=hub data.path={tmp_path}" in str(said.value)
        if name != "rows.jsonl.gz":
            path.unlink()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    cfg = DataConfig(kind="hub", path=str(tmp_path), held_out=0.0, cache=False)
    assert load_rows(cfg, byte_tokenizer(), {2}, 260, 64).lines.numel() == 8


@pytest.mark.skipif(not shutil.which("gzip"), reason="no gzip on this machine")
def test_the_command_that_unpacks_prompts_works(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl.gz"
    path.write_bytes(OTHERS["rows.jsonl.gz"])
    with pytest.raises(UserError, match="^prompts: ") as said:
        list(read_lines(path, "prompts"))
    subprocess.run(str(said.value).rpartition("convert it: ")[2].split(), check=True)
    assert len([*read_lines(path.with_suffix(""), "prompts")]) == 8
