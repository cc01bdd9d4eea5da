"""What only behaviour shows: does an imported head draft well as its files say, or does another known convention fit?

The target answers a few prompts; the head's first two draft levels are compared with these answers, teacher-forced,
once as
written and once under every convention that some program uses. A convention fits when it accepts more over the same
positions by four standard errors.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.drafters import NoDraft
from decode.engine import Request, generate
from decode.sampling import Sampling
from decode.target import Target
from heads.base import Batch

SURE, LEAST = 4.0, 0.02  # standard errors, and accepted tokens, by which a convention must be better
AS_WRITTEN = "as_written"


@dataclass
class Reading:
    """One convention. accepted: mean draft tokens accepted of the first two. better: by how many standard errors."""

    name: str
    about: str
    accepted: float
    better: float = 0.0


def conventions(head: Any) -> Iterator[tuple[str, str, Any]]:
    """(name, what it means, a copy of the head read so) for every other convention that this kind of head occurs in."""
    if head.kind == "eagle3":
        yield from _eagle3(head)
    elif head.kind == "eagle1":
        twin = copy.deepcopy(head)
        left, right = twin.net.fc.weight.data.chunk(2, 1)
        twin.net.fc.weight.data = torch.cat([right, left], 1)
        yield "fc_halves", "fc reads the feature first, then the embedding", twin
    elif head.kind == "medusa":
        twin = copy.deepcopy(head)
        twin.block_weight.data = twin.block_weight.data.transpose(2, 3).contiguous()
        yield "transpose_blocks", "the blocks' weights are transposed", twin
    if head.kind.startswith("eagle"):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(head.net.layers[0].self_attn, name).weight
            if weight.shape[0] == weight.shape[1]:
                twin = copy.deepcopy(head)
                mine = getattr(twin.net.layers[0].self_attn, name).weight
                mine.data = mine.data.T.contiguous()
                yield f"transpose_{name}", f"{name} is transposed", twin


def _eagle3(head: Any) -> Iterator[tuple[str, str, Any]]:
    for step, name in ((1, "taps_plus_1"), (-1, "taps_minus_1")):
        taps = tuple(tap + step for tap in head.taps)
        if min(taps) >= 0 and max(taps) < head.final:
            twin = copy.deepcopy(head)
            twin.taps, twin.cfg.taps = taps, list(taps)
            yield name, f"layers {list(taps)} (hidden_states) instead of {list(head.taps)}", twin
    count = len(head.taps)
    for order in list(itertools.permutations(range(count)))[1:] if count <= 3 else []:
        twin = copy.deepcopy(head)
        parts = twin.net.fc.weight.data.chunk(count, 1)
        twin.net.fc.weight.data = torch.cat([parts[i] for i in order], 1)
        yield f"fc_{''.join(map(str, order))}", f"fc's column blocks in the order {list(order)}", twin
    twin = copy.deepcopy(head)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(twin.net.layers[0].self_attn, name).weight
        weight.data = torch.cat(weight.data.chunk(2, 1)[::-1], 1)
    yield "attention_halves", "the attention reads the feature first, then the embedding", twin
    for key in ("norm_output", "norm_before_residual"):
        twin = copy.deepcopy(head)
        value = not getattr(twin.cfg, key)
        setattr(twin.cfg, key, value)
        setattr(twin.net, key, value)
        yield key, f"{key} is {str(value).lower()}", twin


@torch.inference_mode()
def answers(target: Target, prompts: Sequence[Sequence[int]], tokens: int) -> Batch:
    """The target's own greedy answers as a batch; their tokens are supervised."""
    requests = [Request(list(p), tokens, id=i) for i, p in enumerate(prompts)]
    run = generate(target, NoDraft(), requests, Sampling(), batch_size=min(8, len(requests)))
    rows = [(g.prompt_ids, g.token_ids) for g in run.generations]
    width = max(len(p) + len(t) for p, t in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask, loss = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor([*prompt, *answer])
        mask[i, :end], loss[i, len(prompt) : end] = True, True
    return Batch(ids, mask, loss, torch.arange(len(rows))).to(target.device)


@torch.inference_mode()
def accepted(head: Any, batch: Batch, target: Target) -> Tensor:
    """[n] float: how many of its first two draft tokens (one, for a single Medusa head) are accepted at every
    supervised
    token that a draft can begin with."""
    tokens, ids = batch.ids.reshape(-1), head.ids()
    hit = torch.zeros(2, tokens.numel() + 1, dtype=torch.bool, device=tokens.device)
    first = torch.zeros(tokens.numel(), dtype=torch.bool, device=tokens.device)
    for flat, level, logits in head.forced(batch, target, 2):
        if level < 2:
            place = logits.argmax(-1)
            hit[level, flat] = (place if ids is None else ids[place]) == tokens[flat]
            if level == 0:
                first[flat] = True
    chain = hit[0, :-1].double() + (hit[0, :-1] & hit[1, 1:]).double()
    return chain[first]


def probe(head: Any, batch: Batch, target: Target) -> list[Reading]:
    """As written first, then every other convention, best first."""
    base = accepted(head, batch, target)
    out = [Reading(AS_WRITTEN, "as the files say", float(base.mean()))]
    others = []
    for name, about, twin in conventions(head):
        twin._rows = None
        gain = accepted(twin, batch, target) - base
        error = float(gain.std()) / max(len(gain), 1) ** 0.5
        others.append(Reading(name, about, float(base.mean() + gain.mean()), float(gain.mean()) / max(error, 1e-9)))
    return out + sorted(others, key=lambda r: -r.accepted)


def fitting(readings: Sequence[Reading]) -> Reading:
    """The convention that fits: the one as written, unless another is clearly better."""
    written = readings[0]
    better = [r for r in readings[1:] if r.better > SURE and r.accepted - written.accepted > LEAST]
    return max(better, key=lambda r: r.accepted, default=written)
