"""What users type and hand in, through the commands themselves: one line that names the key or
file:line, never a traceback; and no second process in a folder that is being written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.heads.checkpoint import save_head
from outrider.heads.registry import head_class
from outrider.scripts import chat, evaluate, tune
from outrider.scripts.common import files
from tests.helpers import pictures
from tests.helpers.commands import code_of
from tests.helpers.training import TINY, tiny_target

TARGET = ["target=tiny", *(f"target.{k}={v}" for k, v in TINY.items())]
HALF = "half of a surrogate pair"


def one_line(capsys: Any) -> str:
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.count("\n") == 1, said
    return str(said)


# -- what is asked, and of what


def rows(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_half_an_emoji_leaves_the_other_prompts(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """And a prompt that fills the context goes the same way: left out, named, exit code 3."""
    pictures.left_out(monkeypatch)
    path = rows(tmp_path / "p.jsonl", "cut \ud83d", "one two one two", "long " * 300, "three")
    out = tmp_path / "out"
    few = ("device=cpu", "dtype=float32", "drafters=[none]", "max_new_tokens=4", "quiet=true")
    assert code_of(evaluate.main, *TARGET, f"prompts={path}", f"out={out}", *few) == 3
    report = json.loads((out / "report.json").read_text())
    reasons = {row["name"]: row["reason"] for row in report["skipped"]}
    assert reasons.keys() == {"p.jsonl:1", "3"} and HALF in reasons["p.jsonl:1"]
    assert (
        "prompts: 3 has" in reasons["3"]
        and "context holds 1024; shorten or remove it" in reasons["3"]
    )
    assert report["settings"]["num_prompts"] == 2
    rows(path, "long " * 300)
    assert code_of(evaluate.main, *TARGET, f"prompts={path}", f"out={out}-2", *few) == 2
    assert "prompts: 1 has" in one_line(capsys)


def test_every_drafter_that_does_not_load_is_named_in_a_line(tmp_path: Path, capsys: Any) -> None:
    target, odd = tiny_target(), tiny_target(vocab=261)
    odd.tokenizer.add_tokens(["<real>"])
    for name, made in (("odd", odd), ("bare", target)):
        made.model.save_pretrained(tmp_path / name)
        made.tokenizer.save_pretrained(tmp_path / name)
    kind = head_class("medusa")
    head = kind.for_target(target, kind.Config(draft_vocab=0))
    save_head(head, tmp_path / "empty", target.identity)
    for file in ("bare/model.safetensors", "empty/head.safetensors"):
        (tmp_path / file).unlink()
    named = ",".join(f"{tmp_path}/{name}@chain" for name in ("odd", "bare", "empty"))
    path = rows(tmp_path / "p.jsonl", "ab ab")
    keys = ("device=cpu", "dtype=float32", f"prompts={path}", f"out={tmp_path}/out")
    assert code_of(evaluate.main, *TARGET, *keys, f"drafters=[{named}]") == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("<real>", "/bare", "head.safetensors"))
    assert "Traceback" not in said and not (tmp_path / "out/report.json").exists()


def test_a_conversation_that_is_no_text(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    assert code_of(chat.main, *TARGET, "temperature=0", "max_new_tokens=2") == 2
    assert "message: standard input is no utf-8 text" in one_line(capsys)


# -- one writer, and what a run depends on


@pytest.mark.parametrize("module", [evaluate, tune])
def test_a_second_process_is_refused(
    module: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the run began")

    monkeypatch.setattr(module, "load_target", loaded)
    named = "drafters=[none]" if module is evaluate else "drafter=ngram"
    args = [named, f"out={tmp_path / 'out'}", *TARGET]
    with files.sole_writer(tmp_path / "out"):
        assert code_of(module.main, *args) == 2
        assert f"another process is writing {tmp_path / 'out'}; wait for it" in one_line(capsys)
    assert not list(tmp_path.glob(".*.lock"))
    with pytest.raises(AssertionError, match="the run began"):
        module.main(args)
    assert not list(tmp_path.glob(".*.lock")), "a run that fails gives its mark back"
