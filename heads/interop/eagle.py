"""EAGLE-1 and EAGLE-3 heads (EAGLE-3.1 and P-EAGLE among them) for vLLM, for SGLang and in the
format of the speculators package; folders of the original repository are read too.

EAGLE-1: vLLM's loader drops fc.bias without a word, SGLang always has one. The LM head is the
target's; a draft vocabulary is a matter of our engine and is not exported.

EAGLE-3: our norm_before_fc (a norm for each tapped feature) is `fc_norm` there, their
`norm_before_fc` our head.norm_joined. Our tap k is hidden_states[k]: vLLM reads the top-level
list as k, SGLang the nested one and adds one, so that heads with unusual taps name both.

Sliding window: vLLM takes `sliding_window` where `layer_types` calls a layer
sliding_attention; SGLang takes it from --speculative-draft-window-size alone.

Shape letters: D width, V vocabulary, F tapped features, Vd draft vocabulary.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.config import MOST_DEPTH
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle1Head, Eagle3Head, EagleHead
from outrider.heads.interop import engines, layout
from outrider.heads.interop.reading import Foreign

# Flags: ours -> theirs
NORMS = {
    "norm_before_fc": "fc_norm",
    "norm_joined": "norm_before_fc",
    "norm_output": "norm_output",
    "norm_before_residual": "norm_before_residual",
}
# Tensors, behind "net.": ours -> theirs, "LAYER." the prefix of the layer
NAMES = {
    "layers.0.": "LAYER.",
    "embed_norm.": "LAYER.input_layernorm.",
    "hidden_norm.": "LAYER.hidden_norm.",
}
AUTOMODEL = "LlamaEagle3DraftModel"
TAPS = "eagle_aux_hidden_state_layer_ids"


def layer_refusals(head: EagleHead, engine: engines.Engine) -> list[str]:
    """Return why an engine cannot run this draft layer."""
    found, layer = [], head.config_json()["layer"]
    three = head.kind == "eagle3"
    if head.cfg.sliding_window is not None and not (three and engine.loads("sliding_window")):
        found.append(
            f"head.sliding_window: {head.cfg.sliding_window}; {engine.title} reads none from a "
            "head's folder (vLLM does, of EAGLE-3): train with head.sliding_window=null"
        )
    if layer["num_hidden_layers"] != 1:
        found.append(
            f"head.layers: {layer['num_hidden_layers']}; engines differ on further layers (names "
            "and norms): train with head.layers=1"
        )
    if layer["hidden_act"] != "silu":
        found.append(
            f"hidden_act: {layer['hidden_act']}; engines' layers know silu alone: train a new head"
        )
    return found


def eagle3_refusals(head: Eagle3Head, engine: engines.Engine, target: Target) -> list[str]:
    """Return why an engine cannot run an EAGLE-3 head."""
    found, cfg = layer_refusals(head, engine), head.cfg
    for key, part in engines.NORMS.items():
        if getattr(cfg, key) and not engine.loads(part):
            found.append(
                f"head.{key}: {engine.title} has no such norm: format=vllm, or train with "
                f"head.{key}=false (recipe smollm2_eagle3_portable)"
            )
    if cfg.parallel and not engine.loads("p_eagle"):
        found.append(
            f"head.parallel: {engine.title} drafts with no masks: format=vllm or speculators, or "
            "train with head.parallel=false"
        )
    elif cfg.parallel and cfg.mask_token == -1:
        found.append(layout.MASK)
    if list(head.taps) != sorted(set(head.taps)):
        found.append(
            f"head.taps: {list(head.taps)} do not ascend, and engines sort them: train with "
            "ascending taps"
        )
    if target.num_layers in head.taps:
        found.append(
            f"head.taps: {target.num_layers} is the output after the final norm here, before it in "
            f"engines: train with taps below {target.num_layers}"
        )
    return found


def check_layer(foreign: Foreign, config: Mapping[str, Any], cfg: EagleConfig) -> None:
    """Raise UserError for more than one layer, and for a window that a usual draft fills."""
    count = config.get("num_hidden_layers", 1)
    if count != 1:
        layout.refuse(
            foreign, f"num_hidden_layers: {count!r:.40}; draft heads of one layer are read"
        )
    if wrong := [line for line in cfg.validate() if line.startswith("sliding_window")]:
        layout.refuse(foreign, *wrong)


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors without the prefix and the tables that some programs save."""
    return {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")
    }


# -- EAGLE-1


