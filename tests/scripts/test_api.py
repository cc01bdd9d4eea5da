"""The Python side: the README's lines run, answers are the engine's own."""

from __future__ import annotations

import json
import math
import re
import typing
from pathlib import Path

import pytest
import torch

import outrider.api
from outrider.conf.errors import UserError
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts import api
from outrider.scripts.common.files import ROOT
from outrider.scripts.common.prompts import chat_ids


def test_an_answer_is_the_engine_s_own() -> None:
    target = api.load_target("tiny", "float32", "cpu", context=512)
    prompt = "abc abc abc abc"
    for sampling, keys in (
        (Sampling(), {}),
        (Sampling(0.8, top_p=0.9), {"temperature": 0.8, "top_p": 0.9}),
    ):
        for drafter in ("none", "ngram"):
            ids = chat_ids(target.tokenizer, [{"role": "user", "content": prompt}])
            made = NoDraft() if drafter == "none" else NGram()
            own = generate(target, made, [Request(ids, 30, id=5)], sampling).generations[0]
            answer = api.generate(target, prompt, drafter, 30, seed=5, **keys)
            pieces = list(answer)
            assert [p.token for p in pieces] == answer.token_ids == own.token_ids
            assert [p.drafted for p in pieces] == answer.from_draft == own.from_draft
            assert answer.finish == own.finish and list(answer) == pieces
            assert answer.text == "".join(p.text for p in pieces)
            assert answer.text == target.tokenizer.decode(own.token_ids, skip_special_tokens=True)
            assert answer.tokens_per_second > 0
            assert (answer.accepted_length > 1) == any(own.from_draft)


def test_a_model_is_named_as_transformers_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[tuple[str, str, str]] = []
    monkeypatch.setattr(
        api.loading, "load_target", lambda cfg, *_: named.append((cfg.kind, cfg.name, cfg.path))
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("Qwen/Qwen3-8B", "mine", "./mine", "tiny"):
        api.load_target(name)
    assert named == [
        ("hub", "Qwen/Qwen3-8B", ""),
        ("local", "", "mine"),
        ("local", "", "./mine"),
        ("tiny", "", ""),
    ]


def test_a_draft_that_is_left_out_is_message() -> None:
    """The answer is whole, and as slow as without a drafter."""
    target = api.load_target("tiny", "float32", "cpu")
    made = DraftModel(target, 3)
    made.logits = lambda state: torch.full((*state.shape[:-1], target.vocab_size), torch.nan)  # type: ignore[method-assign]
    answer = api.generate(target, [3, 4, 5], made, 8, temperature=1.0, seed=5)
    with pytest.warns(UserWarning, match="drafts came to NaN or infinity and end there; check"):
        assert len(answer.token_ids) == 8
    assert not any(answer.from_draft)


def test_it_is_decoded_as_it_is_read() -> None:
    target = api.load_target("tiny", "float32", "cpu")
    answer = api.generate(target, [3, 4, 5], max_new_tokens=20)
    assert not answer._pieces
    next(iter(answer))
    assert len(answer._pieces) < 4
    assert len(answer.token_ids) == 20 or answer.finish == "eos"
    one = api.generate(target, [3, 4, 5], max_new_tokens=1)
    assert len(one.token_ids) == 1 and math.isnan(one.accepted_length)


MISTAKES: dict[str, typing.Callable[[Target], object]] = {
    "prompt is empty": lambda t: api.generate(t, []),
    "context holds": lambda t: api.generate(t, [3] * 2000),
    "outside the target's vocabulary": lambda t: api.generate(t, [10**6]),
    "runs/none-such": lambda t: api.generate(t, "x", "runs/none-such"),
    "max_new_tokens: 0": lambda t: api.generate(t, "x", max_new_tokens=0),
    "temperature: None": lambda t: api.generate(t, "x", temperature=None),  # type: ignore[arg-type]
    "target: a str": lambda t: api.generate("tiny", "x"),  # type: ignore[arg-type]
    "prompt: none of": lambda t: api.generate(t, b"abc"),  # type: ignore[arg-type]
    "message: the content": lambda t: api.generate(t, [{"role": "user"}]),
    "temperatur: no such key": lambda t: api.generate(t, "x", temperatur=1.0),
    "dtype: 'half'": lambda t: api.load_target("tiny", "half"),
    "name: 7": lambda t: api.load_target(7),  # type: ignore[arg-type]
    "did you mean smollm2": lambda t: api.load_target("smolm2"),
    "layer: no such key": lambda t: api.load_target("tiny", layer=3),
    "did you mean medusa": lambda t: api.train("medsua"),
}


def test_mistakes_are_user_errors() -> None:
    target = api.load_target("tiny", "float32", "cpu")
    for message, call in MISTAKES.items():
        with pytest.raises(UserError, match=re.escape(message)):
            call(target)


@pytest.mark.slow
def test_the_lines_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tiny target, its data and two steps in place of the real ones."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert found and len([line for line in found[1].splitlines() if line.strip()]) <= 7
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b c d e"}]
    rows = [{"messages": messages} for _ in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    real = api.train
    tiny = ("target=tiny", "steps=2", "batch_size=4", "eval.every=0", "dtype=float32")

    def quick(head: str, *keys: str) -> Path:
        kept = [k for k in keys if k.partition("=")[0] not in ("target", "data.path", "epochs")]
        return real(head, *kept, *tiny, "data.path=data.jsonl")

    monkeypatch.setattr(outrider.api, "train", quick)
    load = api.load_target
    monkeypatch.setattr(outrider.api, "load_target", lambda name: load("tiny", "float32", "cpu"))
    names: dict[str, object] = {}
    exec(compile(found[1], "README.md", "exec"), names)
    answer = names["answer"]
    assert isinstance(answer, api.Answer) and answer.token_ids
    assert answer.text in capsys.readouterr().out
