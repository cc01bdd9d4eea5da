"""Decoders that are wrong at one kind of place, or by a key, and what a certificate's sampling
layer says of them.

    python scripts/lab/proofs/placed.py           # all; writes docs/results/places.json
    python scripts/lab/proofs/placed.py NAME ...  # those whose names begin so
    python scripts/lab/proofs/placed.py seeds     # the newest tests' own cases under more seeds

The engine itself decodes the tiny target, drafted for by the target's first layer; a rule around
its own draws the token at such places from another distribution, so often that the mean total
variation there is what was asked for. What is found already stays in the JSON, and the table of
docs/lossless.md is written anew.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else this folder comes first
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import numpy as np
import torch
from torch import Tensor

from outrider.decode.drafters import DraftModel
from outrider.decode.models.tiny import tiny_model
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.verify import Coins, Verdict, verify
from outrider.scripts.common import files
from outrider.scripts.lab.pages import lossless_page
from outrider.scripts.lab.pages.lossless_page import MORE, PLACES
from outrider.scripts.proofs import uniformity
from outrider.scripts.proofs.directions import hashed
from outrider.scripts.proofs.greedy import Plain
from outrider.scripts.proofs.sampled import Sample, Setting, sampling_layer

VOCAB, LIMIT, BATCH, DEPTH = 320, 64, 16, 3
TOKENS, ALPHA = 20_000, 1e-4
SEEDS = range(1, 6)  # none of them was looked at while the tests were made


@dataclass
class RequestState:
    """What is known of a request before a verification. rejections: in a row, up to now; before:
    the distribution of its last verification; moved: its batch has changed; number: its id.
    last: the token before the draft, earlier: the one before that."""

    number: int
    tokens: int = 0
    rejections: int = 0
    last: int = -1
    earlier: int = -1
    moved: bool = False
    before: Tensor | None = None


Where = Callable[[RequestState], bool]
Wrong = Callable[[RequestState, Tensor, Tensor], Tensor]  # of p [V] and the next row's p [V]


@dataclass
class PlacedRule:
    """The engine's own rule, wrong `where` it says. root: the first token of the cycle is drawn
    anew; else the token behind a draft that was accepted whole. total: mean total variation at
    such places, None for all that `wrong` does. moved, places, tokens: sums, see `reached`."""

    where: Where
    wrong: Wrong
    root: bool = True
    total: float | None = 0.2
    rows: dict[int, RequestState] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)
    moved: float = 0.0
    unit: float = 0.0
    places: int = 0
    tokens: int = 0

    def __call__(self, tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        found = verify(tree, distribution, rng, "traversal")
        numbers = rng._address[1].tolist()  # type: ignore[attr-defined]
        changed, self.batch = numbers != self.batch, numbers
        every, zero = torch.arange(len(numbers)), torch.zeros(len(numbers), dtype=torch.int64)
        roots = distribution.at(every, zero).dense(distribution.vocab_size).double()
        path, length, bonus = found.path.clone(), found.length.clone(), found.bonus.clone()
        coin = np.random.default_rng([numbers[0], self.tokens])
        for b, number in enumerate(numbers):
            row = self.rows.setdefault(number, RequestState(number))
            row.moved, size = changed, int(tree.size[b])
            p = roots[b]
            if not self.root:
                slot = path[b, length[b] - 1] + 1 if length[b] else zero[0]
                p = distribution.at(every[b : b + 1], slot[None]).dense(VOCAB)[0].double()
            here = self.where(row) and (self.root or int(length[b]) == size > 0)
            if here and self.drawn(row, p, roots[(b + 1) % len(numbers)], coin):
                length[b] = 0 if self.root else length[b]
                path[b, int(length[b]) :] = -1
                bonus[b] = self.token
            row.rejections = row.rejections + 1 if int(length[b]) < size else 0
            drafted = int(tree.tokens[b, path[b, length[b] - 1]]) if length[b] else row.last
            row.before, row.earlier, row.last = roots[b], drafted, int(bonus[b])
            row.tokens += int(length[b]) + 1
            self.tokens += int(length[b]) + 1
        return Verdict(path, length, bonus)

    def drawn(self, row: RequestState, p: Tensor, other: Tensor, coin: np.random.Generator) -> bool:
        """Whether the token is drawn anew; then `token` is it."""
        r = self.wrong(row, p, other)
        apart = float((r - p).abs().sum()) / 2
        self.places, self.unit = self.places + 1, self.unit + apart
        mean = self.unit / self.places
        share = 1.0 if self.total is None else min(1.0, self.total / max(mean, 1e-9))
        self.moved += share * apart
        edges = r.cumsum(0).numpy()
        self.token = min(int(np.searchsorted(edges, coin.random() * edges[-1])), VOCAB - 1)
        return bool(coin.random() < share)


def best(row: RequestState, p: Tensor, other: Tensor) -> Tensor:
    """All on the best token."""
    return torch.nn.functional.one_hot(p.argmax(), len(p)).double()


def cooled(row: RequestState, p: Tensor, other: Tensor) -> Tensor:
    """Half the temperature."""
    return p**2 / (p**2).sum()


def sharper(row: RequestState, p: Tensor, other: Tensor) -> Tensor:
    """A temperature of 0.87."""
    return p**1.15 / (p**1.15).sum()


def of_other(row: RequestState, p: Tensor, other: Tensor) -> Tensor:
    """The next row's distribution."""
    return other


