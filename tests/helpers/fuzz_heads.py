"""Tiny heads of every kind on disk, for the fuzz tests: made once, spoiled and tried many
times.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.heads.checkpoint import CARD, load_head, save_head, signed, text_of
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.heads.small_lm.config import SmallLMConfig
from tests.contract.cases import CASES
from tests.helpers.training import tiny_target

FURTHER = ("hydra-prefix", "small_lm-lora")  # beside the plain ones
CONFIGS: dict[str, Any] = {
    **{name: c.config for name, c in CASES.items() if "-" not in name or name in FURTHER},
    "small_lm path": SmallLMConfig(
        path="small", embedding="own", draft_vocab=64, depth=2, nodes=4, width=2
    ),
}
KINDS = tuple(CONFIGS)
CALIBRATION = {
    "positions": 3,
    "acceptance": [[0.5, 0.2], [0.3, 0.1]],
    "paths": [[0], [1], [0, 0]],
    "values": [0.5, 0.2, 0.1],
}


@functools.cache
def target_of(kind: str) -> Any:
    """The target of a kind's head. One for all."""
    return tiny_target(layers=2)


def made(kind: str, place: Path) -> tuple[Any, Path, dict[str, Any]]:
    """(target, folder of a sound head, its card)."""
    target, cfg = tiny_target(layers=2), CONFIGS[kind]
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    if kind == "small_lm path":
        small = tiny_target(layers=1, hidden=16, seed=4)
        small.model.save_pretrained(place / "small")
        small.tokenizer.save_pretrained(place / "small")
        cfg = replace(cfg, path=str(place / "small"))
    head: Any = head_class(cfg.kind).for_target(target, cfg, counts)
    generator = torch.Generator().manual_seed(0)
    for weight in head.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    head.calibration = dict(CALIBRATION)
    folder = place / "head"
    save_head(
        head, folder, tiny_target(layers=2).identity, {"step": 5, "imported": {"dtype": "float32"}}
    )
    return target, folder, json.loads((folder / CARD).read_text())


def write(folder: Path, card: dict[str, Any]) -> None:
    """A card whose own hash is right, whatever else is wrong with it."""
    sound = isinstance(card.get("sha256"), str) and len(card["sha256"]) == 64
    (folder / CARD).write_text(signed(card) if sound else text_of(card))


def works(folder: Path, kind: str, tokens: int = 5) -> None:
    """Load the head and decode with it: chain and tree, greedy and sampled."""
    target = target_of(kind)
    head = load_head(folder, target)
    for shape in ("chain", "tree"):
        drafter = head.drafter(target, DraftSpec(shape=shape))
        for temperature in (0.0, 1.0):
            made = generate(
                target, drafter, [Request([5, 6, 7], tokens)], Sampling(temperature), eos_ids=()
            )
            assert len(made.generations[0].token_ids) == tokens
