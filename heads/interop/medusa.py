"""Medusa heads for vLLM (its own names) and in the layout of the original repository.

Both project onto the whole vocabulary V. A head of ours with a draft vocabulary is widened:
the rows of all other tokens are the mean of the head's rows, whose logit can never exceed the
best one, so the best token stays the same; `token_map` [Vd] beside them lets an import take
the draft vocabulary back (vLLM ignores it while truncated_vocab_size is not set; with it set,
vLLM 0.32 refuses heads that have projections of their own).

Shape letters: K heads, L blocks, D width, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from decode.target import Target
from heads import vocab
from heads.base import Head
from heads.interop import engines
from heads.interop.layout import Facts, Layout, refuse
from heads.interop.reading import Foreign
from heads.interop.table import Row, Sizes
from heads.parallel.medusa import MedusaConfig, MedusaHead

MAP = Row("token_map", "", "Vd", when="map", dtype="int64", optional=True)


class MedusaVllm(Layout[MedusaHead]):
    """vLLM: config model_type medusa, medusa_fc_bias true (else it drops the biases without a
    word).
    """

    format, kind, engine = "vllm", "medusa", engines.VLLM

    def refusals(self, head: MedusaHead, facts: Facts) -> list[str]:
        """See Layout."""
        found = super().refusals(head, facts)
        if head.cfg.markov_rank:
            found.append(
                "head.markov_rank: no engine knows the term of the token before; the "
                "nearest that is served: "
                "train with head.markov_rank=0"
            )
        return found

    def needs(self, head: MedusaHead) -> list[str]:
        """See Layout."""
        return (
            ["lm_head.weight [V, D] (head.share_lm_head: the heads use the target's)"]
            if head.cfg.share_lm_head
            else []
        )

    def rows(self, sizes: Sizes) -> list[Row]:
        """See Layout."""
        return [
            Row("blocks.{k}.layers.{l}.weight", "block_weight", "D D"),
            Row("blocks.{k}.layers.{l}.bias", "block_bias", "D", when="bias"),
            Row("lm_heads.{k}.weight", "proj", "V D"),
            MAP,
        ]

    def sizes(self, head: MedusaHead, facts: Facts) -> dict[str, int]:
        """See Layout."""
        return {
            "K": head.cfg.heads,
            "L": head.cfg.blocks,
            "D": facts.hidden,
            "V": facts.vocab,
            "bias": 1,
            "map": int(head.cfg.draft_vocab > 0),
            "Vd": head.cfg.draft_vocab,
        }

    def state(self, head: MedusaHead, target: Target, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """See Layout."""
        state = dict(head.state_dict())
        proj = head.projection(target).detach().to(dtype).float()
        ids = head.ids()
        if proj.dim() == 2:
            proj = proj.expand(head.cfg.heads, *proj.shape)
        state["proj"] = (
            proj if ids is None else torch.stack([widen(p, ids, head.vocab_size) for p in proj])
        )
        return state

    def extras(self, head: MedusaHead, target: Target) -> dict[str, Tensor]:
        """See Layout."""
        ids = head.ids()
        return {} if ids is None else {"token_map": ids}

    def config(self, head: MedusaHead, facts: Facts, dtype: str) -> dict[str, Any]:
        """See Layout."""
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

    def counted(self, foreign: Foreign) -> tuple[dict[str, Tensor], int, int]:
        """Tensors by this layout's names, and how many heads and blocks there are by name."""
        tensors = {name.removeprefix("medusa_heads."): t for name, t in foreign.tensors.items()}
        found = [
            re.fullmatch(r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\..*", name) for name in tensors
        ]
        heads = [int(m[1]) for m in found if m]
        blocks = [int(m[2]) for m in found if m]
        return tensors, 1 + max(heads, default=0), 1 + max(blocks, default=0)

    def asked(self, foreign: Foreign) -> tuple[Any, Any]:
        """What config.json says of heads and blocks."""
        config = foreign.config
        return config.get("num_heads", config.get("medusa_num_heads")), config.get(
            "num_hidden_layers"
        )

    def read(self, foreign: Foreign, target: Target) -> Head:
        """See Layout."""
        tensors, heads, blocks = self.counted(foreign)
        for what, found, said in zip(
            ("heads", "layers"), (heads, blocks), self.asked(foreign), strict=True
        ):
            if isinstance(said, int) and said > found:
                refuse(
                    foreign,
                    [
                        f"config.json asks for {said} {what}, the weights hold {found}: "
                        "half-written, or the "
                        "config of another head"
                    ],
                )
        bias = int(any(name.endswith("bias") for name in tensors))
        if self.format == "vllm" and bias and not foreign.config.get("medusa_fc_bias"):
            names = [n for n in tensors if n.endswith("bias")]
            refuse(
                foreign,
                [
                    f"{names[0]}: a bias where none is expected: medusa_fc_bias in "
                    "config.json is not true, "
                    "and vLLM then drops biases without a word; set it if they were trained"
                ],
            )
        ids = tensors.get("token_map")
        sizes = {
            "K": heads,
            "L": blocks,
            "D": target.hidden_size,
            "V": target.vocab_size,
            "bias": bias,
            "map": int(ids is not None),
            "Vd": 0 if ids is None else ids.numel(),
        }
        state = self.checked(foreign, sizes, tensors)
        if not bias:
            state["block_bias"] = torch.zeros(heads, blocks, target.hidden_size)
        chosen = None
        if ids is not None:
            if not vocab.ascends(ids, target.vocab_size):
                wrong = f"its ids do not ascend within the vocabulary of {target.vocab_size}"
                refuse(foreign, [f"token_map: {wrong}"])
            narrow = self._narrow(tensors, ids, heads, blocks)
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

    def _narrow(
        self, tensors: dict[str, Tensor], ids: Tensor, heads: int, blocks: int
    ) -> Tensor | None:
        """The projections [K, Vd, D] of the draft vocabulary alone; None where they say more."""
        raw = torch.stack([tensors[self.head_name(k, blocks)] for k in range(heads)])
        narrow = raw[:, ids].float()
        same = (
            torch.equal(widen(n, ids, raw.shape[1]).to(raw.dtype), r)
            for n, r in zip(narrow, raw, strict=True)
        )
        return narrow if all(same) else None

    def head_name(self, k: int, blocks: int) -> str:
        """Name of head k's projection."""
        return f"lm_heads.{k}.weight"


class MedusaOriginal(MedusaVllm):
    """The original repository: bare numbers as names, biases always, blocks of a head are one
    block repeated.
    """

    format, engine, serves = "medusa", "the original Medusa code", engines.MEDUSA_CODE
    file: ClassVar[str] = "medusa_lm_head.safetensors"

    def refusals(self, head: MedusaHead, facts: Facts) -> list[str]:
        """See Layout."""
        found = super().refusals(head, facts)
        weight = head.block_weight
        if head.cfg.blocks > 1 and not bool((weight == weight[:, :1]).all()):
            found.append(
                "head.blocks: the original code repeats one block, these differ; the "
                "nearest that is served: "
                "format=vllm, or train with head.blocks=1"
            )
        return found

    def rows(self, sizes: Sizes) -> list[Row]:
        """See Layout."""
        return [
            Row("{k}.{l}.linear.weight", "block_weight", "D D"),
            Row("{k}.{l}.linear.bias", "block_bias", "D"),
            Row(f"{{k}}.{sizes['L']}.weight", "proj", "V D"),
            MAP,
        ]

    def config(self, head: MedusaHead, facts: Facts, dtype: str) -> dict[str, Any]:
        """See Layout. The last four keys let vLLM serve the folder as well."""
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

    def counted(self, foreign: Foreign) -> tuple[dict[str, Tensor], int, int]:
        """See MedusaVllm."""
        tensors = {name.removeprefix("medusa_heads."): t for name, t in foreign.tensors.items()}
        found = [re.fullmatch(r"(\d{1,3})\.(\d{1,3})\.linear\..*", name) for name in tensors]
        heads = [int(m[1]) for name in tensors if (m := re.match(r"(\d{1,3})\.\d{1,3}\.", name))]
        blocks = [int(m[2]) for m in found if m]
        return tensors, 1 + max(heads, default=0), 1 + max(blocks, default=0)

    def asked(self, foreign: Foreign) -> tuple[Any, Any]:
        """See MedusaVllm."""
        return foreign.config.get("medusa_num_heads"), foreign.config.get("medusa_num_layers")

    def head_name(self, k: int, blocks: int) -> str:
        """See MedusaVllm."""
        return f"{k}.{blocks}.weight"


def widen(rows: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """[Vd, D] -> [V, D]: the mean row where `ids` [Vd] names none. Its logit is the mean of
    the head's logits.
    """
    mean = rows.double().mean(0).to(rows.dtype)
    return mean.expand(vocab, -1).clone().index_copy_(0, ids.to(rows.device), rows)
