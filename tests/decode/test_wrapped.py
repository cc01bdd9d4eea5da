"""A wrapped drafter is the drafter inside, but for what the wrapper says."""

from __future__ import annotations

import copy

import pytest
import torch

from outrider.decode.adaptive import Wrapped
from outrider.decode.ngram import NGram
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling


def test_it_drafts_and_has_what_the_inner_one_does() -> None:
    text = torch.tensor([5, 6, 7, 5, 6])
    found = []
    for drafter in (NGram(), Wrapped(NGram())):
        drafter.reset(2, 16)
        drafter.begin([text, text], Sampling())
        new = torch.tensor([[*text[1:].tolist(), 7]] * 2)
        drafter.observe(new, None, torch.tensor([5, 5]), slice(0, 2))
        drafter.select([1])
        rng = Rng(0, torch.tensor([1]), torch.tensor([0]))
        tree = drafter.propose(torch.tensor([3]), Sampling(), rng)
        found.append((tree.tokens.tolist(), drafter.name, drafter.shape, drafter.max_depth))
    assert found[0] == found[1] and found[0][0][0]


def test_it_can_be_copied_and_lacks_what_the_inner_one_lacks() -> None:
    wrapped = Wrapped(NGram())
    other = copy.deepcopy(wrapped)
    assert other.inner is not wrapped.inner and other.name == wrapped.name
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = wrapped.nothing_of_the_kind
    with pytest.raises(AttributeError, match="inner"):
        _ = Wrapped.__new__(Wrapped).inner
