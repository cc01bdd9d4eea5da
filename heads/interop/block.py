"""Block heads in engines' layouts: DFlash for vLLM, DSpark in the layout of DeepSpec, both for
SGLang and in the layout of the speculators package.

What the formats cannot hold is refused by its key. The divisors of the features are folded
into fc, a keys' norm without weights is written as ones. Layers are numbered by their outputs,
so our tap k is their k - 1; speculators numbers hidden_states as we do. Whether the rows of a
block see each other is written out in every place that an engine looks at: what vLLM takes for
a speculators folder without `sliding_window_non_causal` has changed twice.

Shape letters: as in eagle1.py, and F features, Vd draft vocabulary, R rank, S head size, L
layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.conf.typed import faults
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.block.config import BlockConfig
from outrider.heads.block.head import BlockHead, DFlashHead, DSparkHead
from outrider.heads.interop import engines, llama
from outrider.heads.interop.eagle3 import MASK
from outrider.heads.interop.layout import (
    Facts,
    HeadLayout,
    check_draft_map,
    check_same,
    embedding,
    number,
    refuse,
)
from outrider.heads.interop.reading import Foreign
from outrider.heads.interop.speculators import about, first, inner, nameless
from outrider.heads.interop.table import Sizes, TensorRow

NORMED = {"input_layernorm": "D", "self_attn.q_norm": "S", "self_attn.k_norm": "S"}
LAYER = {**llama.LAYER, **NORMED}  # we leave out "self_attn."


def refusals(head: BlockHead, facts: Facts) -> list[str]:
    """Why no engine's layout holds this head."""
    cfg, found = head.cfg, []
    if cfg.mask_token < 0:
        found.append(MASK)
    if 0 in head.taps:
        found.append(
            "head.taps: 0, the embeddings, would be layer -1; the nearest that is served: train "
            "with taps from 1 on"
        )
    if cfg.kind == "dflash":
        for key in ("markov_rank", "confidence"):
            if getattr(cfg, key):
                found.append(f"head.{key}: DFlash has no such part; train with head=dspark")
    elif not cfg.markov_rank:
        found.append("head.markov_rank: 0, and engines want one; train with head.markov_rank=64")
    if head.config_json()["layer"]["hidden_act"] != "silu":
        act = head.config_json()["layer"]["hidden_act"]
        found.append(f"head.hidden_act: {act}; engines know silu alone: train with silu")
    if cfg.share_lm_head and not cfg.draft_vocab and facts.scale != 1:
        found.append("head.share_lm_head: the target scales its logits; train with false")
    return found


