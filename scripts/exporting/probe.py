"""What only behaviour shows: does an imported head draft well as its files say, or does
another known convention fit?

The target answers a few prompts; the head's first two draft levels are compared with these
answers, teacher-forced, once as written and once under every convention that some program
uses. A convention fits when it accepts more over the same positions by four standard errors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Batch, Head
from outrider.heads.eagle.head import Eagle3Head
from outrider.scripts.exporting.config import AS_WRITTEN as AS_WRITTEN

SURE = 4.0  # standard errors by which a convention must be better
LOW = 0.05  # accepted draft tokens of two, below which the head hardly drafts for this target


@dataclass
class Convention:
    """One convention. accepted: mean draft tokens accepted of the first two. logp: mean
    log-probability of the target's tokens. better: by how many standard errors that is above
    the head as written."""

    name: str
    about: str
    accepted: float
    logp: float
    better: float = 0.0


def conventions(head: Head) -> dict[str, dict[str, Any]]:
    """Return every other convention that this kind of head occurs in: the keys that it changes."""
    if not isinstance(head, Eagle3Head):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for step, name in ((1, "taps_plus_1"), (-1, "taps_minus_1")):
        taps = [tap + step for tap in head.taps]
        if min(taps) >= 0 and max(taps) < head.final:
            found[name] = {"taps": taps}
    for key in ("norm_output", "norm_before_residual"):
        found[key] = {key: not getattr(head.cfg, key)}
    return found


def read_as(head: Head, convention: str) -> Any:
    """Return a copy of the head read under one of its `conventions`."""
    twin: Any = copy.deepcopy(head)
    changed = conventions(head)[convention]
    twin.cfg, twin.taps = replace(twin.cfg, **changed), tuple(changed.get("taps", head.taps))
    for key in changed.keys() - {"taps"}:
        setattr(twin.net, key, changed[key])
    return twin


@torch.inference_mode()
def answers(target: Target, prompts: Sequence[Sequence[int]], tokens: int) -> Batch:
    """Return the target's own greedy answers as a batch; their tokens are supervised."""
    requests = [Request(list(p), tokens, id=i) for i, p in enumerate(prompts)]
    run = generate(target, NoDraft(), requests, Sampling(), batch_size=min(8, len(requests)))
    rows = [torch.tensor([*g.prompt_ids, *g.token_ids]) for g in run.generations]
    ids = pad_sequence(rows, batch_first=True)
    ends, at = torch.tensor([[len(row)] for row in rows]), torch.arange(ids.shape[1])
    starts = torch.tensor([[len(prompt)] for prompt in prompts])
    mask = at < ends
    return Batch(ids, mask, mask & (at >= starts), torch.arange(len(rows))).to(target.device)


def with_features(target: Target, batch: Batch) -> Any:
    """Return the target, with the features of this batch from one pass over all layers,
    however many conventions ask for them."""
    every = target.features(batch.ids, batch.mask, range(target.num_layers + 1))
    twin: Any = copy.copy(target)
    twin.features = lambda ids, mask, taps, **_: every[:, :, list(taps)]
    return twin


@torch.inference_mode()
def accepted(head: Head, batch: Batch, target: Target) -> tuple[Tensor, Tensor]:
    """Two [n] tensors: how many of its first two draft tokens are accepted at every supervised
    token that a draft can begin with; and the log-probability of that token and of the next
    one, added up (0 outside the draft vocabulary)."""
    tokens, ids = batch.ids.reshape(-1), head.ids()
    place = vocab.places(ids, tokens)
    hit = torch.zeros(2, tokens.numel() + 1, dtype=torch.bool, device=tokens.device)
    logp = torch.zeros(2, tokens.numel() + 1, dtype=torch.float64, device=tokens.device)
    first = torch.zeros(tokens.numel(), dtype=torch.bool, device=tokens.device)
    for flat, level, logits in head.teacher_forced(batch, target, 2):
        if level > 1:
            continue
        spot = place[flat]
        hit[level, flat] = logits.argmax(-1) == spot
        own = logits.double().log_softmax(-1).gather(1, spot.clamp(min=0)[:, None])[:, 0]
        logp[level, flat] = torch.where(spot >= 0, own, 0.0)
        if level == 0:
            first[flat] = True
    chain = hit[0, :-1].double() + (hit[0, :-1] & hit[1, 1:]).double()
    return chain[first], (logp[0, :-1] + logp[1, 1:])[first]


def probe(head: Head, batch: Batch, target: Target) -> list[Convention]:
    """As written first, then every other convention, best first."""
    target = with_features(target, batch)
    base, logp = accepted(head, batch, target)
    written = Convention(AS_WRITTEN, "as the files say", float(base.mean()), float(logp.mean()))
    others = []
    for name, changed in conventions(head).items():
        mine, other = accepted(read_as(head, name), batch, target)
        gain = other - logp
        error = float(gain.std()) / max(len(gain), 1) ** 0.5
        better = float(gain.mean()) / max(error, 1e-9)
        about = ", ".join(f"{key}: {value}" for key, value in changed.items())
        others.append(Convention(name, about, float(mine.mean()), float(other.mean()), better))
    return [written, *sorted(others, key=lambda r: -r.logp)]


def fitting(readings: Sequence[Convention]) -> Convention:
    """Return the convention that fits: the one as written, unless another is clearly
    better. Where none drafts, their order is noise."""
    written = readings[0]
    if max(r.accepted for r in readings) < LOW:
        return written
    better = [r for r in readings[1:] if r.better > SURE and r.accepted >= written.accepted]
    return max(better, key=lambda r: r.logp, default=written)
