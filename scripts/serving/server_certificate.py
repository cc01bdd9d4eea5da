"""A certificate of a running server: ask, judge, add up (scripts/proofs/served.py has the
tests)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.conf.errors import UserError
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress
from outrider.scripts.proofs import certificate, power, served
from outrider.scripts.proofs.greedy import Plain
from outrider.scripts.proofs.served import Distributions, SampledAnswer, Towards
from outrider.scripts.serving.asking import MOST_TOP, Address
from outrider.scripts.serving.sampled_answers import (
    SampledResponse,
    SampleJob,
    ask_all,
    own_distributions,
    plain_distributions,
)

SAFETY = 4  # rounding is measured on a few prompts only
PLAIN_TIE = 0.01  # logits of another process
ALIEN = 1.0  # a first greedy token so far below the best one is another model's


@dataclass(frozen=True)
class How:
    """The keys of scripts/certify.py that the tests depend on."""

    sampling: Sampling
    tokens: int
    limit: int
    greedy: int
    levels: tuple[int, ...]
    alpha: float
    detect: float
    tie: float
    seed: int
    members: int | None


class Stopwatch:
    """Seconds since `took` was last called, added up by what they went into."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.began = time.perf_counter()

    def took(self, what: str) -> None:
        """What went on until now."""
        now = time.perf_counter()
        self.spent[what] = self.spent.get(what, 0.0) + now - self.began
        self.began = now


def certified(
    target: Target,
    prompts: Sequence[Sequence[int]],
    how: How,
    address: Address,
    plain: Address | None,
    memo: Memo,
    on_progress: OnProgress,
    towards: Towards | None = None,
) -> dict[str, Any]:
    """verdict, reasons, layers, negative_controls, power, untested: what certificate.json
    holds of the server. plain: None for the distributions of the weights in this process.
    towards: the distributions of the server's drafter where it is known here. spent: seconds
    of this run alone.

    Raises UserError for a server that cannot be asked or runs another model.
    """
    if plain is None:
        own = Plain(target)
        probs = own_distributions(own)
        tie = how.tie or SAFETY * memo.once("tie", lambda: own.rounding(list(prompts[:2]))["gap"])
    else:
        probs = plain_distributions(plain, MOST_TOP, target.vocab_size, memo, on_progress)
        tie = how.tie or PLAIN_TIE
    layers: list[dict[str, Any]] = []
    clock = Stopwatch()

    def approve(greedy: Sequence[SampledAnswer]) -> None:
        clock.took("asking")
        layers.append(greedy_layer(greedy, probs, tie, address))
        clock.took("judging")

    replies = ask_all(_job(target, prompts, how, address), memo, on_progress, approve)
    clock.took("asking")
    negative: list[dict[str, Any]] = []
    found: dict[str, Any] = {"tokens": 0, "min_detectable": None}
    if replies.sampled:
        layer, negative, found = sampling_layers(target, replies, probs, how, on_progress, towards)
        layers.append(layer)
    clock.took("judging")
    verdict, reasons = certificate.verdict(
        layers, negative or [{"rejected": True}], found, how.detect
    )
    doubt = _doubt(replies)
    if doubt:
        reasons = [*reasons, doubt]
        verdict = "undecided" if verdict == "lossless" else verdict
    return {
        "verdict": verdict,
        "reasons": reasons,
        "server": {"url": address.url, "kind": replies.kind, "drafted": replies.drafted},
        "laws": "weights" if plain is None else plain.url,
        "spent": {what: round(seconds, 2) for what, seconds in clock.spent.items()},
        "layers": layers,
        "negative_controls": negative,
        "power": found,
        "notes": replies.notes,
        "untested": untested(replies, plain, towards is not None),
    }


def _doubt(replies: SampledResponse) -> str:
    """Why nothing may be known of speculation, though every layer passed; "" for nothing."""
    if replies.doubt:
        return f"{replies.doubt}: how much it drafted is not known; certify in a new folder"
    drafted = replies.drafted != 0
    return "" if drafted else "the server drafted nothing: nothing was tested of speculation"


def _job(target: Target, prompts: Sequence[Sequence[int]], how: How, address: Address) -> SampleJob:
    return SampleJob(
        address,
        prompts,
        how.sampling,
        how.tokens,
        how.limit,
        how.greedy,
        how.levels,
        target.vocab_size,
        frozenset(target.eos_ids),
        how.seed,
    )


def greedy_layer(
    greedy: Sequence[SampledAnswer], probs: Distributions, tie: float, address: Address
) -> dict[str, Any]:
    """Greedy answers by the distance to the best logit. Raises UserError where the very first
    tokens are far from it: those no draft has touched."""
    gaps, first = [], []
    for wave in served.waves(greedy, probs):
        for answer, logits in zip(wave.answers, wave.logits, strict=True):
            own = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            gap = (logits.amax(-1) - own).tolist()
            gaps.append(gap)
            first.append(gap[0])
    alien = [gap for gap in first if not gap <= max(ALIEN, tie)]
    if first and len(alien) > len(first) / 2:
        raise UserError(
            f"{address.setting}: {address.url}: asked greedy answers to {len(first)} prompts; "
            f"{len(alien)} first tokens lie up to {max(alien):.3g} below the target's best one: "
            "another model, tokenizer or template than target; set target to what it serves"
        )
    return served.greedy_json(gaps, tie)


def sampling_layers(
    target: Target,
    replies: SampledResponse,
    probs: Distributions,
    how: How,
    on_progress: OnProgress,
    towards: Towards | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The sampling layer, the negative controls on the same answers, the power."""
    plan = served.ServerTestPlan(
        how.sampling, how.alpha, how.detect, how.seed, how.levels, how.members
    )
    key = served.key_of(replies.sampled)
    judge = served.Judge(plan, target.vocab_size, key, towards)
    known = served.controls(plan, target.vocab_size, key)
    kept: list[served.Wave] = []
    wanted = power.rows_wanted(target.vocab_size)
    total = sum(len(a.tokens) for a in replies.sampled)
    for wave in served.waves(replies.sampled, probs):
        judge.add(wave)
        for control in known:
            served.simulate(control, wave, how.alpha)
        if wanted > 0:
            kept.append(wave)
            wanted -= sum(len(x) for x in wave.logits)
        on_progress(judge.count, total, "judged tokens")
    layer = served.sampling_json(judge, how.alpha)
    negative = [
        {
            "name": c.name,
            "layer": "sampling",
            "rejected": c.rejected,
            "p": c.p,
            "tokens": c.tokens,
        }
        for c in known
    ]
    found = served.power_json(plan, kept, judge.count, len(layer["tests"]))
    return layer, negative, found


def untested(replies: SampledResponse, plain: Address | None, known: bool = False) -> list[str]:
    """What an answer over HTTP does not show."""
    out = [
        "where a cycle begins and ends: biases that exist at one place of a cycle only are met "
        "with the weight of that place",
        "log-probabilities that the server sends while it speculates",
    ]
    if plain is not None:
        out.append(f"the distributions beyond the {MOST_TOP} best tokens of the plain server")
    if replies.drafted is None:
        out.append("how much was drafted: the server does not tell")
    if not replies.sampled:
        out.append("sampling: temperature=0")
    elif not known:
        out.append(
            "a lean towards the drafter's own distribution: no drafter was given "
            "(drafter=FOLDER); a bonus "
            "token drawn from it is met with the weight of whole drafts only"
        )
    return out