class Eagle1(layout.Layout[Eagle1Head]):
    """A LlamaConfig; vLLM's method "eagle", SGLang's EAGLE."""

    def refusals(self, head: Eagle1Head, target: Target, name: str) -> list[str]:
        found = super().refusals(head, target, name) + layer_refusals(head, self.engine)
        if self.format == "vllm" and head.cfg.fc_bias and bool(head.net.fc.bias.any()):
            found.append(
                "head.fc_bias: vLLM drops the bias of fc without a word: format=sglang, or a head "
                "trained here (no bias)"
            )
        return found

    def tensors(self, head: Eagle1Head, target: Target) -> dict[str, Tensor]:
        found = {
            name.removeprefix("net."): value
            for name, value in head.state_dict().items()
            if name not in ("d2t", "net.fc.bias")
        }
        if self.format == "sglang":
            zeros = torch.zeros(target.hidden_size)
            found["fc.bias"] = head.net.fc.bias if head.cfg.fc_bias else zeros
        return found

    def config(self, head: Eagle1Head, target: Target, name: str, dtype: str) -> dict[str, Any]:
        sglang, scale = self.format == "sglang", float(target.head.scale)
        return {
            "architectures": ["LlamaForCausalLMEagle" if sglang else "LlamaForCausalLM"],
            **layout.layer_fields(head.config_json()["layer"], target, dtype),
            **({"bias": True} if sglang else {}),
            **({} if scale == 1 else {"logit_scale": scale}),
        }


def read_eagle1(foreign: Foreign, target: Target) -> Head:
    """Return a head of ours. A bias of zeros is dropped, another one kept (head.fc_bias).
    Raises UserError that lists all that does not fit."""
    config, last = foreign.config, target.num_layers
    layer = layout.read_layer(foreign, config, target)
    copies = {layout.EMBEDDING: target.embedding_weight, layout.LM_HEAD: target.lm_head_weight}
    tensors = layout.without_copies(foreign, plain_names(foreign.tensors), copies)
    there = "fc.bias" in tensors
    if there != bool(config.get("bias", there)):
        what = "a bias where none is expected" if there else "missing"
        layout.refuse(foreign, f"fc.bias: {what}: bias in config.json is {str(not there).lower()}")
    cfg = EagleConfig(
        kind="eagle1",
        draft_vocab=0,
        steps=1,
        step_decay=1.0,
        feature_loss=1.0,
        fc_bias=there and bool(tensors["fc.bias"].any()),
        sliding_window=layout.window_in(foreign, config),
    )
    check_layer(foreign, layer, cfg)
    if not cfg.fc_bias:
        tensors.pop("fc.bias", None)
    make = functools.partial(Eagle1Head, cfg, layer, (last,), target.vocab_size, last)
    return layout.loaded(foreign, tensors, target, make, lambda name: name.removeprefix("net."), {})


# -- EAGLE-3


class Eagle3(layout.Layout[Eagle3Head]):
    """vLLM's method "eagle3", SGLang's EAGLE3: a LlamaConfig; speculators: its own keys around
    one."""

    def refusals(self, head: Eagle3Head, target: Target, name: str) -> list[str]:
        found = super().refusals(head, target, name) + eagle3_refusals(head, self.engine, target)
        if self.format == "sglang" and 0 in head.taps:
            found.append(
                "head.taps: SGLang cannot name the embeddings (its number would be -1): "
                "format=vllm, or train with taps from 1 on"
            )
        return found

    def tensors(self, head: Eagle3Head, target: Target) -> dict[str, Tensor]:
        if self.format == "speculators":
            return {**eagle3_tensors(head, "layers.0"), layout.EMBEDDING: target.embedding_weight}
        return eagle3_tensors(head, "midlayer")

    def config(self, head: Eagle3Head, target: Target, name: str, dtype: str) -> dict[str, Any]:
        cfg, taps = head.cfg, list(head.taps)
        layer = layout.layer_fields(head.config_json()["layer"], target, dtype)
        if cfg.sliding_window is not None:
            kinds = ["sliding_attention"] * cfg.layers
            layer |= {"sliding_window": cfg.sliding_window, "layer_types": kinds}
        about = {
            "draft_vocab_size": cfg.draft_vocab or target.vocab_size,
            "target_hidden_size": target.hidden_size,
            **{theirs: getattr(cfg, ours) for ours, theirs in NORMS.items()},
        }
        if self.format == "speculators":
            return {
                "architectures": ["PEagleSpeculator" if cfg.parallel else "Eagle3Speculator"],
                **layout.speculators(
                    "peagle" if cfg.parallel else "eagle3", target, name, cfg.depth
                ),
                **({"mask_token_id": cfg.mask_token} if cfg.parallel else {}),
                "transformer_layer_config": layer,
                **about,
                TAPS: taps,
                "torch_dtype": dtype,
            }
        named = {TAPS: taps, "eagle_config": {TAPS: [k - 1 for k in taps]}}
        usual = taps == usual_taps(target.num_layers)
        return {
            "architectures": [
                "PeagleLlamaForCausalLM" if cfg.parallel else "LlamaForCausalLMEagle3"
            ],
            **({"pard_token": cfg.mask_token} if cfg.parallel else {}),
            **layer,
            **about,
            "num_aux_hidden_states": len(taps),
            **({} if usual else named),
        }