def stale(row: RequestState, p: Tensor, other: Tensor) -> Tensor:
    """The distribution that the row was verified against a cycle before."""
    return p if row.before is None else row.before


def watermark(delta: float, tokens: int = 1) -> Wrong:
    """`delta` more on the logits of half of all ids, by a hash of the token before the draft, or
    of the two before it."""

    def wrong(row: RequestState, p: Tensor, other: Tensor) -> Tensor:
        key = 99 + 7919 * row.last + (104_729 * row.earlier if tokens == 2 else 0)
        green = torch.from_numpy((hashed(len(p), key) >> np.uint64(9)) % 2 == 1)
        r = p * torch.where(green, np.exp(delta), 1.0)
        return r / r.sum()

    return wrong


def always(row: RequestState) -> bool:
    return True


# name -> rule, tokens, and whether so many must reject it. A name behind MORE: the same bias.
CASES: dict[str, tuple[Callable[[], PlacedRule], int, bool]] = {
    "first token of an answer, the best one": (
        lambda: PlacedRule(lambda row: row.tokens == 0, best, total=None),
        TOKENS,
        True,
    ),
    "second token of an answer, the best one": (
        lambda: PlacedRule(lambda row: row.tokens == 1, best, total=None),
        TOKENS,
        True,
    ),
    "after two rejections in a row, cooled": (
        lambda: PlacedRule(lambda row: row.rejections >= 2, cooled),
        TOKENS,
        True,
    ),
    "after two rejections in a row, the step before": (
        lambda: PlacedRule(lambda row: row.rejections >= 2, stale),
        TOKENS,
        True,
    ),
    "after a row joined or left, the next row": (
        lambda: PlacedRule(lambda row: row.moved and row.tokens > 0, of_other),
        TOKENS,
        True,
    ),
    "second half of the answer, cooled": (
        lambda: PlacedRule(lambda row: row.tokens >= LIMIT // 2, cooled, total=0.15),
        TOKENS,
        True,
    ),
    "last token before the limit, the best one": (
        lambda: PlacedRule(lambda row: row.tokens == LIMIT - 1, best, total=0.2),
        TOKENS,
        True,
    ),
    f"last token before the limit, the best one{MORE}": (
        lambda: PlacedRule(lambda row: row.tokens == LIMIT - 1, best, total=0.2),
        45_000,
        False,
    ),
    "behind a whole draft, cooled": (
        lambda: PlacedRule(always, cooled, root=False),
        TOKENS,
        True,
    ),
    "first of a cycle, watermark of the token before, 4": (
        lambda: PlacedRule(always, watermark(4.0), total=0.18),
        TOKENS,
        True,
    ),
    f"first of a cycle, watermark of the token before, 4{MORE}": (
        lambda: PlacedRule(always, watermark(4.0), total=0.18),
        40_000,
        False,
    ),
    "first of a cycle, watermark of the token before, five times the tokens": (
        lambda: PlacedRule(always, watermark(4.0), total=0.2),
        100_000,
        True,
    ),
    "first of a cycle, watermark of the token before, 1": (
        lambda: PlacedRule(always, watermark(1.0), total=None),
        TOKENS,
        False,
    ),
    "first of a cycle, weak watermark of the token before": (
        lambda: PlacedRule(always, watermark(1.0), total=0.095),
        TOKENS,
        False,
    ),
    f"first of a cycle, weak watermark of the token before{MORE}": (
        lambda: PlacedRule(always, watermark(1.0), total=0.095),
        100_000,
        False,
    ),
    "first of a cycle, watermark of the two tokens before, 4": (
        lambda: PlacedRule(always, watermark(4.0, tokens=2), total=0.2),
        40_000,
        False,
    ),
    "second half of the answer, p^1.15": (
        lambda: PlacedRule(lambda row: row.tokens >= LIMIT // 2, sharper, total=None),
        TOKENS,
        False,
    ),
    "second half of the answer, p^1.15 at every fourth place": (
        lambda: PlacedRule(lambda row: row.tokens >= LIMIT // 2, sharper, total=0.023),
        TOKENS,
        False,
    ),
    f"second half of the answer, p^1.15 at every fourth place{MORE}": (
        lambda: PlacedRule(lambda row: row.tokens >= LIMIT // 2, sharper, total=0.023),
        60_000,
        False,
    ),
    "first of a cycle, 3 % from the next row": (
        lambda: PlacedRule(always, of_other, total=0.015),
        TOKENS,
        False,
    ),
    f"first of a cycle, 3 % from the next row{MORE}": (
        lambda: PlacedRule(always, of_other, total=0.015),
        150_000,
        False,
    ),
    "one request in twenty, first of a cycle from the step before": (
        lambda: PlacedRule(lambda row: row.number % 20 == 0, stale, total=None),
        TOKENS,
        False,
    ),
    f"one request in twenty, first of a cycle from the step before{MORE}": (
        lambda: PlacedRule(lambda row: row.number % 20 == 0, stale, total=None),
        100_000,
        False,
    ),
    "one request in twenty, one cycle in four from the step before": (
        lambda: PlacedRule(lambda row: row.number % 20 == 0, stale, total=0.18),
        TOKENS,
        False,
    ),
    f"one request in twenty, one cycle in four from the step before{MORE}": (
        lambda: PlacedRule(lambda row: row.number % 20 == 0, stale, total=0.18),
        100_000,
        False,
    ),
}
# what the tests were made on that found it: the count of the likeliest token together with the
# stratum without a draft, and pairs of first tokens
MADE_ON = (
    "last token before the limit, the best one",
    f"last token before the limit, the best one{MORE}",
    "first of a cycle, watermark of the token before, 4",
    f"first of a cycle, watermark of the token before, 4{MORE}",
    "first of a cycle, watermark of the token before, five times the tokens",
)


class Bench:
    """The tiny target, its own first layer as drafter, and prompts."""

    def __init__(self) -> None:
        self.target, draft = Target(tiny_model(vocab=VOCAB)), tiny_model(vocab=VOCAB, layers=1)
        draft.load_state_dict(tiny_model(vocab=VOCAB).state_dict(), strict=False)
        self.plain, self.drafter = Plain(self.target), DraftModel(Target(draft), DEPTH)
        self.prompts = [[3 + i, 5, 7 + 2 * i, 9] for i in range(12)]
        self.target.probe()

    def sample(self, rule: Any, tokens: int, seed: int = 0) -> Sample:
        """`tokens` tokens under a rule."""
        how = Setting(Sampling(1.0), tokens, LIMIT, BATCH, seed, rule)
        return sampling_layer(self.plain, self.target, self.drafter, self.prompts, how)

    def judged(self, rule: Any, tokens: int, seed: int = 0) -> dict[str, Any]:
        """What the sampling layer says of `tokens` tokens under a rule."""
        begin = time.process_time()
        tests = sorted(self.sample(rule, tokens, seed).tests(), key=lambda test: test.p)
        return {
            "tokens": tokens,
            "p": uniformity.overall(tests),
            "rejected": uniformity.overall(tests) < ALPHA,
            "by": f"{tests[0].name} of {tests[0].stratum}",
            "statistic": tests[0].statistic,
            "tests": len(tests),
            "cpu_s": round(time.process_time() - begin, 1),
        }


def one(bench: Bench, name: str) -> dict[str, Any]:
    """What is found of a case."""
    make, tokens, _ = CASES[name]
    rule = make()
    return bench.judged(rule, tokens) | {
        "share_of_places": rule.places / rule.tokens,
        "total_variation_there": rule.moved / max(rule.places, 1),
        "mean_total_variation": rule.moved / rule.tokens,
    }


def again(bench: Bench, name: str) -> dict[str, Any]:
    """A case under every one of SEEDS, of many tokens under two."""
    make, tokens, _ = CASES[name]
    seeds = SEEDS if tokens < 100_000 else SEEDS[:2]
    p = [bench.judged(make(), tokens, seed)["p"] for seed in seeds]
    return {"first": SEEDS[0], "p": p, "rejected": sum(value < ALPHA for value in p)}


def main(names: Sequence[str]) -> None:
    """One case after another."""
    bench, seeds = Bench(), [*names] == ["seeds"]
    for name in MADE_ON if seeds else CASES:
        known = json.loads(PLACES.read_text())
        there = "seeds" in known.get(name, {}) if seeds else name in known
        if there or (names and not seeds and not name.startswith(tuple(names))):
            continue
        if seeds:
            found = known[name] | {"seeds": again(bench, name) | files.origin()}
        else:
            found = one(bench, name) | files.origin()
        files.write_json(PLACES, known | {name: found})
        print(name, json.dumps(found.get("seeds", found)), flush=True)
    lossless_page.refresh()


if __name__ == "__main__":
    main(sys.argv[1:])
