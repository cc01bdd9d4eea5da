"""A scorer whose linear layers are packed while it decodes (decode/models/packed.py), whose layers
then run as one function (decode/models/flat.py), compiled where that pays
(decode/models/compiled.py), and whose model is as it was loaded for everybody who takes it:
training, export, references.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from outrider.conf.errors import first_line
from outrider.decode import attention
from outrider.decode.cache import TreeCache
from outrider.decode.masks import FULL
from outrider.decode.models import compiled, packed, pieces
from outrider.decode.models.flat import FlatPass, flat_pass
from outrider.decode.probe import TOLERANCE, difference
from outrider.decode.probed import Probe
from outrider.decode.scorer import Scorer
from outrider.decode.tree import DraftTree


@dataclass
class DecodingForm(packed.Packing):
    """How a model is made to decode. flat: all layers as one function; exact: whether that gave
    the modules' bits, None: not asked yet; compiled_exact: the same of its compiled layers.
    ready: it was looked what can be done."""

    flat: FlatPass | None = None
    exact: bool | None = None
    compiled_exact: bool | None = None
    ready: bool = False

    def undo(self) -> None:
        """See Packing; modules run again."""
        self.flat, self.ready = None, False
        super().undo()


class PackingScorer(Scorer):
    """packs_weights: whether its weights may be packed. sharded: its layers are spread over
    processes, so they may not. compiles: whether its layers may be compiled. expected_passes: how
    many are to come, about: compiling must pay. packing: what was done to it, one object
    of all copies."""

    packs_weights = True
    compiles = sharded = False
    expected_passes = 0

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        super().__init__(model, tokenizer)
        self.packing = DecodingForm()
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
        or nothing. Then all layers run as one function, and compiled, where that changes no
        bit."""
        state = self.packing
        if state.ready or not self.packs_weights or self.sharded:
            return
        if any(weight.requires_grad for weight in self._model.parameters()):
            return
        try:
            if packed.takes(self.dtype, self.device) and not state.refused:
                self._pack_checked(state)
            self._flatten(state)
            self._compile(state)
            state.ready = True
        except BaseException:  # half done, or not looked at
            self.unpack_weights()
            raise

    def _pack_checked(self, state: DecodingForm) -> None:
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

    def _flatten(self, state: DecodingForm) -> None:
        """Take the flat pass where it gives the model's own bits, on CPUs alone: elsewhere nobody
        has measured it."""
        found = flat_pass(self._model)
        if found is None or self.device.type != "cpu":
            return
        probe, used = self.probe(), self._model.config._attn_implementation
        if probe.support != "tree" or used != attention.NAME or not self.head.exact:
            return
        if len(probe.reaches) > 1 or FULL not in probe.reaches.values():
            return
        if state.exact is None:
            wanted = self._passes()
            state.flat = found
            state.exact = all(map(torch.equal, self._passes(), wanted))
        state.flat = found if state.exact else None

    def _compile(self, state: DecodingForm) -> None:
        """Take compiled layers where they give the flat pass's bits: whole ones, or in float32
        the pieces between their products."""
        flat = state.flat
        if not self.compiles or not state.places or state.compiled_exact is False:
            return
        to_come = self.expected_passes * self.num_layers
        found: FlatPass | None
        if self.dtype == torch.bfloat16:
            found, pays = compiled.compiled_pass(flat, to_come), compiled.PAYS
        else:
            found, pays = pieces.pieced_pass(flat, to_come), pieces.PAYS
        if found is None:
            # What failed is not tried again at every packing; what is gone may come back.
            state.compiled_exact = False if to_come >= pays else None
            return
        if state.compiled_exact is None:
            wanted = self._passes()
            state.flat = found
            try:
                state.compiled_exact = all(map(torch.equal, self._passes(), wanted))
                why = "compiled layers round otherwise here"
            except RuntimeError as e:
                state.compiled_exact, why = False, first_line(e)
            if not state.compiled_exact:
                compiled.refuse(why)
        state.flat = found if state.compiled_exact else flat

    @property
    def compiled(self) -> bool:
        """Whether its layers run compiled while it decodes."""
        return bool(self.packing.compiled_exact)

    def _passes(self) -> list[Tensor]:
        """Logits and all hidden states of a prefill, a tree and a single token behind it; of one
        row, of two that stand at the same place and of two that do not."""
        taps, few = range(self.num_layers + 1), min(5, self.context_length // 2)
        ids = torch.arange(3, 3 + 2 * few, device=self.device).remainder(self.vocab_size)
        one, other, shorter = ids[:few], ids[few : 2 * few], ids[1:few]
        steps = []
        for prompts in ([one], [one, other], [one, shorter])[: 2 if few < 2 else 3]:
            rows = len(prompts)
            tokens = ids[None, few + 1 :].repeat(rows, 1)
            tree = DraftTree.chain(tokens, torch.tensor([few - 1] * rows, device=self.device))
            cache = super().new_cache(rows, few, tree.width)
            steps.append(self.prefill(cache, prompts, taps))
            for draft in (tree, DraftTree.empty(rows, self.device)):
                steps.append(self.score(cache, ids[few : few + 1].repeat(rows), draft, taps))
        return [part for step in steps for part in (step.logits, step.feats) if part is not None]

    @torch.no_grad()
    def read(self, ids: Tensor, positions: Tensor, mask: Any, cache: TreeCache) -> Tensor:
        """Last hidden states [B, T, D] of a pass over ids [B, T], whose place in the cache was
        opened."""
        if self._runs_flat:
            return self._states(ids, positions, mask, cache, ())[0]
        with self.rows_apart():
            out = self.body(**self._inputs(ids, positions, mask, cache))
        return out.last_hidden_state  # type: ignore[no-any-return]

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Any,
        cache: TreeCache,
        taps: Sequence[int],
        last: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """See Scorer."""
        if not self._runs_flat:
            return super()._forward(ids, positions, mask, cache, taps, last)
        self._wants_all(taps)  # which names a tap that is not there
        hidden, seen = self._states(ids, positions, mask, cache, taps)
        if last is not None:
            hidden = hidden[torch.arange(len(ids), device=self.device), last][:, None]
        return self.unembed(hidden), torch.stack(seen, 2) if taps else None

    @property
    def _runs_flat(self) -> bool:
        """A trial of what the model can do (`assuming`) runs the modules."""
        return self.packing.flat is not None and self.packs_weights

    @torch.no_grad()
    def _states(
        self, ids: Tensor, positions: Tensor, mask: Any, cache: TreeCache, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        assert self.packing.flat is not None
        cached = [pair for pair in cache.views if pair is not None]
        slots = torch.arange(cache.offset, cache.offset + ids.shape[1], device=self.device)
        with self.rows_apart():
            return self.packing.flat(ids, positions, cached, slots, mask, taps)

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
