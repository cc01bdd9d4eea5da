"""EAGLE, Hydra heads, Medusa with a Markov term and DSpark on every architecture: a
training step, then greedy equality.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request
from outrider.decode.target import Target
from outrider.heads.block.config import BlockConfig
from outrider.heads.checkpoint import load_head, save_head
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.losses import LossWeights
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.medusa.hydra_heads import HydraHeadsConfig
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from tests.helpers.archs import TREE, VOCAB, build
from tests.helpers.decoding import texts
from tests.helpers.training import random_batch

CASES = {
    "eagle1": EagleConfig(kind="eagle1", draft_vocab=0, depth=4, nodes=9, width=3),
    "eagle3": EagleConfig(draft_vocab=0, taps=[1, 1, 2], depth=4, nodes=9, width=3),
    "hydra": HydraHeadsConfig(heads=2, blocks=2, draft_vocab=0, prefix_layers=1, nodes=6),
    "markov": MedusaConfig(heads=2, draft_vocab=40, markov_rank=4, nodes=6, loss=LossWeights(0, 1)),
    "dspark": BlockConfig(
        kind="dspark",
        block=3,
        draft_vocab=40,
        markov_rank=4,
        nodes=6,
        width=3,
        loss=LossWeights(0, 1),
    ),
}

FAST = {"llama": [*CASES], "gpt2": ["markov", "hydra"], "gemma3_text": ["eagle1", "dspark"]}
SLOW = [(a, ["eagle3", "hydra", "dspark"][i % 3]) for i, a in enumerate(TREE)]
PAIRS = [
    *((arch, name) for arch, names in FAST.items() for name in names),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW if pair[0] not in FAST),
]


@pytest.mark.parametrize("arch, name", PAIRS)
def test_trains_saves_loads_and_decodes_losslessly(arch: str, name: str, tmp_path) -> None:
    torch.manual_seed(0)
    target, cfg = Target(build(arch)), dataclasses.replace(CASES[name])
    head = head_class(cfg.kind).for_target(target, cfg, torch.arange(VOCAB) + 1)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.02)
    for _ in range(2):
        optimizer.zero_grad()
        head(random_batch(vocab=VOCAB), target).sum.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
        optimizer.step()
    head.eval()
    head.calibrate([random_batch(vocab=VOCAB, seed=1)], target)
    save_head(head, tmp_path / "head", None)
    fresh = Target(build(arch))
    loaded = load_head(tmp_path / "head", fresh)
    requests = [Request([5, 6, 7, 8 + i][: 2 + i], 8, id=i) for i in range(3)]
    want = texts(fresh, NoDraft(), requests, eos_ids=())
    for shape in ("chain", "tree") if arch in TREE else ("chain",):
        for size in (1, 3):
            drafter = loaded.drafter(fresh, DraftSpec(shape=shape))
            assert texts(fresh, drafter, requests, batch_size=size, eos_ids=()) == want
