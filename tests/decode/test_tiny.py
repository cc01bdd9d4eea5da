"""The tiny target, its byte tokenizer and the identity of targets."""

import dataclasses

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.models.identity import (
    Identity,
    sha256_template,
    sha256_tokenizer,
    sha256_weights,
)
from outrider.decode.models.load import TargetConfig, load_target, load_tokenizer, torch_dtype
from outrider.decode.models.tiny import byte_tokenizer, tiny_model
from tests.helpers.chats import CHATML_WITH_SPANS

TINY = TargetConfig(kind="tiny")
TOKENIZER = byte_tokenizer(300)


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
