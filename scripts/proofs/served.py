"""A certificate of answers that came over HTTP: tokens alone, no cycles, no logits.

Every answer token is placed in the distribution that its text owes it (of the same weights in
this process, or of a plain server), and the certificate's tests ask whether these places are
those of draws from these distributions: transforms (pit.py), directions (directions.py), pairs
inside an answer, pairs of answers that were decoded at the same time, and answers that follow
an earlier one to their prompt (repeats.py). Greedy answers are judged by the distance of each
token's logit to the best one.

Negative controls are simulated on the very same answers: at every place a token is drawn from
a wrong distribution, and the same tests must reject.

Shape letters: R tokens, V vocabulary, O orders, G strata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decode.sampling import Sampling
from outrider.scripts.proofs import directions, pit, power, uniformity
from outrider.scripts.proofs.repeats import Repeats
from outrider.scripts.proofs.sampled import FLAT, ROWS, Orders, hashed_key, marginals, pairs

CONTROL_TOKENS = 4000  # of a control, unless it is rejected sooner
COOLER, NARROWER = 0.8, 0.9  # what the wrong temperature and the wrong top-p are multiplied by
TYPICAL, SHARE = 0.09, 0.3  # Medusa's typical acceptance: p(x) > min(0.09, 0.3 exp(-H))


@dataclass(frozen=True)
class ServerTestPlan:
    """What the tests need to know. levels: numbers of requests asked at a time. members:
    random biases of each family that the power is measured on."""

    sampling: Sampling
    alpha: float
    detect: float
    seed: int
    levels: tuple[int, ...]
    members: int | None = None

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the strata."""
        together = (f"{level} at a time" for level in self.levels)
        return ("all tokens", *together, "first of an answer", "flat distributions")


@dataclass(frozen=True)
class SampledAnswer:
    """One sampled answer. wave: the answers of one wave were asked together."""

    number: int
    wave: int
    level: int
    prompt: list[int]
    tokens: list[int]


Distributions = Callable[
    [Sequence[SampledAnswer]], Iterator[tuple[int, Tensor]]
]  # (index, logits [R, V])


def key_of(answers: Sequence[SampledAnswer]) -> int:
    """The key of all pseudo-random orders: a hash of the first answers, which no server knew
    before."""
    return hashed_key([a.tokens for a in answers[:16]])


@dataclass
class Wave:
    """Answers that were asked together, with their distributions. logits: [R, V] of each."""

    answers: list[SampledAnswer]
    logits: list[Tensor]


Towards = Callable[
    [SampledAnswer], Tensor
]  # the drafter's distributions [R, V] behind an answer's text


class Lean(directions.DirectionSums):
    """Do tokens lean towards the drafter's distribution? At every place the direction (q -
    p) / (q + p) of that distribution q against the one that is owed: of the same place, and
    of the place before, which the last step of a draft knows. A direction only looks at
    earlier tokens, so the sums are those of directions.py, and whatever q is, draws from p
    do not lean."""

    NAMES = ("distribution of the drafter", "distribution of the drafter a token before")

    def __init__(self, groups: tuple[str, ...]) -> None:
        super().__init__(self.NAMES, groups)

    def add(
        self,
        distribution: Tensor,
        distributions: Sequence[Tensor],
        tokens: Tensor,
        groups: np.ndarray,
    ) -> None:
        """distribution: [R, V] that is owed. distributions: [R, V] each, in the order of NAMES."""
        distribution = distribution.double()
        scores = [directions.contrast(drafter.double(), distribution) for drafter in distributions]
        own = torch.cat([d.gather(1, tokens[:, None]) for d in scores], 1)
        moments = [
            torch.stack([(distribution * d**n).sum(-1) for d in scores], 1) for n in (1, 2, 3)
        ]
        self.note(own, moments, groups)


