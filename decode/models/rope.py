"""Rotary embeddings that depend on the length of a text: one set of frequencies up to a
switch, others beyond it.

transformers chooses the set of `longrope` (Phi-3-128k, Phi-3.5, Phi-4-mini) by the largest
position of the whole pass, so a longer neighbour in the batch, or padding, would change every
row; `RowwiseRope` lets every row choose by itself. A row that outgrows the switch must be read
again, for its cached keys were rotated by the other set. Where transformers' own `generate`
does not do so (nor for `dynamic`), texts end at the switch: see facts.context_length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

LONGROPE = ("longrope", "su")  # "su": its name in Microsoft's own files
ORIGINAL = "original_max_position_embeddings"  # where the switch of longrope is written


def parameter_sets(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a text config: one set, or one for every layer type."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def switch(config: Any) -> int | None:
    """Longest text, in tokens, that is rotated by the first set of frequencies; None: there is
    but one set.
    """
    lengths = []
    for given in parameter_sets(config):
        kind = given.get("rope_type", given.get("type"))
        longest = getattr(config, "max_position_embeddings", None)
        if kind in LONGROPE:
            lengths.append(given.get(ORIGINAL) or getattr(config, ORIGINAL, None) or longest)
        elif kind == "dynamic":
            lengths.append(longest)
    return min((length for length in lengths if length), default=None)


def rowwise(model: Any, config: Any) -> RowwiseRope | None:
    """How to decode `model` beyond its switch; None: it has none, or its own `generate` does
    not read a text again that outgrows it. Models that do so prepare the inputs of `generate`
    themselves and know the switch as a key of their config."""
    from transformers import GenerationMixin

    length = switch(config)
    if length is None or ORIGINAL not in vars(config):
        return None
    if type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation:
        return None
    modules = [m for m in model.modules() if _chooses(getattr(m, "rope_type", None))]
    return RowwiseRope(modules, config, length) if modules else None


@dataclass
class RowwiseRope:
    """modules: the rotary ones of a model, which choose by the largest position of a pass.
    config: the text config.
    length: the switch, in tokens."""

    modules: list[Any]
    config: Any
    length: int

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """While the block runs, each row of a pass chooses by its own largest position. The
        model is left as it was.
        """
        kept = [vars(module).get("forward") for module in self.modules]
        for module in self.modules:
            module.forward = self._by_row(module.forward)
        try:
            yield
        finally:
            for module, forward in zip(self.modules, kept, strict=True):
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    @contextlib.contextmanager
    def switched_at(self, length: int) -> Iterator[None]:
        """The switch comes after `length` tokens while the block runs: for a probe that must
        be short.
        """
        kept = self.length
        spaces = [
            vars(self.config),
            *(given for given in parameter_sets(self.config) if ORIGINAL in given),
        ]
        before = [space[ORIGINAL] for space in spaces]
        for space in spaces:
            space[ORIGINAL] = length
        self.length = length
        try:
            yield
        finally:
            self.length = kept
            for space, value in zip(spaces, before, strict=True):
                space[ORIGINAL] = value

    def _by_row(self, inner: Any) -> Any:
        def forward(
            x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, ...]:
            """x gives dtype and device. position_ids: [B, T]. Returns cos and sin [B, T, hd]."""
            is_long = position_ids.amax(-1) >= self.length
            if bool(is_long.all()) or not bool(is_long.any()):
                return inner(x, position_ids, *args, **kwargs)
            tables: list[Tensor] = []
            for rows in (is_long, ~is_long):
                found = inner(x, position_ids[rows], *args, **kwargs)
                if not tables:
                    tables = [t.new_empty(is_long.shape[0], *t.shape[1:]) for t in found]
                for table, part in zip(tables, found, strict=True):
                    table[rows] = part
            return tuple(tables)

        return forward


def _chooses(rope_type: Any) -> bool:
    """rope_type: of a rotary module, one name or one for every layer type."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(kind in LONGROPE for kind in kinds)
