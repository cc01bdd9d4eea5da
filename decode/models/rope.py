"""Rotary embeddings that depend on the length of a text: one set of frequencies up to a length,
others beyond it.

transformers chooses the set of `longrope` (Phi-3-128k, Phi-3.5, Phi-4-mini) and of `dynamic` by
the largest position of a whole pass, and keys in a cache that were rotated by one set do not fit
the other. So no text leaves the first range: facts.context_length ends there, and
decode/checks.py refuses what would cross it.
"""

from __future__ import annotations

from typing import Any

LONGROPE = ("longrope", "su")  # "su": its name in Microsoft's own files
ORIGINAL = "original_max_position_embeddings"  # where the first range of longrope is written


def parameter_sets(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a text config: one set, or one for every layer type."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def first_range(config: Any) -> int | None:
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
