"""How predictable the target's own answers are: entropy of its distribution, and how far
earlier tokens foretell later ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from outrider.decode import stats
from outrider.decode.drafters import NGram
from outrider.decode.engine import Generation
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target


def statistics(
    target: Target, prompts: Sequence[list[int]], answers: Sequence[Generation]
) -> dict[str, Any]:
    """entropy: nats per token of the target's distribution before temperature; top1: its
    mean highest probability; ngram: accepted length of prompt lookup on these answers, which
    needs no training; grams: share of answer tokens whose 1, 2, 3 tokens before stood there
    before with the same one behind them."""
    entropy, top1 = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.token_ids:
            h, p = _distribution(target, prompt, answer.token_ids)
            entropy.append(h)
            top1.append(p)
    if not entropy:
        return {"tokens": 0}
    flat = np.concatenate(entropy)
    lengths = [lookup(p, a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    found = stats.ratio_interval([sum(x) for x in lengths], [len(x) for x in lengths])
    return {
        "tokens": int(len(flat)),
        "entropy": float(flat.mean()),
        "top1": float(np.concatenate(top1).mean()),
        "ngram": found.json(),
        "grams": {str(n): _repeats(prompts, answers, n) for n in (1, 2, 3)},
    }


@torch.no_grad()
def _distribution(
    target: Target, prompt: list[int], answer: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Entropy and highest probability before every token of an answer, [A] each."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=target.device)
    with target.as_loaded() as model:
        logits = model(input_ids=ids, use_cache=False).logits[0, -len(answer) :]
    distribution = logits.float().log_softmax(-1)
    entropy = -(distribution.exp() * distribution.clamp(min=-1e4)).sum(-1)
    return entropy.cpu().numpy(), distribution.amax(-1).exp().cpu().numpy()


def lookup(prompt: list[int], answer: list[int]) -> list[int]:
    """Tokens of every cycle that prompt lookup would have taken for an answer."""
    drafter = NGram()
    drafter.reset(1, len(prompt) + len(answer))
    drafter.begin([torch.tensor(prompt)], Sampling())
    _see(drafter, prompt[1:])
    budget, cycles, at = torch.tensor([drafter.max_depth]), [], 0
    rng = Rng(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    while at < len(answer):
        _see(drafter, answer[at : at + 1])  # the bonus token of the cycle before
        at += 1
        tree = drafter.propose(budget, Sampling(), rng)
        draft = tree.tokens[0, : int(tree.size[0])].tolist()
        rest = answer[at : at + len(draft)]
        same = [a == b for a, b in zip(draft, rest, strict=False)]
        taken = same.index(False) if False in same else len(same)
        _see(drafter, answer[at : at + taken])
        at += taken
        cycles.append(taken + 1)
    return cycles


def _see(drafter: NGram, tokens: list[int]) -> None:
    if tokens:
        drafter.observe(torch.tensor([tokens]), None, torch.tensor([len(tokens)]), slice(0, 1))


def _repeats(prompts: Sequence[list[int]], answers: Sequence[Generation], n: int) -> float:
    hits = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt, *answer.token_ids]
        seen: set[tuple[int, ...]] = set()
        for at in range(n, len(ids)):
            gram = tuple(ids[at - n : at + 1])
            if at >= len(prompt):
                total += 1
                hits += gram in seen
            seen.add(gram)
    return hits / max(total, 1)
