"""Medusa heads for vLLM (its own names) and in the layout of the original repository.

Both project onto the whole vocabulary V. A head of ours with a draft vocabulary is widened:
the rows of all other tokens are the mean of the head's rows, whose logit can never exceed the
best one, so the best token stays the same; `token_map` [Vd] beside them lets an import take
the draft vocabulary back (vLLM ignores it while truncated_vocab_size is not set; with it set,
vLLM 0.32 refuses heads that have projections of their own). vLLM 0.33.0 removed Medusa
(engines.yaml).

Shape letters: K heads, L blocks, D width, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.interop import engines
from outrider.heads.interop.layout import Facts, HeadLayout, refuse
from outrider.heads.interop.reading import Foreign
from outrider.heads.interop.table import Sizes, TensorRow, to_ours
from outrider.heads.medusa.head import MedusaConfig, MedusaHead

MAP = TensorRow("token_map", "", "Vd", when="map", dtype="int64", optional=True)


class MedusaVllm(HeadLayout[MedusaHead]):
    """vLLM: config model_type medusa, medusa_fc_bias true (else it drops the biases without a
    word).
    """

    format, kind, engine = "vllm", "medusa", engines.VLLM
    # What config.json calls the numbers of heads and of blocks, the first that is there counts;
    # names of their tensors.
    heads_key: ClassVar[tuple[str, ...]] = ("num_heads", "medusa_num_heads")
    blocks_key: ClassVar[str] = "num_hidden_layers"
    of_head: ClassVar[str] = r"blocks\.(\d{1,3})\.layers\.\d{1,3}\."
    of_block: ClassVar[str] = r"blocks\.\d{1,3}\.layers\.(\d{1,3})\."

    def refusals(self, head: MedusaHead, facts: Facts) -> list[str]:
        """See HeadLayout."""
        found = super().refusals(head, facts)
        if head.cfg.markov_rank:
            found.append(
                "head.markov_rank: no engine knows the term of the token before; train with "
                "head.markov_rank=0"
            )
        return found

    def needs(self, head: MedusaHead) -> list[str]:
        """See HeadLayout."""
        if not head.cfg.share_lm_head:
            return []
        return ["lm_head.weight [V, D] (head.share_lm_head: the heads use the target's)"]

    def rows(self, sizes: Sizes) -> list[TensorRow]:
        """See HeadLayout."""
        return [
            TensorRow("blocks.{k}.layers.{l}.weight", "block_weight", "D D"),
            TensorRow("blocks.{k}.layers.{l}.bias", "block_bias", "D", when="bias"),
            TensorRow("lm_heads.{k}.weight", "proj", "V D"),
            MAP,
        ]

    def sizes(self, head: MedusaHead, facts: Facts) -> dict[str, int]:
        """See HeadLayout."""
        cfg, known = head.cfg, head.cfg.draft_vocab or 0
        letters = {"K": cfg.heads, "L": cfg.blocks, "D": facts.hidden, "V": facts.vocab}
        return {**letters, "bias": 1, "map": known, "Vd": known}

    def state(self, head: MedusaHead, target: Target, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """See HeadLayout."""
        state = dict(head.state_dict())
        proj = head.projection(target).detach().to(dtype).float()
        ids = head.ids()
        if proj.dim() == 2:
            proj = proj.expand(head.cfg.heads, *proj.shape)
        if ids is not None:
            proj = torch.stack([widen(p, ids, head.vocab_size) for p in proj])
        state["proj"] = proj
        return state

    def extras(self, head: MedusaHead, target: Target) -> dict[str, Tensor]:
        """See HeadLayout."""
        ids = head.ids()
        return {} if ids is None else {"token_map": ids}

    def config(self, head: MedusaHead, facts: Facts, dtype: str) -> dict[str, Any]:
        """See HeadLayout."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": facts.hidden,
            "vocab_size": facts.vocab,
            "num_heads": head.cfg.heads,
            "num_hidden_layers": head.cfg.blocks,
            "medusa_fc_bias": True,
            "torch_dtype": dtype,
        }

    def read(self, foreign: Foreign, target: Target) -> Head:
        """See HeadLayout."""
        config = foreign.config
        tensors = {name.removeprefix("medusa_heads."): t for name, t in foreign.tensors.items()}
        heads, blocks = counted(tensors, self.of_head), counted(tensors, self.of_block)
        requested = next((config[key] for key in self.heads_key if key in config), None)
        for what, found, said in (
            ("heads", heads, requested),
            ("layers", blocks, config.get(self.blocks_key)),
        ):
            if isinstance(said, int) and said > found:
                refuse(
                    foreign,
                    f"config.json asks for {said} {what}, the weights hold {found}: half-written, "
                    "or the config of another head",
                )
        bias = int(any(name.endswith("bias") for name in tensors))
        if self.format == "vllm" and bias and not config.get("medusa_fc_bias"):
            names = [n for n in tensors if n.endswith("bias")]
            refuse(
                foreign,
                f"{names[0]}: a bias where none is expected: medusa_fc_bias in config.json is not "
                "true, and vLLM then drops biases without a word; set it if they were trained",
            )
        ids = tensors.get("token_map")
        sizes = {"K": heads, "L": blocks, "D": target.hidden_size, "V": target.vocab_size}
        sizes |= {"bias": bias, "map": ids is not None, "Vd": 0 if ids is None else ids.numel()}
        state = self.checked(foreign, sizes, tensors)
        if not bias:
            state["block_bias"] = torch.zeros(heads, blocks, target.hidden_size)
        chosen = None
        if ids is not None:
            if not vocab.ascends(ids, target.vocab_size):
                wrong = f"its ids do not ascend within the vocabulary of {target.vocab_size}"
                refuse(foreign, f"token_map: {wrong}")
            rows = [row for row in self.rows(sizes) if row.ours == "proj"]
            narrow = narrowed(to_ours(rows, sizes, tensors)["proj"], ids)
            if narrow is not None:
                chosen, state["proj"] = ids, narrow
        size = 0 if chosen is None else chosen.numel()
        cfg = MedusaConfig(heads=heads, blocks=blocks, draft_vocab=size)
        head = MedusaHead(
            cfg, target.hidden_size, target.vocab_size, target.num_layers, target.device
        )
        if chosen is not None:
            state["d2t"] = chosen - torch.arange(size)
        head.load_state_dict(state)
        return head


