"""Heads in other programs' formats: round trips, the independent reader, and what is
refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.conf.errors import UserError
from outrider.heads.interop import LAYOUTS, Facts, detect, find_layout, read_folder
from outrider.scripts.exporting.card import About
from outrider.scripts.exporting.self_check import check_export
from tests.helpers.engine_schemas import SCHEMAS, violations
from tests.helpers.interop import PAIRS, change, deep_target, folder, random_head


@pytest.fixture(scope="module")
def target():
    return deep_target()


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 259, (n,), generator=generator) for n in (4, 9)]


def keys(format: str, kind: str) -> dict:
    """Variants that the format can carry, so that their flags are exercised too."""
    if kind == "eagle3" and format in ("vllm", "sglang", "speculators"):
        return {"norm_before_fc": True, "norm_output": True, "taps": [1, 3, 6]}
    if kind in ("dflash", "dspark") and format == "sglang":
        return {"share_lm_head": True, "draft_vocab": 0}
    return {"draft_vocab": 64} if kind == "medusa" else {}


@pytest.mark.parametrize("format, kind", PAIRS)
def test_export_import_export_gives_the_same_bytes(
    target, tmp_path: Path, format: str, kind: str
) -> None:
    head = random_head(target, kind, **keys(format, kind))
    first = folder(tmp_path / "a", target, head, format)
    foreign = read_folder(first)
    again = detect(foreign, format).read(foreign, target)
    second = folder(tmp_path / "b", target, again, format)
    file = LAYOUTS[format, kind].file
    assert (first / file).read_bytes() == (second / file).read_bytes()
    assert json.loads((first / "config.json").read_text()) == json.loads(
        (second / "config.json").read_text()
    )
    for name, tensor in again.state_dict().items():
        assert tensor.equal(head.state_dict()[name]), name


@pytest.mark.parametrize("format, kind", PAIRS)
def test_the_independent_reader_drafts_what_the_head_drafts(
    target, prompts, tmp_path: Path, format: str, kind: str
) -> None:
    head = random_head(target, kind, **keys(format, kind))
    path = folder(tmp_path / "a", target, head, format)
    found = check_export(path, format, head, target, prompts, torch.float32)
    assert found.tokens == 3 * len(prompts) and found.error < 1e-4 * found.largest


@pytest.mark.parametrize(
    "extra", [{"norm_joined": True}, {"norm_before_residual": True}, {"norm_output": True}, {}]
)
def test_every_norm_of_published_heads_reads_the_same(
    target, prompts, tmp_path: Path, extra: dict
) -> None:
    for format in ("vllm", "speculators"):
        head = random_head(target, "eagle3", **extra)
        path = folder(tmp_path / format, target, head, format)
        assert check_export(path, format, head, target, prompts, torch.float32).tokens == 6


def test_a_window_does_not_choose_how_much_an_engine_drafts(target, tmp_path: Path) -> None:
    head = random_head(target, "eagle3", sliding_window=40, steps=6, depth=4)
    about = About("vllm", head, {}, Facts.of(target, ""), None, tmp_path, {})
    assert about.depth == 6 and head.deepest == 39


@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_a_window_is_written_read_and_served(target, prompts, tmp_path: Path, format: str) -> None:
    """vLLM's Llama layers take it where layer_types says so; the reader that knows the format
    alone drafts the same, and one that misses the window is caught."""
    head = random_head(target, "eagle3", sliding_window=6)
    path = folder(tmp_path / "a", target, head, format)
    found = check_export(path, format, head, target, prompts, torch.float32)
    assert found.tokens == 3 * len(prompts) and found.error < 1e-4 * found.largest
    again = detect(read_folder(path), "auto").read(read_folder(path), target)
    assert again.cfg.sliding_window == 6

    def inner(settings: dict) -> dict:
        return settings.get("transformer_layer_config", settings)

    for value, said in ((0, "whole number above 0"), (4, "leaves a draft of 5 steps nothing")):
        change(path, settings=lambda c, v=value: inner(c).update(sliding_window=v))
        with pytest.raises(UserError, match=f"sliding_window.*{said}"):
            detect(read_folder(path), "auto").read(read_folder(path), target)
    odd = ["sliding_attention", ["full_attention"]]
    change(path, settings=lambda c: inner(c).update(layer_types=odd))
    with pytest.raises(UserError, match="some layers slide and some do not"):
        detect(read_folder(path), "auto").read(read_folder(path), target)
    change(path, settings=lambda c: inner(c).update(layer_types=["full_attention"]))
    assert detect(read_folder(path), "auto").read(read_folder(path), target).cfg == (
        replace(again.cfg, sliding_window=None)
    )
    with pytest.raises(UserError, match="logits differ"):
        check_export(path, format, head, target, prompts, torch.float32)
    change(
        path,
        settings=lambda c: inner(c).update(layer_types=["full_attention", "sliding_attention"]),
    )
    with pytest.raises(UserError, match="some layers slide"):
        detect(read_folder(path), "auto").read(read_folder(path), target)


def test_half_precision_is_compared_with_the_rounded_head(target, prompts, tmp_path: Path) -> None:
    head = random_head(target, "eagle3")
    layout = find_layout("vllm", head)
    settings, tensors = layout.write(head, target, Facts.of(target, ""), torch.bfloat16)
    assert settings["torch_dtype"] == "bfloat16" and tensors["fc.weight"].dtype == torch.bfloat16
    path = folder(tmp_path / "a", target, head, "vllm")
    change(path, lambda t: t.update(tensors))
    assert check_export(path, "vllm", head, target, prompts, torch.bfloat16).error < 1e-3
    with pytest.raises(UserError, match="logits differ"):
        check_export(path, "vllm", head, target, prompts, torch.float32)


SIZES = {"D": 32, "V": 260, "A": 32, "G": 16, "I": 64, "F": 3, "N": 64}
SIZES |= {"S": 8, "R": 4, "C": 36, "1": 1}
SHARED = {"share_lm_head": True, "draft_vocab": 0, "taps": [2, 4, 6]}


@pytest.mark.parametrize(
    "schema, format, kind, extra",
    [
        ("sglang eagle1", "sglang", "eagle1", {}),
        ("sglang eagle3", "sglang", "eagle3", {"norm_before_fc": True}),
        ("sglang eagle3", "sglang", "eagle3", {"norm_joined": True}),
        ("sglang dflash", "sglang", "dflash", SHARED),
        ("sglang dspark", "sglang", "dspark", SHARED),
        ("tensorrt eagle3", "eagle", "eagle3", {}),
        ("tensorrt medusa", "medusa", "medusa", {"draft_vocab": 64}),
    ],
)
def test_exports_meet_the_schemas_of_engines_that_do_not_run_here(
    target, tmp_path: Path, schema: str, format: str, kind: str, extra: dict
) -> None:
    path = folder(tmp_path / "a", target, random_head(target, kind, **extra), format)
    config, tensors = json.loads((path / "config.json").read_text()), read_folder(path).tensors
    assert violations(SCHEMAS[schema], config, tensors, SIZES, heads=3) == []
    name = next(
        n for n in tensors if n.endswith("weight") and "fc_norm" not in n and "input_norm" not in n
    )
    rest = {n: t for n, t in tensors.items() if n != name}
    assert violations(SCHEMAS[schema], config, rest, SIZES, heads=3) == [f"{name} is missing"]
    assert (
        violations(SCHEMAS[schema], config, {**rest, name: tensors[name][1:]}, SIZES, heads=3) != []
    )


def test_custom_layers_are_written_for_both_engines(target, tmp_path: Path) -> None:
    """vLLM reads the list on top as hidden_states[k]; SGLang reads the nested one and adds
    1."""
    path = folder(tmp_path / "a", target, random_head(target, "eagle3", taps=[1, 3, 6]), "vllm")
    config = json.loads((path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    plain = folder(tmp_path / "b", target, random_head(target, "eagle3"), "vllm")
    assert "layer_ids" not in (plain / "config.json").read_text()


def test_the_widened_vocabulary_never_changes_the_best_token(target, tmp_path: Path) -> None:
    head = random_head(target, "medusa", draft_vocab=64)
    path = folder(tmp_path / "a", target, head, "vllm")
    x = torch.randn(200, 32)
    for k in range(3):
        wide = x @ read_folder(path).tensors[f"lm_heads.{k}.weight"].T
        assert wide.argmax(-1).equal(head.ids()[(x @ head.proj[k].T).argmax(-1)])


# --- block heads and masks

MASKED = {"parallel": True, "steps": 3, "mask_token": 259}


@pytest.mark.parametrize(
    "format, kind, extra",
    [
        ("vllm", "eagle3", MASKED),
        ("speculators", "eagle3", {**MASKED, "norm_before_fc": True}),
        ("vllm", "dflash", {"depth": 3, "block": 6}),
        ("vllm", "dflash", {"layers": 1, "key_norm": True}),
        ("vllm", "dflash", {"share_lm_head": True}),
        ("speculators", "dflash", {"share_lm_head": True, "draft_vocab": 0}),
        ("speculators", "dspark", {"confidence": 0.0}),
        ("deepspec", "dspark", {"draft_vocab": 0}),
    ],
)
def test_variants_go_round_and_draft_alike(
    target, prompts, tmp_path: Path, format: str, kind: str, extra: dict
) -> None:
    head = random_head(target, kind, **extra)
    path = folder(tmp_path / "a", target, head, format)
    found = check_export(path, format, head, target, prompts, torch.float32)
    assert found.tokens == 3 * len(prompts)
    again = detect(read_folder(path), "auto").read(read_folder(path), target)
    second = folder(tmp_path / "b", target, again, format)
    assert json.loads((path / "config.json").read_text()) == json.loads(
        (second / "config.json").read_text()
    )
    assert check_export(second, format, head, target, prompts, torch.float32).tokens == found.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divisors_of_the_features_are_folded(target, prompts, tmp_path: Path, dtype) -> None:
    head = random_head(target, "dflash")
    head.net.scale.uniform_(0.2, 5.0)
    path = tmp_path / "a"
    path.mkdir()
    layout = LAYOUTS["vllm", "dflash"]
    settings, tensors = layout.write(head, target, Facts.of(target, "/a/target"), dtype)
    (path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, path / layout.file)
    assert check_export(path, "vllm", head, target, prompts, dtype).tokens >= 4


def test_that_rows_see_each_other_is_written_everywhere(target, tmp_path) -> None:
    """An engine's own default must never decide."""
    head = random_head(target, "dflash")
    native = json.loads((folder(tmp_path / "a", target, head, "vllm") / "config.json").read_text())
    assert native["is_causal"] is native["dflash_config"]["causal"] is False
    assert native["layer_types"] == ["full_attention"] * 2
    other = folder(tmp_path / "b", target, head, "speculators") / "config.json"
    assert json.loads(other.read_text())["sliding_window_non_causal"] is True


