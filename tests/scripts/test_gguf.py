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
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.packages import TARGETS
from outrider.heads.checkpoint import save_head
from outrider.heads.interop import gguf_write
from outrider.heads.interop.reading import read_gguf
from outrider.scripts.export import main
from outrider.scripts.exporting import write
from outrider.scripts.exporting.loaders import gguf as read
from tests.helpers.interop import DEEP, biased_qwen2, deep_target, random_head

FEW = ("max_new_tokens=4",)


@pytest.fixture(scope="module")
def target():
    return deep_target()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text('{"prompt": "a slow horse"}\n{"prompt": "go"}\n')
    return path


def saved(path: Path, target, kind: str = "eagle3", **keys) -> Path:
    save_head(random_head(target, kind, **keys), path / "run/head", target.identity, {"step": 7})
    return path / "run"


def run(prompts: Path, *args: str, **shape) -> int:
    keys = [f"target.{k}={v}" for k, v in {**DEEP, **shape}.items()]
    with pytest.raises(SystemExit) as stop:
        main(["target=tiny", *keys, f"prompts={prompts}", "device=cpu", "format=gguf", *FEW, *args])
    return int(stop.value.code or 0)


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
    target, prompts, tmp_path: Path, dtype: str, norm: str
) -> None:
    keys = {norm: True} if norm else {}
    source, out = saved(tmp_path, target, **keys), tmp_path / "out"
    assert run(prompts, f"drafter={source}", f"out={out}", f"dtype={dtype}") == 0
    file, head = read_gguf(out / "draft.gguf"), random_head(target, "eagle3")
    assert file.fields["general.architecture"] == "eagle3"
    assert file.fields["eagle3.target_layers"] == [2, 4, 5]
    assert file.fields["eagle3.norm_before_fc"] == (norm == "norm_joined")
    assert file.fields["eagle3.norm_before_residual"] == (norm == "norm_before_residual")
    assert len(file.fields["tokenizer.ggml.tokens"]) == target.vocab_size
    assert torch.equal(file.tensors["d2t"], head.ids())  # absolute ids, not our offsets
    assert file.types["fc.weight"] == KINDS[dtype] and file.types["output_norm.weight"] == "f32"
    manifest = json.loads((out / "outrider.json").read_text())
    assert set(manifest["files"]) == {"draft.gguf", "README.md", "expected.json"}
    assert manifest["check"]["draft_tokens_equal"] == 6 and manifest["dtype"] == dtype
    card = (out / "README.md").read_text()
    assert "--spec-type draft-eagle3 --spec-draft-n-max 3" in card
    assert "is the target's own file" in card


@pytest.mark.parametrize("kind", ["medusa", "eagle1"])
def test_heads_that_it_cannot_run_are_refused_in_one_line(
    target, prompts, tmp_path: Path, kind: str, capsys
) -> None:
    source, out = saved(tmp_path, target, kind), tmp_path / "out"
    assert run(prompts, f"drafter={source}", f"out={out}") == 2
    error = capsys.readouterr().err.strip()
    assert "format=gguf" in error and "\n" not in error and not out.exists()


@pytest.mark.parametrize("kind, dtype", [("dflash", "bfloat16"), ("dspark", "q8_0")])
def test_a_block_head_becomes_one_checked_file(
    target, prompts, tmp_path: Path, kind: str, dtype: str
) -> None:
    """Also where fc has to take the features' divisors."""
    head = random_head(target, kind)
    head.net.scale.uniform_(0.5, 3.0)
    save_head(head, tmp_path / "run/head", target.identity, {"step": 7})
    out = tmp_path / "out"
    assert run(prompts, f"drafter={tmp_path / 'run'}", f"out={out}", f"dtype={dtype}") == 0
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
    target, prompts, tmp_path: Path, name: str, monkeypatch, capsys
) -> None:
    whole = gguf_write.write

    def broken(path: Path, model: gguf_write.GgufModel, dtype: str) -> None:
        value = model.tensors[name]
        model.tensors[name] = value.roll(1, 0)
        whole(path, model, dtype)

    monkeypatch.setattr(gguf_write, "write", broken)
    source, out = saved(tmp_path, target), tmp_path / "out"
    assert run(prompts, f"drafter={source}", f"out={out}") == 2
    assert "the export" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize("dtype", ["float32", "q8_0"])
