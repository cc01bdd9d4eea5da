"""A log as real servers leave them (tests/helpers/traffic.py): what becomes of every line is known
beforehand. And logs that are none."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.decode.models.load import TargetConfig, load_tokenizer
from outrider.scripts.extra.logs import LogOptions, LogsReport, LogWork, prepare
from outrider.scripts.extra.masking import across
from outrider.train.texts import workers
from tests.helpers.traffic import FORMS, KINDS, Log

TINY = TargetConfig(kind="tiny")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def log() -> Log:
    made = Log(500, letters=300)
    assert set(made.forms) == set(FORMS) and set(made.counts) == {*KINDS, "plain"}
    return made


def told(report: LogsReport) -> dict[str, int]:
    return {why: count for why, count in report.counts.items() if why != "usable"}


def written(out: Path) -> list[bytes]:
    return [(out / name).read_bytes() for name in ("train.jsonl", "later.jsonl")]


def test_every_line_of_a_log_is_accounted_for(log: Log, tmp_path: Path, tokenizer: Any) -> None:
    path = log.write(tmp_path / "log.jsonl")
    report = prepare([path], tmp_path / "out", TINY, tokenizer)
    assert told(report) == log.reasons and report.counts["usable"] == log.usable
    assert sum(report.rows.values()) == log.usable
    for why in log.reasons:
        assert report.named[why][0].startswith("log.jsonl:")
    assert len(report.models) == 3
    said = "\n".join(report.lines())
    assert all(f"{count} {why}" in said for why, count in log.reasons.items())
    assert said.count("masking knows what has a form") == 1
    text = b"".join(written(tmp_path / "out")).decode()
    assert 0 < sum(report.masked.values()) <= log.secrets
    for secret in ("example.org", "sk-proj-", r"//admin:[0-9a-f]", r"\+49 30", r"word = \w+\d"):
        assert not re.search(secret, text), secret
    for row in map(json.loads, text.splitlines()):
        json.dumps(row, allow_nan=False)
    assert "tool_calls" in text and "reasoning_content" in text
    assert not (tmp_path / "out/finds.jsonl").exists()


def test_the_number_of_processes_changes_no_byte(
    log: Log, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log.write(tmp_path / "log.jsonl")
    prepare([path], tmp_path / "one", TINY, tokenizer)
    monkeypatch.setattr(workers, "SECONDS", 0.0)
    monkeypatch.setattr(across, "PART", 20_000)
    prepare([path], tmp_path / "two", TINY, tokenizer, work=LogWork(2))
    assert written(tmp_path / "one") == written(tmp_path / "two")


def test_killed_while_masking(log: Log, tmp_path: Path, tokenizer: Any) -> None:
    """SIGKILL in the middle: no half-written rows, and the same rows afterwards."""
    path, out = log.write(tmp_path / "log.jsonl"), tmp_path / "out"
    code = (
        "import sys\n"
        "from outrider.decode.models.load import TargetConfig, load_tokenizer\n"
        "from outrider.scripts.extra.logs import prepare\n"
        "from outrider.scripts.extra.masking import across\n"
        "across.PART = 3000\n"
        "tiny = TargetConfig(kind='tiny')\n"
        "real = across._found\n"
        "def slow(how, part):\n"
        "    import time; time.sleep(0.05)\n"
        "    return real(how, part)\n"
        "across._found = slow\n"
        "prepare([sys.argv[1]], sys.argv[2], tiny, load_tokenizer(tiny))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    finds = out / "finds.jsonl"
    while child.poll() is None and (not finds.exists() or finds.read_text().count("\n") < 5):
        time.sleep(0.02)
    child.kill()
    assert child.wait() < 0
    assert sorted(p.name for p in out.iterdir()) == ["finds.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(across, "PART", 3000)
        looked: list[Any] = []
        real = across._found
        patch.setattr(across, "_found", lambda how, part: looked.append(part) or real(how, part))
        prepare([path], out, TINY, tokenizer)
        again = len(looked)
        prepare([path], tmp_path / "whole", TINY, tokenizer)
    assert written(out) == written(tmp_path / "whole") and again <= len(looked) - again - 4


# -- logs that are none, by name


def refused(folder: Path, tokenizer: Any, **options: Any) -> str:
    with pytest.raises(UserError) as message:
        prepare([folder], folder.parent / "out", TINY, tokenizer, LogOptions(**options))
    text = str(message.value)
    assert "\n" not in text and ": " in text and "; " in text
    assert not (folder.parent / "out/train.jsonl").exists()
    return text


def test_logs_that_are_none(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "log.jsonl"

    def said(content: bytes, **options: Any) -> str:
        path.write_bytes(content)
        return refused(path, tokenizer, **options)

    assert said(b"").startswith("logs: ") and "it is empty" in said(b"\n\n")
    assert "is compressed (gzip)" in said(gzip.compress(b"{}")) and "gunzip" in said(
        gzip.compress(b"{}")
    )
    assert "is not UTF-8" in said(b"\x80\x81\xfe" * 50 + b"\n" + b"\xff" * 40)
    assert "one JSON array" in said(b'[{"a": 1},\n{"b": 2}]')
    assert "line of" in said(b'{"messages": "' + b"x" * (9 << 20) + b'"}')
    other = Log(12, model="llama-70b")
    text = said(b"\n".join(other.lines))
    assert text.startswith("served: ") and "say served=llama-70b" in text
    failed = json.dumps(
        {"request": {"messages": [{"role": "user", "content": "x"}]}, "status": 500}
    )
    assert "2 the request failed" in said(f"{failed}\n{failed}\n".encode())


@pytest.mark.slow
def test_a_line_of_a_hundred_megabytes(log: Log, tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        file.write(b"".join(line + b"\n" for line in log.lines[:40]))
        file.write(b'{"messages": [{"role": "user", "content": "' + b"x" * 100_000_000 + b'"}]}\n')
        file.write(b"".join(line + b"\n" for line in log.lines[40:80]))
    report = prepare([path], tmp_path / "out", TINY, tokenizer)
    (why,) = (why for why in report.named if why.startswith("line of"))
    assert report.counts[why] == 1 and report.named[why] == ["log.jsonl:41"]


def test_a_folder_stands_for_its_files(log: Log, tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    assert "holds no *.jsonl" in refused(folder, tokenizer)
    half = len(log.lines) // 2
    for name, part in (("a", log.lines[:half]), ("b", log.lines[half:])):
        (folder / f"{name}.jsonl").write_bytes(b"".join(line + b"\n" for line in part))
    (folder / "notes.txt").write_text("nothing of it")
    whole = log.write(tmp_path / "log.jsonl")
    prepare([folder], tmp_path / "parts", TINY, tokenizer)
    prepare([whole], tmp_path / "whole", TINY, tokenizer)
    assert written(tmp_path / "parts") == written(tmp_path / "whole")


def test_a_full_disk_leaves_nothing_half_written(
    log: Log, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = log.write(tmp_path / "log.jsonl"), tmp_path / "out"
    full = OSError(errno.ENOSPC, "No space left on device", str(out / "train.jsonl"))

    def refuse(place: Path, text: str) -> None:
        if place.name != "finds.jsonl":
            raise full

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[prepare.__module__], "write_text", refuse)
        with pytest.raises(OSError, match="No space left"):  # conf/schema.py says it in one line
            prepare([path], out, TINY, tokenizer)
    assert not [p for p in out.iterdir() if p.name != "finds.jsonl"]

    def cannot(*_: Any) -> None:
        raise full

    monkeypatch.setattr(across, "_append", cannot)
    monkeypatch.setattr(across, "PART", 3000)
    report = prepare([path], out, TINY, tokenizer)  # what helps to go on is not needed
    assert report.counts["usable"] == log.usable
