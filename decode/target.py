"""Target: any Hugging Face causal language model, frozen, behind a few methods. It asks for no
name: `decode/probe.py` finds out what the model can do when the first cache is made.

Shape letters: B rows, T tokens, D hidden size. Taps: see decode/scorer.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.decode import waits
from outrider.decode.packing import PackingScorer
from outrider.decode.probe import (
    TOLERANCE,
    caught,
    packing_error,
    probe_head,
    probe_layers,
    probe_target,
)
from outrider.decode.probed import LMHead, Probe


class Target(PackingScorer):
    """A scorer that is probed at first use: a model that can score neither trees nor chains
    (recurrent state, no K/V cache) raises UserError with the reason then.

    tuning: what has changed the weights since loading; the identity then says so too.
    borrowed: a head that was trained for just these weights has been loaded. sharded: its
    layers are spread over processes, which must all run it at the same time. relatives: heads
    of other weights with the same tokenizer may draft for it.
    """

    def __init__(self, model: Any, tokenizer: Any = None, identity: Any = None, source: Any = None):
        super().__init__(model, tokenizer)
        self.tokenizer, self.identity, self.source = tokenizer, identity, source
        self.tuning = ""
        self.borrowed = self.sharded = self.relatives = False
        self._packs: str | None = None

    def probe(self) -> Probe:
        """What the model can do; runs a few tiny passes the first time. Raises UserError for
        an unusable model.
        """
        if self._probe is None:
            self._probe = probe_target(self)
        return self._probe

    @property
    def head(self) -> LMHead:
        """How logits follow from the last hidden state; probed at first use."""
        if self._head is None:
            self._head = probe_head(self)
        return self._head

    # -- training

    def features(
        self,
        ids: Tensor,
        mask: Tensor,
        taps: Sequence[int],
        grad: bool = False,
        position: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, taps, D] of right-padded `ids` [B, T]; `mask` [B, T] bool marks
        real tokens. position: [B, T] int64 where several documents stand in a row, each
        counted from 0: none sees another (see packs).

        No cache and no [B, T, V]. With `grad` the graph through the target is kept (for
        adapters inside it). Raises ValueError for padding on the left (on a GPU the device
        asserts it): only right padding is invisible to a causal pass.
        """
        wrong, message = (
            (mask[:, 1:] & ~mask[:, :-1]).any(),
            "features: a real token follows padding",
        )
        if not waits.free(mask):
            torch._assert_async(~wrong, message)
        elif bool(wrong):
            raise ValueError(f"{message}; pad on the right")
        self.unpack_weights()
        kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
        with torch.set_grad_enabled(grad):
            if self.takes_positions:
                kwargs["position_ids"] = (
                    self._places(ids.shape[1], mask.sum(1)) if position is None else position
                )
            several = self._wants_all(taps)
            if several and not grad and (layers := self.tapped_layers):
                return caught(self, layers, taps, kwargs)
            with self.rows_apart():
                out = self.body(**kwargs, output_hidden_states=several)
            return self._taps(out, taps)

    @functools.cached_property
    def tapped_layers(self) -> list[nn.Module]:
        """The layers whose inputs are the hidden states that transformers lists; [] where that
        does not hold."""
        return probe_layers(self)

    def packs(self) -> str:
        """Why this target cannot take packed documents; empty when it can. Asked of the model
        itself: without a cache transformers keeps documents apart by their positions, where
        the architecture supports it."""
        if self.switch is not None:
            return (
                f"a document of more than {self.switch} tokens changes the rotation of its "
                "whole row"
            )
        if self._packs is None:
            error = packing_error(self, self.features)
            self._packs = ""
            if error > TOLERANCE[self.dtype]:
                self._packs = f"packed documents see each other (relative error {error:.2g})"
        return self._packs
