"""References obey the settings of the run, not the model's own generation_config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import DecodedRun, Request, generate
from outrider.decode.models import facts
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.scoring.reference import hf_assisted, hf_generate
from tests.helpers.archs import VOCAB, build

# What Qwen2.5-Instruct ships, and what else transformers would obey.
QWEN = {"repetition_penalty": 1.5, "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
OTHERS: dict[str, Any] = {
    "suppress_tokens": list(range(3, 40)),
    "begin_suppress_tokens": list(range(20, 55)),
    "sequence_bias": {(n,): 9.0 for n in range(5, 9)},
    "bad_words_ids": [[n] for n in range(10, 45)],
    "num_beams": 2,
    "length_penalty": 0.3,
    "no_repeat_ngram_size": 1,
    "forced_eos_token_id": 7,
    "forced_bos_token_id": 8,
    "min_length": 60,
    "min_new_tokens": 4,
    "exponential_decay_length_penalty": (2, 3.0),
    "typical_p": 0.2,
    "epsilon_cutoff": 0.1,
    "guidance_scale": 3.0,
    "prompt_lookup_num_tokens": 3,
    "cache_implementation": "static",
    "stop_strings": ["a"],
    "return_dict_in_generate": True,
}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [11, 12], [30] * 9]


def asking(arch: str = "qwen2", **fields: Any) -> Target:
    """A target whose generation_config asks for these fields."""
    model = build(arch, torch.float64)
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return Target(model)


def requests(tokens: int = 14) -> list[Request]:
    return [Request(p, tokens, id=i) for i, p in enumerate(PROMPTS)]


def texts(run: DecodedRun) -> list[list[int]]:
    return [g.token_ids for g in run.generations]


def references(target: Target, helper: Target, sampling: Sampling) -> dict[str, list[list[int]]]:
    return {
        "hf_generate": texts(hf_generate(target, requests(), sampling)),
        "hf_generate, batch 3": texts(hf_generate(target, requests(), sampling, batch_size=3)),
        "hf_assisted": texts(hf_assisted(target, helper, 3, requests(), sampling)),
    }


@pytest.mark.parametrize("fields", [QWEN, OTHERS], ids=["qwen2.5", "others"])
def test_greedy_references_write_what_we_write(fields: dict[str, Any]) -> None:
    target, helper = asking(**fields), asking("llama", **fields)
    want = texts(generate(target, NoDraft(), requests(), Sampling()))
    assert texts(generate(target, NGram(), requests(), Sampling())) == want
    for name, found in references(target, helper, Sampling()).items():
        assert found == want, name


def test_our_own_penalty_is_part_of_the_distribution() -> None:
    target, helper = asking(**QWEN), asking("llama", **QWEN)
    sampling = Sampling(repetition_penalty=1.2)
    want = texts(generate(target, DraftModel(helper, 3), requests(), sampling))
    assert want != texts(generate(target, NoDraft(), requests(), Sampling()))
    for name, found in references(target, helper, sampling).items():
        assert found == want, name


def test_sampled_references_follow_the_distribution_of_the_run() -> None:
    """The first token of 4,000 answers against softmax(logits): a fitting distribution is
    rejected once in 10,000 times.
    """
    target = asking(**QWEN, **OTHERS)
    many = [Request(PROMPTS[0], 1, id=i) for i in range(4000)]
    found = texts(hf_generate(target, many, Sampling(1.0), batch_size=4000, seed=5))
    with torch.no_grad():
        distribution = target.model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor(found)[:, 0], minlength=VOCAB).double()
    likely = distribution * len(many) >= 5
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    expected = torch.cat([distribution[likely], distribution[~likely].sum()[None]]) * len(many)
    assert chisquare(seen.numpy(), (expected * seen.sum() / expected.sum()).numpy()).pvalue > 1e-4


def test_the_models_own_settings_come_back_even_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, helper = asking(**QWEN), asking("llama", **QWEN)
    kept = [t.model.generation_config for t in (target, helper)]
    before = [k.to_dict() for k in kept]
    hf_generate(target, requests(2), Sampling())

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(target.model, "generate", broken)
    for run in (
        lambda: hf_generate(target, requests(2), Sampling()),
        lambda: hf_assisted(target, helper, 3, requests(2), Sampling()),
    ):
        with pytest.raises(RuntimeError, match="out of memory"):
            run()
    assert all(t.model.generation_config is k for t, k in zip((target, helper), kept, strict=True))
    assert [k.to_dict() for k in kept] == before


def test_answers_of_the_reference_end_with_the_context() -> None:
    """Learned positions end there: without a limit transformers would read behind their table."""
    model = build("gpt2", torch.float64, n_positions=24)
    model.generation_config.eos_token_id = None
    target = Target(model)
    target.eos_ids = ()
    requested = [Request([5, 6, 7] * 6, 20, id=0), Request([8, 9], 20, id=1)]
    want = texts(generate(target, NoDraft(), requested, Sampling(), batch_size=2))
    assert [len(w) for w in want] == [6, 20]
    assert texts(hf_generate(target, requested, Sampling(), batch_size=2)) == want


# -- what is said of them


def test_what_the_model_asks_for_is_said_in_one_line() -> None:
    fields = {
        "repetition_penalty": 1.05,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 1.0,
    }
    target = asking(**fields, num_beams=1, max_length=99)
    assert facts.ignored(target.model, Sampling()) == {
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_k": 20,
    }
    (line,) = facts.notes(target, Sampling())
    assert "repetition_penalty=1.05 temperature=0.7 top_k=20" in line
    same = Sampling(0.7, 20, repetition_penalty=1.05)
    assert facts.ignored(target.model, same) == {} and facts.notes(target, same) == []
