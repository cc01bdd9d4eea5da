"""The make of a head's own decoder layers: what it takes from the target, and what its keys
choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.registry import head_class
from tests.helpers.archs import VOCAB, build

WITH_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {"draft_vocab": 0}),
    "eagle3": ("eagle3", {"draft_vocab": 20}),
    "p_eagle": ("eagle3", {"draft_vocab": 20, "parallel": True, "layers": 2}),
    "dflash": ("dflash", {"draft_vocab": 20, "block": 4, "layers": 1}),
    "dspark": ("dspark", {"draft_vocab": 20, "block": 3, "layers": 1, "markov_rank": 2}),
    "hydra": ("hydra_heads", {"draft_vocab": 20, "heads": 2, "prefix_layers": 1}),
}


def made(target: Target, name: str, **keys: Any) -> Head:
    kind, own = WITH_LAYERS[name]
    torch.manual_seed(5)
    cls = head_class(kind)
    own = {**own, "kind": kind} if kind != "hydra_heads" else own
    return cls.for_target(target, cls.Config(**own, **keys), torch.arange(VOCAB) + 1).eval()


def layer(head: Head) -> dict[str, Any]:
    message = head.config_json()
    return message.get("layer") or message["prefix"]


ARCHS = [("gemma3_text", 48), ("mixtral", 128)]
PAIRS = [(name, *ARCHS[i % 2]) for i, name in enumerate(WITH_LAYERS)]


@pytest.mark.parametrize("name, arch, inner", PAIRS)
def test_layers_have_silu_and_are_wide_behind_experts(name: str, arch: str, inner: int) -> None:
    """Whatever the target's activation is: engines' draft layers know silu alone."""
    target = Target(build(arch))
    head = made(target, name)
    assert layer(head)["hidden_act"] == "silu" and layer(head)["intermediate_size"] == inner
    assert head.cfg.intermediate_size == inner
    chosen = made(target, name, intermediate_size=80)
    assert layer(chosen)["intermediate_size"] == 80
