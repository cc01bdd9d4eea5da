"""Target: any Hugging Face causal language model, frozen, behind a few methods. It asks for no
name: `decode/probe.py` finds out what the model can do when the first cache is made.

Shape letters: B rows, T tokens, D hidden size. Taps: see decode/scorer.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decode import waits
from decode.packing import PackingScorer
from decode.probe import TOLERANCE, difference, probe_head, probe_target
from decode.scorer import Head, Probe


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
        self._loaded_attention = model.config._attn_implementation
        self._packs: str | None = None
        self._layers: list[nn.Module] | None = None

    @contextlib.contextmanager
    def as_loaded(self) -> Iterator[Any]:
        """The model with the attention it was loaded with, for references that must not share
        our code: the probe exchanges it for one that does not copy K/V for trees.
        """
        used = self._model.config._attn_implementation
        if used == self._loaded_attention:
            yield self.model
            return
        self._model.set_attn_implementation(self._loaded_attention)
        try:
            yield self.model
        finally:
            self._model.set_attn_implementation(used)

    def probe(self) -> Probe:
        """What the model can do; runs a few tiny passes the first time. Raises UserError for
        an unusable model.
        """
        if self._probe is None:
            self._probe = probe_target(self)
        return self._probe

    @property
    def head(self) -> Head:
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
        wrong, told = (mask[:, 1:] & ~mask[:, :-1]).any(), "features: a real token follows padding"
        if not waits.free(mask):
            torch._assert_async(~wrong, told)
        elif bool(wrong):
            raise ValueError(f"{told}; pad on the right")
        self.unpack_weights()
        kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
        with torch.set_grad_enabled(grad):
            if self.takes_positions:
                kwargs["position_ids"] = (
                    self._places(ids.shape[1], mask.sum(1)) if position is None else position
                )
            several = self._wants_all(taps)
            if several and not grad and (layers := self._tapped_layers()):
                return self._caught(layers, taps, kwargs)
            with self._rows_apart():
                out = self.body(**kwargs, output_hidden_states=several)
            return self._taps(out, taps)

    def _caught(
        self, layers: Sequence[nn.Module], taps: Sequence[int], kwargs: dict[str, Any]
    ) -> Tensor:
        """As _taps after a pass with `kwargs`, holding no other hidden state: what goes into
        the layers is read on the way."""
        found: dict[int, Tensor] = {}

        def reader(tap: int) -> Any:
            def read(_: nn.Module, args: Any, named: Any) -> None:
                found[tap] = args[0] if args else named["hidden_states"]

            return read

        wanted = {tap for tap in taps if tap < self.num_layers}
        hooks = [layers[t].register_forward_pre_hook(reader(t), with_kwargs=True) for t in wanted]
        try:
            with self._rows_apart():
                found[self.num_layers] = self.body(**kwargs).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([found[tap] for tap in taps], 2)

    def _tapped_layers(self) -> list[nn.Module]:
        """The layers whose inputs are the hidden states that transformers lists; [] where that
        does not hold. Asked of the model itself, by one short pass each way."""
        if self._layers is None:
            stacks = [
                part
                for part in self.body.modules()
                if isinstance(part, nn.ModuleList) and len(part) == self.num_layers
            ]
            self._layers = list(stacks[0]) if len(stacks) == 1 else []
            if self._layers and not self._listed_as_caught():
                self._layers = []
        return self._layers

    def _listed_as_caught(self) -> bool:
        ids = torch.arange(3, 8, device=self.device).remainder(self.vocab_size)[None]
        kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
        if self.takes_positions:
            kwargs["position_ids"] = torch.arange(5, device=self.device)[None]
        taps = range(self.num_layers + 1)
        with self._rows_apart():
            listed = self._taps(self.body(**kwargs, output_hidden_states=True), taps)
        try:
            caught = self._caught(self._layers or [], taps, kwargs)
        except (KeyError, IndexError, RuntimeError, AttributeError):  # layers of another build
            return False
        return torch.equal(listed, caught)

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
            ids = torch.arange(3, 3 + 26, device=self.device).remainder(self.vocab_size).view(2, 13)
            at = torch.tensor([[*range(5), *range(8)], [*range(9), *range(4)]], device=self.device)
            real, taps = torch.ones_like(ids, dtype=torch.bool), (self.num_layers,)
            packed = self.features(ids, real, taps, position=at)
            worst = 0.0
            for b, cut in ((0, 5), (1, 9)):
                for part in (slice(0, cut), slice(cut, 13)):
                    alone = self.features(ids[b : b + 1, part], real[b : b + 1, part], taps)
                    worst = max(worst, difference(packed[b : b + 1, part, 0], alone[:, :, 0]))
            limit = TOLERANCE[self.dtype]
            self._packs = (
                ""
                if worst <= limit
                else f"packed documents see each other (relative error {worst:.2g})"
            )
        return self._packs
