"""Heads in other programs' formats: round trips, the independent reader, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.heads.block.config import BlockConfig
from outrider.heads.interop import read_folder, read_head, refusals
from outrider.heads.registry import head_class
from outrider.scripts.exporting import loaders
from outrider.scripts.exporting.card import usual_depth
from outrider.scripts.exporting.self_check import ExportCheck, check_head, rounded
from tests.helpers.interop import PAIRS, change, deep_target, folder, random_head

MASKED = {"parallel": True, "steps": 3, "mask_token": 259}
SHARED = {"share_lm_head": True, "draft_vocab": 0}
# What further keys a format can carry, so that their flags are exercised too
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("vllm", "medusa", {"draft_vocab": 64, "blocks": 2}),
    ("vllm", "eagle3", {"norm_before_fc": True, "norm_output": True, "taps": [1, 3, 6]}),
    ("sglang", "eagle3", {"norm_joined": True, "taps": [1, 3, 6]}),
    ("speculators", "eagle3", {"norm_before_residual": True, "sliding_window": 6}),
    ("speculators", "eagle3", {**MASKED, "norm_before_fc": True}),
    ("vllm", "dflash", {"layers": 1, "key_norm": True}),
    ("speculators", "dflash", SHARED),
    ("speculators", "dspark", {"confidence": 0.0}),
    ("deepspec", "dspark", {"draft_vocab": 0}),
    ("sglang", "dflash", SHARED),
    ("sglang", "dspark", SHARED),
]
CASES = [*((f, k, {}) for f, k in PAIRS if (f, k[0]) != ("sglang", "d")), *VARIANTS]


@pytest.fixture(scope="module")
def target():
    return deep_target()


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 259, (n,), generator=generator) for n in (4, 9)]


def checked(path: Path, format: str, head, target, prompts, dtype=torch.float32) -> ExportCheck:
    rows = target.embedding_weight, target.lm_head_weight
    file = loaders.folder(path, format, *rows, target.num_layers)
    twin = rounded(head, lambda weight: weight.to(dtype).float())
    return check_head(file, twin, target, prompts)


@pytest.mark.parametrize("format, kind, keys", CASES)
def test_an_export_is_read_back_and_drafts_what_the_head_drafts(
    target, prompts, tmp_path: Path, format: str, kind: str, keys: dict
) -> None:
    head = random_head(target, kind, **keys)
    first = folder(tmp_path / "a", target, head, format)
    found = checked(first, format, head, target, prompts)
    assert (
        found.draft_tokens_equal == 3 * len(prompts)
        and found.largest_logit_difference < 1e-4 * found.largest_logit
    )
    again, _ = read_head(read_folder(first), target)
    second = folder(tmp_path / "b", target, again, format)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "config.json").read_text() == (second / "config.json").read_text()
    mine, theirs = head.state_dict(), again.state_dict()
    wide = kind == "medusa" and head.cfg.draft_vocab  # an export has the whole vocabulary
    assert wide or all(theirs[name].equal(mine[name]) for name in mine.keys() & theirs.keys())


@pytest.mark.parametrize("kind, scaled", [("medusa", False), ("dflash", True)])
def test_half_precision_is_compared_with_the_rounded_head(
    target, prompts, tmp_path: Path, kind: str, scaled: bool
) -> None:
    """scaled: fc takes the features' divisors."""
    head = random_head(target, kind)
    if scaled:
        head.net.scale.uniform_(0.2, 5.0)
    path = folder(tmp_path / "a", target, head, "vllm", dtype=torch.bfloat16)
    assert checked(path, "vllm", head, target, prompts, torch.bfloat16).draft_tokens_equal == 6
    with pytest.raises(UserError, match="logits differ"):
        checked(path, "vllm", head, target, prompts)


@pytest.mark.parametrize(
    "kind, keys, name",
    [
        ("medusa", {}, "blocks.1.layers.0.bias"),
        ("eagle3", {"norm_before_fc": True}, "fc_norm"),
        ("eagle3", {}, "d2t"),
        ("dflash", {}, "k_norm"),
    ],
)
def test_a_mutated_file_is_caught(target, prompts, tmp_path, kind, keys, name) -> None:
    head = random_head(target, kind, **keys)
    path = folder(tmp_path / "a", target, head, "vllm")

    def mutate(tensors: dict) -> None:
        key = next(k for k in tensors if name in k)
        value = tensors[key]
        tensors[key] = value.roll(1, 0) if value.dtype == torch.int64 else value * 1.2

    change(path, mutate)
    with pytest.raises(UserError, match="logits differ"):
        checked(path, "vllm", head, target, prompts)