class Judge:
    """The tests of one stream of tokens: the server's, or a control's. towards: the drafter's
    distributions where they are known."""

    def __init__(
        self, plan: ServerTestPlan, vocab: int, key: int, towards: Towards | None = None
    ) -> None:
        self.plan, self.key, self.towards = plan, key, towards
        self.lean = Lean(plan.groups)
        self.repeats = Repeats()
        self.bank = directions.Bank(vocab, key)
        self.tally = directions.Tally(self.bank, plan.groups)
        self.orders = Orders(vocab, key, np.random.default_rng([plan.seed, 20240601]))
        self.u: list[np.ndarray] = []
        self.groups: list[np.ndarray] = []
        self.where: list[np.ndarray] = []  # (wave, place, number) of every token
        self.outside = self.edge = 0
        self.edge_mass = 0.0

    def add(self, wave: Wave, drawn: Sequence[Sequence[int]] | None = None) -> None:
        """A wave's answers in their distributions; drawn: tokens that a control draws in
        their places, each behind the answer's own text."""
        plan = self.plan
        chosen = [a.tokens for a in wave.answers] if drawn is None else drawn
        softly = [(x.float() / plan.sampling.temperature).softmax(-1) for x in wave.logits]
        for i, (answer, logits) in enumerate(zip(wave.answers, wave.logits, strict=True)):
            before: Tensor | None = None
            drafter = None if self.towards is None else self.towards(answer)
            mass: list[float] = []
            for a in range(0, len(logits), ROWS):
                rows = slice(a, min(a + ROWS, len(logits)))
                tokens = torch.tensor(chosen[i][rows], dtype=torch.int64)
                histories: list[list[int]] = []
                if plan.sampling.uses_history:
                    text = [*answer.prompt, *answer.tokens]
                    start = len(answer.prompt)
                    histories = [text[: start + t] for t in range(rows.start, rows.stop)]
                p = pit.places(logits[rows], tokens, plan.sampling, histories)
                distribution = p.distribution.float()
                groups = self._groups(answer, rows, p.top)
                block = self._block(distribution, before, softly, i, a, wave)
                before = distribution[-1:]
                self.tally.add(self.bank.open(block), tokens, groups)
                if drafter is not None:
                    shifted = torch.cat([torch.zeros_like(drafter[:1]), drafter[:-1]])
                    self.lean.add(distribution, [drafter[rows], shifted[rows]], tokens, groups)
                self.u.append(self.orders.transforms(p, distribution, tokens))
                self.groups.append(groups)
                place = np.arange(rows.start, rows.stop)
                self.where.append(
                    np.stack([np.full_like(place, answer.wave), place, np.full_like(place, i)], 1)
                )
                self.outside += int(p.outside.sum())
                self.edge += int(p.edge.sum())
                self.edge_mass += float(p.edge_mass.sum())
                mass += p.mass.tolist()
            if drawn is None:
                self.repeats.add(answer.prompt, answer.tokens, mass)

    def _groups(self, answer: SampledAnswer, rows: slice, top: np.ndarray) -> np.ndarray:
        count = rows.stop - rows.start
        every = np.ones(count, dtype=bool)
        together = [every & (answer.level == level) for level in self.plan.levels]
        first = np.arange(rows.start, rows.stop) == 0
        return np.stack([every, *together, first, top < FLAT], 1)

    def _block(
        self,
        distribution: Tensor,
        last: Tensor | None,
        softly: Sequence[Tensor],
        mine: int,
        at: int,
        wave: Wave,
    ) -> directions.TokenBlock:
        """What is known before each token of an answer from place `at` on."""
        others = torch.zeros_like(distribution)
        answer = wave.answers[mine]
        mates = [k for k in range(len(softly)) if k != mine]
        for k in mates:
            some = softly[k][at : at + len(distribution)]
            others[: len(some)] += some / len(mates)
        texts = [(wave.answers[k].prompt, wave.answers[k].tokens) for k in mates]
        places = range(at, at + len(distribution))
        theirs = [[[*prompt, *tokens[:t]][-1] for prompt, tokens in texts] for t in places]
        text = ([*answer.prompt, *answer.tokens], len(answer.prompt) + at)
        return directions.TokenBlock.of(distribution, last, others, text, theirs)

    @property
    def count(self) -> int:
        """Tokens judged so far."""
        return sum(map(len, self.u))

    def tests(self) -> list[uniformity.Test]:
        """Every test of the tokens so far."""
        if not self.u:
            return []
        u, groups = np.concatenate(self.u), np.concatenate(self.groups)
        where = np.concatenate(self.where)
        found = marginals(u, groups, self.plan.groups)
        found += self._pairs(u, where, (0, 2, 1), "two tokens of an answer")
        found += self._pairs(u, where, (0, 1, 2), "two answers at once")
        found += uniformity.edge_test(self.edge, self.edge_mass, len(u)) + self.repeats.tests()
        return found + self.tally.tests() + self.lean.tests()

    def _pairs(
        self, u: np.ndarray, where: np.ndarray, order: tuple[int, int, int], name: str
    ) -> list[uniformity.Test]:
        """Neighbours in the order of these columns, as long as the first two are the same."""
        keys = where[:, order]
        ranked = np.lexsort(keys.T[::-1])
        keys, sorted_u = keys[ranked], u[ranked]
        same = np.r_[False, (keys[1:, :2] == keys[:-1, :2]).all(1)]
        return pairs(sorted_u, same, name)

    def p(self) -> float:
        """Of all tests together; 0 when a token came that its distribution does not hold."""
        return 0.0 if self.outside else uniformity.overall(self.tests())


Wrong = Callable[[Tensor, Sampling], Tensor]  # distributions [R, V] of logits and what was asked


@dataclass
class ServerControl:
    """A wrong distribution. wrong: the distributions that it draws from."""

    name: str
    wrong: Wrong
    judge: Judge
    rejected: bool = False
    p: float = 1.0
    tokens: int = 0
    coin: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))


