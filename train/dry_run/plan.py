"""A run on paper: its passes, and its head, which is built on torch's meta device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from outrider.conf.errors import UserError
from outrider.decode.models.facts import context_length
from outrider.decode.models.load import torch_dtype
from outrider.heads import head_class
from outrider.heads.layers.head import LayeredHead
from outrider.heads.layers.shape import layer_config
from outrider.heads.medusa.base import ParallelHead
from outrider.heads.medusa.hydra_heads import HydraHeads
from outrider.train.config import ValidateConfig
from outrider.train.dry_run.models import Model


@dataclass(frozen=True)
class Plan:
    """A run on paper. typed: the head's keys. head: on the meta device. layer: keys of its
    draft layers, {} without any. rows, length, tokens, taught: of the largest pass of a rank,
    its supervised tokens. width: bytes of a number that is computed with."""

    cfg: ValidateConfig
    model: Model
    typed: Any
    head: Any
    layer: dict[str, Any]
    rows: int
    length: int
    width: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def taught(self) -> int:
        return self.rows * round(self.length * self.cfg.supervised)

    @property
    def lm_head(self) -> int:
        """Parameters of the head's own LM heads, 0 where it reads the target's."""
        named = self.head.named_parameters()
        return sum(p.numel() for n, p in named if n in ("proj", "net.lm_head.weight"))

    def changed(self, keys: dict[str, Any]) -> Plan:
        """With other values of keys, "head.NAME" among them."""
        own = {k: v for k, v in keys.items() if not k.startswith("head.")}
        heads = {k.removeprefix("head."): v for k, v in keys.items() if k not in own}
        cfg, typed = dataclasses.replace(self.cfg, **own), dataclasses.replace(self.typed, **heads)
        return plan_of(cfg, self.model, typed)


def plan_of(cfg: ValidateConfig, model: Model, typed: Any) -> Plan:
    """typed: the head's keys, its draft vocabulary settled. Raises UserError for a head that
    this target cannot have, or that has no formula."""
    kind, text = head_class(typed.kind), model.text
    length, width = context_length(text), text.hidden_size
    table = SimpleNamespace(shape=(text.vocab_size, width))
    about: Any = SimpleNamespace(
        config=text, hidden_size=width, embedding_weight=table, context_length=length
    )
    layers = getattr(typed, "prefix_layers" if issubclass(kind, HydraHeads) else "layers", 0)
    layer, deep = layer_config(about, layers, typed) if layers else {}, text.num_hidden_layers
    with torch.device("meta"):
        if issubclass(kind, LayeredHead):
            taps = (deep,) if typed.kind == "eagle1" else tuple(typed.taps) or (1, 2, 3)
            head: Any = kind(typed, layer, taps, text.vocab_size, deep)
        elif issubclass(kind, ParallelHead):
            more = (width, layer) if issubclass(kind, HydraHeads) else ()
            head = kind(typed, width, text.vocab_size, deep, "meta", *more)
        else:
            why = "run validate without dry_run on one GPU: it measures two small passes"
            raise UserError(f"head.kind: a dry run has no formula for {typed.kind}; {why}")
    length, mine = min(cfg.data.max_length, length), max(1, cfg.batch_size // cfg.gpus)
    rows = min(mine, cfg.micro_batch or mine)
    rows = min(rows, max(1, cfg.micro_tokens // length)) if cfg.micro_tokens else rows
    return Plan(cfg, model, typed, head, layer, rows, length, torch_dtype(cfg.dtype).itemsize)