@pytest.mark.parametrize(
    "format, kind, keys, settings",
    [
        ("vllm", "eagle3", {"taps": [1, 3, 6]}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}),
        ("vllm", "eagle3", {"sliding_window": 6}, {"layer_types": ["full_attention"]}),
        ("speculators", "dflash", {}, {"sliding_window_non_causal": False}),
        ("speculators", "dspark", {}, {"sample_from_anchor": False}),
    ],
)
def test_a_config_that_means_something_else_is_caught(
    target, prompts, tmp_path: Path, format: str, kind: str, keys: dict, settings: dict
) -> None:
    head = random_head(target, kind, **keys)
    path = change(
        folder(tmp_path / "a", target, head, format), settings=lambda c: c.update(settings)
    )
    with pytest.raises(UserError, match="^export: "):
        checked(path, format, head, target, prompts)


def test_a_window_does_not_choose_how_much_an_engine_drafts(target) -> None:
    head = random_head(target, "eagle3", sliding_window=40, steps=6, depth=4)
    assert usual_depth(head, None) == 6 and head.deepest == 39


def test_engines_own_defaults_never_decide(target, tmp_path: Path) -> None:
    """vLLM reads the list of layers on top as hidden_states[k], SGLang the nested one and adds 1;
    whether the rows of a block see each other is written everywhere."""

    def config(kind: str, format: str, **keys: Any) -> dict:
        path = tmp_path / f"{kind}{format}{len(keys)}"
        path = folder(path, target, random_head(target, kind, **keys), format)
        return json.loads((path / "config.json").read_text())

    own = config("eagle3", "vllm", taps=[1, 3, 6])
    assert own["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert own["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert "layer_ids" not in json.dumps(config("eagle3", "vllm"))
    native = config("dflash", "vllm")
    assert native["is_causal"] is native["dflash_config"]["causal"] is False
    assert native["layer_types"] == ["full_attention"] * 2
    assert config("dflash", "speculators")["sliding_window_non_causal"] is True


ARCHITECTURES = {
    "eagle1": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "dflash": "DFlashDraftModel",
    "dspark": "Qwen3DSparkModel",
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_sglang_is_told_its_own_class(target, tmp_path: Path, kind: str) -> None:
    """It skips an LM head and a draft vocabulary of block heads without a word: none is there."""
    block = kind.startswith("d")
    head = random_head(target, kind, **(SHARED if block else {}))
    path = folder(tmp_path / "a", target, head, "sglang")
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURES[kind]] and config["rms_norm_eps"]
    assert not block or not read_folder(path).tensors.keys() & {"lm_head.weight", "d2t"}


# -- refusals


@pytest.mark.parametrize(
    "format, kind, extra, said",
    [
        ("vllm", "hydra_heads", {}, "head=eagle3"),
        ("sglang", "medusa", {}, "format=vllm, for vLLM up to 0.32.0"),
        ("vllm", "medusa", {"markov_rank": 2}, "head.markov_rank"),
        (
            "deepspec",
            "eagle3",
            {},
            "format=vllm or format=speculators or format=sglang or format=gguf",
        ),
        ("vllm", "eagle3", {"taps": [5, 2, 4]}, "head.taps"),
        ("vllm", "eagle3", {"layers": 2}, "head.layers"),
        ("transformers", "eagle3", {}, "it has no place for eagle3"),
        ("vllm", "dflash", {"mask_token": -1}, "head.mask_token"),
        ("vllm", "dflash", {"key_norm": True}, "head.key_norm"),
        ("vllm", "dflash", {"markov_rank": 4}, "head.markov_rank"),
        ("speculators", "dflash", {"confidence": 1.0}, "head.confidence"),
        (
            "vllm",
            "dspark",
            {},
            "format=speculators or format=sglang or format=deepspec or format=gguf",
        ),
        ("sglang", "dflash", {}, "head.share_lm_head"),
        ("sglang", "eagle3", MASKED, "head.parallel"),
        ("sglang", "eagle3", {"taps": [0, 3, 5]}, "head.taps"),
        ("vllm", "eagle3", {**MASKED, "mask_token": -1}, "head.mask_token"),
        ("sglang", "eagle3", {"sliding_window": 9}, "head.sliding_window: 9"),
        ("vllm", "eagle1", {"sliding_window": 9}, "head.sliding_window: 9"),
        ("gguf", "eagle3", {"norm_before_fc": True}, "head.norm_before_fc"),
        ("gguf", "eagle3", {"taps": [2, 4]}, "head.taps"),
        ("gguf", "medusa", {}, "format=gguf"),
        ("gguf", "dflash", {"taps": [0, 4]}, "head.taps: 0"),
        ("gguf", "dspark", {"markov_rank": 0}, "head.markov_rank"),
    ],
)
def test_what_engines_cannot_have_is_named(target, format, kind, extra, said: str) -> None:
    found = refusals(format, random_head(target, kind, **extra), target, "/a/t")
    assert any(said in f"format={format}: {line}" for line in found), found


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_head_of_default_keys_can_be_exported(target, kind: str) -> None:
    keys = {"kind": kind, "draft_vocab": 64, "markov_rank": 4 if kind == "dspark" else 0}
    counts = torch.ones(260, dtype=torch.int64)
    counts[259] = 0  # <|reserved_259|>
    head = head_class(kind).for_target(target, BlockConfig(**keys), counts)
    assert refusals("speculators", head, target, "/a/t") == []


def test_a_folder_that_names_its_target_needs_a_name(target) -> None:
    (line,) = refusals("speculators", random_head(target, "eagle3"), target, "")
    assert line.startswith("verifier: ")


def test_a_target_that_the_engine_does_not_serve() -> None:
    gpt = deep_target(arch="gpt_neox")
    for format in ("vllm", "sglang", "gguf"):
        (line,) = refusals(format, random_head(gpt, "eagle3"), gpt, "/a/t")
        assert line.startswith("target: ") and "GPTNeoXForCausalLM" in line


# -- folders whose config means something that is not run here

WRONG = {
    "sliding_window_non_causal": ("speculators", "dflash", None),
    "is_causal": ("vllm", "dflash", True),
    "sample_from_anchor": ("speculators", "dspark", False),
    "aux_hidden_state_layer_ids": ("speculators", "dflash", [2, 8]),
    "mask_token_id": ("speculators", "dflash", 10**6),
    "block_size": ("deepspec", "dspark", 1),
    "markov_head_type": ("deepspec", "dspark", "gated"),
    "target_layer_ids": ("deepspec", "dspark", "all"),
    "layer_types": ("deepspec", "dspark", ["sliding_attention"] * 2),
    "hidden_size": ("deepspec", "dspark", 64),
    "target_hidden_size": ("vllm", "eagle3", 64),
    "partial_rotary_factor": ("vllm", "eagle3", 0.5),
    "use_qk_norm": ("vllm", "eagle3", True),
    "final_logit_softcapping": ("vllm", "eagle3", 30.0),
    "embedding_multiplier": ("sglang", "eagle3", 12.0),
    "pard_token": ("vllm", "eagle3", None),
    "speculators_model_type": ("speculators", "dflash", "xpress"),
    "sliding_window": ("vllm", "eagle3", 0),
}
SAYS = {
    "is_causal": "causal",
    "aux_hidden_state_layer_ids": "target layers",
    "block_size": "block",
}


@pytest.mark.parametrize("key", WRONG)
def test_a_config_of_another_meaning_is_refused(target, tmp_path: Path, key: str) -> None:
    format, kind, value = WRONG[key]
    masked = {"sliding_window": {"sliding_window": 6}, "pard_token": MASKED}.get(key, {})
    path = folder(tmp_path / "a", target, random_head(target, kind, **masked), format)
    change(path, settings=lambda c: c.update({key: value}))
    with pytest.raises(UserError, match=SAYS.get(key, key)) as caught:
        read_head(read_folder(path), target)
    assert str(path) in str(caught.value)


def test_layers_that_slide_and_some_that_do_not(target, tmp_path: Path) -> None:
    head = random_head(target, "eagle3", sliding_window=6)
    path = folder(tmp_path / "a", target, head, "vllm")
    for kinds in (["sliding_attention", ["full_attention"]], ["full", "sliding_attention"]):
        change(path, settings=lambda c, k=kinds: c.update(layer_types=k))
        with pytest.raises(UserError, match="layer_types"):
            read_head(read_folder(path), target)
