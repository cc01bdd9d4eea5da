"""scripts/export.py: what lands on disk, what is refused, and that no export that differs from
its head survives.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.decode.models import load
from outrider.heads.checkpoint import save_head
from outrider.scripts.export import main
from outrider.scripts.exporting import write
from tests.helpers.commands import code_of
from tests.helpers.interop import DEEP, random_head


def saved(path: Path, target, kind: str, **keys) -> Path:
    save_head(random_head(target, kind, **keys), path / "run/head", target.identity, {"step": 7})
    start = json.dumps({"event": "start", "data": "9 rows of text"})
    (path / "run/metrics.jsonl").write_text(start + "\n")
    return path / "run"


def run(prompts: Path, *args: str) -> int:
    keys = [*(f"target.{k}={v}" for k, v in DEEP.items()), f"prompts={prompts}", "device=cpu"]
    return code_of(main, "target=tiny", *keys, "max_new_tokens=4", *args)


@pytest.mark.parametrize(
    "kind, format",
    [("medusa", "vllm"), ("eagle1", "sglang"), ("eagle3", "vllm"), ("eagle3", "speculators")],
)
def test_an_export_is_whole_checked_and_hashed(
    target, prompts, tmp_path: Path, kind: str, format: str, capsys
) -> None:
    source, out = saved(tmp_path, target, kind), tmp_path / "out"
    keys = (f"drafter={source}", f"format={format}", f"out={out}", "verifier=org/model")
    assert run(prompts, *keys) == 0
    manifest = json.loads((out / "outrider.json").read_text())
    assert set(manifest["files"]) == {p.name for p in out.iterdir()} - {"outrider.json"}
    for name, said in manifest["files"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == said["sha256"], name
    assert manifest["target"]["weights_sha256"] == target.identity.weights_sha256
    assert manifest["check"]["draft_tokens_equal"] == 6 and manifest["check"]["prompts"] == 2
    card = (out / "README.md").read_text()
    assert "9 rows of text" in card and target.identity.tokenizer_sha256 in card
    for line in manifest["serve"]:
        assert line["command"] in card
    if format == "vllm":
        assert f'"method": "{kind}", "num_speculative_tokens": 3' in card
        assert "vllm serve org/model" in card
    if format == "speculators":
        assert f"vllm serve {out}" in card
    told = capsys.readouterr().out
    assert ("version that does is 0.32.0" in told) == (kind == "medusa") and "weights: " in told
    assert {p.name for p in tmp_path.iterdir()} == {"run", "out"}


def broken(tensors: dict, path: Path, **_: Any) -> None:
    tensors = {k: v.flip(0) if "up_proj" in k else v for k, v in tensors.items()}
    save_file(tensors, path)


def interrupted(tensors: dict, path: Path, **_: Any) -> None:
    path.write_bytes(b"half")
    raise KeyboardInterrupt


def terminated(tensors: dict, path: Path, **_: Any) -> None:
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGTERM)


def full(tensors: dict, path: Path, **_: Any) -> None:
    path.write_bytes(b"half")
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    "save, code, said",
    [
        (broken, 2, "logits differ"),
        (interrupted, 130, "interrupted"),
        (terminated, 75, "interrupted"),
        (full, 2, "No space left on device"),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_an_export_that_is_wrong_or_stopped_leaves_what_was_there(
    target,
    prompts,
    tmp_path: Path,
    monkeypatch,
    capsys,
    save: Callable[..., None],
    code: int,
    said: str,
    again: bool,
) -> None:
    source, out = saved(tmp_path, target, "eagle3"), tmp_path / "out"
    args = (f"drafter={source}", "format=vllm", f"out={out}", "overwrite=true")
    assert not again or run(prompts, *args) == 0
    before = (out / "outrider.json").read_bytes() if again else None
    monkeypatch.setattr(write, "save_file", save)
    assert run(prompts, *args) == code
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"run", *(["out"] if again else [])}
    assert before is None or (out / "outrider.json").read_bytes() == before


def test_an_existing_folder_is_refused_then_swapped_as_a_whole(
    target, prompts, tmp_path: Path, capsys
) -> None:
    source, out = saved(tmp_path, target, "medusa"), tmp_path / "out"
    args = (f"drafter={source}", "format=vllm", f"out={out}")
    assert run(prompts, *args) == 0
    (out / "old.txt").write_text("of the first export")
    assert run(prompts, *args) == 2 and "overwrite=true" in capsys.readouterr().err
    assert run(prompts, *args, "overwrite=true", "dtype=bfloat16") == 0
    assert not (out / "old.txt").exists()
    assert load_file(out / "model.safetensors")["lm_heads.0.weight"].dtype == torch.bfloat16
    strange = tmp_path / "home"
    strange.mkdir()
    (strange / "thesis.tex").write_text("all my work")
    # converted targets carry a file of this name too
    (strange / "outrider.json").write_text('{"format": 1}')
    assert run(prompts, *args[:2], f"out={strange}", "overwrite=true") == 2
    assert (strange / "thesis.tex").exists() and "outrider.json" in capsys.readouterr().err
    assert run(prompts, *args[:2], f"out={source}", "overwrite=true") == 2
    assert (source / "head/head.json").exists()


@pytest.mark.parametrize(
    "kind, keys, said",
    [
        ("eagle3", ("format=speculators",), "verifier"),
        ("eagle3", ("format=medusa",), "format"),
        ("eagle3", ("format=vllm", "dtype=q8_0"), "dtype"),
        ("eagle3", ("format=vllm", "tokenizer_from=x.gguf"), "tokenizer_from"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_key(
    target, prompts, tmp_path: Path, kind: str, keys: tuple, said: str, capsys
) -> None:
    source = saved(tmp_path, target, kind)
    assert run(prompts, f"drafter={source}", f"out={tmp_path / 'out'}", *keys) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_export_that_does_not_fit_on_the_disk(
    target, prompts, tmp_path: Path, monkeypatch, capsys
) -> None:
    source, out = saved(tmp_path, target, "medusa", draft_vocab=64), tmp_path / "out"
    little: Any = SimpleNamespace(f_bavail=10, f_blocks=10, f_bfree=10, f_frsize=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: little)
    assert run(prompts, f"drafter={source}", "format=vllm", f"out={out}") == 2
    assert "set dtype=bfloat16" in capsys.readouterr().err
    assert not out.exists()


def test_a_separate_draft_is_a_plain_folder(
    target, prompts, tmp_path: Path, monkeypatch, capsys
) -> None:
    from transformers import AutoModelForCausalLM

    from outrider.heads.small_lm.config import SmallLMConfig
    from outrider.heads.small_lm.head import SmallLM

    head = SmallLM.for_target(target, SmallLMConfig(from_target_layers=2, depth=3))
    save_head(head, tmp_path / "run/head", target.identity, {})
    out = tmp_path / "out"
    args = (f"drafter={tmp_path / 'run'}", f"out={out}", "verifier=org/model")
    assert run(prompts, *args, "format=transformers", "dtype=bfloat16") == 0
    assert not (out / "head.json").exists() and (out / "tokenizer.json").exists()
    assert json.loads((out / "outrider.json").read_text())["kind"] == "small_lm"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == 2 and model.dtype == torch.bfloat16
    card = (out / "README.md").read_text()
    assert '"method": "draft_model", "num_speculative_tokens": 3' in card and "STANDALONE" in card
    assert run(prompts, *args, "format=vllm", "overwrite=true") == 2
    assert "format=transformers" in capsys.readouterr().err
    whole = AutoModelForCausalLM.from_pretrained

    def wrong(*args: Any, **keys: Any) -> Any:
        found = whole(*args, **keys)
        found.model.layers[0].mlp.up_proj.weight.data.neg_()
        return found

    monkeypatch.setattr(write.AutoModelForCausalLM, "from_pretrained", wrong)
    assert run(prompts, *args, "format=transformers", "overwrite=true") == 2
    assert "logits differ" in capsys.readouterr().err


def test_a_head_of_another_target_is_refused_before_that_is_fetched(
    target, tmp_path: Path, monkeypatch, capsys
) -> None:
    def fetched(*_: Any) -> Any:
        raise AssertionError("the target is fetched")

    monkeypatch.setattr(load, "ensure", fetched)
    keys = (f"drafter={saved(tmp_path, target, 'eagle3')}", "format=vllm", f"out={tmp_path / 'o'}")
    assert (
        code_of(main, "target=smollm2", *keys) == 2 and "another target" in capsys.readouterr().err
    )
