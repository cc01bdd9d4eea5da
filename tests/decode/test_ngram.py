"""Prompt lookup against a search through the whole text, and the n-gram drafter on it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from outrider.decode.checks import validate
from outrider.decode.ngram import LONGEST, NGram, branches, latest
from outrider.decode.sampling import Sampling


def ends_of(text: list[int], length: int) -> list[int]:
    """Where the last `length` tokens ended earlier."""
    last = text[len(text) - length :]
    return [e for e in range(length, len(text)) if text[e - length : e] == last]


def longest(text: list[int]) -> int:
    """Length of the longest end of `text` that occurred earlier."""
    return next((n for n in range(len(text) - 1, 0, -1) if ends_of(text, n)), 0)


@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_it_finds_what_a_search_finds(seed: int) -> None:
    """Of every beginning: how the latest earlier occurrence of the longest end went on, and every
    continuation with its share."""
    dice = random.Random(seed)
    tokens = [dice.randrange(dice.choice([1, 2, 3, 8])) for _ in range(dice.randint(1, 30))]
    for count in range(1, len(tokens) + 1):
        text = tokens[:count]
        known = np.array(text)
        length = min(longest(text), LONGEST)
        ends = ends_of(text, length) if length else []
        assert latest(known, 5) == (text[ends[-1] : ends[-1] + 5] if ends else [])
        found = branches(known, 99, 1, 0.0)
        after = [text[e] for e in ends]
        assert {token for token, _ in found} == set(after) and len(found) == len(set(after))
        if found:
            assert after.count(found[0][0]) == max(after.count(t) for t in after)


def test_branches_stand_behind_what_they_hang_below_and_within_their_bounds() -> None:
    dice = random.Random(0)
    known = np.array([dice.randrange(4) for _ in range(300)])
    for nodes, depth, least in ((10, 10, 0.0), (10, 2, 0.0), (3, 5, 0.0), (50, 9, 0.05)):
        found = branches(known, nodes, depth, least)
        assert 0 < len(found) <= nodes and len(set(found)) == len(found)
        level: list[int] = []
        for place, (_, above) in enumerate(found):
            assert -1 <= above < place
            level.append(1 if above < 0 else level[above] + 1)
        assert max(level) <= depth
    assert len(branches(known, 50, 9, 0.5)) < len(branches(known, 50, 9, 0.0))
    assert branches(known, 10, 10, 1.0) == branches(known, 0, 5, 0.0) == []


def test_an_ngram_tree_keeps_to_each_rows_budget() -> None:
    drafter = NGram(depth=4, nodes=6)
    assert (drafter.shape, drafter.max_depth, drafter.max_nodes) == ("tree", 4, 6)
    drafter.reset(3, 64)
    drafter.begin([torch.tensor([1])] * 3, Sampling())
    tokens = torch.tensor([[2, 3, 1, 2, 4, 1, 2]] * 3)
    drafter.observe(tokens, None, torch.tensor([7, 7, 4]), slice(0, 3))
    tree = drafter.propose(torch.tensor([4, 1, -3]), Sampling(), None)  # type: ignore[arg-type]
    validate(tree, 9, 6)
    assert tree.size.tolist()[1:] == [2, 0] and int(tree.size[0]) > 2
    assert tree.tokens[1, :2].tolist() == [4, 3] and tree.sampled is None
    assert drafter.propose(torch.tensor([0, 0, 0]), Sampling(), None).width == 0  # type: ignore[arg-type]
