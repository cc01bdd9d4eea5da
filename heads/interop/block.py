"""Block heads in engines' layouts: DFlash for vLLM, DSpark in the layout of DeepSpec, both for
SGLang and in the format of the speculators package.

What the formats cannot hold is refused by its key. The divisors of the features are folded
into fc, a keys' norm without weights is written as ones. Layers are numbered by their outputs,
so our tap k is their k - 1; speculators numbers hidden_states as we do. Whether the rows of a
block see each other is written out in every place that an engine looks at: what vLLM takes for
a speculators folder without `sliding_window_non_causal` has changed twice.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.conf.typed import faults
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.block.config import BlockConfig
from outrider.heads.block.head import BlockHead, DFlashHead, DSparkHead
from outrider.heads.interop import layout
from outrider.heads.interop.reading import Foreign

FAMILY: dict[str, type[BlockHead]] = {"dflash": DFlashHead, "dspark": DSparkHead}
# Tensors that are called otherwise, behind "net.": ours -> theirs
NAMES = {
    "markov_in": "markov_head.markov_w1.weight",
    "markov_out": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}
FROM_TARGET = ("net.mask", "net.scale")  # of ours, and in no file


def theirs(name: str) -> str:
    """Return an engine's name for a tensor of ours."""
    name = name.removeprefix("net.")
    return NAMES.get(name) or re.sub(r"^(layers\.\d+\.)([qkvo]_)", r"\1self_attn.\2", name)


@torch.no_grad()
def folded(head: Head) -> Any:
    """Return a copy of any head; of a block head one whose features' divisors are in its fc."""
    twin: Any = copy.deepcopy(head)
    if isinstance(head, BlockHead):
        twin.net.fc.weight.div_(twin.net.scale.flatten())
        twin.net.scale.fill_(1.0)
    return twin


def block_tensors(head: BlockHead, target: Target) -> dict[str, Tensor]:
    """Return a file's tensors: fc with the features' divisors, the keys' norms, and an LM
    head over a draft vocabulary."""
    found = {theirs(n): v for n, v in head.state_dict().items() if n not in FROM_TARGET}
    found["fc.weight"] = found["fc.weight"] / head.net.scale.flatten()
    for layer in range(head.cfg.layers):
        key, query = (f"layers.{layer}.self_attn.{part}_norm.weight" for part in "kq")
        found.setdefault(key, torch.ones_like(found[query]))
    if head.cfg.draft_vocab:
        found.setdefault(layout.LM_HEAD, head.projection(target).detach())
    return layout.with_map(head, found, target.vocab_size)


def block_refusals(head: BlockHead, target: Target) -> list[str]:
    """Return why no engine's layout holds this head."""
    cfg, found = head.cfg, []
    if cfg.mask_token == -1:
        found.append(layout.MASK)
    if 0 in head.taps:
        found.append("head.taps: 0, the embeddings, would be layer -1: train with taps from 1 on")
    if cfg.kind == "dflash":
        for key in ("markov_rank", "confidence"):
            if getattr(cfg, key):
                found.append(f"head.{key}: DFlash has no such part; train with head=dspark")
    elif not cfg.markov_rank:
        found.append("head.markov_rank: 0, and engines want one; train with head.markov_rank=64")
    act = head.config_json()["layer"]["hidden_act"]
    if act != "silu":
        found.append(f"hidden_act: {act}; engines know silu alone: train a new head")
    if cfg.share_lm_head and not cfg.draft_vocab and target.head.scale != 1:
        found.append("head.share_lm_head: the target scales its logits; train with false")
    return found


