"""What a stranger's files may do: nothing. No code of a model's repository runs unless it is asked
for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.conf.errors import UserError
from outrider.decode.models import load
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.tiny import byte_tokenizer, tiny_model

EVIL = """
from pathlib import Path
from transformers import PretrainedConfig
Path({canary!r}).write_text("ran")
class EvilConfig(PretrainedConfig):
    model_type = "evil"
"""


def foreign_model(folder: Path, canary: Path) -> Path:
    """A model folder that brings code along."""
    tiny_model(layers=1, hidden=32, heads=2, kv_heads=1, vocab=260).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(EVIL.format(canary=str(canary)))
    return folder


def test_code_of_a_model_runs_only_when_requested_for_and_then_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, canary = foreign_model(tmp_path / "evil", tmp_path / "canary"), tmp_path / "canary"
    assert TargetConfig().trust_remote_code is False
    with pytest.raises(UserError, match="target: "):
        load_target(TargetConfig(kind="local", path=str(folder)))
    assert not canary.exists() and "trust_remote_code" not in capfd.readouterr().err
    load._say_once.cache_clear()
    with pytest.raises(UserError, match="target: "):  # the code runs, and defines no model
        load_target(TargetConfig(kind="local", path=str(folder), trust_remote_code=True))
    assert canary.read_text() == "ran"
    assert (
        f"target.trust_remote_code is on: Python code from {folder} runs here"
        in capfd.readouterr().err
    )
