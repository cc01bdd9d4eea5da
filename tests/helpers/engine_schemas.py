"""Names, shapes and dtypes that engines which do not run here read, written down from their
loaders: the only check that exports for them get. {..} are sizes: D width, V vocabulary, A
query heads x head size, G key heads x head size, I width of the MLP, F tapped features, N
draft vocabulary, S head size, R rank, C D + R.

SGLang 0.5.23: srt/models/llama_eagle.py, llama_eagle3.py, dflash.py, dspark.py (which skip an LM
head and a draft vocabulary without a word, so none may be there).
"""

from __future__ import annotations

LAYER = {
    "self_attn.q_proj.weight": "A W",
    "self_attn.k_proj.weight": "G W",
    "self_attn.v_proj.weight": "G W",
    "self_attn.o_proj.weight": "D A",
    "mlp.gate_proj.weight": "I D",
    "mlp.up_proj.weight": "I D",
    "mlp.down_proj.weight": "D I",
    "post_attention_layernorm.weight": "D",
}


def layer(prefix: str, wide: str) -> dict[str, str]:
    return {prefix + name: shape.replace("W", wide) for name, shape in LAYER.items()}


EAGLE3 = {
    "fc.weight": "D FD",
    "midlayer.input_layernorm.weight": "D",
    "midlayer.hidden_norm.weight": "D",
    **layer("midlayer.", "2D"),
    "norm.weight": "D",
    "lm_head.weight": "N D",
    "d2t": "N",
}
BLOCK = {  # of two layers
    "fc.weight": "D FD",
    "hidden_norm.weight": "D",
    "norm.weight": "D",
    **{
        f"layers.{number}.{name}": shape
        for number in range(2)
        for name, shape in {
            **layer("", "D"),
            "input_layernorm.weight": "D",
            "self_attn.q_norm.weight": "S",
            "self_attn.k_norm.weight": "S",
        }.items()
    },
}
BLOCK_CONFIG = {
    "num_hidden_layers": 2,
    "block_size": None,
    "num_target_layers": 8,
    "layer_types": ["full_attention"] * 2,
    "is_causal": False,
    "head_dim": 8,
    "rms_norm_eps": None,
}


# required: the loader leaves a parameter at its random start where one is missing. optional:
#     read when there.
# config: keys the loader reads, with the value they must have (None: any).
SCHEMAS: dict[str, dict] = {
    "sglang eagle1": {
        "required": {"fc.weight": "D 2D", "fc.bias": "D", **layer("layers.0.", "D")},
        "optional": {"embed_tokens.weight": "V D"},
        "config": {
            "architectures": ["LlamaForCausalLMEagle"],
            "tie_word_embeddings": False,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "hidden_size": None,
            "vocab_size": None,
            "rms_norm_eps": None,
        },
    },
    "sglang eagle3": {
        "required": EAGLE3,
        "optional": {
            "embed_tokens.weight": "V D",
            "t2d": "V",
            "input_norm.weight": "FD",
            **{f"fc_norm.{i}.weight": "D" for i in range(3)},
        },
        "config": {
            "architectures": ["LlamaForCausalLMEagle3"],
            "tie_word_embeddings": False,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "draft_vocab_size": None,
            "hidden_size": None,
            "rms_norm_eps": None,
        },
    },
    "sglang dflash": {
        "required": BLOCK,
        "optional": {},
        "config": {
            **BLOCK_CONFIG,
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"mask_token_id": 259, "target_layer_ids": [1, 3, 5], "causal": False},
        },
    },
    "sglang dspark": {
        "required": {
            **BLOCK,
            "markov_head.markov_w1.weight": "V R",
            "markov_head.markov_w2.weight": "V R",
            "confidence_head.proj.weight": "1 C",
            "confidence_head.proj.bias": "1",
        },
        "optional": {},
        "config": {
            **BLOCK_CONFIG,
            "architectures": ["Qwen3DSparkModel"],
            "mask_token_id": 259,
            "target_layer_ids": [1, 3, 5],
            "sample_from_anchor": True,
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    },
}


def violations(schema: dict, config: dict, tensors: dict, sizes: dict[str, int]) -> list[str]:
    """What of an export the engine would not find, would not know, or would find in another
    shape or dtype.
    """

    required, optional = schema["required"], schema["optional"]
    found = [f"{name} is missing" for name in required if name not in tensors]
    for name, tensor in tensors.items():
        shape = required.get(name) or optional.get(name)
        if shape is None:
            found.append(f"{name} is unknown")
            continue
        factor = {"2D": 2 * sizes["D"], "FD": sizes["F"] * sizes["D"]}
        wanted = [factor.get(letter) or sizes[letter] for letter in shape.split()]
        if list(tensor.shape) != wanted:
            found.append(f"{name} is {list(tensor.shape)}, wanted {wanted}")
        kind = {"d2t": "torch.int64", "t2d": "torch.bool"}.get(name)
        if str(tensor.dtype) != kind and not (kind is None and tensor.is_floating_point()):
            found.append(f"{name} is {tensor.dtype}")
    for key, value in schema["config"].items():
        if key not in config or (value is not None and config[key] != value):
            found.append(f"config {key} is {config.get(key)!r}")
    return found