def typical(logits: Tensor, sampling: Sampling) -> Tensor:
    """Only tokens that typical acceptance would keep, the best one where it keeps none."""
    distribution = pit.distribution_of(logits, sampling)
    entropy = -(distribution * distribution.clamp(min=1e-30).log()).sum(-1, keepdim=True)
    edge = torch.minimum(torch.full_like(entropy, TYPICAL), SHARE * (-entropy).exp())
    kept = distribution * (
        (distribution > edge) | (distribution == distribution.amax(-1, keepdim=True))
    )
    return kept / kept.sum(-1, keepdim=True)


CONTROLS: dict[str, Wrong] = {
    f"temperature {COOLER:g} times what was asked": lambda logits, requested: pit.distribution_of(
        logits, dataclasses.replace(requested, temperature=requested.temperature * COOLER)
    ),
    f"top-p {NARROWER:g} times what was asked": lambda logits, requested: pit.distribution_of(
        logits, dataclasses.replace(requested, top_p=requested.top_p * NARROWER)
    ),
    "typical acceptance": typical,
}


def controls(plan: ServerTestPlan, vocab: int, key: int) -> list[ServerControl]:
    """All of them, each with its own tests."""
    return [ServerControl(name, wrong, Judge(plan, vocab, key)) for name, wrong in CONTROLS.items()]


def simulate(control: ServerControl, wave: Wave, alpha: float) -> None:
    """Draw the wave's tokens from the wrong distribution and judge them, until that is rejected."""
    if control.rejected or control.tokens >= CONTROL_TOKENS:
        return
    drawn = []
    for logits in wave.logits:
        distribution = control.wrong(logits, control.judge.plan.sampling).double()
        u = torch.from_numpy(control.coin.random((len(distribution), 1)))
        cumulative = distribution.cumsum(-1)
        index = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
        drawn.append(index[:, 0].clamp(max=distribution.shape[1] - 1).tolist())
    control.judge.add(wave, drawn)
    control.tokens = control.judge.count
    if control.tokens >= uniformity.SMALLEST:
        control.p = control.judge.p()
        control.rejected = control.p < alpha


def waves(answers: Sequence[SampledAnswer], distributions: Distributions) -> Iterator[Wave]:
    """The answers wave by wave with their distributions; empty answers have none."""
    numbers = sorted({a.wave for a in answers})
    by_wave: dict[int, list[SampledAnswer]] = {n: [] for n in numbers}
    for answer in answers:
        if answer.tokens:
            by_wave[answer.wave].append(answer)
    for number in numbers:
        members = by_wave[number]
        if members:
            found = dict(distributions(members))
            yield Wave(members, [found[i] for i in range(len(members))])


def sampling_json(judge: Judge, alpha: float) -> dict[str, Any]:
    """The sampling layer as certificate.json holds it."""
    tests = sorted(judge.tests(), key=lambda t: t.p)
    p = uniformity.overall(tests)
    if judge.outside:
        why = f"{judge.outside} tokens have probability 0 after their text"
    else:
        why = uniformity.objection(tests, alpha)
    return {
        "name": "sampling",
        "passed": not why,
        "why": why,
        "tokens": judge.count,
        "alpha": alpha,
        "p": 0.0 if judge.outside else p,
        "outside_the_law": judge.outside,
        "repeats": judge.repeats.json(),
        "tests": [dataclasses.asdict(t) for t in tests],
    }


def greedy_json(gaps: Sequence[Sequence[float]], tie: float) -> dict[str, Any]:
    """The greedy layer. gaps: per answer the distance of every token's logit to the best one."""
    flat = [gap for row in gaps for gap in row]
    far = [(i, t, g) for i, row in enumerate(gaps) for t, g in enumerate(row) if not g <= tie]
    why = ""
    if far:
        number, place, gap = far[0]
        why = (
            f"{len(far)} of {len(flat)} greedy tokens are not the best one: the first is token "
            f"{place + 1} of answer {number + 1}, {gap:.3g} below it (a tie is up to {tie:.3g})"
        )
    return {
        "name": "greedy",
        "passed": not why,
        "why": why,
        "answers": len(gaps),
        "tokens": len(flat),
        "beyond_ties": len(far),
        "ties": sum(0 < gap <= tie for gap in flat),
        "tie": tie,
        "largest_gap": max(flat, default=0.0),
    }


def power_json(
    plan: ServerTestPlan, seen: Sequence[Wave], tokens: int, tests: int
) -> dict[str, Any]:
    """What so many tokens find, measured on the distributions of the first answers."""
    if not seen:
        return {"tokens": tokens, "min_detectable": None, "families": {}, "blind": []}
    vocab = seen[0].logits[0].shape[1]
    left = power.rows_wanted(vocab)
    answers: list[power.AnswerDistributions] = []
    for wave in seen:
        for logits in wave.logits:
            if left:
                answers.append(power.AnswerDistributions.of(logits[:left], plan.sampling))
                left -= len(answers[-1].distribution)
    bank = directions.Bank(vocab, plan.seed)
    known = power.Power(answers, bank, tokens, plan.alpha, tests)
    found = power.measure(known, plan.detect, plan.seed, plan.members)
    return {"tokens": tokens, "alpha": plan.alpha, "detect": plan.detect, **found}
