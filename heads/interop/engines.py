"""What the serving engines take: read from the loaders of vLLM 0.32 and SGLang 0.5.23, whose
versions the tables name.

An architecture is the class name in the target's config.json ("architectures").
"""

from __future__ import annotations

VLLM, SGLANG = "vLLM 0.32", "SGLang 0.5.23"
LLAMACPP = "llama.cpp"


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
SGLANG_EAGLE1 = SGLANG_EAGLE3 | _names(
    "Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM FalconH1ForCausalLM "
    "Glm4ForCausalLM MiMoForCausalLM NemotronHForCausalLM OPTForCausalLM"
)
# The original EAGLE code brings its own copies of these targets.
EAGLE_CODE = _names("LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM MixtralForCausalLM")
# The original Medusa code: Llama and Mistral.
MEDUSA_CODE = _names("LlamaForCausalLM MistralForCausalLM")
SPECULATORS_TARGETS = VLLM_EAGLE3
