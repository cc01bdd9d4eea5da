"""The words of a command line as people type them."""

from __future__ import annotations

import pytest

from outrider.conf.argv import joined, undashed


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["drafters=[none,", "ngram]"], ["drafters=[none, ngram]"]),
        (["a=1", "x=[a,", "b,", "c]", "d=2"], ["a=1", "x=[a, b, c]", "d=2"]),
        (["k={a:", "[1,", "2]}"], ["k={a: [1, 2]}"]),
        (["x=[a,", "b@http://h:1]"], ["x=[a, b@http://h:1]"]),
        (["x=[a,", "out=b]"], ["x=[a,", "out=b]"]),  # another key begins
        (["x=[a,", "b"], ["x=[a,", "b"]),  # never closes
        (["x=']['", "b=1"], ["x=']['", "b=1"]),  # brackets in quotes
        (["x=a]", "b"], ["x=a]", "b"]),
        ([], []),
    ],
)
def test_a_list_that_a_space_parted_is_one_word(words: list[str], meant: list[str]) -> None:
    assert joined(words) == meant


def test_a_key_with_dashes_is_read() -> None:
    assert undashed("--target", ["tiny"]) == ("target", "tiny")
    assert undashed("--max-new-tokens=64", ["out=x"]) == ("max_new_tokens", "64")
    assert undashed("--quiet", ["out=x"]) == ("quiet", "")
    assert undashed("-o", []) == ("o", "")
