"""The heads that the contract is tested on: one or more for every line of heads.registry, and
how one of them is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.decode.drafters import Drafter
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.heads.base import Head, HeadConfig
from outrider.heads.batch import Batch
from outrider.heads.block.config import BlockConfig
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.medusa.hydra_heads import HydraHeadsConfig
from outrider.heads.registry import head_class
from outrider.heads.small_lm.config import LoraKeys, SmallLMConfig
from tests.helpers.training import random_batch, tiny_target


@dataclass(frozen=True)
class Case:
    """One head. config: its keys. wrong: a key and a value that it refuses. starts_as_lm_head:
    a fresh head's logits are the LM head's."""

    config: HeadConfig
    wrong: tuple[str, Any]
    starts_as_lm_head: bool = False


PARALLEL: dict[str, Any] = {"heads": 3, "draft_vocab": 60, "nodes": 7}
WHOLE = {**PARALLEL, "draft_vocab": 0}
LAYERED: dict[str, Any] = {"draft_vocab": 60, "depth": 3, "nodes": 7, "width": 3}
DEEP = {**LAYERED, "depth": 4, "layers": 2}
BLOCKS: dict[str, Any] = {"block": 4, "layers": 2, "draft_vocab": 60, "nodes": 7, "width": 3}
CUT: dict[str, Any] = {"from_target_layers": 1, "depth": 3, "nodes": 7, "width": 3}
MARKOV: dict[str, Any] = {"block": 3, "markov_rank": 4, "confidence": 1.0}
ONE_LAYER = {**BLOCKS, "layers": 1}
CASES = {
    "medusa": Case(MedusaConfig(**PARALLEL), ("decay", 2.0), True),
    "markov": Case(MedusaConfig(**PARALLEL, markov_rank=4), ("markov_rank", -1), True),
    "hydra": Case(HydraHeadsConfig(**PARALLEL), ("blocks", 0), True),
    "hydra-one-block": Case(
        HydraHeadsConfig(**WHOLE, blocks=1, share_lm_head=True), ("heads", 0), True
    ),
    "hydra-prefix": Case(
        HydraHeadsConfig(**WHOLE, blocks=3, prefix_layers=2), ("prefix_layers", -1), True
    ),
    "eagle1": Case(EagleConfig(**LAYERED, kind="eagle1", feature_loss=1.0), ("steps", 0)),
    "eagle3": Case(EagleConfig(**LAYERED), ("steps", 0)),
    "eagle3.1-two-layers": Case(
        EagleConfig(**DEEP, norm_before_fc=True, norm_output=True), ("width", 0)
    ),
    "eagle3-window": Case(EagleConfig(**LAYERED, sliding_window=5), ("sliding_window", 3)),
    "dflash": Case(BlockConfig(**BLOCKS), ("block", 1)),
    "dflash-frozen-head": Case(
        BlockConfig(**{**ONE_LAYER, "draft_vocab": 0}, share_lm_head=True), ("depth", 4)
    ),
    "dspark": Case(BlockConfig(kind="dspark", **{**BLOCKS, **MARKOV}), ("decay", 0)),
    "p-eagle": Case(EagleConfig(**DEEP, parallel=True), ("steps", 1)),
    "small_lm": Case(SmallLMConfig(**CUT, draft_vocab=60), ("depth", 0)),
    "small_lm-lora": Case(SmallLMConfig(**CUT, lora=LoraKeys(rank=2)), ("embedding", "own")),
}


def fresh(case: Case, dtype: str = "float32", **keys: Any) -> tuple[Target, Head]:
    """A fresh head of a fresh target. keys: of its config."""
    target, cfg = tiny_target(dtype, layers=2), replace(case.config, **keys)
    torch.manual_seed(0)
    head = head_class(cfg.kind).for_target(target, cfg, torch.arange(target.vocab_size) + 1)
    return target, head.eval()


def moved(case: Case, dtype: str = "float32", **keys: Any) -> tuple[Target, Head]:
    """As `fresh`, with weights that are no longer those of the start, and calibrated."""
    target, head = fresh(case, dtype, **keys)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn_like(weight)
    head.calibrate([random_batch(seed=1)], target)
    return target, head


def rng(rows: int) -> Rng:
    """Random numbers of the same request in every row: rows that hold the same draw the same."""
    none = torch.zeros(rows, dtype=torch.int64)
    return Rng(0, none, none)


def features(target: Target, head: Head, ids: Tensor) -> Tensor | None:
    """What the engine would hand its drafter with ids [B, T], [B, T, taps, D]."""
    if not head.taps:
        return None
    return target.features(ids, torch.ones_like(ids, dtype=torch.bool), head.taps)


def observe(
    drafter: Drafter, ids: Tensor, feats: Tensor | None, start: list[int], stop: list[int]
) -> None:
    """Show every live row its tokens start[b] .. stop[b] - 1 of ids [B, T]."""
    counts = torch.tensor(stop) - torch.tensor(start)
    place = torch.tensor(start)[:, None] + torch.arange(int(counts.max()))
    place = place.clamp(max=ids.shape[1] - 1)
    row = torch.arange(len(start))[:, None]
    seen = None if feats is None else feats[row, place - 1]
    drafter.observe(ids[row, place], seen, counts, slice(0, len(start)))


def drafted(
    drafter: Drafter, ids: Tensor, feats: Tensor | None, ends: list[int], sampling: Sampling
) -> DraftTree:
    """What a drafter proposes that has seen the tokens ids [T] of one row in pieces that end
    at `ends`; it proposes after every piece."""
    drafter.reset(1, 64)
    drafter.begin([ids[:1]], sampling)
    before = 1
    for end in ends:
        observe(drafter, ids[None], None if feats is None else feats[None], [before], [end])
        tree = drafter.propose(torch.tensor([drafter.max_depth]), sampling, rng(1))
        before = end
    return tree


def alone(batch: Batch, row: int) -> Batch:
    """One row of a batch without its padding."""
    size = int(batch.mask[row].sum())
    parts = [t[row : row + 1, :size] for t in (batch.ids, batch.mask, batch.loss_mask)]
    return Batch(*parts, batch.sample_ids[row : row + 1])
