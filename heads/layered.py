"""What heads share that run decoder layers of their own on tapped features of the target: EAGLE
(heads/eagle/) and block heads (heads/block/).

Shape letters: T positions of all rows, n predicted tokens, D width, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from decode.target import Target
from heads import vocab
from heads.base import Head
from heads.eagle.init import reset_weights
from heads.eagle.shape import LayerShape
from heads.layered_saved import LayeredSaved
from heads.losses import LawFn, target_law
from heads.stored_law import stored_law


class LayeredHead(Head):
    """net: the network, with the transformers config of its layers. taps: what it reads.
    final: number of the target's last hidden state."""

    Saved: ClassVar[type[LayeredSaved]] = LayeredSaved
    packs: ClassVar[bool] = True
    takes_stored_law: ClassVar[bool] = True
    net: Any

    def __init__(
        self, cfg: Any, net: nn.Module, taps: tuple[int, ...], vocab_size: int, final: int
    ) -> None:
        super().__init__(cfg)
        self.net, self.taps, self.vocab_size, self.final = net, taps, vocab_size, final
        if cfg.draft_vocab:
            self.d2t = torch.zeros(cfg.draft_vocab, dtype=torch.int64)

    @classmethod
    def restored(cls, known: Any, layer: dict[str, Any], target: Target) -> Self:
        """The empty head that `known`, of the class's own `Saved`, describes. layer: keys of a
        LlamaConfig."""
        raise TypeError("a subclass defines it")

    @classmethod
    def from_json(cls, saved: dict[str, Any], target: Target) -> Self:
        """See Head. Raises UserError for values that are no such head."""
        known = cls.Saved.read(saved, target, cls.kind)
        head = cls.restored(known, asdict(known.layer), target)
        head.coverage, head.calibration = known.coverage, known.calibration
        return head

    def config_json(self) -> dict[str, Any]:
        """See Head; also the draft layer's shape, the taps with their convention."""
        config = self.net.config
        layer = {k: getattr(config, k) for k in LayerShape.__dataclass_fields__}
        return {
            **super().config_json(),
            "layer": {**layer, "rope_parameters": dict(config.rope_parameters or {})},
            "vocab_size": self.vocab_size,
            "taps": list(self.taps),
            "tap_convention": "hidden_states[k] of transformers; num_layers = output "
            "after the final norm",
            "final": self.final,
        }

    def projection(self, target: Target) -> Tensor:
        """[Vd, D] the weight that turns what the network gives into draft logits: its own LM
        head, or the target's, frozen."""
        own = getattr(self.net, "lm_head", None)
        return self.target_rows(target)[0] * target.head.scale if own is None else own.weight

    def begin(self, target: Target, counts: Tensor | None) -> None:
        """Random weights and the draft vocabulary of a fresh head, on the target's device."""
        reset_weights(self.net, float(getattr(target.config, "initializer_range", 0) or 0.02))
        if size := self.cfg.draft_vocab:
            self.d2t = vocab.to_d2t(self.choose_vocabulary(counts, size))
        self.to(target.device)

    def law(self, target: Target, last: Tensor | None, source: Tensor, place: Tensor) -> LawFn:
        """The target's law of n tokens: from stored laws where there are such, else from its
        last features `last` [T, D]. source: [n] int64, the row before each token. place: [n]
        int64, the token in the draft vocabulary, -1 outside."""
        mask, ids = self.cfg.loss.mask, self.ids()
        if stored := getattr(target, "stored_law", None):
            return stored_law(stored(), source, ids, self.vocab_size, place, mask)
        assert last is not None
        top_k = getattr(self.cfg, "top_k", 0)
        return target_law(target, self.law_rows(target), last, source, ids, place, mask, top_k)
