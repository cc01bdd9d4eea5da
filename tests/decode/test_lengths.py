"""Greedy answers, and what changes with the length of a text: rotary frequencies, windows of any
name, the end of the context.

Every drafter equals transformers' `generate` token for token, alone and beside ragged
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models import facts
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from tests.decode.test_engine import Tree
from tests.helpers.archs import LONGROPE, SWITCH, build

DOUBLE = torch.float64
NEW = 30
SLOW = ["qwen3", "gpt2", "phi3", "mistral"]


def phi() -> Any:
    return build("phi3", DOUBLE, **LONGROPE)


def doge(**changes: Any) -> Any:
    """Its mask depends on a learned number for every head, which starts as zero: then all
    tokens would tie.
    """
    model = build("doge", DOUBLE, **changes)
    generator = torch.Generator().manual_seed(changes.get("seed", 0))
    for name, weight in model.named_parameters():
        if name.endswith("self_attn.A"):
            weight.data = torch.randn(weight.shape, generator=generator, dtype=DOUBLE) * 3
    return model


def prompts(lengths: Sequence[int], seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 53, (n,), generator=generator).tolist() for n in lengths]


def written(model: Any, requested: list[list[int]], new: int, **more: Any) -> list[list[int]]:
    """What transformers' `generate` writes, one prompt at a time."""
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in requested:
        ids = torch.tensor([prompt])
        out = model.generate(ids, do_sample=False, max_new_tokens=new, pad_token_id=0, **more)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def decoded(
    target: Target,
    drafter: Drafter,
    requested: list[list[int]],
    batch_size: int,
    new: int = NEW,
) -> list[list[int]]:
    requests = [Request(p, new, id=i) for i, p in enumerate(requested)]
    run = generate(target, drafter, requests, Sampling(), batch_size=batch_size, eos_ids=[])
    for g in run.generations:  # every token after the first belongs to one cycle
        assert 1 + sum(c.accepted + 1 for c in g.cycles) == len(g.token_ids)
    return [g.token_ids for g in run.generations]


def drafters(target: Target, make: Callable[[], Any]) -> list[Drafter]:
    return [NoDraft(), NGram(), DraftModel(Target(make()), 4), Tree()]


@pytest.mark.parametrize(
    "arch",
    ["llama", "gemma3_text", *(pytest.param(a, marks=pytest.mark.slow) for a in SLOW)],
)
def test_greedy_answers_are_those_of_generate(arch: str, request: pytest.FixtureRequest) -> None:
    """Alone and in eights, with a draft of other weights."""
    many = request.node.get_closest_marker("slow") is not None
    lengths = torch.randint(
        1, 40, (160 if many else 8,), generator=torch.Generator().manual_seed(5)
    )
    requested, new = prompts(lengths.tolist()), 16
    want = written(build(arch, DOUBLE), requested, new)
    target = Target(build(arch, DOUBLE))
    for drafter in drafters(target, lambda: build(arch, DOUBLE, seed=1)):
        for batch_size in (1, 8):
            assert decoded(target, drafter, requested, batch_size, new) == want, drafter.name


# -- rotary frequencies that change at a length


@pytest.mark.parametrize("arch", ["phi3", "llama"])
def test_texts_within_the_first_range_of_longrope(arch: str) -> None:
    """Up to its last token, alone and beside neighbours; whether transformers' own `generate` reads
    a text again that outgrows it (Phi) or not (Llama)."""

    def make() -> Any:
        return build(arch, DOUBLE, **LONGROPE)

    new = 11
    requested = prompts((SWITCH - new, 5, 9))
    want = written(make(), requested, new)
    target = Target(make())
    assert target.context_length == SWITCH == target.first_range
    assert facts.notes(target, Sampling()) == [
        f"target: texts of more than {SWITCH} tokens are refused, of 128 that it has positions "
        "for: beyond, its rotary embedding changes (LongRoPE)"
    ]
    for drafter in drafters(target, make):
        for batch_size in (1, 3):
            found = decoded(target, drafter, requested, batch_size, new)
            assert found == want, (drafter.name, batch_size)


@pytest.mark.parametrize(("size", "new"), [(SWITCH - 4, 5), (SWITCH, 1)])
def test_a_text_that_would_cross_the_first_range_is_refused(size: int, new: int) -> None:
    target = Target(phi())
    with pytest.raises(UserError, match=rf"^request 1: the prompt has {size} tokens.*{SWITCH}"):
        decoded(target, NoDraft(), prompts((5, size)), 2, new)


def test_texts_end_where_dynamic_frequencies_change() -> None:
    """Llama's `generate` would go on with keys rotated by other frequencies than its queries."""
    given = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

    def make() -> Any:
        return build("llama", DOUBLE, rope_parameters=given, max_position_embeddings=SWITCH)

    target = Target(make())
    assert target.context_length == SWITCH and target.first_range is None
    requested = prompts((20, 13, 5))
    want = [
        w[: SWITCH - len(p)]
        for w, p in zip(written(make(), requested, SWITCH - 5), requested, strict=True)
    ]
    for drafter in (NGram(), Tree()):
        assert decoded(target, drafter, requested, 3) == want, drafter.name
    with pytest.raises(
        UserError, match=f"the prompt has {SWITCH} tokens and the target's context holds {SWITCH}"
    ):
        decoded(target, NoDraft(), prompts((SWITCH,)), 1)


# -- windows of any name


def test_a_window_in_a_buffer_is_refused() -> None:
    with pytest.raises(UserError, match="keeps window_size=12 .* cannot be probed"):
        Target(build("gpt_neo", DOUBLE)).probe()


def test_a_window_that_keeps_the_best_tokens_is_refused() -> None:
    """Doge ranks tokens by themselves: repeated ones tie, and which of them stay depends on
    the length of a pass.
    """
    with pytest.raises(UserError, match=r"once its window \(keep_window_size=12\) is full"):
        Target(doge()).probe()
