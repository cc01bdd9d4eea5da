"""The tiny target, its byte tokenizer and the identity of targets."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.conf.errors import UserError
from outrider.decode.models.identity import (
    Identity,
    sha256_state,
    sha256_template,
    sha256_tokenizer,
    sha256_weights,
)
from outrider.decode.models.load import TargetConfig, load_target, load_tokenizer, torch_dtype
from outrider.decode.models.tiny import FIRST_BYTE, byte_tokenizer, tiny_model
from tests.helpers.chats import CHATML_WITH_SPANS

TINY = TargetConfig(kind="tiny")
TOKENIZER = byte_tokenizer(300)


@given(st.text(max_size=60))
def test_bytes_round_trip(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    if "<|" not in text:
        assert ids == [FIRST_BYTE + b for b in text.encode()]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_template_with_spans_renders_the_same_text_and_marks_the_answer() -> None:
    turns = [("user", "hey"), ("assistant", "yo"), ("user", "?")]
    chat = [{"role": role, "content": content} for role, content in turns]
    spans = byte_tokenizer(300, CHATML_WITH_SPANS)
    for generation in (False, True):
        keys = {"tokenize": False, "add_generation_prompt": generation}
        assert TOKENIZER.apply_chat_template(chat, **keys) == spans.apply_chat_template(
            chat, **keys
        )
    out = spans.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert spans.decode(marked) == "yo<|im_end|>"


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2", "gemma2"])
def test_models_are_pure_functions_of_their_arguments(arch: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a, b, c = tiny_model(arch), tiny_model(arch), tiny_model(arch, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    hashes = [sha256_state(m.state_dict()) for m in (a, b, c)]
    assert hashes[0] == hashes[1] != hashes[2]
    ids = torch.arange(3, 30)[None]
    spread = a(ids).logits.std(-1).mean().item()
    assert 1.0 < spread < 2.5


@pytest.mark.parametrize(
    "change, key",
    [
        ({"vocab": 200}, "target.vocab"),
        ({"arch": "nope"}, "target.arch"),
        ({"layers": 0}, "target.layers"),
        ({"kind": "cloud"}, "target.kind"),
        ({"attn": "fast"}, "target.attn"),
        ({"kind": "hub"}, "target.name"),
        ({"kind": "local"}, "target.path"),
        ({"kind": "local", "path": "/no/such/folder"}, "target.path"),
    ],
)
def test_bad_keys_are_named(change: dict, key: str) -> None:
    with pytest.raises(UserError, match=key):
        load_target(dataclasses.replace(TINY, **change))


def test_dtype_does_not_change_the_identity() -> None:
    full, half = load_target(TINY), load_target(TINY, "bfloat16")
    assert half.dtype == torch.bfloat16 and full.dtype == torch.float32
    assert full.identity == half.identity
    assert full.identity.differences(half.identity) == []
    with pytest.raises(UserError, match="dtype"):
        torch_dtype("int4")


def test_differences_name_the_hash() -> None:
    one, two = load_target(TINY).identity, load_target(dataclasses.replace(TINY, seed=1)).identity
    (line,) = one.differences(two)
    assert line.startswith("weights_sha256") and two.weights_sha256[:12] in line
    assert Identity.from_json(one.to_json()) == one
    assert sha256_template(byte_tokenizer(300, CHATML_WITH_SPANS)) != sha256_template(TOKENIZER)
    assert sha256_tokenizer(byte_tokenizer(300, CHATML_WITH_SPANS)) == sha256_tokenizer(TOKENIZER)
    assert sha256_tokenizer(byte_tokenizer(301)) != sha256_tokenizer(TOKENIZER)
    used = byte_tokenizer(300)
    used(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert sha256_tokenizer(used) == sha256_tokenizer(TOKENIZER)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    byte_tokenizer(320).save_pretrained(folder)
    return folder


def test_local_folder_loads_what_was_saved(saved) -> None:
    cfg = TargetConfig(kind="local", path=str(saved))
    target, source = load_target(cfg), load_target(TINY)
    ids = torch.arange(3, 40)[None]
    assert torch.equal(target.model(ids).logits, source.model(ids).logits)
    assert target.identity.name == "model" and target.identity.path == str(saved.resolve())
    assert target.identity.tokenizer_sha256 == source.identity.tokenizer_sha256
    assert load_tokenizer(cfg).chat_template == load_tokenizer(TINY).chat_template


def test_weights_hash_follows_the_content_past_its_memory(saved) -> None:
    first = sha256_weights(saved)
    assert sha256_weights(saved) == first
    tiny_model(seed=1).save_pretrained(saved)
    assert sha256_weights(saved) != first
