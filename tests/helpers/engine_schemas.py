"""Names, shapes and dtypes that engines which do not run here read, written down from their
loaders: the only check that exports for them get. {..} are sizes: D width, V vocabulary, A
query heads x head size, G key heads x head size, I width of the MLP, F tapped features, N
draft vocabulary, K Medusa heads, k a head.

SGLang 0.5.23: srt/models/llama_eagle.py, llama_eagle3.py. TensorRT-LLM: the EAGLE-3 folder of
its PyTorch backend, and the file that its Medusa conversion reads.
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
        "required": {
            "fc.weight": "D FD",
            "midlayer.input_layernorm.weight": "D",
            "midlayer.hidden_norm.weight": "D",
            **layer("midlayer.", "2D"),
            "norm.weight": "D",
            "lm_head.weight": "N D",
            "d2t": "N",
        },
        "optional": {
            "embed_tokens.weight": "V D",
            "t2d": "V",
            "input_norm.weight": "FD",
            "fc_norm.0.weight": "D",
            "fc_norm.1.weight": "D",
            "fc_norm.2.weight": "D",
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
    "tensorrt eagle3": {
        "required": {
            "fc.weight": "D FD",
            "midlayer.input_layernorm.weight": "D",
            "midlayer.hidden_norm.weight": "D",
            **layer("midlayer.", "2D"),
            "norm.weight": "D",
            "lm_head.weight": "N D",
            "d2t": "N",
        },
        "optional": {"t2d": "V"},
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "draft_vocab_size": None,
            "hidden_size": None,
        },
    },
    "tensorrt medusa": {
        "required": {"k.0.linear.weight": "D D", "k.0.linear.bias": "D", "k.1.weight": "V D"},
        "optional": {"token_map": "N"},
        "config": {"medusa_num_heads": None, "medusa_num_layers": 1},
    },
}


def violations(
    schema: dict, config: dict, tensors: dict, sizes: dict[str, int], heads: int = 1
) -> list[str]:
    """What of an export the engine would not find, would not know, or would find in another
    shape or dtype.
    """

    def expand(table: dict[str, str]) -> dict[str, str]:
        return {
            n.replace("k.", f"{k}.", 1) if n.startswith("k.") else n: s
            for n, s in table.items()
            for k in range(heads if n.startswith("k.") else 1)
        }

    required, optional = expand(schema["required"]), expand(schema["optional"])
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
        kind = {"d2t": "torch.int64", "token_map": "torch.int64", "t2d": "torch.bool"}.get(name)
        if str(tensor.dtype) != kind and not (kind is None and tensor.is_floating_point()):
            found.append(f"{name} is {tensor.dtype}")
    for key, value in schema["config"].items():
        if key not in config or (value is not None and config[key] != value):
            found.append(f"config {key} is {config.get(key)!r}")
    return found
