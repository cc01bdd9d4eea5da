"""Decoders whose single tokens are nearly right: what tells them is where a token stands, or
what other answers say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree
from outrider.decode.verify import Coins, Verdict, verify
from outrider.scripts.proofs import served

Whose = Callable[[Tensor], Tensor]  # request ids [B] whose random numbers requests [B] get


def greedy_first(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
    """Sound, but for the token behind the prompt: the most probable one."""
    _, _, cycles = rng._address  # type: ignore[attr-defined]
    found = verify(tree, distribution, rng, rule="traversal")
    begin = cycles.to(found.bonus.device) == 0
    best = distribution.logits[:, 0].argmax(-1)
    return Verdict(found.path, found.length, torch.where(begin, best, found.bonus))


def sharing(whose: Whose) -> Any:
    """Random numbers that belong to other requests: in the place of decode.rng.Rng."""

    class Shared(Rng):
        def __init__(self, seed: int, requests: Tensor, cycles: Tensor) -> None:
            super().__init__(seed, whose(requests), cycles)

    return Shared


def every_fifth_from(prompts: int) -> Whose:
    """Every fifth request has the numbers of the first one that had its prompt."""
    return lambda requests: torch.where(requests % 5 == 4, requests % prompts, requests)


# --- a server without a model: the next token hangs on the last one alone

VOCAB, PROMPTS, LIMIT, LEVELS = 48, 12, 64, (1, 2, 8)


def table(seed: int = 0) -> Tensor:
    """[V, V] logits of the next token by the last one, some sharp, some flat."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(VOCAB, 1, generator=generator) * 2.5 + 0.5
    return torch.randn(VOCAB, VOCAB, generator=generator) * scale


def answers(
    seed: int,
    count: int,
    cached: int = 0,
    greedy: bool = False,
    distributions: Tensor | None = None,
) -> list[served.SampledAnswer]:
    """`count` answers of LIMIT tokens to the prompts in turn. cached: every so many repeated
    prompts get the answer from before; 0 = none. greedy: the first token is the best one."""
    logits = table() if distributions is None else distributions
    rng = np.random.default_rng(seed)
    edges = logits.double().softmax(-1).cumsum(-1).numpy()
    found: list[served.SampledAnswer] = []
    kept: dict[int, list[int]] = {}
    repeated = wave = 0
    while len(found) < count:
        level = LEVELS[wave % len(LEVELS)]
        for number in range(len(found), len(found) + level):
            prompt = [number % PROMPTS]
            tokens, last = list[int](), prompt[-1]
            for u in rng.random(LIMIT):
                best = greedy and not tokens
                last = int(logits[last].argmax() if best else np.searchsorted(edges[last], u))
                tokens.append(min(last, VOCAB - 1))
            repeated += prompt[0] in kept
            if cached and prompt[0] in kept and repeated % cached == 0:
                tokens = kept[prompt[0]]
            kept.setdefault(prompt[0], tokens)
            found.append(served.SampledAnswer(number, wave, level, prompt, tokens))
        wave += 1
    return found[:count]


def judged(
    found: list[served.SampledAnswer], seed: int = 0, distributions: Tensor | None = None
) -> served.Judge:
    """What a certificate of a server sees of these answers."""
    logits = table() if distributions is None else distributions

    def owed(some: Sequence[served.SampledAnswer]) -> Iterator[tuple[int, Tensor]]:
        for i, a in enumerate(some):
            yield i, logits[[a.prompt[-1], *a.tokens[:-1]]]

    plan = served.ServerTestPlan(Sampling(1.0), 1e-4, 0.1, seed, LEVELS)
    judge = served.Judge(plan, VOCAB, served.key_of(found))
    for wave in served.waves(found, owed):
        judge.add(wave)
    return judge


def masses(
    prompt: list[int], tokens: list[int], distributions: Tensor | None = None
) -> list[float]:
    """Probabilities of the tokens of an answer."""
    logits = table() if distributions is None else distributions
    rows = logits[[prompt[-1], *tokens[:-1]]].double().softmax(-1)
    return rows[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
