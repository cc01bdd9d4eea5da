"""What the serving engines take: which drafters they load, by version (engines.yaml
beside this file, with the day on which it was checked), and on which targets.

An architecture is the class name in the target's config.json ("architectures"), as the
loaders of vLLM 0.33.0 and SGLang 0.5.23 list them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("engines.yaml")
# What an EAGLE head may want of an engine beyond the plain one, by its key
NORMS = {
    "norm_before_fc": "eagle3.1",
    "norm_output": "eagle3.1",
    "norm_joined": "norm_joined",
    "norm_before_residual": "norm_before_residual",
}
WORDS = {
    "medusa": "Medusa heads",
    "hydra_heads": "Hydra heads",
    "eagle1": "EAGLE-1",
    "eagle3": "EAGLE-3",
    "eagle3.1": "norms of EAGLE-3.1",
    "p_eagle": "P-EAGLE",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "small_lm": "separate draft",
    "ngram": "n-grams",
}


@dataclass(frozen=True)
class Support:
    """How an engine loads a drafter. since, until: its first and last version, "" = as
    far back as was looked, and the newest. how: the engine's word for it. note: a
    condition. source: where it was read."""

    since: str = ""
    until: str = ""
    how: str = ""
    note: str = ""
    source: str = ""


@dataclass(frozen=True)
class Engine:
    """One engine. newest: its newest release when the table was checked, "" for a
    repository that is not released by versions. drafters: what it loads, or once loaded.
    folder: the form of export that is meant, where it reads several."""

    name: str
    drafters: Mapping[str, Support]
    newest: str = ""
    folder: str = ""

    @property
    def title(self) -> str:
        """Name and newest version."""
        return f"{self.name} {self.newest}".rstrip()

    def loads(self, *drafters: str) -> bool:
        """Whether its newest version loads a drafter that has all these parts."""
        return all(part in self.drafters and not self.drafters[part].until for part in drafters)

    def versions(self, *drafters: str) -> str:
        """Name and the versions that load a drafter that has all these parts, as far as any
        version knows them."""
        found = [self.drafters[part] for part in drafters if part in self.drafters]
        since = max((s.since for s in found if s.since), key=_order, default="")
        until = min((s.until for s in found if s.until), key=_order, default="")
        last = until or self.newest
        if not since or since == last:
            return f"{self.name} {'up to ' if until else ''}{last}".rstrip()
        return f"{self.name} {since} to {last}"

    def gone(self, drafter: str) -> str:
        """That its newest version no longer loads a drafter, in words; "" where it does,
        or no version did."""
        if drafter not in self.drafters or self.loads(drafter):
            return ""
        last = self.drafters[drafter].until
        return (
            f"{self.title}, the newest on {CHECKED}, loads no {WORDS[drafter]}; the last version "
            f"that does is {last}"
        )


def required(kind: str, cfg: Any) -> tuple[str, ...]:
    """What a head wants of an engine: its kind, and the parts of it that not every
    version knows. cfg: the head's configuration."""
    parts = {part for key, part in NORMS.items() if getattr(cfg, key, False)}
    if getattr(cfg, "sliding_window", None) is not None:
        parts.add("sliding_window")
    return ("p_eagle" if getattr(cfg, "parallel", False) else kind, *sorted(parts))


def _order(version: str) -> tuple[int, ...]:
    """The numbers of a version, by which versions are ordered: 0.5.9 comes before 0.5.10."""
    digits = "".join(c if c.isdigit() else " " for c in version)
    return tuple(map(int, digits.split()))


@functools.cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return found


def _engine(given: Mapping[str, Any]) -> Engine:
    drafters = {name: Support(**support) for name, support in given["drafters"].items()}
    return Engine(**{**given, "drafters": drafters})