def test_a_file_served_causally_is_caught(target, prompts, tmp_path: Path) -> None:
    """What engines do where the key is left out: the drafts are others."""
    head = random_head(target, "dflash")
    path = folder(tmp_path / "a", target, head, "speculators")
    change(path, settings=lambda c: c.pop("sliding_window_non_causal"))
    with pytest.raises(UserError, match="the export"):
        check_export(path, "speculators", head, target, prompts, torch.float32)


@pytest.mark.parametrize(
    "format, kind, extra, said",
    [
        ("vllm", "dflash", {"mask_token": -1}, r"head\.mask_token: -1; engines take the mask's"),
        ("vllm", "dflash", {"key_norm": True}, r"head\.key_norm: 2 layers, of whose norms"),
        ("vllm", "dflash", {"markov_rank": 4}, r"head\.markov_rank: DFlash has no such part"),
        ("speculators", "dflash", {"confidence": 1.0}, r"head\.confidence: DFlash has no such"),
        ("deepspec", "dspark", {"markov_rank": 0}, r"head\.markov_rank: 0, and engines want one"),
        ("vllm", "dflash", {"taps": [0, 3]}, r"head\.taps: 0, the embeddings"),
        ("vllm", "dspark", {}, r"no layout for dspark heads; .*=deepspec or sglang or speculators"),
        (
            "sglang",
            "dflash",
            {},
            r"head\.share_lm_head: SGLang .*=true head\.draft_vocab=0, or.*=vllm",
        ),
        ("sglang", "dspark", {"share_lm_head": True}, r"head\.share_lm_head: .*or .*=speculators"),
        ("sglang", "eagle3", MASKED, r"head\.parallel: SGLang 0\.5\.23 drafts with no masks"),
        ("vllm", "eagle3", {**MASKED, "mask_token": -1}, r"head\.mask_token: -1; engines take"),
        ("sglang", "eagle3", {"sliding_window": 9}, r"sliding_window: 9; SGLang .*=vllm or specul"),
        ("eagle", "eagle3", {"sliding_window": 9}, r"sliding_window: 9; the original EAGLE code"),
        ("vllm", "eagle1", {"sliding_window": 9}, r"sliding_window: 9; vLLM .*_window=null"),
    ],
)
def test_what_engines_cannot_have_is_named(target, format, kind, extra, said: str) -> None:
    head = random_head(target, kind, **extra)
    with pytest.raises(UserError, match=said):
        find_layout(format, head).write(head, target, Facts.of(target, "/a/t"), torch.float32)


