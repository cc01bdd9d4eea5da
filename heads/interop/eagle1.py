"""EAGLE-1 heads for vLLM, SGLang and in the layout of the original repository.

vLLM's loader drops fc.bias without a word; SGLang and the original code have one always, so it
is written there as zeros. The LM head is the target's, over the whole vocabulary: a draft
vocabulary is a matter of our engine and is not exported.

Shape letters: D width, V vocabulary, A query heads x head size, G key heads x head size, I
width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle1Head, EagleHead
from outrider.heads.interop import engines, llama
from outrider.heads.interop.layout import Facts, HeadLayout, check_same, embedding, refuse
from outrider.heads.interop.reading import Foreign
from outrider.heads.interop.table import Sizes, TensorRow


def body(theirs: str) -> list[TensorRow]:
    """The rows of the layer that EAGLE-1 and EAGLE-3 share. theirs: its prefix."""
    names = llama.LAYER.items()
    return [
        TensorRow(f"{theirs}{n}.weight", f"net.layers.0.{n}.weight", shape) for n, shape in names
    ]


def layer_refusals(head: EagleHead, engine: str, window: bool = False) -> list[str]:
    """Why no engine can run this draft layer. window: whether this one looks back as far as the
    file says."""
    found, layer = [], head.config_json()["layer"]
    if head.cfg.sliding_window is not None and not window:
        nearest = (
            "format=vllm or speculators, or train with" if head.kind == "eagle3" else "train with"
        )
        found.append(
            f"head.sliding_window: {head.cfg.sliding_window}; {engine} reads none from a head's "
            "folder and would look back over the whole text; the nearest that is served: "
            f"{nearest} head.sliding_window=null"
        )
    if layer["num_hidden_layers"] != 1:
        found.append(
            f"head.layers: {layer['num_hidden_layers']} layers; engines differ on further layers "
            "(names and norms), and only one is checked here; the nearest that is served: train "
            "with head.layers=1"
        )
    if layer["hidden_act"] != "silu":
        found.append(
            f"head.hidden_act: {layer['hidden_act']}; the engines' Llama layers know silu alone; "
            "the nearest that is served: train with head.hidden_act=silu"
        )
    return found


def check_layer(foreign: Foreign, layer: dict[str, Any], target: Target) -> None:
    """A draft layer that this repository can run with this target. Raises UserError otherwise."""
    if layer["num_hidden_layers"] != 1:
        refuse(
            foreign,
            f"num_hidden_layers: {layer['num_hidden_layers']}; draft heads of one layer are read",
        )
    said = foreign.config.get("target_hidden_size")
    if layer["hidden_size"] != target.hidden_size or said not in (None, target.hidden_size):
        refuse(
            foreign,
            f"hidden_size: {layer['hidden_size']} (target_hidden_size {said}); the target's is "
            f"{target.hidden_size}: give the target that the head was trained for",
        )


def check_window(foreign: Foreign, cfg: EagleConfig) -> None:
    """Raises UserError for a window that a draft of usual depth fills."""
    if wrong := [line for line in cfg.validate() if line.startswith("sliding_window")]:
        refuse(foreign, *wrong)


class Eagle1Vllm(HeadLayout[Eagle1Head]):
    """vLLM: a LlamaConfig whose architectures say LlamaForCausalLM, method "eagle"."""

    format, kind, engine, serves = "vllm", "eagle1", engines.VLLM, engines.VLLM_EAGLE1
    architecture, bias = "LlamaForCausalLM", False

    def refusals(self, head: Eagle1Head, facts: Facts) -> list[str]:
        """See HeadLayout."""
        found = super().refusals(head, facts) + layer_refusals(head, self.engine.title)
        if head.cfg.fc_bias and not self.bias and bool(head.net.fc.bias.any()):
            found.append(
                "head.fc_bias: vLLM drops the bias of fc without a word, and this one is not zero; "
                "the nearest that is served: format=sglang, or a head trained here (no bias)"
            )
        return found

    def rows(self, sizes: Sizes) -> list[TensorRow]:
        """See HeadLayout."""
        own = TensorRow("fc.bias", "net.fc.bias" if sizes["own_bias"] else "", "D", when="bias")
        return [
            TensorRow("fc.weight", "net.fc.weight", "D 2*D"),
            own,
            *body("layers.0."),
            TensorRow("embed_tokens.weight", "", "V D", optional=True),
            TensorRow("lm_head.weight", "", "V D", optional=True),
        ]

    def sizes(self, head: Eagle1Head, facts: Facts) -> dict[str, int]:
        """See HeadLayout."""
        layer = llama.sizes(head.config_json()["layer"], facts.vocab)
        return {**layer, "bias": int(self.bias), "own_bias": int(head.cfg.fc_bias)}

    def extras(self, head: Eagle1Head, target: Target) -> dict[str, Tensor]:
        """See HeadLayout."""
        if head.cfg.fc_bias or not self.bias:
            return {}
        return {"fc.bias": torch.zeros(head.net.fc.weight.shape[0])}

    def config(self, head: Eagle1Head, facts: Facts, dtype: str) -> dict[str, Any]:
        """See HeadLayout."""
        scale = {} if facts.scale == 1 else {"logit_scale": facts.scale}
        return {
            "architectures": [self.architecture],
            **llama.fields(head.config_json()["layer"], facts, dtype),
            **({"bias": True} if self.bias else {}),
            **scale,
        }

    def read(self, foreign: Foreign, target: Target) -> Head:
        """See HeadLayout. A bias of zeros is dropped, another one kept (head.fc_bias)."""
        layer = llama.layer(foreign, foreign.config)
        check_layer(foreign, layer, target)
        tensors = {
            k: v for k, v in foreign.tensors.items() if not k.endswith("rotary_emb.inv_freq")
        }
        there = "fc.bias" in tensors
        wants = bool(foreign.config.get("bias", there))
        if there and foreign.config.get("bias") is False:
            refuse(foreign, "fc.bias: a bias where none is expected: bias in config.json is false")
        keep = there and bool(tensors["fc.bias"].any())
        sizes = llama.sizes(layer, target.vocab_size)
        state = self.checked(foreign, {**sizes, "bias": wants, "own_bias": keep}, tensors)
        check_same(foreign, tensors, embedding(target))
        check_same(foreign, tensors, target.lm_head_weight, "lm_head.weight")
        cfg = EagleConfig(
            kind="eagle1",
            draft_vocab=0,
            steps=1,
            step_decay=1.0,
            feature_loss=1.0,
            fc_bias=keep,
            sliding_window=llama.window_in(foreign, foreign.config),
        )
        check_window(foreign, cfg)
        last = target.num_layers
        head = Eagle1Head(cfg, layer, (last,), target.vocab_size, last)
        head.load_state_dict(state)
        return head.to(target.device)


class Eagle1Sglang(Eagle1Vllm):
    """SGLang: fc has a bias always."""

    format, engine, serves = "sglang", engines.SGLANG, engines.SGLANG_EAGLE1
    architecture, bias = "LlamaForCausalLMEagle", True


class Eagle1Original(Eagle1Vllm):
    """The original repository: the embedding always comes from the target, fc has a bias by
    default.
    """

    format, engine, serves = "eagle", engines.EAGLE_CODE, engines.EAGLE_CODE_TARGETS
    architecture, bias = "LlamaForCausalLM", True
