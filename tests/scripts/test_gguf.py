"""format=gguf: what lands in the file, read back by a reader that shares no code with the
writer; what is refused; damaged files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from outrider.conf.errors import UserError
from outrider.heads.checkpoint import save_head
from outrider.heads.interop import gguf_write
from outrider.heads.interop.reading import read_gguf
from outrider.scripts.export import main
from tests.helpers.commands import code_of
from tests.helpers.interop import DEEP, deep_target, random_head, target_gguf


@pytest.fixture(scope="module")
def words(target, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"tokenizer_from={target_gguf(tmp_path_factory.mktemp('target') / 't.gguf', target)}"


def saved(path: Path, target, kind: str = "eagle3", **keys) -> Path:
    save_head(random_head(target, kind, **keys), path / "run/head", target.identity, {"step": 7})
    return path / "run"


def run(prompts: Path, words: str, *args: str, **shape) -> int:
    keys = [f"target.{k}={v}" for k, v in {**DEEP, **shape}.items()]
    keys += [f"prompts={prompts}", "device=cpu", "format=gguf", "max_new_tokens=4", words]
    return code_of(main, "target=tiny", *keys, *args)


KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "q8_0": "q8_0"}


@pytest.mark.parametrize(
    "dtype, norm",
    [
        ("float32", "norm_joined"),
        ("bfloat16", "norm_before_residual"),
        ("float16", ""),
        ("q8_0", ""),
    ],
)
def test_a_head_becomes_one_checked_file(
    target, prompts, words, tmp_path: Path, dtype: str, norm: str
) -> None:
    keys = {norm: True} if norm else {}
    source, out = saved(tmp_path, target, **keys), tmp_path / "out"
    assert run(prompts, words, f"drafter={source}", f"out={out}", f"dtype={dtype}") == 0
    file, head = read_gguf(out / "draft.gguf"), random_head(target, "eagle3")
    assert file.fields["general.architecture"] == "eagle3"
    assert file.fields["eagle3.target_layers"] == [2, 4, 5]
    assert file.fields["eagle3.norm_before_fc"] == (norm == "norm_joined")
    assert file.fields["eagle3.norm_before_residual"] == (norm == "norm_before_residual")
    assert len(file.fields["tokenizer.ggml.tokens"]) == 260
    assert torch.equal(file.tensors["d2t"], head.ids())  # absolute ids, not our offsets
    assert file.types["fc.weight"] == KINDS[dtype] and file.types["output_norm.weight"] == "f32"
    manifest = json.loads((out / "outrider.json").read_text())
    assert set(manifest["files"]) == {"draft.gguf", "README.md", "expected.json"}
    assert manifest["check"]["draft_tokens_equal"] == 6 and manifest["dtype"] == dtype
    card = (out / "README.md").read_text()
    assert "--spec-type draft-eagle3 --spec-draft-n-max 3" in card


@pytest.mark.parametrize("kind, dtype", [("dflash", "bfloat16"), ("dspark", "q8_0")])
def test_a_block_head_becomes_one_checked_file(
    target, prompts, words, tmp_path: Path, kind: str, dtype: str
) -> None:
    """Also where fc has to take the features' divisors."""
    head = random_head(target, kind)
    head.net.scale.uniform_(0.5, 3.0)
    save_head(head, tmp_path / "run/head", target.identity, {"step": 7})
    out = tmp_path / "out"
    assert run(prompts, words, f"drafter={tmp_path / 'run'}", f"out={out}", f"dtype={dtype}") == 0
    file = read_gguf(out / "draft.gguf")
    assert file.fields["general.architecture"] == "dflash"
    assert file.fields["dflash.target_layers"] == list(head.taps)
    assert file.fields["dflash.block_size"] == head.cfg.block
    assert file.fields["dflash.attention.causal"] is False
    assert file.fields["tokenizer.ggml.mask_token_id"] == 259
    assert ("markov_w1.weight" in file.tensors) == (kind == "dspark")
    card = (out / "README.md").read_text()
    assert f"--spec-type draft-{kind} --spec-draft-n-max 3 " in card


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "d2t", "output_norm.weight"])
def test_a_file_that_drafts_otherwise_never_appears(
    target, prompts, words, tmp_path: Path, name: str, monkeypatch, capsys
) -> None:
    whole = gguf_write.write

    def broken(path: Path, model: gguf_write.GgufModel, dtype: str) -> None:
        value = model.tensors[name]
        model.tensors[name] = value.roll(1, 0)
        whole(path, model, dtype)

    monkeypatch.setattr(gguf_write, "write", broken)
    source, out = saved(tmp_path, target), tmp_path / "out"
    assert run(prompts, words, f"drafter={source}", f"out={out}") == 2
    assert "the export" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_scaled_rotary_positions_are_written_as_factors() -> None:
    layer = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    }
    factors = gguf_write.rope_factors(layer)["rope_freqs.weight"]
    assert torch.allclose(factors, torch.full((4,), 4.0))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"arch": "qwen2"}, "target: llama.cpp"),
        ({"vocab": 261}, "tokenizer_from: "),
    ],
)
def test_targets_that_it_cannot_serve(
    prompts, words, tmp_path: Path, change: dict, said: str, capsys
) -> None:
    source, out = saved(tmp_path, deep_target(**change)), tmp_path / "out"
    assert run(prompts, words, f"drafter={source}", f"out={out}", **change) == 2
    assert said in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    "dtype, value",
    [
        ("float16", 1e9),
        ("bfloat16", float("nan")),
        ("bfloat16", 3.4e38),  # float32 has it; in bfloat16 it would be infinite
    ],
)
def test_numbers_that_the_type_cannot_hold(target, tmp_path, dtype: str, value: float) -> None:
    model = gguf_write.head_model(random_head(target, "eagle3"), target, {})
    model.tensors["fc.weight"][0, 0] = value
    with pytest.raises(UserError, match="fc.weight"):
        gguf_write.write(tmp_path / "x.gguf", model, dtype)
    assert not (tmp_path / "x.gguf").exists()


def sound_file(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_tensor("a", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_damaged_files_are_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    whole = sound_file(path)
    assert torch.equal(read_gguf(path).tensors["a"].flatten(), torch.arange(64.0))
    for data in (
        b"",
        b"PK\x03\x04" + whole[4:],
        whole[:4] + struct.pack("<I", 9) + whole[8:],  # version
        whole[:8] + struct.pack("<Q", 1 << 62) + whole[16:],  # number of tensors
        *(whole[:n] for n in range(4, len(whole), 7)),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError) as message:
            read_gguf(path)
        assert "\n" not in str(message.value)
    rng = np.random.default_rng(0)
    for _ in range(300):  # flipped bytes
        data = bytearray(whole)
        data[int(rng.integers(0, len(whole) - 256))] = int(rng.integers(0, 256))
        path.write_bytes(bytes(data))
        try:
            read_gguf(path)
        except UserError as message:
            assert "\n" not in str(message)
