"""Scoring: passes of a causal language model over prompts and draft trees, with a cache, once
it is known what the model can do. decode/probe.py tries what that is; decode/target.py is a
scorer whose capabilities were probed.

Shape letters: B live rows, T tokens, N tree nodes, V vocabulary, D hidden size.
Tap k is `hidden_states[k]` of transformers: 0 = embeddings, k = input of layer k, num_layers =
output after the final norm. Taps are always read by number from the full list: selecting them
in the call means another layer in 5.19 than in 5.23.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import devices
from outrider.decode.cache import LayerShape, TreeCache
from outrider.decode.masks import Reach, TreeMasks
from outrider.decode.models import facts
from outrider.decode.states import Scored, StateCache, Taps, by_length
from outrider.decode.tree import DraftTree


@dataclass(frozen=True)
class LMHead:
    """logits = cap * tanh(scale * lm_head(h) / cap), cap None: no cap. exact: the model's
    logits agree.
    """

    scale: float = 1.0
    cap: float | None = None
    exact: bool = False
    reason: str = ""

    def finish(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True)
class Probe:
    """What a model can do: K/V shapes per layer, reach per layer type, mask rows per node.

    tested: tokens of the longest text compared with a plain pass. states: a hybrid model's cache.
    """

    shapes: list[LayerShape | None]
    reaches: dict[str, Reach]
    tile: int = 1
    tested: int = 0
    states: type[StateCache] | None = None


@dataclass(frozen=True)
class Tokens:
    """What a pass reads behind the committed tokens of each row.

    ids: [B, n]. depth: [B or 1, R] int64, distance from the row's end of every token that stands
    there, R of them, these n last. seen: [B or 1, n, R] bool, which of the R each may look at;
    None: one token looks at all."""

    ids: Tensor
    seen: Tensor | None
    depth: Tensor


@dataclass
class Step:
    """One pass of the target.

    logits: score: [B, N + 1, V], row 0 follows the last committed token, row i + 1 follows
        node i; rows of padding nodes are meaningless. prefill: [B, 1, V] at each row's last
        prompt token. Model dtype.
    feats: score: [B, N + 1, taps, D], prefill: [B, T, taps, D] right-padded; None without
        taps.
    """

    logits: Tensor
    feats: Tensor | None = None


class Scorer:
    """A frozen causal language model (eval mode, no gradients to its weights) that scores
    draft trees.

    vocab_size, hidden_size, num_layers, context_length (tokens; 2**31 - 1 where the model has
    no limit), eos_ids (ascending), dtype, device.

    first_range: longest text before the rotary frequencies of LongRoPE change, where that comes
    before the model's last position; None elsewhere.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self._model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.context_length: int = facts.context_length(self.config)
        cut = self.context_length < facts.positions(self.config)
        self.first_range: int | None = self.context_length if cut else None
        self.eos_ids: tuple[int, ...] = facts.eos_ids(model, tokenizer)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.body = facts.body(model)
        self._probe: Probe | None = None
        self._head: LMHead | None = None

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._model

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    def probe(self) -> Probe:
        """Return what the model can do."""
        raise TypeError("a subclass defines it")

    def assuming(self, probe: Probe) -> Self:
        """Return the same model, taken to be able to do what `probe` says."""
        other = copy.copy(self)
        other._probe = probe
        vars(other).pop("masks", None)
        return other

    @property
    def head(self) -> LMHead:
        """How logits follow from the last hidden state."""
        raise TypeError("a subclass defines it")

    def new_cache(self, max_rows: int, max_len: int, max_nodes: int) -> TreeCache:
        """Return a cache for `max_rows` requests of at most `max_len` committed tokens,
        trees of at most `max_nodes` nodes."""
        found = self.probe()
        kind = found.states or TreeCache
        return kind(found.shapes, max_rows, max_len, max_nodes, self.dtype, self.device)

    @torch.no_grad()
    def prefill(
        self, cache: TreeCache, prompts: Sequence[Tensor], taps: Sequence[int] = ()
    ) -> Step:
        """Append one live row per prompt (1-D int64, ragged) and run them in one batch."""
        lengths = [len(p) for p in prompts]
        width, start = max(lengths), cache.rows
        if min(lengths) < width and isinstance(cache, StateCache):
            return Step(*by_length(functools.partial(self.prefill, cache, taps=taps), prompts))
        ids = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True).to(self.device)
        cache.open(start, start + len(prompts), 0, width)
        # Right padding needs no mask: a causal pass never looks right, and later passes hide
        # or overwrite these slots.
        counts = torch.tensor(lengths, device=self.device)
        places = torch.arange(width, device=self.device).expand(len(prompts), width)
        logits, feats = self.forward(ids, places, None, cache, taps, (counts - 1)[:, None])
        cache.lengths = [*cache.lengths, *lengths]
        return Step(logits, feats)

    @torch.no_grad()
    def score(
        self, cache: TreeCache, last: Tensor, tree: DraftTree, taps: Sequence[int] = ()
    ) -> Step:
        """Return one pass over the last committed token [B] (not yet in the cache) and the
        tree's nodes.

        Nothing counts as committed until `cache.commit`. Learned positions end at the context:
        the engine caps depth.
        """
        run = functools.partial(self._score, cache, taps)
        if isinstance(cache, StateCache):
            return Step(*cache.score(run, last, tree))
        return Step(*run(last, tree))

    def _score(
        self, cache: TreeCache, taps: Sequence[int], last: Tensor, tree: DraftTree, at: Any = None
    ) -> Scored:
        """As `score`, of one pass, with logits at the places `at` alone, see `forward`."""
        ids = torch.cat([last[:, None], tree.tokens], 1).clamp(0, self.vocab_size - 1)  # padding
        tokens = Tokens(ids, tree.layout.mask, tree.layout.positions)
        return self._pass(cache, tokens, tuple(taps), at)

    @torch.no_grad()
    def read(self, cache: TreeCache, tokens: Tokens) -> Tensor:
        """Return the last hidden states [B, n, D] of one pass over tokens behind the committed
        ones, which do not count as committed either."""
        return self._pass(cache, tokens, None)[0]

    def _pass(
        self, cache: TreeCache, tokens: Tokens, taps: Taps, at: Tensor | None = None
    ) -> Scored:
        """Return what one pass gives, see `forward`."""
        n, every = tokens.ids.shape[1], tokens.depth.shape[1]
        offset = cache.room(every) + every - n
        ends = devices.send(cache.lengths, self.device)[:, None]
        mask = self.masks(cache.lengths, ends, tokens.seen, tokens.depth)
        positions = ends + tokens.depth[:, -n:]
        cache.open(0, cache.rows, offset, n)
        return self.forward(tokens.ids, positions, mask, cache, taps, at)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Any,
        cache: TreeCache,
        taps: Taps,
        places: Tensor | None = None,
    ) -> Scored:
        """Return logits of every token [B, T, V], or only at `places` [B, n] when given ([B, n,
        V]), and hidden states [B, T, taps, D], None without taps. taps None: the last hidden states
        [B, T, D] in place of logits."""
        every = self._wants_all(taps or ())
        short = self.head.exact and (places is not None or (bool(taps) and not every))
        short |= taps is None
        inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
        if self.takes_positions:  # padding nodes of a tree cut by its size stick out of the context
            inputs["position_ids"] = positions.clamp(max=self.context_length - 1)
        run, every = self.body if short else self._model, every | (bool(taps) and not short)
        out = run(**inputs, use_cache=True, return_dict=True, output_hidden_states=every)
        found = out.last_hidden_state if short else out.logits
        if places is not None:
            found = found[torch.arange(len(ids), device=self.device)[:, None], places]
        if short and taps is not None:
            found = self.unembed(found)
        return found, self._taps(out, taps) if taps else None

    @functools.cached_property
    def masks(self) -> TreeMasks:
        """Masks for this model."""
        found = self.probe()
        return TreeMasks(found.reaches, found.tile, self.dtype, self.device)

    def _wants_all(self, taps: Sequence[int]) -> bool:
        for tap in taps:
            if not 0 <= tap <= self.num_layers:
                raise UserError(
                    f"taps: {tap} is not among the target's 0..{self.num_layers} hidden states"
                )
        return any(tap != self.num_layers for tap in taps)

    def _taps(self, out: Any, taps: Sequence[int]) -> Tensor:
        if out.hidden_states is None:
            if self._wants_all(taps):
                raise UserError(
                    f"target: {type(self.body).__name__} does not hand out its hidden "
                    f"states {list(taps)}; "
                    "use a head that reads the last one alone, such as head=medusa"
                )
            return torch.stack([out.last_hidden_state] * len(taps), 2)
        return torch.stack([out.hidden_states[tap] for tap in taps], 2)

    @property
    def embedding_weight(self) -> Tensor:
        """[V, D]; for a drafter, which must not ask for `model` while its target decodes."""
        return self._model.get_input_embeddings().weight  # type: ignore[no-any-return]

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] of `ids` [...], scaled where the embedding module itself
        scales.
        """
        return self._model.get_input_embeddings()(ids)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of final hidden states [..., D] (tap num_layers), final
        scale and softcap included.

        Raises UserError when the probe found no such rule for this model.
        """
        head = self.head
        if not head.exact:
            raise UserError(
                f"target: its logits do not follow from the last hidden state ({head.reason}); "
                "heads that reuse the LM head cannot work on it"
            )
        return head.finish(self.lm_head(hidden))

    @property
    def lm_head(self) -> Any:
        """The module that maps hidden states to unscaled logits."""
        return self._model.get_output_embeddings()

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, D]."""
        return self.lm_head.weight
