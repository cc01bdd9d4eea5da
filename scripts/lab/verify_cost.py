"""What verification costs beside the target's pass: both rules, with and without top-p, timed
by turns.

Shape letters: B rows, N nodes per tree, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from decode.rng import Rng
from decode.sampling import Law, Sampling
from decode.target import Target
from decode.tree import DraftTree, Proposal, TreeShape
from decode.verify import RULES
from scripts.common.clock import clock

# A sampled tree of 64 nodes, eight chains of eight: every level and every sibling costs a
# residual.
EIGHT_BY_EIGHT = [(r, *(0,) * d) for r in range(8) for d in range(8)]


def sampled_tree(logits: torch.Tensor, shape: TreeShape, seed: int) -> DraftTree:
    """The children of the root drawn without replacement from the target's own law; below them
    draws from the same law, which is a plausible but poor draft there. logits: [B, V] target
    logits after the last committed token.
    """
    rows, n = logits.shape[0], len(shape)
    generator = torch.Generator(device=logits.device).manual_seed(seed)
    law = logits.float().softmax(-1)
    siblings = max(p[-1] for p in shape.paths) + 1
    ranks = torch.tensor([p[-1] for p in shape.paths], device=logits.device)
    drawn = torch.multinomial(law, n, replacement=True, generator=generator)
    # Distinct, as draws without replacement are.
    first = torch.multinomial(law, siblings, generator=generator)
    tops = torch.tensor([len(p) == 1 for p in shape.paths], device=logits.device)
    tokens = torch.where(tops, first[:, ranks], drawn)
    proposal = Proposal(law[:, None], torch.zeros(rows, n, dtype=torch.int64, device=logits.device))
    return DraftTree.static(
        shape, tokens, None, torch.ones(rows, n, dtype=torch.bool, device=logits.device), proposal
    )


def verify_cost(
    target: Target, prompts: list[list[int]], rounds: int = 12, seed: int = 0
) -> dict[str, Any]:
    """Milliseconds of a tree pass (B rows, 64 nodes) and, as a share of it, of verifying its
    logits.

    prompts: one real prompt per row: random tokens would give flat laws that no text has.
    Returns medians over `rounds`, paired within a round, with the lowest and highest share
    seen.
    """
    device, now = target.device, clock(target.device)
    shape = TreeShape.of(EIGHT_BY_EIGHT)
    rows = len(prompts)
    cache = target.new_cache(rows, max(map(len, prompts)) + 1, len(shape))
    start = target.prefill(cache, [torch.tensor(ids, device=device) for ids in prompts])
    last = start.logits[:, 0].argmax(-1)
    # The tree is drawn from the law after that first token, so that walks go as deep as a good
    # draft's.
    after = target.score(cache, last, DraftTree.empty(rows, device)).logits[:, 0]
    tree = sampled_tree(after, shape, seed)
    laws = {"T=1": Sampling(1.0), "T=1, top-p 0.9": Sampling(1.0, top_p=0.9)}
    passes: list[float] = []
    spent: dict[str, list[float]] = {f"{rule}, {name}": [] for rule in RULES for name in laws}
    computed: dict[str, int] = {}
    requests = torch.arange(rows, device=device)
    for number in range(rounds + 2):
        began = now()
        logits = target.score(cache, last, tree).logits
        if number >= 2:  # the first passes warm caches and allocators
            passes.append(now() - began)
        for rule, run in RULES.items():
            for name, sampling in laws.items():
                law = Law(sampling, logits, tree)
                rng = Rng(seed, requests, torch.full_like(requests, number))
                began = now()
                run(tree, law, rng)
                law.check()
                if number >= 2:
                    spent[f"{rule}, {name}"].append(now() - began)
                computed[f"{rule}, {name}"] = law.computed
    shares = {name: np.array(s) / np.array(passes) for name, s in spent.items()}
    return {
        "rows": [
            {
                "case": name,
                "share": float(np.median(s)),
                "lowest": float(s.min()),
                "highest": float(s.max()),
                "ms": 1000 * float(np.median(spent[name])),
                "law_rows": computed[name],
            }
            for name, s in shares.items()
        ],
        "tree_pass_ms": 1000 * float(np.median(passes)),
        "batch_size": rows,
        "nodes": len(shape),
        "vocab": target.vocab_size,
    }
