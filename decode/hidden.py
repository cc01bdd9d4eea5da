"""Hidden states without the list of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decode.scorer import Scorer


def caught(
    scorer: Scorer, layers: Sequence[nn.Module], taps: Sequence[int], kwargs: dict[str, Any]
) -> Tensor:
    """The hidden states `taps` [B, T, taps, D] of a pass with `kwargs`, and no other one held
    meanwhile: what goes into the layers is read on the way."""
    found: dict[int, Tensor] = {}

    def reader(tap: int) -> Any:
        def read(_: nn.Module, args: Any, named: Any) -> None:
            found[tap] = args[0] if args else named["hidden_states"]

        return read

    wanted = {tap for tap in taps if tap < scorer.num_layers}
    hooks = [layers[t].register_forward_pre_hook(reader(t), with_kwargs=True) for t in wanted]
    try:
        with scorer.rows_apart():
            found[scorer.num_layers] = scorer.body(**kwargs).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([found[tap] for tap in taps], 2)