WRONG = {
    "sliding_window_non_causal": ("speculators", "dflash", None, "causally or not"),
    "is_causal": ("vllm", "dflash", True, "rows that see each other are read"),
    "sample_from_anchor": ("speculators", "dspark", False, "dspark heads are read with true"),
    "aux_hidden_state_layer_ids": ("speculators", "dflash", [2, 8], "expected ascending numbers"),
    "mask_token_id": ("speculators", "dflash", 10**6, "expected a token of the target's"),
    "block_size": ("deepspec", "dspark", 1, "block: 1 is below 2"),
    "markov_head_type": ("deepspec", "dspark", "gated", "vanilla is read"),
    "target_layer_ids": ("deepspec", "dspark", "all", "expected a list of whole numbers"),
    "layer_types": ("deepspec", "dspark", ["sliding_attention"] * 2, "full attention are read"),
    "hidden_size": ("deepspec", "dspark", 64, "hidden_size: 64; the target's is 32"),
    "pard_token": ("vllm", "eagle3", None, "expected a token of the target's vocabulary"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_config_that_means_something_else_is_refused(target, tmp_path: Path, key: str) -> None:
    format, kind, value, said = WRONG[key]
    head = random_head(target, kind, **(MASKED if kind == "eagle3" else {}))
    path = folder(tmp_path / "a", target, head, format)
    change(path, settings=lambda c: c.update({key: value}))
    foreign = read_folder(path)
    with pytest.raises(UserError, match=said) as caught:
        detect(foreign, "auto").read(foreign, target)
    assert str(path) in str(caught.value)


def test_an_unknown_kind_of_speculators_is_named(target, tmp_path: Path) -> None:
    path = folder(tmp_path / "a", target, random_head(target, "dflash"), "speculators")
    change(path, settings=lambda c: c.update(speculators_model_type="xpress"))
    with pytest.raises(UserError, match="'xpress'; eagle3, peagle, dflash, dspark are read"):
        detect(read_folder(path), "auto")
