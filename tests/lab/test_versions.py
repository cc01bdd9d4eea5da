"""scripts/lab/serving/versions.py: what is counted of transformers' assisted generation, and what
the table says of an older report."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.decode.models.tiny import tiny_model
from outrider.scripts.lab.pages import sampled_versions
from outrider.scripts.lab.serving import versions
from outrider.scripts.proofs.served import SampledAnswer


@pytest.mark.parametrize("drafts", [True, False])
def test_drafted_tokens_are_those_that_are_verified(drafts: bool) -> None:
    """The target as its own assistant: every draft of three is accepted."""
    model, prompt = tiny_model(vocab=260), [5, 6, 7]
    more: dict[str, Any] = {"max_new_tokens": 9}
    if drafts:
        more |= {"assistant_model": tiny_model(vocab=260)}
        more["assistant_model"].generation_config.num_assistant_tokens = 3
        more["assistant_model"].generation_config.assistant_confidence_threshold = 0.0
    ids = torch.tensor([prompt])
    with versions.Passes(model) as passes, torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **more)
    answer = SampledAnswer(0, 0, 1, prompt, out[0, 3:].tolist())
    assert len(answer.tokens) == 9
    assert passes.drafted([answer]) == (9 - passes.count if drafts else 0)
    assert passes.count == (3 if drafts else 9)


def test_a_word_is_a_token() -> None:
    """None of them holds half a character, in whatever order they stand."""
    tokenizer = versions.lettered()
    assert tokenizer.convert_ids_to_tokens([3, 259]) == ["w3", "w259"] and len(tokenizer) == 260
    assert tokenizer.eos_token_id == 2


def test_what_drafted_nothing_is_a_control() -> None:
    said = sampled_versions._verdict
    assert said("undecided", "none", ["the server drafted nothing"]) == "control passed"
    assert said("undecided", "ngram", ["few drafts"]) == "undecided: few drafts"
    assert said("not lossless", "none", ["layer sampling"]) == "**not lossless**"
