"""Two tokenizers are the same, or the first difference is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from outrider.decode.models.tiny import byte_tokenizer
from outrider.heads.small_lm.tokenizers import compare


def changed(edit: Callable[[dict[str, Any]], None], **special: str) -> Any:
    """A byte tokenizer whose JSON was edited."""
    core = json.loads(byte_tokenizer(300).backend_tokenizer.to_str())
    edit(core)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(core)),
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **special},
    )


def swap(core: dict[str, Any]) -> None:
    vocab = core["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def merge(core: dict[str, Any]) -> None:
    core["model"]["merges"] = [["e", "l"]]
    core["model"]["vocab"]["el"] = core["model"]["vocab"].pop("<|reserved_299|>")


def plain_start(core: dict[str, Any]) -> None:
    core["added_tokens"] = [t for t in core["added_tokens"] if t["content"] != "<|im_start|>"]


def test_the_same_and_the_padded_are_compatible() -> None:
    a = byte_tokenizer(300)
    assert not compare(a, byte_tokenizer(300)) and not compare(a, byte_tokenizer(320), 384)
    assert not compare(byte_tokenizer(320), a, 300), "in either direction"
    assert not compare(a, changed(lambda c: None, eos_token="<|endoftext|>")), "the target's ends"


@pytest.mark.parametrize(
    "edit, words",
    [
        (swap, "token 'a' has id"),
        (merge, "id 299 is .* in the target and .el. in the draft"),
        (lambda c: c.update(normalizer={"type": "NFKC"}), "the text .* in the target"),
        (lambda c: c.update(normalizer={"type": "Lowercase"}), "the text 'Hello world'"),
        (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), "the text"),
        (lambda c: c.update(decoder={"type": "Fuse"}), "is decoded as"),
        (plain_start, "the text"),
    ],
)
def test_the_first_difference_is_named(edit: Any, words: str) -> None:
    reason = compare(byte_tokenizer(300), changed(edit))
    assert re.search(words, reason), reason


def test_a_new_real_token_and_missing_rows_are_differences() -> None:
    more = byte_tokenizer(300)
    more.add_special_tokens({"additional_special_tokens": [AddedToken("<tool>", special=True)]})
    assert "'<tool>' (id 300) is known to the draft only" in compare(byte_tokenizer(300), more)
    short = compare(byte_tokenizer(300), byte_tokenizer(300), 200)
    assert "200 embeddings for tokens up to id 258" in short
