"""Every conf/experiment composes, and what it trains works on a tiny random target of its
architecture.

pytest tests/train/test_recipes.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.conf.schema import CONF, compose
from outrider.decode.target import Target
from outrider.heads import parity
from outrider.heads.registry import head_class
from outrider.train.config import TrainConfig
from outrider.train.runs import keys_of
from outrider.train.validate import ValidateConfig, head_config
from tests.helpers.archs import VOCAB, build
from tests.helpers.training import random_batch

RECIPES = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))
RUNS: dict[str, tuple[str, type[TrainConfig]]] = {
    "eagle": ("eagle", keys_of("eagle")),
    "medusa": ("medusa", keys_of("medusa")),
    "hydra": ("hydra_heads", keys_of("hydra_heads")),
    "draft": ("draft", keys_of("draft")),
    "demo": ("eagle", keys_of("eagle")),
}
ARCHITECTURES = {
    "llama31": "llama",
    "llama32": "llama",
    "gpt": "gpt_oss",
    "qwen25": "qwen2",
    "qwen3": "qwen3",
    "qwen3_next": "qwen3_next",
    "mistral": "mistral",
    "gemma3": "gemma3",
    "smollm2": "llama",
}


def drawn_up(name: str) -> tuple[str, type[TrainConfig]]:
    """The script and the schema of a recipe."""
    return next(run for word, run in RUNS.items() if f"_{word}" in name)


def test_every_recipe_is_taken_by_its_script_and_by_validate() -> None:
    for name in RECIPES:
        given = [f"experiment={name}", "data.path=x", "out_dir=y"]
        cfg = compose(*drawn_up(name), given)
        again = compose("validate", ValidateConfig, given)
        assert head_config(again.head) == cfg.head and again.steps == cfg.steps, name
        on_gpus = not name.startswith("smollm2")
        assert cfg.micro_batch <= cfg.batch_size and cfg.eval.every <= (cfg.steps or 2000), name
        assert (cfg.steps == 0 < cfg.epochs) if on_gpus else cfg.steps > 0 == cfg.epochs, name


# one recipe for every architecture with every script
PAIRS = {
    (
        ARCHITECTURES[max((a for a in ARCHITECTURES if name.startswith(a)), key=len)],
        drawn_up(name)[0],
    ): name
    for name in RECIPES
}


@pytest.mark.parametrize(("arch", "script"), PAIRS)
def test_what_a_recipe_trains_learns_and_drafts_what_it_learned(arch: str, script: str) -> None:
    name = PAIRS[arch, script]
    head = compose(*drawn_up(name), [f"experiment={name}", "data.path=x", "out_dir=y"]).head
    tiny = {"draft_vocab": 40, "nodes": 8, "width": 3, "from_target_layers": 2}
    tiny["sliding_window"] = 16
    head = replace(head, **{key: small for key, small in tiny.items() if getattr(head, key, 0)})
    target = Target(build(arch, num_hidden_layers=3))
    torch.manual_seed(0)
    draft = head_class(head.kind).for_target(target, head, torch.arange(VOCAB) + 1)
    out = draft(random_batch(vocab=VOCAB), target)
    out.sum.backward()
    assert bool(out.sum.isfinite())
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all())
        for p in draft.parameters()
        if p.requires_grad
    )
    found = parity.check(draft, target, [[5, 6, 7], [9, 4]], 9, batch_size=2)
    assert found.passed, found.problems
