"""EAGLE-3 heads for vLLM and SGLang (one file serves both) and in the layout of the original
repository.

Names that differ in meaning: what this repository calls norm_before_fc (a norm for each tapped
feature, EAGLE-3.1) is `fc_norm` there; their `norm_before_fc` is one norm over the features
side by side (head.norm_joined here).

Inner layers: our tap k is hidden_states[k], the input of layer k. vLLM reads the top-level
list as k and sorts it; SGLang reads the nested list and adds one. Heads with the default taps
name no layers at all, others both lists: k and k - 1.

Sliding window: vLLM's Llama layers take `sliding_window` where `layer_types` calls a layer
sliding_attention, the row's own position among them, as here. SGLang's take it from
--speculative-draft-window-size alone, whatever a folder says.

Shape letters: as in eagle1.py, and F tapped features, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.interop import engines, llama
from outrider.heads.interop.eagle1 import body, check_layer, check_window, layer_refusals
from outrider.heads.interop.layout import (
    Facts,
    HeadLayout,
    check_draft_map,
    check_same,
    embedding,
    refuse,
)
from outrider.heads.interop.reading import Foreign
from outrider.heads.interop.table import Sizes, TensorRow

# Ours -> theirs
NORMS = {
    "norm_before_fc": "fc_norm",
    "norm_joined": "norm_before_fc",
    "norm_output": "norm_output",
    "norm_before_residual": "norm_before_residual",
}

AUTOMODEL = "LlamaEagle3DraftModel"

MASK = (
    "head.mask_token: -1; engines take the mask's embedding from the target's table: train with "
    "head.mask_token=ID of a reserved token"
)


class Eagle3Vllm(HeadLayout[Eagle3Head]):
    """vLLM: a LlamaConfig whose architectures say LlamaForCausalLMEagle3, method "eagle3"."""

    format, kind, engine, serves = "vllm", "eagle3", engines.VLLM, engines.VLLM_EAGLE3
    prefix: ClassVar[str] = "midlayer."

    def refusals(self, head: Eagle3Head, facts: Facts) -> list[str]:
        """See HeadLayout."""
        found = super().refusals(head, facts)
        known, title = self.engine.loads, self.engine.title
        found += layer_refusals(head, title, known("sliding_window"))
        wanted = engines.NORMS.items()
        unknown = [key for key, part in wanted if getattr(head.cfg, key) and not known(part)]
        if unknown:
            found.append(
                f"head.{unknown[0]}: {title} has no such norm; the nearest that is served: "
                f"format=vllm, or train with head.{unknown[0]}=false"
            )
        if head.cfg.parallel and not known("p_eagle"):
            found.append(
                f"head.parallel: {title} drafts with no masks; the nearest that is served: "
                "format=vllm or speculators, or train with head.parallel=false"
            )
        elif head.cfg.parallel and head.cfg.mask_token < 0:
            found.append(MASK)
        taps = head.taps
        if list(taps) != sorted(set(taps)):
            found.append(
                f"head.taps: {list(taps)} do not ascend, and engines sort them; the nearest that "
                "is served: train with ascending taps"
            )
        if facts.layers in taps:
            found.append(
                f"head.taps: {facts.layers} is the output after the final norm here, and before it "
                f"in engines; the nearest that is served: train with taps below {facts.layers}"
            )
        return found

    def rows(self, sizes: Sizes) -> list[TensorRow]:
        """See HeadLayout."""
        return [
            TensorRow("fc.weight", "net.fc.weight", "D F*D"),
            TensorRow("fc_norm.{f}.weight", "net.fc_norm.{f}.weight", "D", when="fc_norm"),
            TensorRow("input_norm.weight", "net.input_norm.weight", "F*D", when="input_norm"),
            TensorRow(f"{self.prefix}input_layernorm.weight", "net.embed_norm.weight", "D"),
            TensorRow(f"{self.prefix}hidden_norm.weight", "net.hidden_norm.weight", "D"),
            *body(self.prefix),
            TensorRow("mask_hidden", "mask_hidden", "1 F*D", when="mask"),
            TensorRow("norm.weight", "net.norm.weight", "D"),
            TensorRow("lm_head.weight", "net.lm_head.weight", "Vd D"),
            TensorRow("d2t", "d2t", "Vd", when="map", dtype="int64"),
            TensorRow("t2d", "", "V", when="map", dtype="bool", optional=True),
            TensorRow("embed_tokens.weight", "", "V D", optional=True),
        ]

    def sizes(self, head: Eagle3Head, facts: Facts) -> dict[str, int]:
        """See HeadLayout."""
        return letters(head.cfg, head.config_json()["layer"], len(head.taps), facts.vocab)

    def state(self, head: Eagle3Head, target: Target, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """See HeadLayout. The mask's features lie side by side."""
        state = dict(head.state_dict())
        if head.cfg.parallel:
            state["mask_hidden"] = state["net.mask_feats"].reshape(1, -1)
        return state

    def config(self, head: Eagle3Head, facts: Facts, dtype: str) -> dict[str, Any]:
        """See HeadLayout."""
        taps = list(head.taps)
        ids: dict[str, Any] = {}
        if tuple(taps) != facts.default_taps:
            ids = {
                "eagle_aux_hidden_state_layer_ids": taps,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in taps]},
            }
        parallel = head.cfg.parallel
        return {
            "architectures": ["PeagleLlamaForCausalLM" if parallel else "LlamaForCausalLMEagle3"],
            **({"pard_token": head.cfg.mask_token} if parallel else {}),
            **llama.fields(head.config_json()["layer"], facts, dtype),
            **llama.window(head.cfg.sliding_window, head.cfg.layers),
            "draft_vocab_size": head.cfg.draft_vocab or facts.vocab,
            "target_hidden_size": facts.hidden,
            "num_aux_hidden_states": len(taps),
            **{t: getattr(head.cfg, o) for o, t in NORMS.items()},
            **ids,
        }

    def taps(self, foreign: Foreign, target: Target) -> tuple[int, ...]:
        """The taps that a config means: vLLM's list, else the nested one as vLLM reads it,
        else the default.
        """
        config = foreign.config
        nested = config.get("eagle_config")
        given = config.get("eagle_aux_hidden_state_layer_ids")
        if not given and isinstance(nested, dict):
            given = nested.get("eagle_aux_hidden_state_layer_ids")
        deep = target.num_layers
        if not given:
            return (2, deep // 2, deep - 3)
        if not isinstance(given, list) or not all(isinstance(k, int) for k in given):
            refuse(
                foreign,
                f"eagle_aux_hidden_state_layer_ids: {given!r}; expected a list of whole numbers",
            )
        wrong = [k for k in given if not 0 <= k < deep]
        if wrong or given != sorted(set(given)):
            refuse(
                foreign,
                f"eagle_aux_hidden_state_layer_ids: {given}; expected ascending numbers among the "
                f"target's layers 0..{deep - 1}",
            )
        return tuple(given)

    def described(self, foreign: Foreign) -> dict[str, Any]:
        """The LlamaConfig's keys. Automodel leaves the number of the target's layers there, and
        builds one."""
        config = foreign.config
        if config.get("architectures") == [AUTOMODEL] and not config.get("parallel_drafting"):
            return {**config, "num_hidden_layers": 1}
        return config

    def renamed(self, foreign: Foreign) -> dict[str, Tensor]:
        """The tensors by this layout's names."""
        tensors = {}
        for name, tensor in foreign.tensors.items():
            name = name.removeprefix("model.")
            for old in ("midlayer.", "layers.0."):
                name = self.prefix + name[len(old) :] if name.startswith(old) else name
            if not name.endswith("rotary_emb.inv_freq"):
                tensors[name] = tensor
        return tensors

    def read(self, foreign: Foreign, target: Target) -> Head:
        """See HeadLayout. An LM head that the file lacks is the target's own."""
        config = foreign.config
        described = self.described(foreign)
        layer, window = llama.layer(foreign, described), llama.window_in(foreign, described)
        check_layer(foreign, layer, target)
        tensors = self.renamed(foreign)
        there, parallel = "d2t" in tensors, "mask_hidden" in tensors
        if "lm_head.weight" not in tensors and not there:
            tensors["lm_head.weight"] = (
                (target.lm_head_weight.detach() * target.head.scale).float().cpu()
            )
        taps = self.taps(foreign, target)
        size = tensors["d2t"].numel() if there else target.vocab_size
        said = config.get("draft_vocab_size")
        if said not in (None, size):
            refuse(foreign, f"draft_vocab_size: {said} in config.json, the weights hold {size}")
        flags: dict[str, Any] = {ours: bool(config.get(theirs)) for ours, theirs in NORMS.items()}
        nested = config.get("eagle_config")
        if isinstance(nested, dict) and "norm_before_fc" in nested:
            flags["norm_joined"] = bool(nested["norm_before_fc"])
        cfg = EagleConfig(
            kind="eagle3",
            taps=list(taps),
            draft_vocab=size if there else 0,
            parallel=parallel,
            sliding_window=window,
            **flags,
        )
        sizes = letters(cfg, layer, len(taps), target.vocab_size)
        state = self.checked(foreign, sizes, tensors)
        if parallel:
            cfg = replace(cfg, mask_token=self._mask(foreign, target))
            given = torch.tensor([cfg.mask_token], device=target.device)
            state["net.mask_embed"] = vocab.table(target, given).detach().float().cpu()
            state["net.mask_feats"] = state.pop("mask_hidden").view(len(taps), -1)
        if there:
            check_draft_map(foreign, tensors, target.vocab_size)
        check_same(foreign, tensors, embedding(target))
        check_window(foreign, cfg)
        head = Eagle3Head(cfg, layer, taps, target.vocab_size, target.num_layers)
        head.load_state_dict(state)
        return head.to(target.device)

    def _mask(self, foreign: Foreign, target: Target) -> int:
        """The token whose embedding is the mask's. Raises UserError where there is none."""
        token = foreign.config.get("pard_token", foreign.config.get("mask_token_id"))
        if type(token) is not int or not 0 <= token < target.vocab_size:
            found = f"pard_token: {token!r}; expected a token of the target's vocabulary"
            refuse(foreign, found)
        return int(token)


def letters(cfg: EagleConfig, layer: dict[str, Any], features: int, vocab: int) -> dict[str, int]:
    """The letters of the tables for such a head."""
    return {
        **llama.sizes(layer, vocab, wide=2),
        "F": features,
        "Vd": cfg.draft_vocab or vocab,
        "map": cfg.draft_vocab or 0,
        "fc_norm": cfg.norm_before_fc,
        "input_norm": cfg.norm_joined,
        "mask": cfg.parallel,
    }


class Eagle3Sglang(Eagle3Vllm):
    """SGLang: the same file."""

    format, engine, serves = "sglang", engines.SGLANG, engines.SGLANG_EAGLE3

    def refusals(self, head: Eagle3Head, facts: Facts) -> list[str]:
        """See HeadLayout."""
        found = super().refusals(head, facts)
        if 0 in head.taps:
            found.append(
                "head.taps: SGLang cannot name the embeddings (its number would be -1); the "
                "nearest that is served: format=vllm, or train with taps from 1 on"
            )
        return found


class Eagle3Original(Eagle3Vllm):
    """The original repository: three fixed layers, none of the further norms."""

    format, engine, serves = "eagle", engines.EAGLE_CODE, engines.EAGLE_CODE_TARGETS

    def refusals(self, head: Eagle3Head, facts: Facts) -> list[str]:
        """See HeadLayout."""
        found = super().refusals(head, facts)
        if tuple(head.taps) != facts.default_taps:
            found.append(
                f"head.taps: {list(head.taps)}; the original code reads {list(facts.default_taps)} "
                "always; the nearest that is served: format=vllm"
            )
        return found

    def config(self, head: Eagle3Head, facts: Facts, dtype: str) -> dict[str, Any]:
        """See HeadLayout."""
        keys = ("target_hidden_size", "num_aux_hidden_states", *NORMS.values())
        config = super().config(head, facts, dtype)
        return {
            **{k: v for k, v in config.items() if k not in keys},
            "architectures": ["LlamaForCausalLM"],
        }
