"""Does the acceptance probe name what was done to a file? Exports of trained heads are broken
in ways that leave no trace in names, shapes and dtypes, read again, and probed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from decode.target import Target
from heads.base import Batch, Head
from heads.interop import Foreign, detect
from scripts.serving import probe as acceptance_probe


def breakages(foreign: Foreign, head: Head) -> Iterator[tuple[str, str, Foreign]]:
    """(what was done, the convention that mends it, the broken folder)."""
    yield "nothing", acceptance_probe.AS_WRITTEN, foreign
    if head.kind == "eagle3":
        for step, mend in ((-1, "taps_plus_1"), (1, "taps_minus_1")):
            ids = [tap + step for tap in head.taps]
            yield (
                f"layer ids {ids}",
                mend,
                replace(
                    foreign, config={**foreign.config, "eagle_aux_hidden_state_layer_ids": ids}
                ),
            )
        yield (
            "fc blocks reversed",
            "fc_210",
            _edited(foreign, "fc.weight", lambda t: torch.cat(t.chunk(3, 1)[::-1], 1)),
        )
    if head.kind == "eagle1":
        swapped = _edited(foreign, "fc.weight", lambda t: torch.cat(t.chunk(2, 1)[::-1], 1))
        yield "fc halves swapped", "fc_halves", swapped
    if head.kind == "medusa":
        yield (
            "blocks transposed",
            "transpose_blocks",
            _edited(foreign, "layers.0.weight", lambda t: t.T.contiguous()),
        )
    else:
        weight = next(t for n, t in foreign.tensors.items() if n.endswith("o_proj.weight"))
        if weight.shape[0] == weight.shape[1]:
            yield (
                "o_proj transposed",
                "transpose_o_proj",
                _edited(foreign, "o_proj.weight", lambda t: t.T.contiguous()),
            )


def _edited(foreign: Foreign, name: str, edit: Any) -> Foreign:
    tensors = {n: edit(t) if n.endswith(name) else t for n, t in foreign.tensors.items()}
    return replace(foreign, tensors=tensors)


def trial(foreign: Foreign, target: Target, batch: Batch) -> list[dict[str, Any]]:
    """One row per breakage: what the probe named, with the figures it went by."""
    layout = detect(foreign, "auto")
    rows = []
    for done, mend, broken in breakages(foreign, layout.read(foreign, target)):
        found = acceptance_probe.probe(layout.read(broken, target).eval(), batch, target)
        named = acceptance_probe.fitting(found)
        rows.append(
            {
                "done": done,
                "named": named.name,
                "right": named.name == mend,
                "accepted_as_written": found[0].accepted,
                "accepted_as_named": named.accepted,
                "standard_errors": named.better,
            }
        )
    return rows
