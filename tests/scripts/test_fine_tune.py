"""A relative of a target: a LoRA on every linear layer, merged, saved as any model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Trainer

from decode.models.load import TargetConfig, load_target
from scripts import fine_tune

SHAPE: dict[str, Any] = {"kind": "tiny", "layers": 2, "hidden": 32, "vocab": 260}
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


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_seed_gives_the_same_weights(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6), ("d", 1 << 62)):
        (tmp_path / name).mkdir()
        torch.manual_seed(len(found))  # whatever happened before
        assert tuned(tmp_path / name, f"seed={seed}", "steps=2", "lr=0.01") == 0
        found.append(weights(tmp_path / name / "out"))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert not all(torch.equal(found[0][key], found[2][key]) for key in found[0])


@pytest.mark.parametrize("arch", ["gpt2", "gemma2"])
def test_a_tied_head_stays_tied(tmp_path: Path, arch: str) -> None:
    assert tuned(tmp_path, f"target.arch={arch}", "steps=2", "lr=0.01") == 0
    new = load_target(TargetConfig(kind="local", path=str(tmp_path / "out")), "float32", "cpu")
    head, table = new.model.get_output_embeddings(), new.model.get_input_embeddings()
    old = load_target(TargetConfig(**{**SHAPE, "arch": arch}), "float32", "cpu")
    tied = old.model.get_output_embeddings().weight is old.model.get_input_embeddings().weight
    assert (head.weight is table.weight) == tied


def test_a_loss_that_is_none_is_not_saved(tmp_path: Path, capsys) -> None:
    assert tuned(tmp_path, "lr=1e30") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: lr: 1e+30; ") and "lower it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_a_stop_half_way_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for owner, name in ((Trainer, "train"), (PreTrainedModel, "save_pretrained")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopped)
            assert tuned(tmp_path, "steps=1") == 130
        assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_nothing_is_left_where_it_runs(tmp_path: Path, monkeypatch, capfd) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    monkeypatch.chdir(place)
    before = dict(os.environ)
    assert tuned(tmp_path, "steps=3") == 0
    assert not list(place.iterdir()) and dict(os.environ) == before
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 1 and not err  # quiet


def test_chats_that_teach_nothing_are_told(tmp_path: Path, capsys) -> None:
    empty = json.dumps({"messages": [CHAT["messages"][0], {"role": "assistant", "content": ""}]})
    assert tuned(tmp_path, chats=empty) == 2
    said = capsys.readouterr().err
    assert "chats.jsonl:1: turn 1: content is empty" in said and "data." not in said
    assert tuned(tmp_path, "sentences=1", chats=empty) == 2
    assert f"{tmp_path / 'chats.jsonl'}:1: turn 1" in capsys.readouterr().err
    assert tuned(tmp_path, f"chats={tmp_path / 'nowhere'}") == 2
    assert "chats: no such file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    some = f"{json.dumps(CHAT)}\n\n{empty}"
    assert tuned(tmp_path, "sentences=1", "steps=2", chats=some) == 0
    out, err = capsys.readouterr()
    assert "on 4 chats" in out and err == "chats: 4 left out (4 x turn N: content is empty)\n"


def test_long_prompts_and_whole_batches_without_an_answer(tmp_path: Path, capsys) -> None:
    """A chat of which nothing is taught would make a batch's loss 0/0."""
    long = {**CHAT, "messages": [{"role": "user", "content": "a " * 200}, CHAT["messages"][1]]}
    chats = f"{json.dumps(long)}\n{json.dumps(CHAT)}"
    keys = ("max_length=64", "batch_size=1", "steps=9")
    assert tuned(tmp_path, *keys, chats=chats) == 0
    assert "4 left out" in capsys.readouterr().err


def test_blank_lines_and_a_home_are_no_trouble(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cut").mkdir()
    (tmp_path / "chats.jsonl").write_text(f"\n{json.dumps(CHAT)}\n\n")
    lines = fine_tune.shortened(tmp_path / "chats.jsonl", 1, tmp_path / "cut").read_text()
    assert lines.startswith("\n{") and "But not now" not in lines
    seen = []

    def looked(path: Path, sentences: int, scratch: Path) -> Path:
        seen.append(path)
        return path

    monkeypatch.setattr(fine_tune, "shortened", looked)
    assert tuned(tmp_path, "chats='~/chats.jsonl'", "steps=1") == 0
    assert seen == [tmp_path / "chats.jsonl"]


def test_a_target_in_fewer_bits_or_without_a_template_is_refused(tmp_path: Path, capsys) -> None:
    cfg = TargetConfig(**SHAPE)
    target = load_target(cfg, "float32", "cpu")
    target.tokenizer.chat_template = None
    target.model.save_pretrained(tmp_path / "bare")
    target.tokenizer.save_pretrained(tmp_path / "bare")
    bare = ("target=local", f"target.path={tmp_path / 'bare'}")
    kept = [key for key in KEYS if key != "target=tiny"]
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(CHAT) + "\n")
    for more, said in (([], "no chat template"), (["target.quantize=bnb-nf4"], "merged update")):
        with pytest.raises(SystemExit) as stop:
            args = [*bare, *kept, f"chats={path}", f"out={tmp_path / 'out'}", "quiet=true"]
            fine_tune.main([*args, *more])
        assert stop.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