class BlockNative(HeadLayout[BlockHead]):
    """What the layouts of one kind share: plain names, keys beside a Qwen3 config."""

    family: ClassVar[type[BlockHead]]

    def refusals(self, head: BlockHead, facts: Facts) -> list[str]:
        """See HeadLayout."""
        found = super().refusals(head, facts) + refusals(head, facts)
        if head.cfg.key_norm and head.cfg.layers > 1:
            found.append(
                f"head.key_norm: {head.cfg.layers} layers, of whose norms vLLM's CPU build reads "
                "the first for all; train with head.key_norm=false, or head.layers=1"
            )
        return found

    def rows(self, sizes: Sizes) -> list[TensorRow]:
        """See HeadLayout."""
        layer = [
            TensorRow(
                f"layers.{{l}}.{theirs}.weight",
                f"net.layers.{{l}}.{theirs.removeprefix('self_attn.')}.weight",
                shape,
            )
            for theirs, shape in LAYER.items()
        ]
        return [
            TensorRow("fc.weight", "net.fc.weight", "D F*D"),
            TensorRow("hidden_norm.weight", "net.hidden_norm.weight", "D"),
            *layer,
            TensorRow("norm.weight", "net.norm.weight", "D"),
            TensorRow("lm_head.weight", "net.lm_head.weight", "Vd D", when="own"),
            TensorRow("d2t", "d2t", "Vd", when="map", dtype="int64"),
            TensorRow("t2d", "", "V", when="map", dtype="bool", optional=True),
            TensorRow("embed_tokens.weight", "", "V D", optional=True),
            TensorRow("markov_head.markov_w1.weight", "net.markov_in", "V R", when="R"),
            TensorRow("markov_head.markov_w2.weight", "net.markov_out", "Vd R", when="R"),
            TensorRow("confidence_head.proj.weight", "net.confidence.weight", "1 C", when="C"),
            TensorRow("confidence_head.proj.bias", "net.confidence.bias", "1", when="C"),
        ]

    def sizes(self, head: BlockHead, facts: Facts) -> dict[str, int]:
        """See HeadLayout."""
        cfg, layer = head.cfg, head.config_json()["layer"]
        own = not cfg.share_lm_head or bool(cfg.draft_vocab)
        return letters(cfg, layer, len(head.taps), facts.vocab) | {"own": own}

    def state(self, head: BlockHead, target: Target, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """See HeadLayout."""
        return exported(head, target)

    def parts(self, head: BlockHead) -> dict[str, Any]:
        """Keys of the Markov term and the confidence head."""
        if not head.cfg.markov_rank:
            return {}
        return {
            "markov_rank": head.cfg.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": head.cfg.confidence > 0,
            "confidence_head_with_markov": head.cfg.confidence > 0,
        }

    def layer(self, head: BlockHead, facts: Facts, dtype: str) -> dict[str, Any]:
        """Keys of the Qwen3 config that describes the layers."""
        kinds = ["full_attention"] * head.cfg.layers
        given = llama.fields(head.config_json()["layer"], facts, dtype)
        return {**given, "model_type": "qwen3", "layer_types": kinds}

    def config(self, head: BlockHead, facts: Facts, dtype: str) -> dict[str, Any]:
        """See HeadLayout."""
        cfg = head.cfg
        numbers = {
            "mask_token_id": cfg.mask_token,
            "target_layer_ids": [tap - 1 for tap in head.taps],
        }
        plain = cfg.kind == "dflash"
        more = {"dflash_config": {**numbers, "causal": False}} if plain else numbers
        return {
            **self.layer(head, facts, dtype),
            "architectures": ["DFlashDraftModel" if plain else "Qwen3DSparkModel"],
            "block_size": cfg.block,
            "num_target_layers": facts.layers,
            "draft_vocab_size": cfg.draft_vocab or facts.vocab,
            "is_causal": False,
            "sample_from_anchor": not plain,
            **more,
            **self.parts(head),
        }

    # -- reading

    def described(self, foreign: Foreign) -> dict[str, Any]:
        """The keys that describe the layers."""
        return foreign.config

    def numbers(self, foreign: Foreign) -> dict[str, Any]:
        """mask_token_id, causal, the taps as we count them, and where slots begin."""
        config = foreign.config
        nested = config.get("dflash_config")
        nested = nested if isinstance(nested, dict) else {}
        causal = config.get("is_causal", nested.get("causal", False))
        given = {**config, **nested}
        layers = given.get("target_layer_ids")
        if not isinstance(layers, list) or not all(type(k) is int for k in layers):
            refuse(foreign, f"target_layer_ids: {layers!r}; expected a list of whole numbers")
        return {
            "mask_token_id": given.get("mask_token_id"),
            "causal": causal,
            "taps": [k + 1 for k in layers],
            "anchor_first": config.get("sample_from_anchor", self.kind == "dspark"),
        }

    def read(self, foreign: Foreign, target: Target) -> Head:
        """See HeadLayout. An LM head that the file lacks is the target's own."""
        config, shape = foreign.config, self.described(foreign)
        layer, given = llama.layer(foreign, shape), self.numbers(foreign)
        tensors = {n.removeprefix("model."): t for n, t in foreign.tensors.items()}
        block = number(foreign, config, "block_size")
        there, own = "d2t" in tensors, "lm_head.weight" in tensors
        sure = "confidence_head.proj.weight" in tensors
        rank = tensors["markov_head.markov_w1.weight"].shape[-1] if self.kind == "dspark" else 0
        size = tensors["d2t"].numel() if there else target.vocab_size
        self._check(foreign, target, layer, given)
        cfg = BlockConfig(
            kind="dspark" if self.kind == "dspark" else "dflash",
            block=block,
            layers=layer["num_hidden_layers"],
            taps=given["taps"],
            draft_vocab=size if there else 0,
            share_lm_head=not own,
            markov_rank=rank,
            mask_token=given["mask_token_id"],
            confidence=float(sure),
        )
        sizes = letters(cfg, layer, len(cfg.taps), target.vocab_size) | {"own": own}
        state = self.checked(foreign, sizes, tensors)
        if there:
            check_draft_map(foreign, tensors, target.vocab_size)
        check_same(foreign, tensors, embedding(target))
        norms = [n for n in state if n.endswith("k_norm.weight")]
        cfg = replace(cfg, key_norm=any(not bool((state[n] == 1).all()) for n in norms))
        wrong = faults(cfg)
        if wrong:
            refuse(foreign, *wrong)
        taps = tuple(given["taps"])
        head = self.family(cfg, layer, taps, target.vocab_size, target.num_layers)
        if not cfg.key_norm:
            state = {n: t for n, t in state.items() if n not in norms}
        mask = torch.tensor([cfg.mask_token], device=target.device)
        state["net.mask"] = vocab.table(target, mask)[0].detach().float().cpu()
        state["net.scale"] = torch.ones_like(head.net.scale)
        head.load_state_dict(state)
        return head.to(target.device)

    def _check(
        self, foreign: Foreign, target: Target, layer: dict[str, Any], given: dict[str, Any]
    ) -> None:
        """Raises UserError for what this repository does not run."""
        found, deep, mask = [], target.num_layers, given["mask_token_id"]
        if layer["hidden_size"] != target.hidden_size:
            found.append(
                f"hidden_size: {layer['hidden_size']}; the target's is {target.hidden_size}: give "
                "the target that the head was trained for"
            )
        if type(mask) is not int or not 0 <= mask < target.vocab_size:
            found.append(f"mask_token_id: {mask!r}; expected a token of the target's vocabulary")
        if given["causal"] is not False:
            found.append(f"causal: {given['causal']!r}; rows that see each other are read")
        if given["anchor_first"] is not (self.kind == "dspark"):
            found.append(
                f"sample_from_anchor: {given['anchor_first']!r}; {self.kind} heads are read with "
                f"{str(self.kind == 'dspark').lower()}"
            )
        taps = given["taps"]
        if taps != sorted({tap for tap in taps if 0 < tap < deep}) or not taps:
            found.append(
                f"target layers: {[tap - 1 for tap in taps]}; expected ascending numbers among "
                f"the outputs 0..{deep - 2} below the target's last layer"
            )
        config = foreign.config
        kinds, nested = self.described(foreign).get("layer_types"), config.get("dflash_config")
        slides = isinstance(kinds, list) and "sliding_attention" in kinds
        if slides or (isinstance(nested, dict) and nested.get("use_swa")):
            found.append("layer_types: sliding attention; heads with full attention are read")
        if config.get("markov_head_type", "vanilla") != "vanilla":
            found.append(f"markov_head_type: {config['markov_head_type']!r}; vanilla is read")
        if config.get("enable_confidence_head") and not config.get("confidence_head_with_markov"):
            found.append("confidence_head_with_markov: not true; heads with it are read")
        if found:
            refuse(foreign, *found)


def letters(cfg: BlockConfig, layer: dict[str, Any], features: int, vocab: int) -> dict[str, int]:
    """The letters of the tables for such a head, but for "own", an LM head in the file."""
    return {
        **llama.sizes(layer, vocab),
        "F": features,
        "L": cfg.layers,
        "R": cfg.markov_rank,
        "C": (layer["hidden_size"] + cfg.markov_rank) * int(cfg.confidence > 0),
        "Vd": cfg.draft_vocab or vocab,
        "map": cfg.draft_vocab or 0,
    }


class DFlashVllm(BlockNative):
    """DFlash's own layout; vLLM, method "dflash"."""

    format, kind, engine, serves = "vllm", "dflash", engines.VLLM, engines.VLLM_EAGLE3
    family = DFlashHead


class DSparkDeepSpec(BlockNative):
    """DSpark's own layout, with the target's embedding; vLLM on a GPU, method "dspark"."""

    format, kind, engine, serves = "deepspec", "dspark", engines.VLLM, engines.VLLM_EAGLE3
    family, embeds = DSparkHead, True


class BlockSglang(BlockNative):
    """SGLang: the same file, but rows go through the target's LM head whatever the file holds."""

    format, engine, serves = "sglang", engines.SGLANG, engines.SGLANG_BLOCK

    def refusals(self, head: BlockHead, facts: Facts) -> list[str]:
        """See HeadLayout."""
        found = super().refusals(head, facts)
        if head.cfg.share_lm_head and not head.cfg.draft_vocab:
            return found
        nearest = " or ".join(["vllm"] * (self.kind == "dflash") + ["speculators"])
        return [
            *found,
            f"head.share_lm_head: {self.engine.title} drafts through the target's LM head alone, "
            "without a word on one in the file; train with head.share_lm_head=true "
            f"head.draft_vocab=0, or export with format={nearest}",
        ]


class DFlashSglang(BlockSglang):
    """SGLang, algorithm DFLASH."""

    kind, family = "dflash", DFlashHead


class DSparkSglang(BlockSglang):
    """SGLang, algorithm DSPARK."""

    kind, family = "dspark", DSparkHead


class BlockSpeculators(BlockNative):
    """One folder that names its target, which `vllm serve FOLDER` takes as the model."""

    format, engine, serves = "speculators", engines.SPECULATORS, engines.VLLM_EAGLE3
    name: ClassVar[str]

    def refusals(self, head: BlockHead, facts: Facts) -> list[str]:
        """See HeadLayout."""
        return super().refusals(head, facts) + nameless(facts)

    def config(self, head: BlockHead, facts: Facts, dtype: str) -> dict[str, Any]:
        """See HeadLayout."""
        cfg = head.cfg
        return {
            "architectures": [self.name],
            **about(self.kind, facts, cfg.slots),
            "transformer_layer_config": self.layer(head, facts, dtype),
            "draft_vocab_size": cfg.draft_vocab or facts.vocab,
            "target_hidden_size": facts.hidden,
            "block_size": cfg.block,
            "aux_hidden_state_layer_ids": list(head.taps),
            "mask_token_id": cfg.mask_token,
            "sample_from_anchor": cfg.kind == "dspark",
            "sliding_window_non_causal": True,
            **self.parts(head),
            "torch_dtype": dtype,
        }

    def described(self, foreign: Foreign) -> dict[str, Any]:
        """See BlockNative."""
        return inner(foreign, ("qwen3",))

    def numbers(self, foreign: Foreign) -> dict[str, Any]:
        """See BlockNative. Without sliding_window_non_causal programs disagree."""
        config = foreign.config
        taps, wide = config.get("aux_hidden_state_layer_ids"), "sliding_window_non_causal"
        if not isinstance(taps, list) or not all(type(k) is int for k in taps):
            found = f"aux_hidden_state_layer_ids: {taps!r}; expected a list of whole numbers"
            refuse(foreign, found)
        if type(config.get(wide)) is not bool:
            refuse(
                foreign,
                f"{wide}: {config.get(wide)!r}; engines would serve the head causally or not "
                "by their version: write true for rows that see each other, else false",
            )
        return {
            "mask_token_id": config.get("mask_token_id"),
            "causal": not config[wide],
            "taps": taps,
            "anchor_first": config.get("sample_from_anchor", False),
        }

    def read(self, foreign: Foreign, target: Target) -> Head:
        """See HeadLayout."""
        head = super().read(foreign, target)
        path = ("speculators_config", "proposal_methods", 0, "speculative_tokens")
        depth = first(foreign.config, *path)
        if type(depth) is int and 0 < depth < head.cfg.slots:
            head.cfg = replace(head.cfg, depth=depth)
        return head


class DFlashSpeculators(BlockSpeculators):
    """speculators_model_type dflash."""

    kind, family, name = "dflash", DFlashHead, "DFlashSpeculator"


class DSparkSpeculators(BlockSpeculators):
    """speculators_model_type dspark."""

    kind, family, name = "dspark", DSparkHead, "DSparkSpeculator"


@torch.no_grad()
def folded(head: Head) -> Any:
    """A copy of any head; of a block head one whose features' divisors are in its fc."""
    twin: Any = copy.deepcopy(head)
    if isinstance(head, BlockHead):
        twin.net.fc.weight.div_(twin.net.scale.flatten())
        twin.net.scale.fill_(1.0)
    return twin


def exported(head: BlockHead, target: Target) -> dict[str, Tensor]:
    """The state as engines have it: fc with the features' divisors, keys' norms, and an LM
    head over a draft vocabulary."""
    state = {name: value.detach() for name, value in head.state_dict().items()}
    state["net.fc.weight"] = state["net.fc.weight"] / state["net.scale"].flatten()
    size = int(head.net.config.head_dim or 0)
    for layer in range(head.cfg.layers):
        name = f"net.layers.{layer}.k_norm.weight"
        state.setdefault(name, torch.ones(size, device=state["net.scale"].device))
    state.setdefault("net.lm_head.weight", head.projection(target).detach())
    return state
