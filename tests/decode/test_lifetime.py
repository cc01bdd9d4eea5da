"""Nothing outlives its answer: with Python's collector off, keys, values and whatever else holds
tensors are freed with whoever asked for them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from outrider import api
from outrider.decode.adaptive import Adaptive
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter
from outrider.decode.engine import BatchLimits, Engine, Request, generate
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.union import Union
from outrider.heads.names import DraftSpec
from tests.contract.cases import CASES, moved
from tests.helpers.training import tiny_target

REQUEST = Request([5, 6, 7, 5, 6], 6)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held() -> int:
    """Bytes of all tensors that anything holds, reachable or not."""
    sizes = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor):
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(sizes.values())


def grows(act: Callable[[int], object]) -> int:
    """Bytes that are held after act(1) .. act(4) and were not after act(0), whose shapes stay known
    from then on."""
    act(0)
    before = held()
    for number in range(1, 5):
        act(number)
    return held() - before


HEADS = [name for name in CASES if "lora" not in name]


@pytest.mark.parametrize("name", ["draft model", "union", "adaptive", *HEADS])
def test_a_run_leaves_nothing(name: str) -> None:
    """Each with a drafter and a temperature of its own."""
    if name in CASES:
        target, head = moved(CASES[name])
    else:
        target, draft = tiny_target(), tiny_target(seed=5)

    def act(number: int) -> None:
        drafter: Drafter
        if name in CASES:
            drafter = head.drafter(target, DraftSpec(shape="tree"))
        else:
            drafter = DraftModel(draft, 2)
            drafter = Union([drafter, NGram()]) if name == "union" else drafter
            drafter = Adaptive(drafter) if name == "adaptive" else drafter
        generate(target, drafter, [REQUEST], Sampling(0.5 + number), eos_ids=())

    assert grows(act) == 0


def test_an_engine_of_another_temperature_takes_the_place_of_one() -> None:
    target = tiny_target()
    drafter, engines = DraftModel(tiny_target(seed=5), 2), list[Engine]()

    def act(number: int) -> None:
        engines[:] = [Engine(target, drafter, Sampling(0.5 + number), BatchLimits(2, 32))]
        rows = [engines[0].join(REQUEST, lambda fresh: None) for _ in range(3)]
        while engines[0].busy:
            engines[0].step()
        assert all(row.watch is None for row in rows)

    assert grows(act) == 0


def test_answers_that_are_kept_keep_no_cache() -> None:
    target: Target = tiny_target()
    kept = list[api.Answer]()

    drafter = DraftModel(tiny_target(seed=5), 2)

    def act(number: int) -> None:
        warm = 1.0 + number
        kept.append(api.generate(target, [5, 6, 7], drafter, 6, temperature=warm, seed=number))
        assert kept[-1].token_ids

    assert grows(act) <= 4 * 1024