class MedusaOriginal(MedusaVllm):
    """The original repository: bare numbers as names, biases always, blocks of a head are one
    block repeated.
    """

    format, engine = "medusa", engines.MEDUSA_CODE
    serves = engines.MEDUSA_CODE_TARGETS
    file: ClassVar[str] = "medusa_lm_head.safetensors"
    heads_key, blocks_key = ("medusa_num_heads",), "medusa_num_layers"
    of_head, of_block = r"(\d{1,3})\.\d{1,3}\.", r"\d{1,3}\.(\d{1,3})\.linear\."

    def refusals(self, head: MedusaHead, facts: Facts) -> list[str]:
        """See HeadLayout."""
        found = super().refusals(head, facts)
        weight = head.block_weight
        if head.cfg.blocks > 1 and not bool((weight == weight[:, :1]).all()):
            found.append(
                "head.blocks: the original code repeats one block, these differ; train with "
                f"head.blocks=1, or export with format=vllm ({engines.VLLM.versions(self.kind)})"
            )
        return found

    def rows(self, sizes: Sizes) -> list[TensorRow]:
        """See HeadLayout."""
        return [
            TensorRow("{k}.{l}.linear.weight", "block_weight", "D D"),
            TensorRow("{k}.{l}.linear.bias", "block_bias", "D"),
            TensorRow(f"{{k}}.{sizes['L']}.weight", "proj", "V D"),
            MAP,
        ]

    def config(self, head: MedusaHead, facts: Facts, dtype: str) -> dict[str, Any]:
        """See HeadLayout. The last four keys let versions of vLLM that know Medusa serve the
        folder as well."""
        return {
            "medusa_num_heads": head.cfg.heads,
            "medusa_num_layers": head.cfg.blocks,
            "base_model_name_or_path": facts.name,
            "model_type": "medusa",
            "hidden_size": facts.hidden,
            "vocab_size": facts.vocab,
            "medusa_fc_bias": True,
            "torch_dtype": dtype,
        }


def counted(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number that `pattern` finds at the start of names; at least 1."""
    return 1 + max((int(m[1]) for name in names if (m := re.match(pattern, name))), default=0)


def widen(rows: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """[Vd, D] -> [V, D]: the mean row where `ids` [Vd] names none. Its logit is the mean of
    the head's logits.
    """
    mean = rows.double().mean(0).to(rows.dtype)
    return mean.expand(vocab, -1).clone().index_copy_(0, ids.to(rows.device), rows)


def narrowed(wide: Tensor, ids: Tensor) -> Tensor | None:
    """The rows [K, Vd, D] of the draft vocabulary alone, of [K, V, D]; None where `wide` says
    more than `widen` gives."""
    narrow = wide[:, ids].float()
    same = (
        torch.equal(widen(few, ids, wide.shape[1]).to(wide.dtype), all_)
        for few, all_ in zip(narrow, wide, strict=True)
    )
    return narrow if all(same) else None