def eagle3_tensors(head: Eagle3Head, prefix: str) -> dict[str, Tensor]:
    """Return a file's tensors; the mask's features lie side by side. prefix: of the layer."""
    found = {
        theirs(name, prefix): value.reshape(1, -1) if name == "net.mask_feats" else value
        for name, value in head.state_dict().items()
        if name != "net.mask_embed"
    }
    return layout.with_map(head, found, int(head.vocab_size))


def theirs(name: str, prefix: str) -> str:
    """Return an engine's name for a tensor of ours. prefix: of the layer."""
    name = name.removeprefix("net.").replace("mask_feats", "mask_hidden")
    for ours, other in NAMES.items():
        if name.startswith(ours):
            return other.replace("LAYER", prefix) + name.removeprefix(ours)
    return name


def usual_taps(layers: int) -> list[int]:
    """Return the inner layers that engines and the original code read when a config names none."""
    return [2, layers // 2, layers - 3]


def taps_in(foreign: Foreign, target: Target) -> list[int]:
    """Return the taps that a config means: vLLM's list, else the nested one as vLLM reads
    it, else the default. Raises UserError for layers that the target does not have."""
    nested, deep = foreign.config.get("eagle_config"), target.num_layers
    given = foreign.config.get(TAPS)
    if not given and isinstance(nested, dict):
        given = nested.get(TAPS)
    if not given:
        return usual_taps(deep)
    if not isinstance(given, list) or not all(type(k) is int for k in given):
        layout.refuse(foreign, f"{TAPS}: {given!r:.80}; expected a list of whole numbers")
    if given != sorted({k for k in given if 0 <= k < deep}):
        layout.refuse(
            foreign,
            f"{TAPS}: {given!r:.80}; expected ascending numbers among the target's layers "
            f"0..{deep - 1}",
        )
    return given


def read_eagle3(foreign: Foreign, target: Target) -> Head:
    """Return a head of ours. An LM head that the file lacks is the target's own. Raises
    UserError that lists all that does not fit."""
    config, shape = foreign.config, layout.described(foreign, "llama")
    if config.get("architectures") == [AUTOMODEL] and not config.get("parallel_drafting"):
        shape = {**shape, "num_hidden_layers": 1}  # Automodel leaves the target's there
    layer = layout.read_layer(foreign, shape, target)
    tensors = {
        "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: t
        for name, t in plain_names(foreign.tensors).items()
    }
    copies = {layout.EMBEDDING: target.embedding_weight}
    tensors = layout.without_copies(foreign, tensors, copies)
    ids = layout.draft_ids(foreign, tensors, target.vocab_size)
    if layout.LM_HEAD not in tensors:
        print(
            f"note: {foreign.folder}: holds no LM head; the target's rows are taken",
            file=sys.stderr,
        )
        rows = target.lm_head_weight.detach().cpu()
        rows = rows if ids is None else rows[ids]
        tensors[layout.LM_HEAD] = (rows * target.head.scale).float()
    taps, size = taps_in(foreign, target), target.vocab_size if ids is None else ids.numel()
    if config.get("draft_vocab_size", size) not in (None, size):
        said = config["draft_vocab_size"]
        layout.refuse(
            foreign, f"draft_vocab_size: {said!r:.40} in config.json, the weights hold {size}"
        )
    flags: dict[str, Any] = {ours: bool(config.get(theirs)) for ours, theirs in NORMS.items()}
    nested = config.get("eagle_config")
    if isinstance(nested, dict) and "norm_before_fc" in nested:
        flags["norm_joined"] = bool(nested["norm_before_fc"])
    parallel = "mask_hidden" in tensors
    cfg = EagleConfig(
        kind="eagle3",
        taps=taps,
        draft_vocab=0 if ids is None else size,
        parallel=parallel,
        mask_token=mask_token(foreign, target) if parallel else -1,
        sliding_window=layout.window_in(foreign, shape),
        depth=layout.depth_in(config, MOST_DEPTH) or EagleConfig.depth,
        **flags,
    )
    check_layer(foreign, layer, cfg)
    known = {}
    if parallel:
        token = torch.tensor([cfg.mask_token], device=target.device)
        known["net.mask_embed"] = vocab.table(target, token)
        if tensors["mask_hidden"].shape == (1, len(taps) * target.hidden_size):
            tensors["mask_hidden"] = tensors["mask_hidden"].view(len(taps), -1)
    make = functools.partial(
        Eagle3Head, cfg, layer, tuple(taps), target.vocab_size, target.num_layers
    )
    return layout.loaded(
        foreign, tensors, target, make, lambda name: theirs(name, "midlayer"), known
    )


def mask_token(foreign: Foreign, target: Target) -> int:
    """Return the token whose embedding is the mask's. Raises UserError where there is none."""
    token = foreign.config.get("pard_token", foreign.config.get("mask_token_id"))
    if type(token) is not int or not 0 <= token < target.vocab_size:
        layout.refuse(
            foreign, f"pard_token: {token!r:.40}; expected a token of the target's vocabulary"
        )
    return int(token)