CHECKED = str(_table()["checked"])
ENGINES = {key: _engine(given) for key, given in _table()["engines"].items()}
VLLM, SPECULATORS = ENGINES["vllm"], ENGINES["speculators"]
SGLANG, LLAMACPP = ENGINES["sglang"], ENGINES["llamacpp"]
MEDUSA_CODE, EAGLE_CODE = ENGINES["medusa_code"], ENGINES["eagle_code"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Targets whose vLLM class hands out hidden states of inner layers (SupportsEagle3), text
# models alone.
VLLM_EAGLE3 = _names(
    "AfmoeForCausalLM ApertusForCausalLM Cohere2MoeForCausalLM DeepseekForCausalLM "
    "DeepseekV2ForCausalLM DeepseekV3ForCausalLM Ernie4_5ForCausalLM Gemma4ForCausalLM "
    "GptOssForCausalLM GraniteForCausalLM IQuestCoderForCausalLM InternLM3ForCausalLM "
    "LLaMAForCausalLM LagunaForCausalLM Llama4ForCausalLM LlamaForCausalLM MiMoForCausalLM "
    "MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM MiniMaxM2ForCausalLM "
    "Ministral3ForCausalLM MistralForCausalLM NemotronHForCausalLM Phi3ForCausalLM "
    "Plamo3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM "
    "Step1ForCausalLM TeleChat2ForCausalLM"
)
# Targets whose vLLM class takes EAGLE-1 heads (SupportsEagle), text models alone.
VLLM_EAGLE1 = _names(
    "ApertusForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM "
    "Ernie4_5ForCausalLM GptOssForCausalLM IQuestCoderForCausalLM InternLM3ForCausalLM "
    "LLaMAForCausalLM Llama4ForCausalLM LlamaForCausalLM MiMoForCausalLM MiniCPM3ForCausalLM "
    "MiniCPMForCausalLM Ministral3ForCausalLM MistralForCausalLM NemotronHForCausalLM "
    "Phi3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Step1ForCausalLM "
    "TeleChat2ForCausalLM"
)
# Targets whose SGLang class lends embedding and LM head (get_embed_and_head), and those that
# also capture inner layers. Gemma 3's larger sizes come with a vision tower, whose class asks the
# language model for both.
SGLANG_EAGLE3 = _names(
    "ApertusForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM "
    "DeepseekV2ForCausalLM DeepseekV3ForCausalLM ExaoneMoEForCausalLM Gemma3ForCausalLM "
    "Gemma3ForConditionalGeneration Gemma4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM "
    "GptOssForCausalLM IQuestCoderForCausalLM InternLM3ForCausalLM LlamaForCausalLM "
    "LongcatFlashForCausalLM MiniMaxM2ForCausalLM Phi3ForCausalLM Qwen2ForCausalLM "
    "Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM"
)
# SGLang's classes that capture inner layers for DFLASH and DSPARK.
SGLANG_BLOCK = _names(
    "DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM Gemma4ForCausalLM "
    "Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM IQuestCoderForCausalLM "
    "InternLM3ForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Llama4ForCausalLM "
    "LlamaForCausalLM MiMoV2FlashForCausalLM Ministral3ForCausalLM MistralForCausalLM "
    "NemotronHForCausalLM Phi3ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM "
    "Qwen3NextForCausalLM TeleFLMForCausalLM"
)
SGLANG_EAGLE1 = SGLANG_EAGLE3 | _names(
    "Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM FalconH1ForCausalLM "
    "Glm4ForCausalLM MiMoForCausalLM NemotronHForCausalLM OPTForCausalLM"
)
# Targets whose graph in llama.cpp (b11549, src/models) hands out the inputs of its layers, which
# EAGLE-3 and block heads read; on others its server ends at the first token. By the names in its
# converter; of Qwen2 the files that this repository writes, as a llama.
LLAMACPP_LAYERS = _names(
    "Gemma4ForCausalLM Gemma4ForConditionalGeneration GptOssForCausalLM "
    "IQuestCoderForCausalLM InternLM3ForCausalLM LFM2ForCausalLM LLaMAForCausalLM "
    "Lfm2ForCausalLM Lfm2MoeForCausalLM LlamaForCausalLM MiMoV2FlashForCausalLM "
    "MiMoV2ForCausalLM MiniMaxM2ForCausalLM MiniMaxText01ForCausalLM MistralForCausalLM "
    "MixtralForCausalLM NanbeigeForCausalLM NemotronHForCausalLM NemotronHPuzzleForCausalLM "
    "Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM "
    "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM "
    "Qwen3_5MoeForConditionalGeneration"
)
# The original EAGLE code brings its own copies of these targets.
EAGLE_CODE_TARGETS = _names("LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM MixtralForCausalLM")
# The original Medusa code: Llama and Mistral.
MEDUSA_CODE_TARGETS = _names("LlamaForCausalLM MistralForCausalLM")
