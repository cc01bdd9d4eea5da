"""scripts/import_head.py: published layouts from their documented shapes, broken files named,
wrong conventions found."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.conf.errors import UserError
from outrider.heads.checkpoint import load_head
from outrider.heads.interop import read_folder, read_head
from outrider.heads.names import DraftSpec
from outrider.scripts.exporting import probe as acceptance_probe
from outrider.scripts.exporting.probe import Convention
from outrider.scripts.import_head import main
from tests.helpers.commands import code_of
from tests.helpers.interop import DEEP, change, folder, random_head


def read(path: Path, target):
    return read_head(read_folder(path), target)[0]


def run(*args: str) -> int:
    shape = (f"target.{k}={v}" for k, v in DEEP.items())
    return code_of(main, "target=tiny", *shape, "device=cpu", *args)


# -- published layouts, built from their documented names and shapes

D, V, A, G, INNER, VD = 32, 260, 32, 16, 64, 40
LLAMA = {
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
    "max_position_embeddings": 1024,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "model_type": "llama",
}


def weights(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {k: torch.randn(s, generator=generator).mul_(0.1).to(dtype) for k, s in shapes.items()}


def body(prefix: str, wide: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (A, wide),
        f"{prefix}self_attn.k_proj.weight": (G, wide),
        f"{prefix}self_attn.v_proj.weight": (G, wide),
        f"{prefix}self_attn.o_proj.weight": (D, A),
        f"{prefix}mlp.gate_proj.weight": (INNER, D),
        f"{prefix}mlp.up_proj.weight": (INNER, D),
        f"{prefix}mlp.down_proj.weight": (D, INNER),
        f"{prefix}post_attention_layernorm.weight": (D,),
    }


def published(path: Path, name: str) -> Path:
    """Folders as FasterDecoding, SafeAILab and the speculators package publish them."""
    path.mkdir()
    config: dict = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    if name == "medusa":  # a pickle, heads as a list
        shapes: dict = {f"{k}.0.linear.weight": (D, D) for k in range(3)}
        shapes |= {f"{k}.0.linear.bias": (D,) for k in range(3)}
        shapes |= {f"{k}.1.weight": (V, D) for k in range(3)}
        config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
        torch.save(weights(shapes, torch.float16), path / "medusa_lm_head.pt")
    elif name == "eagle1":  # fc with a bias
        shapes = {"fc.weight": (D, 2 * D), "fc.bias": (D,), **body("layers.0.", D)}
        config["bias"] = True
        torch.save(weights(shapes, torch.float16), path / "pytorch_model.bin")
    else:
        prefix = "midlayer." if name == "eagle3" else "layers.0."
        shapes = {
            "fc.weight": (D, 3 * D),
            f"{prefix}hidden_norm.weight": (D,),
            f"{prefix}input_layernorm.weight": (D,),
            "norm.weight": (D,),
            "lm_head.weight": (VD, D),
            **body(prefix, 2 * D),
        }
        ids = torch.arange(0, 6 * VD, 6) + torch.arange(VD) % 3
        ids[:3] = torch.arange(3)
        t2d = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
        tensors = weights(shapes, torch.bfloat16) | {"d2t": ids - torch.arange(VD), "t2d": t2d}
        config["draft_vocab_size"] = VD
        if name == "eagle3":
            torch.save(tensors, path / "pytorch_model.bin")
        else:
            config = {
                "speculators_model_type": "eagle3",
                "draft_vocab_size": VD,
                "transformer_layer_config": LLAMA,
                "norm_before_residual": True,
                "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
            }
            save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("mapped", [True, False])
def test_an_lm_head_that_is_left_out_is_the_targets(
    target, tmp_path: Path, mapped: bool, capsys
) -> None:
    path = published(tmp_path / "in", "speculators")

    def thinner(tensors: dict) -> None:
        for name in ("lm_head.weight", *(() if mapped else ("d2t", "t2d"))):
            del tensors[name]

    change(path, thinner, lambda c: c.update(draft_vocab_size=VD if mapped else V))
    head = read(path, target)
    assert head.net.lm_head.weight.equal(target.lm_head_weight[head.ids() if mapped else ...])
    assert "holds no LM head; the target's rows are taken" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["medusa", "eagle1", "eagle3", "speculators"])
def test_published_layouts_import_and_load(target, tmp_path: Path, name: str) -> None:
    source, out = published(tmp_path / "in", name), tmp_path / "out"
    assert run(f"from={source}", f"out={out}", "probe=false") == 0
    head = load_head(out, target)
    kind = "eagle3" if name == "speculators" else name
    assert head.kind == kind and head.drafter(target, DraftSpec(shape="chain")).max_depth >= 3
    card = json.loads((out / "head.json").read_text())
    assert card["target"] == target.identity.to_json()
    assert card["extra"]["imported"]["dtype"] == {"medusa": "float16", "eagle1": "float16"}.get(
        name, "bfloat16"
    )
    if name == "eagle1":
        assert head.cfg.fc_bias and bool(
            head.net.fc.bias.any()
        )  # kept: ours can run it, vLLM could not
    if name == "speculators":
        assert head.cfg.norm_before_residual and head.cfg.depth == 4
    if kind == "eagle3":
        assert head.taps == (2, 4, 5) and head.ids().numel() == VD


def test_automodel_leaves_the_target_s_number_of_layers(target, tmp_path: Path) -> None:
    source = published(tmp_path / "in", "eagle3")
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": 8, "architectures": ["LlamaEagle3DraftModel"]}
    (source / "config.json").write_text(json.dumps(config))
    assert run(f"from={source}", f"out={tmp_path / 'out'}", "probe=false") == 0
    assert len(load_head(tmp_path / "out", target).net.layers) == 1
    config["parallel_drafting"] = True
    (source / "config.json").write_text(json.dumps(config))
    assert run(f"from={source}", f"out={tmp_path / 'two'}", "probe=false") == 2


# -- what the file itself shows


def drop(name: str):
    return lambda t: t.pop(name)


def put(name: str, make):
    return lambda t: t.update({name: make(t.get(name))})


Q, MAP = "layers.0.self_attn.q_proj", {"eagle_aux_hidden_state_layer_ids": [2, 4]}
# kind, edit of the tensors, keys of config.json, what the error names
BROKEN = [
    ("medusa", drop("1.0.linear.bias"), {}, r"1\.0\.linear\.bias: missing"),
    ("medusa", put("0.1.weight", lambda w: w.T), {}, r"0\.1\.weight: .*transposed"),
    ("medusa", put("0.0.linear.weight", torch.Tensor.long), {}, r"0\.0\.linear.*int64"),
    ("medusa", None, {"medusa_num_heads": 5}, "5 heads"),
    ("eagle1", drop("fc.weight"), {}, "no known head"),
    ("eagle1", None, {"bias": False}, r"fc\.bias: "),
    ("eagle1", put(f"{Q}.bias", lambda _: torch.zeros(A)), {}, r"q_proj\.bias: unknown"),
    ("eagle1", None, {"hidden_size": 48}, "hidden_size: 48"),
    ("eagle1", None, {"num_attention_heads": 8, "head_dim": 8}, r"q_proj\.weight: its shape"),
    ("eagle1", None, {"hidden_size": 10**18}, "hidden_size is 1000000000000000000"),
    ("eagle3", drop("midlayer.hidden_norm.weight"), {}, r"hidden_norm\.weight: missing"),
    ("eagle3", put("norm.weight", lambda w: w * float("nan")), {}, r"norm\.weight: .*NaN"),
    ("eagle3", put("d2t", lambda w: w + torch.arange(VD)), {}, "d2t: .*absolute token ids"),
    ("eagle3", put("d2t", torch.Tensor.int), {}, "d2t: its dtype is int32"),
    ("eagle3", put("d2t", lambda w: w.flip(0)), {}, "d2t: "),
    ("eagle3", put("t2d", lambda w: ~w), {}, "t2d: "),
    ("eagle3", None, {"draft_vocab_size": 99}, "draft_vocab_size: 99"),
    ("eagle3", None, {next(iter(MAP)): [2, 4, 9]}, "expected ascending numbers"),
    ("eagle3", None, MAP, r"fc\.weight: its shape is \[32, 96\]"),
    ("eagle3", None, {"fc_norm": True}, r"fc_norm\.0\.weight: missing"),
    ("eagle3", None, {"attention_bias": True}, "attention_bias"),
    ("eagle3", None, {"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ("speculators", put("embed_tokens.weight", lambda _: torch.zeros(V, D)), {}, "embed_tokens"),
]


@pytest.mark.parametrize("name, edit, settings, said", BROKEN)
def test_every_broken_file_is_refused_by_name(
    target, tmp_path: Path, name: str, edit, settings, said: str
) -> None:
    path = published(tmp_path / "in", name)
    for pickled in [p for p in path.iterdir() if p.suffix in (".bin", ".pt")]:
        tensors = torch.load(pickled, weights_only=True)  # as what the edit helper reads
        save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
        pickled.unlink()
    read(path, target)  # sound before
    change(path, edit, lambda c: c.update(settings))
    with pytest.raises(UserError, match=said):
        read(path, target)


def test_absolute_ids_are_seen_without_t2d(target, tmp_path: Path) -> None:
    path = published(tmp_path / "in", "speculators")
    change(path, lambda t: (t.pop("t2d"), t.update(d2t=torch.arange(0, 2 * VD, 2))))
    with pytest.raises(UserError, match="d2t: .*absolute token ids"):
        read(path, target)


def test_native_medusa_biases_need_their_flag(target, tmp_path: Path) -> None:
    path = folder(tmp_path / "in", target, random_head(target, "medusa"), "vllm")
    change(path, None, lambda c: c.pop("medusa_fc_bias"))
    with pytest.raises(UserError, match="medusa_fc_bias"):
        read(path, target)


INDEX = "model.safetensors.index.json"
FILE, SHARD = "model.safetensors", "model-00001-of-00002.safetensors"
MISSING = {"weight_map": {"a": SHARD, "b": "model-00002-of-00002.safetensors"}}


@pytest.mark.parametrize(
    "renamed, written, said",
    [
        (f"{FILE}.incomplete", {}, "half-written"),
        (SHARD, {INDEX: json.dumps(MISSING)}, "model-00002-of-00002.safetensors is missing"),
        ("../outside", {INDEX: '{"weight_map": {"a": "../outside"}}'}, "outside the folder"),
        (FILE, {FILE: "cut"}, "model.safetensors: cannot be read"),
        (FILE, {"config.json": '{"speculators_model'}, "config.json: no readable JSON"),
    ],
)
def test_half_written_and_hostile_folders_are_named(
    target, tmp_path: Path, renamed: str, written: dict[str, str], said: str
) -> None:
    path = published(tmp_path / "in", "speculators")
    (path / FILE).rename(path / renamed)
    for name, text in written.items():
        (path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        read(path, target)
    with pytest.raises(UserError, match="is no folder"):
        read(tmp_path / "none", target)


def test_a_pickle_that_would_run_code_does_not(target, tmp_path: Path) -> None:
    path, mark = published(tmp_path / "in", "medusa"), tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {mark}",)

    torch.save({"0.0.linear.weight": Bomb()}, path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="would call .*system"):
        read(path, target)
    assert not mark.exists()


# -- the command


def test_the_command_writes_a_head_or_nothing(target, tmp_path: Path, capsys) -> None:
    source, out = published(tmp_path / "in", "eagle3"), tmp_path / "out"
    assert run(f"from={source}", f"out={out}", "probe=false") == 0
    assert (
        run(f"from={source}", f"out={out}", "probe=false") == 2
        and "overwrite=true" in capsys.readouterr().err
    )
    assert run(f"from={source}", f"out={out}", "probe=false", "overwrite=true") == 0
    assert run(f"from={source}", f"out={source}", "probe=false", "overwrite=true") == 2
    assert run("--help") == 0 and re.search(r"^  from  ", capsys.readouterr().out, re.M)


def test_an_export_for_another_target_is_refused(target, tmp_path: Path, capsys) -> None:
    path = folder(tmp_path / "in", target, random_head(target, "eagle3"), "vllm")
    other = {**target.identity.to_json(), "weights_sha256": "0" * 64}
    (path / "outrider.json").write_text(
        json.dumps({"engine_format": "vllm", "files": {}, "target": other})
    )
    assert run(f"from={path}", f"out={tmp_path / 'out'}", "probe=false") == 2
    assert "exported for another target (weights_sha256" in capsys.readouterr().err


# -- what only behaviour shows; heads that draft well come from tests.helpers.interop.taught


def test_conventions_that_only_behaviour_shows_are_named(target) -> None:
    """Each convention of a random head read as written accepts what its twin accepts when read
    back.
    """
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 259, (6,), generator=generator).tolist() for _ in range(3)]
    batch = acceptance_probe.answers(target, prompts, 8)
    head = random_head(target, "eagle3")
    base = acceptance_probe.accepted(head, batch, target)[1]
    undo = {"taps_plus_1": "taps_minus_1", "taps_minus_1": "taps_plus_1"}
    names = {*undo, "norm_output", "norm_before_residual"}
    found = acceptance_probe.probe(head, batch, target)
    assert found[0].logp == float(base.mean()) and {one.name for one in found[1:]} == names
    for name in names:
        twin = acceptance_probe.read_as(head, name)
        back = acceptance_probe.read_as(twin, undo.get(name, name))
        assert acceptance_probe.accepted(back, batch, target)[1].equal(base), name
        assert not acceptance_probe.accepted(twin, batch, target)[1].equal(base), name


def test_the_probe_takes_another_convention_only_when_it_is_clearly_better() -> None:
    fitting, written = acceptance_probe.fitting, Convention("as_written", "", 0.40, -9.0)
    unsure = [Convention("a", "", 0.43, -8.9, 2.0), Convention("b", "", 0.39, -8.0, 9.0)]
    assert fitting([written, *unsure]) is written
    clear = Convention("c", "", 0.60, -7.0, 8.0)
    assert fitting([written, Convention("a", "", 0.50, -8.0, 5.0), clear]) is clear
    # it drafts under none: what seems better is noise
    hopeless = Convention("as_written", "", 0.014, -12.785)
    assert fitting([hopeless, Convention("a", "", 0.014, -12.774, 9.0)]) is hopeless
