"""Heads in other programs' formats: round trips, the independent reader, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conf.errors import UserError
from heads.interop import LAYOUTS, Facts, detect, find_layout, read_folder
from scripts.serving.check import check_export
from tests.engine_schemas import SCHEMAS, violations
from tests.interop import PAIRS, change, deep_target, folder, random_head


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


@pytest.mark.parametrize(
    "schema, format, kind, extra",
    [
        ("sglang eagle1", "sglang", "eagle1", {}),
        ("sglang eagle3", "sglang", "eagle3", {"norm_before_fc": True}),
        ("sglang eagle3", "sglang", "eagle3", {"norm_joined": True}),
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
    """vLLM reads the list on top as hidden_states[k]; SGLang reads the nested one and adds 1."""
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


@pytest.mark.parametrize("format, kind", PAIRS)
def test_half_precision_goes_round_unchanged(
    target, tmp_path: Path, format: str, kind: str
) -> None:
    head = random_head(target, kind, **keys(format, kind))
    layout = LAYOUTS[format, kind]
    settings, tensors = layout.write(head, target, Facts.of(target, "/a/target"), torch.bfloat16)
    path = folder(tmp_path / "a", target, head, format)
    change(path, lambda t: t.update(tensors), lambda c: c.update(settings))
    again = detect(read_folder(path), format).read(read_folder(path), target)
    assert again.cfg.draft_vocab == head.cfg.draft_vocab
    _, second = layout.write(again, target, Facts.of(target, "/a/target"), torch.bfloat16)
    assert second.keys() == tensors.keys() and all(t.equal(tensors[k]) for k, t in second.items())