def test_the_target_itself(target, prompts, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "out"
    assert run(prompts, "drafter=none", f"out={out}", f"dtype={dtype}") == 0
    served = read(out / "target.gguf", torch.zeros(0))
    ids = torch.tensor([5, 77, 200, 31])
    (theirs,) = served.logits(ids, lambda _: ids, ids)
    mine = target.model(ids[None]).logits[0, -1]
    assert float((mine - theirs).abs().max()) < (1e-4 if dtype == "float32" else 0.3)
    manifest = json.loads((out / "outrider.json").read_text())
    assert manifest["kind"] == "target" and manifest["dtype"] == dtype
    assert (manifest["check"]["rounded_share"] == 0) == (dtype == "float32")


def test_a_bfloat16_target_is_in_its_file_bit_for_bit(
    target, prompts, tmp_path: Path, capsys
) -> None:
    """Read back by the format's package: every number of a matrix the bits of the target's,
    norms in float32. float16 rounds the small ones, and says so."""
    folder = tmp_path / "model"
    model = deep_target().model.bfloat16()
    model.model.embed_tokens.weight.data[7, :4] = torch.tensor([1e-7, -3e-39, 0.0, 7e4]).bfloat16()
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    keys = ("target=local", f"target.path={folder}", f"prompts={prompts}", "device=cpu")
    given = (*keys, "format=gguf", "drafter=none")

    def export(out: Path, dtype: str) -> int:
        with pytest.raises(SystemExit) as stop:
            main([*given, f"out={out}", f"dtype={dtype}"])
        return int(stop.value.code or 0)

    assert export(tmp_path / "b", "bfloat16") == 0
    read = {t.name: t for t in gguf.GGUFReader(tmp_path / "b/target.gguf").tensors}
    state = model.state_dict()
    stored = {"token_embd": "model.embed_tokens", "blk.3.ffn_down": "model.layers.3.mlp.down_proj"}
    for name, ours in stored.items():
        bits = np.array(read[f"{name}.weight"].data).view(np.int16)
        assert np.array_equal(bits, state[f"{ours}.weight"].view(torch.int16).numpy())
    assert {t.tensor_type.name for t in read.values() if len(t.shape) > 1} == {"BF16"}
    assert {t.tensor_type.name for t in read.values() if len(t.shape) == 1} == {"F32"}
    assert "bit for bit" in (tmp_path / "b/README.md").read_text()
    fields = gguf.GGUFReader(tmp_path / "b/target.gguf").fields
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_BF16
    assert export(tmp_path / "f", "float16") == 2  # 7e4
    assert "float16 cannot hold 7" in capsys.readouterr().err


def test_a_model_folder_as_separate_draft(target, prompts, tmp_path: Path) -> None:
    draft = load_target(TargetConfig(kind="tiny", **{**DEEP, "layers": 2}), "float32", "cpu")
    draft.model.save_pretrained(tmp_path / "small")
    draft.tokenizer.save_pretrained(tmp_path / "small")
    out = tmp_path / "out"
    assert run(prompts, f"drafter={tmp_path / 'small'}", f"out={out}") == 0
    assert read_gguf(out / "draft.gguf").fields["llama.block_count"] == 2


def test_a_qwen2_target_and_a_head_on_it(tmp_path: Path) -> None:
    """As a llama with biases, whose rows lie as its weights' do."""
    target, some, dtype = biased_qwen2(), [torch.tensor([5, 77, 200, 31])], "bfloat16"
    write.write_model(tmp_path / "target.gguf", target.model, target, some, dtype)
    file = read_gguf(tmp_path / "target.gguf")
    layer = target.model.model.layers[3].self_attn
    assert file.fields["general.architecture"] == "llama"
    assert torch.equal(file.tensors["blk.3.attn_v.bias"], layer.v_proj.bias)
    keys = file.tensors["blk.3.attn_k.bias"]
    assert torch.equal(keys[:8], layer.k_proj.bias[[0, 4, 1, 5, 2, 6, 3, 7]])
    assert keys.abs().min() > 0
    write.write_head(tmp_path, "gguf", random_head(target, "eagle3"), target, "", some, dtype)
    assert "blk.0.attn_q.bias" not in read_gguf(tmp_path / "draft.gguf").tensors


def test_the_card_names_a_target_file_that_serves_the_head(prompts, tmp_path: Path) -> None:
    """On llama.cpp's own `qwen2` its server ends at the head's first token."""
    source, out = saved(tmp_path, deep_target(arch="qwen2")), tmp_path / "out"
    assert run(prompts, f"drafter={source}", f"out={out}", arch="qwen2") == 0
    assert "must be written as a `llama`" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"use_sliding_window": True}, "target: use_sliding_window is true"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type: yarn"),
        ({"hidden_act": "gelu"}, "target: hidden_act is gelu"),
    ],
)
def test_a_qwen2_that_llama_cpp_would_read_otherwise(change: dict, said: str) -> None:
    model = biased_qwen2().model
    for key, value in change.items():
        setattr(model.config, key, value)
    with pytest.raises(UserError, match=f"^format=gguf: {said}"):
        gguf_write.whole_model(model, 260, {})


def test_qwens_tokenizer_has_its_name_in_llama_cpp() -> None:
    steps = TARGETS["qwen25_coder"].tokenizer["steps"]
    assert gguf_write.split_name(steps) == "qwen2"
    other = json.loads(json.dumps(steps))
    other["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += "x"
    assert gguf_write.split_name(other) is None


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
    layer["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(UserError, match="rope_type: yarn"):
        gguf_write.rope_factors(layer)


def test_the_tokenizer_of_a_gguf_file(target, prompts, tmp_path: Path, capsys) -> None:
    first, out = tmp_path / "target", tmp_path / "out"
    assert run(prompts, "drafter=none", f"out={first}") == 0
    copied = f"tokenizer_from={first / 'target.gguf'}"
    source = saved(tmp_path, target)
    assert run(prompts, f"drafter={source}", f"out={out}", copied) == 0
    mine, theirs = (read_gguf(p).fields for p in (out / "draft.gguf", first / "target.gguf"))
    words = {k for k in theirs if k.startswith("tokenizer.")}
    assert words and all(mine[k] == theirs[k] for k in words)
    small = tmp_path / "small"
    assert run(prompts, "drafter=none", f"out={small}", vocab=261) == 0
    other = f"tokenizer_from={small / 'target.gguf'}"
    assert run(prompts, f"drafter={source}", f"out={tmp_path / 'no'}", other) == 2
    assert "holds 261 tokens, the target 260" in capsys.readouterr().err


@pytest.mark.parametrize(
    "dtype, value",
    [
        ("float16", 1e9),
        ("bfloat16", float("nan")),
        ("bfloat16", 3.4e38),  # float32 has it; in bfloat16 it would be infinite
    ],
)
def test_numbers_that_the_type_cannot_hold(target, tmp_path, dtype: str, value: float) -> None:
    words = gguf_write.tokenizer_keys(target, None)
    model = gguf_write.head_model(random_head(target, "eagle3"), target, words)
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