class Block(layout.Layout[BlockHead]):
    """Plain names; keys beside a Qwen3 config, of speculators around one."""

    def refusals(self, head: BlockHead, target: Target, name: str) -> list[str]:
        found = super().refusals(head, target, name) + block_refusals(head, target)
        cfg = head.cfg
        if cfg.key_norm and cfg.layers > 1:
            found.append(
                "head.key_norm: vLLM's CPU build reads the first layer's for all; train with "
                "head.key_norm=false, or head.layers=1"
            )
        if self.format == "sglang" and not (cfg.share_lm_head and not cfg.draft_vocab):
            nearest = "vllm or speculators" if self.kind == "dflash" else "speculators"
            found.append(
                f"head.share_lm_head: {self.engine.title} drafts through the target's LM head "
                f"alone; train with it and head.draft_vocab=0, or export with format={nearest}"
            )
        return found

    def tensors(self, head: BlockHead, target: Target) -> dict[str, Tensor]:
        found = block_tensors(head, target)
        if self.format == "deepspec":
            found[layout.EMBEDDING] = target.embedding_weight
        return found

    def config(self, head: BlockHead, target: Target, name: str, dtype: str) -> dict[str, Any]:
        cfg, plain = head.cfg, self.kind == "dflash"
        layer = {
            **layout.layer_fields(head.config_json()["layer"], target, dtype),
            "model_type": "qwen3",
            "layer_types": ["full_attention"] * cfg.layers,
        }
        about: dict[str, Any] = {
            "block_size": cfg.block,
            "draft_vocab_size": cfg.draft_vocab or target.vocab_size,
            "sample_from_anchor": not plain,
        }
        if cfg.markov_rank:
            about |= {
                "markov_rank": cfg.markov_rank,
                "markov_head_type": "vanilla",
                "enable_confidence_head": cfg.confidence > 0,
                "confidence_head_with_markov": cfg.confidence > 0,
            }
        if self.format == "speculators":
            return {
                "architectures": ["DFlashSpeculator" if plain else "DSparkSpeculator"],
                **layout.speculators(self.kind, target, name, cfg.slots),
                "transformer_layer_config": layer,
                **about,
                "target_hidden_size": target.hidden_size,
                "aux_hidden_state_layer_ids": list(head.taps),
                "mask_token_id": cfg.mask_token,
                "sliding_window_non_causal": True,
                "torch_dtype": dtype,
            }
        numbers = {
            "mask_token_id": cfg.mask_token,
            "target_layer_ids": [tap - 1 for tap in head.taps],
        }
        return {
            **layer,
            "architectures": ["DFlashDraftModel" if plain else "Qwen3DSparkModel"],
            **about,
            "num_target_layers": target.num_layers,
            "is_causal": False,
            **({"dflash_config": {**numbers, "causal": False}} if plain else numbers),
        }


# -- reading


def numbers_in(foreign: Foreign, kind: str) -> dict[str, Any]:
    """Return what a config says of the mask, whether a row sees earlier ones alone, the
    taps as we count them, and whether slots begin at the anchor. Without
    sliding_window_non_causal programs disagree on a folder of speculators."""
    config, nested = foreign.config, foreign.config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    given, wide, native = {**config, **nested}, "sliding_window_non_causal", kind == "dspark"
    ours = "speculators_model_type" in config
    key = "aux_hidden_state_layer_ids" if ours else "target_layer_ids"
    layers = given.get(key)
    if not isinstance(layers, list) or not all(type(k) is int for k in layers):
        layout.refuse(foreign, f"{key}: {layers!r:.80}; expected a list of whole numbers")
    if ours and type(config.get(wide)) is not bool:
        layout.refuse(
            foreign,
            f"{wide}: {config.get(wide)!r:.40}; engines would serve the head causally or not "
            "by their version: write true for rows that see each other, else false",
        )
    plain = config.get("is_causal", nested.get("causal", False))
    return {
        "mask_token_id": given.get("mask_token_id"),
        "causal": not config[wide] if ours else plain,
        "taps": layers if ours else [k + 1 for k in layers],
        "sample_from_anchor": config.get("sample_from_anchor", native and not ours),
    }


