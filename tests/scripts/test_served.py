"""Every recipe trains a head that drafts what it learned and that some engine loads: for a tiny
target of the class that it names, each format that takes it is written and read back."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.conf.schema import compose
from outrider.decode.models.tiny import byte_tokenizer
from outrider.decode.target import Target
from outrider.heads import parity
from outrider.heads.base import Head
from outrider.heads.interop import architecture, formats, gguf_write, refusals
from outrider.heads.registry import head_class
from outrider.scripts.exporting.write import write_head
from outrider.train.dry_run.memory import Model, model_of
from tests.helpers.interop import random_head, words
from tests.helpers.training import random_batch
from tests.train.test_dry_run import RECIPES, drawn_up

VOCAB = 260
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "query_pre_attn_scalar": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "mm_tokens_per_image": 4,
    "boi_token_index": 257,
    "eoi_token_index": 258,
    "image_token_index": 259,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ALWAYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def shrunk(given: dict[str, Any]) -> dict[str, Any]:
    """A config of the same keys with small numbers."""
    small = {k: TINY.get(k, v) if v is not None else v for k, v in given.items()}
    small |= {k: TINY[k] for k in ALWAYS}
    if "layer_types" in given:
        small["layer_types"] = given["layer_types"][: small["num_hidden_layers"]]
    if "text_config" in given:
        small |= {"text_config": shrunk(given["text_config"]), "vision_config": dict(VISION)}
        small["vision_config"]["model_type"] = given["vision_config"]["model_type"]
    return small


def tiny_like(model: Model) -> Target:
    """A random target of the class that a published config makes."""
    given = shrunk(copy.deepcopy(model.config))
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Target(made.eval(), tokenizer=byte_tokenizer())


def head_of(name: str) -> tuple[Head, Target, str]:
    """The head that a recipe trains, for a tiny target like its own, and the target's name."""
    cfg: Any = compose(*drawn_up(name), [f"experiment={name}", "data.path=x", "out_dir=y"])
    model = model_of(cfg.target)
    small = {"draft_vocab": 40, "from_target_layers": 2, "sliding_window": 16}
    keys = replace(cfg.head, **{k: v for k, v in small.items() if getattr(cfg.head, k, 0)})
    target = tiny_like(model)
    torch.manual_seed(1)
    head = head_class(keys.kind).for_target(target, keys, torch.arange(VOCAB) + 1)
    return head.eval(), target, model.name


PROMPTS = [torch.arange(5, 15), torch.arange(40, 60)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_what_an_engine_loads(name: str, tmp_path: Path) -> None:
    """But for Hydra heads, which nobody serves. It learns and drafts what it learned."""
    head, target, repository = head_of(name)
    out = head(random_batch(vocab=VOCAB), target)
    out.sum.backward()
    learned = [p.grad for p in head.parameters() if p.requires_grad]
    assert all(g is not None and bool(g.isfinite().all()) for g in (out.sum, *learned))
    gate = parity.check(head, target, [[5, 6, 7], [9, 4]], 9, batch_size=2)
    assert gate.passed, gate.problems
    takes = [f for f in formats(head.kind) if not refusals(f, head, target, repository)]
    served = head.kind != "hydra_heads"
    assert bool(takes) == (served or head.kind == "small_lm"), name
    target_file = tmp_path / "target.gguf"
    gguf_write.write(target_file, gguf_write.GgufModel("llama", words(VOCAB), {}), "float32")
    for format in takes:
        stage = tmp_path / format
        stage.mkdir()
        _, found = write_head(
            stage, format, head, target, repository, PROMPTS, "float32", str(target_file)
        )
        assert found.prompts > 0


def test_the_class_is_the_one_that_engines_know() -> None:
    """As its repository's config.json has it: nobody else asks for Gemma's vision tower."""
    _, target, _ = head_of("gemma3_12b_eagle3")
    assert architecture(target) == "Gemma3ForConditionalGeneration"
    assert target.hidden_size == 32


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_llamacpp_hands_layers_of_some_targets_alone(kind: str) -> None:
    """Of others its server ends at the first token (b11549: layer input tensor is null)."""
    gemma = tiny_like(model_of(compose_target("google/gemma-3-12b-it")))
    llama = tiny_like(model_of(compose_target("meta-llama/Llama-3.1-8B-Instruct")))
    said = [refusals("gguf", random_head(target, kind), target, "/a") for target in (gemma, llama)]
    assert [line for line in said[0] if "hands no layer of a Gemma3For" in line]
    assert not [line for line in said[1] if line.startswith("target:")]


def compose_target(name: str) -> Any:
    from outrider.decode.models.load import TargetConfig

    return TargetConfig(kind="hub", name=name)
