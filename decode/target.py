"""Target: any Hugging Face causal language model, frozen, behind a few methods. It asks for
no name: `decode/probe.py` finds out what the model can do when the first cache is made.
While it decodes on a CPU its linear layers may be packed (decode/models/packed.py); whoever
takes the model has it as it was loaded.

Shape letters: B rows, T tokens, D hidden size. Taps: see decode/scorer.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.decode import devices, graphs
from outrider.decode.cache import TreeCache
from outrider.decode.graphs import Graphs, fixed_pass
from outrider.decode.models import packed
from outrider.decode.probe import (
    TOLERANCE,
    caught,
    difference,
    probe_head,
    probe_layers,
    probe_target,
)
from outrider.decode.scorer import LMHead, Probe, Scorer, Tokens
from outrider.decode.states import Scored, Taps


class Target(Scorer):
    """A scorer that is probed at first use: a model that can score neither trees nor chains
    (no K/V cache, positions by slot) raises UserError with the reason then.

    sharded: its layers are spread over processes, which must all run it at the same time.
    relatives: heads of other weights with the same tokenizer may draft for it. packs_weights:
    whether its weights may be packed; packing: what was done to it, one object of all copies.
    captures: whether passes may be captured as CUDA graphs (decode/graphs.py).
    """

    packs_weights = True
    captures = False

    def __init__(self, model: Any, tokenizer: Any = None, identity: Any = None, source: Any = None):
        super().__init__(model, tokenizer)
        self.tokenizer, self.identity, self.source = tokenizer, identity, source
        self.sharded = self.relatives = False
        self.packing = packed.Packing()
        self.graphs = Graphs()
        self._loaded_attention = model.config._attn_implementation

    @property
    def model(self) -> Any:
        """The transformers model with the layers that it was loaded with. Whoever decodes next
        packs them again."""
        self._undo()
        return self._model

    def _undo(self) -> None:
        """Take back what was done for decoding."""
        self.packing.undo()
        self.graphs.clear()

    @contextlib.contextmanager
    def as_loaded(self) -> Iterator[Any]:
        """The model with the attention it was loaded with, for references that must not share
        our code: the probe exchanges it for one that does not copy K/V for trees.
        """
        self.packing.undo()
        used = self._model.config._attn_implementation
        if used == self._loaded_attention:
            yield self._model
            return
        self._model.set_attn_implementation(self._loaded_attention)
        try:
            yield self._model
        finally:
            self._model.set_attn_implementation(used)

    def pack_weights(self) -> None:
        """Make the model ready for decoding: pack its linear layers where that is wanted
        and this device has kernels for it. The model's own logits must stay what they are;
        else nothing is packed."""
        state = self.packing
        if state.places or state.refused or not self.packs_weights or self.sharded:
            return
        if not packed.takes(self.dtype, self.device):
            return
        if any(weight.requires_grad for weight in self._model.parameters()):
            return
        _ = self.probe(), self.head  # both ask the model as it was loaded
        wanted = self._logits()
        try:
            state.pack(self._model, self.lm_head)
            same = difference(self._logits(), wanted) <= TOLERANCE[self.dtype]
            state.refused = not state.places or not same
        except BaseException:
            self.packing.undo()
            raise
        if state.refused:
            self.packing.undo()

    @torch.no_grad()
    def _logits(self) -> Tensor:
        """Return the logits of a short text, by a plain pass."""
        ids = torch.arange(3, 11, device=self.device).remainder(self.vocab_size)[None]
        out = self._model(input_ids=ids, use_cache=False, return_dict=True)
        return out.logits  # type: ignore[no-any-return]

    def new_cache(self, max_rows: int, max_len: int, max_nodes: int) -> TreeCache:
        """As of Scorer; decoding begins here, so weights are packed and passes captured. What was
        released is lent again, and may have more room."""
        kept = self.graphs.lend(max_rows, max_len, max_nodes) if self.capturing else None
        if kept is not None:
            return kept
        with torch.inference_mode(False):  # graphs write to it in any mode
            cache = super().new_cache(max_rows, max_len, max_nodes)
        if self.capturing and self.takes_positions and type(cache) is TreeCache:
            _ = self.head  # asks the model, which would end the captures of the first answer
            self.graphs.keep(cache)
        self.pack_weights()
        return cache

    def release(self, cache: TreeCache) -> None:
        """Take back a cache that nobody uses any more."""
        self.graphs.release(cache)

    @property
    def capturing(self) -> bool:
        """Whether passes are captured: on a GPU, in half precision, where another order of sums is
        within what the dtype rounds anyhow."""
        here = self.captures and graphs.takes(self.dtype, self.device)
        return here and not (self.sharded or self.graphs.refused)

    def _pass(
        self, cache: TreeCache, tokens: Tokens, taps: Taps, at: Tensor | None = None
    ) -> Scored:
        """As of Scorer, by a graph where there is one."""
        plain = functools.partial(super()._pass, cache, tokens, taps, at)
        if cache is not self.graphs.cache or tokens.depth.shape[1] > cache.max_nodes + 1:
            return plain()
        return fixed_pass(self.graphs, self, cache, tokens, taps, plain)

    def assuming(self, probe: Probe) -> Self:
        other = super().assuming(probe)
        other.packs_weights = other.captures = False
        other.graphs = Graphs()
        return other

    def probe(self) -> Probe:
        """Return what the model can do; runs a few tiny passes the first time. Raises
        UserError for an unusable model."""
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

    def features(self, ids: Tensor, mask: Tensor, taps: Sequence[int]) -> Tensor:
        """Return hidden states [B, T, taps, D] of right-padded `ids` [B, T]; `mask` [B, T]
        bool marks real tokens.

        No cache, no gradient and no [B, T, V]. Raises ValueError for padding on the left (on a
        GPU the device asserts it): only right padding is invisible to a causal pass.
        """
        wrong, message = (
            (mask[:, 1:] & ~mask[:, :-1]).any(),
            "features: a real token follows padding",
        )
        if not devices.on_cpu(mask):
            torch._assert_async(~wrong, message)
        elif bool(wrong):
            raise ValueError(f"{message}; pad on the right")
        self._undo()
        kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
        with torch.no_grad():
            if self.takes_positions:
                every = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
                kwargs["position_ids"] = every
            several = self._wants_all(taps)
            if several and (layers := self.tapped_layers):
                return caught(self, layers, taps, kwargs)
            out = self.body(**kwargs, output_hidden_states=several)
            return self._taps(out, taps)

    @functools.cached_property
    def tapped_layers(self) -> list[nn.Module]:
        """The layers whose inputs are the hidden states that transformers lists; [] where that
        does not hold."""
        return probe_layers(self)
