"""Tiny random models of many architectures, seconds to build, no network. Import `build` and
`ARCHS` in tests.

    model = build("llama")                 # LlamaForCausalLM, 2 layers, hidden 32, vocabulary
                                           61
    model = build("gemma3_text", dtype=torch.float64, vocab_size=97)

Weights are larger than the usual initialisation, so that attention matters to the logits: with
the stock 0.02 a wrong mask would hide in the rounding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

VOCAB = 61
WINDOW = 6

_BARE: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
_BASE: dict[str, Any] = {
    **_BARE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
_GQA = {**_BASE, "num_key_value_heads": 2}
_GPT2 = {**_BARE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

# Full attention, sliding windows, learned positions, scaled and capped logits, mixtures of
# experts: all take trees.
TREE: dict[str, dict[str, Any]] = {
    "llama": _GQA,
    "qwen2": _GQA,
    "qwen3": {**_GQA, "head_dim": 8},
    "gpt2": _GPT2,
    "gpt_neox": _BASE,
    "phi3": {**_GQA, "sliding_window": None},
    "mixtral": {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere": {**_GQA, "logit_scale": 0.0625},
    "granite": {
        **_GQA,
        "logits_scaling": 4.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
    },
    "olmo2": _GQA,
    "stablelm": _GQA,
    "opt": {**_BASE, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "mistral": {**_GQA, "sliding_window": WINDOW, "head_dim": 8},
    "gemma2": {**_GQA, "sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        **_GQA,
        "sliding_window": WINDOW,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    # Sinks beside the scores, which no fused attention knows.
    "gpt_oss": {
        **_GQA,
        "sliding_window": WINDOW,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
# Positions follow from the cache's slots (ALiBi): no trees, refused.
BY_SLOT: dict[str, dict[str, Any]] = {
    "bloom": {
        **_BARE,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
    },
}
# Attention beside layers with a recurrent or convolution state: chains, no trees.
_THREE: dict[str, Any] = {
    **_GQA,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_CONV = {**_GQA, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_LATENT: dict[str, Any] = {  # one latent key and value for all heads, and experts in groups
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_INKLING: dict[str, Any] = {
    **_GQA,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": WINDOW,
    "d_rel": 4,
    "rel_extent": 16,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "unpadded_vocab_size": VOCAB,
}
HYBRID: dict[str, dict[str, Any]] = {
    # a delta rule with a gate
    "qwen3_next": {**_THREE, **_DELTA, **_EXPERTS},
    "qwen3_5_text": {**_THREE, **_DELTA},
    "qwen3_5_moe_text": {**_THREE, **_DELTA, **_EXPERTS},
    "olmo_hybrid": {**_THREE, **_DELTA},
    "kimi_linear": {**_THREE, **_LATENT, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {**_THREE, **_LATENT, "head_dim": 8, "first_k_dense_replace": 1},
    # Mamba, Mamba-2
    "bamba": {
        **{k: v for k, v in _THREE.items() if k != "layer_types"},
        **_MAMBA2,
        "attn_layer_indices": [1],
    },
    "falcon_h1": {**_GQA, **_MAMBA2, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **_THREE,
        **_MAMBA2,
        "num_local_experts": 4,
        "shared_intermediate_size": 16,
    },
    "jamba": {
        **_GQA,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "nemotron_h": {
        **_GQA,
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "zamba": {
        **_BASE,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        **_BASE,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "adapter_rank": 4,
    },
    # a linear attention that keeps its state in a cache of its own
    "minimax": {**_THREE, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
    # short convolutions
    "lfm2": {**_CONV, "block_multiple_of": 8},
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {
        **_CONV,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
    },
    # convolutions inside attention
    "zaya": {
        **_GQA,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "router_hidden_size": 16,
        "sliding_window": WINDOW,
        "layer_types": ["hybrid", "hybrid_sliding"],
    },
    "inkling_text": {**_INKLING, "n_shared_experts": 1, "logits_mup_width_multiplier": 1.0},
    "inkling2_text": {**_INKLING, "n_layers_per_attn_res_block": 1},
}
# Language models beside a vision tower, by AutoModelForImageTextToText.
_SEES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VL: dict[str, Any] = {
    "vision_config": {**_SEES, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
    "image_token_id": 60,
    "video_token_id": 59,
    "vision_start_token_id": 58,
    "vision_end_token_id": 57,
}
_TEXT: dict[str, Any] = {**_GQA, "num_hidden_layers": 3, "head_dim": 8}
_AXES: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
SEEING: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_SEES, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 60,
    },
    "qwen2_5_vl": {"text_config": {**_TEXT, "rope_parameters": _AXES}, **_QWEN_VL},
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": _AXES},
        **_QWEN_VL,
        "vision_config": {**_QWEN_VL["vision_config"], "deepstack_visual_indexes": [0]},
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 16,
        },
        "vision_config": {
            **_SEES,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        "image_token_index": 60,
    },
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
        "vision_config": _SEES,
        "mm_tokens_per_image": 4,
        "image_token_index": 60,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 8,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
        },
        "vision_config": {**_SEES, "num_key_value_heads": 2, "head_dim": 8},
        "audio_config": None,
        "image_token_id": 60,
    },
}
# Nothing but recurrent state: refused.
REFUSED: dict[str, dict[str, Any]] = {
    "mamba": {
        **_BARE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
    },
}
# What changes with the length of a text, refused: a window of its own name that is baked into a
# buffer (GPT-Neo), and one that keeps the best tokens (Doge).
BY_LENGTH: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        **_BARE,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 12,
        "max_position_embeddings": 128,
    },
    "doge": {**_GQA, "keep_window_size": 12},
}
ARCHS = {**TREE, **HYBRID, **BY_SLOT, **REFUSED, **BY_LENGTH}

# Changes that give a model the rotary embedding of Phi-3.5 and Phi-4-mini: other frequencies
# beyond SWITCH tokens.
SWITCH = 24
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": SWITCH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 5.0, 9.0, 14.0],
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": SWITCH,
    },
}


def build(
    arch: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A tiny random causal language model of architecture `arch` (a key of ARCHS; of SEEING: with
    its vision tower); `changes` override its config, those of its language model.
    """
    if arch in SEEING:
        given = copy.deepcopy(SEEING[arch])
        given["text_config"].update(changes)
        auto: Any = AutoModelForImageTextToText
    else:
        given, auto = copy.deepcopy({**ARCHS[arch], **changes}), AutoModelForCausalLM
    config = AutoConfig.for_model(arch, **given)
    torch.manual_seed(seed)
    # Some versions let sdpa drop the softcap on scores silently.
    how = (
        {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    )
    model = auto.from_config(config, dtype=dtype, **how)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 or (weight.dim() > 2 and "conv" not in name):
                weight.normal_(
                    0, 0.25 if "embed" in name or "wte" in name else 1.2 * weight.shape[-1] ** -0.5
                )
    return model.eval()
