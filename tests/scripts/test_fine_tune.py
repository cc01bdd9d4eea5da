"""A relative of a target: a LoRA on every linear layer, merged, saved as any model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from decode.models.load import TargetConfig, load_target
from scripts import fine_tune

KEYS = ["target=tiny", "target.layers=2", "target.hidden=32", "target.vocab=260"]
CHAT = {
    "messages": [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "Yes. But not now."},
    ]
}


def tuned(tmp_path: Path, *keys: str, chats: str = json.dumps(CHAT)) -> int:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{chats}\n" * 4)
    with pytest.raises(SystemExit) as stop:
        fine_tune.main(
            [*KEYS, f"chats={path}", f"out={tmp_path / 'out'}", "quiet=true", "steps=6", *keys]
        )
    return int(stop.value.code or 0)


def test_the_relative_has_other_weights_and_the_same_tokenizer(tmp_path: Path, capsys) -> None:
    assert tuned(tmp_path, "lr=0.01", "batch_size=2") == 0
    assert "6 steps on 4 chats" in capsys.readouterr().out
    cfg = TargetConfig(kind="tiny", layers=2, hidden=32, vocab=260)
    old = load_target(cfg, "float32", "cpu")
    new = load_target(TargetConfig(kind="local", path=str(tmp_path / "out")), "float32", "cpu")
    assert new.identity and old.identity
    assert new.identity.weights_sha256 != old.identity.weights_sha256
    ids = old.tokenizer.encode("Yes. But")
    assert new.tokenizer.encode("Yes. But") == ids
    row = torch.tensor([ids])
    with torch.no_grad():
        before, after = old.model(row).logits, new.model(row).logits
    assert before.shape == after.shape and (before - after).abs().max() > 1e-3
    assert tuned(tmp_path) == 2 and "exists; give another folder" in capsys.readouterr().err


def test_answers_are_cut_behind_a_sentence(tmp_path: Path, capsys) -> None:
    assert fine_tune.brief("Yes. But not now.", 1) == "Yes."
    assert fine_tune.brief("It costs 3.50 today! Take it.", 1) == "It costs 3.50 today!"
    assert fine_tune.brief("no end", 1) == "no end"
    assert fine_tune.brief("a. b. c.", 2) == "a. b."
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CHAT) + "\n")
    (tmp_path / "cut").mkdir()
    row = json.loads(fine_tune.shortened(path, 1, tmp_path / "cut").read_text())
    assert [one["content"] for one in row["messages"]] == ["a b", "Yes."]
    assert fine_tune.shortened(path, 0, tmp_path) == path
    assert tuned(tmp_path, "sentences=1", chats='{"text": "x"}') == 2
    assert "chats.jsonl:1 is no chat" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
