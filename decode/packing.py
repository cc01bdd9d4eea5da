"""A scorer whose linear layers are packed while it decodes (decode/models/packed.py), and whose
model is as it was loaded for everybody who takes it: training, export, references.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from outrider.decode.cache import TreeCache
from outrider.decode.models import packed
from outrider.decode.probe import TOLERANCE, difference
from outrider.decode.probed import Probe
from outrider.decode.scorer import Scorer


class PackingScorer(Scorer):
    """packs_weights: whether its weights may be packed. sharded: its layers are spread over
    processes, so they may not. packing: what was done to it, one object of all copies."""

    packs_weights = True
    sharded = False

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        super().__init__(model, tokenizer)
        self.packing = packed.Packing()
        self._loaded_attention = model.config._attn_implementation

    @property
    def model(self) -> Any:
        """The transformers model with the layers that it was loaded with. Whoever decodes next
        packs them again."""
        self.unpack_weights()
        return self._model

    def unpack_weights(self) -> None:
        """Bring the layers back as they were loaded."""
        self.packing.undo()

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

    @property
    def packed_layers(self) -> int:
        """How many linear layers are packed now."""
        return len(self.packing.places)

    def pack_weights(self) -> None:
        """Make the model ready for decoding, where that is wanted. Linear layers are packed where
        this device has kernels for it: they become one product where a pass has shown that they
        read one tensor, and the model's own logits must stay what they are; else less is packed,
        or nothing."""
        state = self.packing
        if state.places or state.refused or not self.packs_weights or self.sharded:
            return
        if any(weight.requires_grad for weight in self._model.parameters()):
            return
        try:
            if packed.takes(self.dtype, self.device):
                self._pack_checked(state)
        except BaseException:  # half done
            self.unpack_weights()
            raise

    def _pack_checked(self, state: packed.Packing) -> None:
        _ = self.probe(), self.head  # both ask the model as it was loaded
        wanted = self._logits()
        places = packed.plain_linears(self._model)
        together = packed.seen_together(places, self._logits)
        for groups in (together, [[place] for place in places]):
            state.take(packed.pack(groups, self._model))
            if difference(self._logits(), wanted) <= TOLERANCE[self.dtype]:
                return
            state.undo()
        state.refused = True

    @torch.no_grad()
    def read(self, ids: Tensor, positions: Tensor, mask: Any, cache: TreeCache) -> Tensor:
        """Last hidden states [B, T, D] of a pass over ids [B, T], whose place in the cache was
        opened."""
        with self.rows_apart():
            out = self.body(**self._inputs(ids, positions, mask, cache))
        return out.last_hidden_state  # type: ignore[no-any-return]

    @torch.no_grad()
    def _logits(self) -> Tensor:
        """Of a short text, by a plain pass."""
        ids = torch.arange(3, 11, device=self.device).remainder(self.vocab_size)[None]
        with self.rows_apart():
            out = self._model(input_ids=ids, use_cache=False, return_dict=True)
        return out.logits  # type: ignore[no-any-return]

    def new_cache(
        self, max_rows: int, max_len: int, max_nodes: int, guidance: float | None = None
    ) -> TreeCache:
        """See Scorer; decoding begins here, so weights are packed."""
        cache = super().new_cache(max_rows, max_len, max_nodes, guidance)
        self.pack_weights()
        return cache

    def assuming(self, probe: Probe) -> Self:
        """See Scorer; a trial runs on the model as it was loaded."""
        other = super().assuming(probe)
        other.packs_weights = False
        return other