def check_numbers(
    foreign: Foreign, target: Target, shape: Mapping[str, Any], said: dict[str, Any], kind: str
) -> None:
    """Raise UserError for what this repository does not run. said: see numbers_in; shape:
    the keys of the layers."""
    found, deep, config = [], target.num_layers, foreign.config
    mask, taps, first = said["mask_token_id"], said["taps"], said["sample_from_anchor"]
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        found.append(f"mask_token_id: {mask!r:.40}; expected a token of the target's vocabulary")
    if said["causal"] is not False:
        found.append(f"causal: {said['causal']!r:.40}; rows that see each other are read")
    if first is not (kind == "dspark"):
        wanted = str(kind == "dspark").lower()
        found.append(f"sample_from_anchor: {first!r:.40}; {kind} heads are read with {wanted}")
    if not taps or taps != sorted({tap for tap in taps if 0 < tap < deep}):
        found.append(
            f"target layers: {[tap - 1 for tap in taps]!r:.80}; expected ascending numbers among "
            f"the outputs 0..{deep - 2} below the target's last layer"
        )
    kinds, nested = shape.get("layer_types"), config.get("dflash_config")
    slides = isinstance(kinds, list) and "sliding_attention" in kinds
    if slides or (isinstance(nested, dict) and nested.get("use_swa")):
        found.append("layer_types: sliding attention; heads with full attention are read")
    if config.get("markov_head_type", "vanilla") != "vanilla":
        found.append(f"markov_head_type: {config['markov_head_type']!r:.40}; vanilla is read")
    if config.get("enable_confidence_head") and not config.get("confidence_head_with_markov"):
        found.append("confidence_head_with_markov: not true; heads with it are read")
    if found:
        layout.refuse(foreign, *found)


def read_block(foreign: Foreign, target: Target, kind: str) -> Head:
    """Return a head of ours. An LM head that the file lacks is the target's own. Raises
    UserError that lists all that does not fit."""
    config, shape = foreign.config, layout.described(foreign, "qwen3")
    layer, said = layout.read_layer(foreign, shape, target), numbers_in(foreign, kind)
    tensors = {n.removeprefix("model."): t for n, t in foreign.tensors.items()}
    copies = {layout.EMBEDDING: target.embedding_weight}
    tensors = layout.without_copies(foreign, tensors, copies)
    ids = layout.draft_ids(foreign, tensors, target.vocab_size)
    check_numbers(foreign, target, shape, said, kind)
    near = tensors.get(NAMES["markov_in"])
    norms = {n: t for n, t in tensors.items() if n.endswith("k_norm.weight")}
    learned = len(norms) != layer["num_hidden_layers"] or not all(
        bool((norm == 1).all()) for norm in norms.values()
    )
    if not learned:
        tensors = {n: t for n, t in tensors.items() if n not in norms}
    cfg = BlockConfig(
        kind="dspark" if kind == "dspark" else "dflash",
        block=layout.number(foreign, config, "block_size"),
        layers=layer["num_hidden_layers"],
        taps=said["taps"],
        draft_vocab=0 if ids is None else ids.numel(),
        share_lm_head=layout.LM_HEAD not in tensors,
        markov_rank=near.shape[-1] if kind == "dspark" and near is not None and near.dim() else 0,
        mask_token=said["mask_token_id"],
        confidence=float(NAMES["confidence.weight"] in tensors),
        key_norm=learned,
    )
    if wrong := faults(cfg):
        layout.refuse(foreign, *wrong)
    if depth := layout.depth_in(config, cfg.slots - 1):
        cfg = replace(cfg, depth=depth)
    make = functools.partial(
        FAMILY[kind], cfg, layer, tuple(cfg.taps), target.vocab_size, target.num_layers
    )
    mask = vocab.table(target, torch.tensor([cfg.mask_token], device=target.device))[0]
    scale = torch.ones(len(cfg.taps), target.hidden_size)
    known = {"net.mask": mask, "net.scale": scale}
    return layout.loaded(foreign, tensors, target, make, theirs, known)
