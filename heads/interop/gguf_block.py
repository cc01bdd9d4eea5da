"""Block heads as GGUF files for llama.cpp (build 11549): both kinds are its architecture
`dflash`, and a file with a Markov term is DSpark.

Layers are Qwen3's, so rows of q and k are left as they are; `d2t` holds absolute target ids,
`target_layers` numbers hidden_states as our taps do, the mask is a token of the vocabulary. A
head with reduced vocabulary brings its LM head, embeddings come from the target. It drafts as
many rows as it is asked for: with rows that see each other ask for all (--spec-draft-n-max).
"""

from __future__ import annotations

from gguf import GGUFValueType

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads.block.head import BlockHead
from outrider.heads.interop import engines
from outrider.heads.interop.block import exported, refusals
from outrider.heads.interop.gguf_write import Fields, GgufModel, layer_fields
from outrider.heads.interop.layout import Facts

ROOT = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
}
# Ours -> theirs
LAYER = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def block_refusals(head: BlockHead, target: Target) -> list[str]:
    """Why llama.cpp cannot run a head, each with its key; [] when it can."""
    found = refusals(head, Facts.of(target, ""))
    kind = head.config_json()["layer"]["rope_parameters"].get("rope_type", "default")
    if kind not in (None, "default"):
        found.append(
            f"rope_parameters.rope_type: {kind}; {engines.LLAMACPP.name} turns block heads by "
            "plain rotary positions alone"
        )
    return found


def block_model(head: BlockHead, target: Target, words: Fields) -> GgufModel:
    """The head as llama.cpp's `dflash` architecture. words: tokenizer_fields.

    Raises UserError with every reason why it cannot be.
    """
    refused = block_refusals(head, target)
    if refused:
        raise UserError("format=gguf: " + "; ".join(refused))
    cfg, state = head.cfg, {n: t.float().cpu() for n, t in exported(head, target).items()}
    fields = layer_fields("dflash", head.config_json()["layer"], target.vocab_size)
    fields |= {
        "dflash.block_size": (GGUFValueType.UINT32, cfg.block),
        "dflash.target_layers": (GGUFValueType.ARRAY, list(head.taps)),
        "dflash.attention.causal": (GGUFValueType.BOOL, False),
        "tokenizer.ggml.mask_token_id": (GGUFValueType.UINT32, cfg.mask_token),
    }
    tensors = {f"{t}.weight": state[f"net.{o}.weight"] for o, t in ROOT.items()}
    for number in range(cfg.layers):
        for ours, theirs in LAYER.items():
            weight = state[f"net.layers.{number}.{ours}.weight"]
            tensors[f"blk.{number}.{theirs}.weight"] = weight
    if cfg.markov_rank:
        fields["dflash.sample_from_anchor"] = (GGUFValueType.BOOL, cfg.kind == "dspark")
        fields["dflash.has_confidence_head"] = (GGUFValueType.BOOL, cfg.confidence > 0)
        tensors["markov_w1.weight"] = state["net.markov_in"]
        tensors["markov_w2.weight"] = state["net.markov_out"]
    if cfg.confidence:
        for part in ("weight", "bias"):
            tensors[f"conf_proj.{part}"] = state[f"net.confidence.{part}"]
    ids = head.ids()
    if ids is not None:
        tensors["d2t"] = ids.detach().cpu().long()
    return GgufModel("dflash", fields | words, tensors)
