"""Medusa heads for vLLM (its own names); folders of the original repository are read too.

Every head projects onto the whole vocabulary V. A head of ours with a draft vocabulary is
widened: the rows of all other tokens are the mean of the head's rows, whose logit can never
exceed the best one, so the best token stays the same. vLLM 0.33.0 removed Medusa
(engines.yaml).

Shape letters: K heads, L blocks, D width, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.interop.layout import Layout, fitted, refuse
from outrider.heads.interop.reading import Foreign
from outrider.heads.medusa.head import MedusaConfig, MedusaHead

# Names of a block (head, block) and of the projection (head, number of blocks), and the keys
# of the numbers of heads and of blocks: vLLM's, the original repository's
VLLM = "blocks.{0}.layers.{1}", "lm_heads.{0}", "num_heads", "num_hidden_layers"
ORIGINAL = "{0}.{1}.linear", "{0}.{1}", "medusa_num_heads", "medusa_num_layers"


class Medusa(Layout[MedusaHead]):
    """vLLM: config model_type medusa, medusa_fc_bias true (else it drops the biases without a
    word)."""

    def refusals(self, head: MedusaHead, target: Target, name: str) -> list[str]:
        found = super().refusals(head, target, name)
        if head.cfg.markov_rank:
            found.append(
                "head.markov_rank: no engine knows the term of the token before; train with "
                "head.markov_rank=0"
            )
        return found

    def tensors(self, head: MedusaHead, target: Target) -> dict[str, Tensor]:
        cfg, ids, found = head.cfg, head.ids(), dict[str, Tensor]()
        own = head.projection(target).detach().float()
        for k, rows in enumerate(own if own.dim() == 3 else own.expand(cfg.heads, *own.shape)):
            for number in range(cfg.blocks):
                found[f"blocks.{k}.layers.{number}.weight"] = head.block_weight[k, number]
                found[f"blocks.{k}.layers.{number}.bias"] = head.block_bias[k, number]
            wide = rows if ids is None else widen(rows, ids, head.vocab_size)
            found[f"lm_heads.{k}.weight"] = wide
        return found

    def config(self, head: MedusaHead, target: Target, name: str, dtype: str) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_heads": head.cfg.heads,
            "num_hidden_layers": head.cfg.blocks,
            "medusa_fc_bias": True,
            "torch_dtype": dtype,
        }


def read_medusa(foreign: Foreign, target: Target) -> Head:
    """Return a head of ours. Raises UserError that lists all that does not fit."""
    config, size = foreign.config, target.vocab_size
    tensors = {
        name.removeprefix("medusa_heads."): tensor
        for name, tensor in foreign.tensors.items()
        if name != "token_map"  # of vLLM, which reads it beside smaller projections alone
    }
    native = any(name.startswith("blocks.") for name in tensors)
    block, last, *keys = VLLM if native else ORIGINAL
    pattern = block.replace(".", r"\.").format(r"(\d{1,3})", r"(\d{1,3})") + r"\."
    heads, blocks = (counted(tensors, pattern, group) for group in (1, 2))
    said = (config.get(keys[0], config.get("medusa_num_heads")), config.get(keys[1]))
    for what, found, wanted in zip(("heads", "layers"), (heads, blocks), said, strict=True):
        if isinstance(wanted, int) and wanted > found:
            refuse(
                foreign,
                f"config.json asks for {wanted} {what}, the weights hold {found}: half-written, "
                "or the config of another head",
            )
    biases = [name for name in tensors if name.endswith("bias")]
    if native and biases and not config.get("medusa_fc_bias"):
        refuse(
            foreign,
            f"{biases[0]}: a bias where none is expected: medusa_fc_bias in config.json is not "
            "true, and vLLM then drops biases without a word; set it if they were trained",
        )
    names = [block.format(k, number) for k in range(heads) for number in range(blocks)]
    projections = [f"{last.format(k, blocks)}.weight" for k in range(heads)]
    width = target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (width, width) for name in names}
    shapes |= {f"{name}.bias": (width,) for name in names if biases or not native}
    shapes |= dict.fromkeys(projections, (size, width))
    state = fitted(foreign, tensors, shapes)
    cfg = MedusaConfig(heads=heads, blocks=blocks, draft_vocab=0)
    head = MedusaHead(cfg, width, size, target.num_layers, target.device)
    zeros = torch.zeros(width)
    weight = torch.stack([state[f"{name}.weight"] for name in names])
    bias = torch.stack([state.get(f"{name}.bias", zeros) for name in names])
    made = {
        "block_weight": weight.view_as(head.block_weight),
        "block_bias": bias.view_as(head.block_bias),
        "proj": torch.stack([state[name] for name in projections]),
    }
    head.load_state_dict(made)
    return head


def counted(names: Iterable[str], pattern: str, group: int) -> int:
    """Return one more than the largest number that `pattern` finds at the start of names;
    at least 1."""
    found = (re.match(pattern, name) for name in names)
    return 1 + max((int(m[group]) for m in found if m), default=0)


def widen(rows: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """[Vd, D] -> [V, D]: the mean row where `ids` [Vd] names none. Its logit is the mean of
    the head's logits."""
    mean = rows.double().mean(0).to(rows.dtype)
    return mean.expand(vocab, -1).clone().index_copy_(0, ids.to(rows.device), rows)
