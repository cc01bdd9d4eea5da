"""How often the gate calls a sound engine wrong, and after how many tokens it names a wrong one.

    python scripts/lab/rl/gate_power.py sound wrong weak   # simulated policies, minutes each
    python scripts/lab/rl/gate_power.py drift              # how far the weak rules drift at all
    python scripts/lab/rl/gate_power.py rounding           # SmolLM2 in bfloat16 beside float32

The gate is asked after every batch, as a trainer would; every rollout begins anew, for a long one
ends among nearly certain tokens that say nothing of any rule. Each section is merged into
docs/results/rl-gate.json.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else this folder comes first
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import numpy as np

from outrider.scripts.common import files
from outrider.scripts.extra.rl_gate.gate import Gate, mismatch
from outrider.scripts.lab.rl import gate_page
from outrider.scripts.lab.rl.simulated import (
    VOCAB,
    Rollouts,
    World,
    deferred,
    drafted,
    plain,
    softmax,
    typical,
)

OUT = files.ROOT / "docs/results/rl-gate.json"
ALPHA, MANY = 1e-3, 0.1  # the default, and one at which so many sound seeds must show some
LENGTH = 64  # tokens of a rollout
DRIFT = 8  # times half a million tokens that a drift is taken from


@dataclass(frozen=True)
class Size:
    """rows: rollouts of a batch, all of LENGTH tokens. together: seeds drawn side by side."""

    seeds: int
    rows: int
    batches: int
    together: int


SIZE, LARGE = Size(200, 8, 40, 50), Size(20, 64, 122, 2)
# of rollouts side by side, those of the first batch first; tokens; seed
Make = Callable[[World, int, int, int], Rollouts]


def table(change: Callable[[World], np.ndarray]) -> Make:
    """Plain sampling from another table [V, V]."""

    def make(world: World, many: int, length: int, seed: int) -> Rollouts:
        return plain(change(world)[None], many, length, seed)

    return make


def cooled(share: float) -> Make:
    """Temperature `share` times what was asked for."""
    return table(lambda world: softmax(world.scores / share))


def top_p(world: World) -> np.ndarray:
    kept = world.p * (world.above < 0.95)
    return kept / kept.sum(-1, keepdims=True)


def balanced(world: World) -> np.ndarray:
    """Sharper with the mean surprise of every distribution kept: the best and the rarest tokens
    give mass to those whose surprise is near the entropy."""
    excess = -world.logp - world.entropy[:, None]
    leaned = world.p * np.exp(-0.5 * excess**2)
    low, high = np.full((VOCAB, 1), -12.0), np.full((VOCAB, 1), 12.0)
    for _ in range(60):  # the tilt that restores the mean
        middle = (low + high) / 2
        moved = leaned * np.exp(middle * excess.clip(-20, 20))
        moved /= moved.sum(-1, keepdims=True)
        above = (moved * excess).sum(-1, keepdims=True) > 0
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return moved


def rounded(sigma: float) -> Callable[[World], np.ndarray]:
    """Every score off by a normal error, its own in every context: a sampler that rounds."""
    noise = np.random.default_rng(7).normal(size=(VOCAB, VOCAB))
    return lambda world: softmax(world.scores + sigma * noise)


def opposed(world: World, many: int, length: int, seed: int) -> Rollouts:
    """Every second rollout too cool, the others too hot."""
    tables = np.stack([softmax(world.scores / 0.8), softmax(world.scores * 0.8)])
    return plain(tables, many, length, seed, lambda place, rows: rows % 2)


def first_greedy(world: World, many: int, length: int, seed: int) -> Rollouts:
    """The first token of every rollout is the best one."""
    tables = np.stack([world.p, np.eye(VOCAB)[world.p.argmax(-1)]])
    return plain(tables, many, length, seed, lambda place, rows: int(place == 0))


def late(world: World, many: int, length: int, seed: int) -> Rollouts:
    """Sound at first; typical acceptance in the second half of the run."""
    early, wrong = (
        drafted(world, many // 2, length, seed, keep) for keep in (None, typical(world))
    )
    return tuple(np.concatenate(pair) for pair in zip(early, wrong, strict=True))  # type: ignore[return-value]


def swapped(world: World) -> np.ndarray:
    """Neighbours by rank below 0.1 share their mass two to none, by a key: nearly the same
    surprise and the same rank, other tokens."""
    order = np.argsort(-world.p, axis=-1, kind="stable")
    mass = np.take_along_axis(world.p, order, -1)
    pairs = mass[:, 1 : VOCAB - 1].reshape(VOCAB, -1, 2)
    coin = np.random.default_rng(5).random(pairs.shape[:2]) < 0.5
    sum_ = pairs.sum(-1, keepdims=True)
    one = np.where(coin[..., None], sum_ * [1, 0], sum_ * [0, 1])
    mass = mass.copy()
    mass[:, 1 : VOCAB - 1] = np.where(pairs.max(-1, keepdims=True) < 0.1, one, pairs).reshape(
        VOCAB, -1
    )
    found = np.empty_like(mass)
    np.put_along_axis(found, order, mass, -1)
    return found


def typical_engine(world: World, many: int, length: int, seed: int) -> Rollouts:
    return drafted(world, many, length, seed, typical(world))


def fly(window: int, greedy: bool) -> Make:
    return lambda world, many, length, seed: drafted(
        world, many, length, seed, deferred(world, window), greedy
    )


SOUND: dict[str, Make] = {
    "plain": table(lambda world: world.p),
    "drafted, sampled drafts": drafted,
    "drafted, best tokens": functools.partial(drafted, greedy=True),
    "scores off by 0.02": table(rounded(0.02)),
    "scores off by 0.05": table(rounded(0.05)),
}
WRONG: dict[str, Make] = {
    "typical acceptance": typical_engine,
    "typical acceptance, second half of the run": late,
    "greedy": cooled(0.01),
    "temperature 0.9 times": cooled(0.9),
    "temperature 1.1 times": cooled(1.1),
    "top-p 0.95": table(top_p),
    "first token of a rollout greedy": first_greedy,
    "one rollout 0.8 times, the next 1.25 times the temperature": opposed,
    "sharper, every mean surprise kept": table(balanced),
    "deferred acceptance, window 1, sampled drafts": fly(1, False),
    "deferred acceptance, window 1, best tokens": fly(1, True),
    "neighbours by rank swapped by a key": table(swapped),
}
WEAK: dict[str, Make] = {
    f"deferred acceptance, window {w}, {name}": fly(w, greedy)
    for w in (1, 3, 6)
    for name, greedy in (("sampled drafts", False), ("best tokens", True))
}


def said_no(
    world: World, rollouts: Rollouts, tolerance: float, ranks: bool
) -> tuple[dict[float, int], str]:
    """Tokens at which a gate said no to batches [N, B, T] of rollouts, batch by batch, at ALPHA
    (which ends it) and at MANY, where it did, and the stream that spoke loudest then."""
    gate, found = Gate(ALPHA, tolerance), dict[float, int]()
    for before, tokens in zip(*rollouts, strict=True):
        verdict = gate.add(**world.columns(before, tokens, ranks))
        for alpha in (MANY, ALPHA):
            if verdict.p <= alpha:
                found.setdefault(alpha, verdict.tokens)
        if not verdict:
            return found, verdict.by
    return found, ""


def judged(make: Make, size: Size) -> dict[str, Any]:
    """What gates of every kind say of one rule, over the seeds."""
    world = World.drawn(0)
    kinds = {
        f"tolerance {t:g}, {'with ranks' if ranks else 'three numbers'}": (t, ranks)
        for t in (0.0, 0.01)
        for ranks in (False, True)
    }
    found: dict[str, list[tuple[dict[float, int], str]]] = {name: [] for name in kinds}
    for start in range(0, size.seeds, size.together):
        shape = size.batches, size.together, size.rows, LENGTH
        drawn = make(world, size.batches * size.together * size.rows, LENGTH, start)
        before, tokens = (part.reshape(shape) for part in drawn)
        for i in range(size.together):
            for name, kind in kinds.items():
                found[name].append(said_no(world, (before[:, i], tokens[:, i]), *kind))
    gates = {name: _summary(said, size.seeds) for name, said in found.items()}
    tokens_each = size.batches * size.rows * LENGTH
    return {"seeds": size.seeds, "tokens": tokens_each, "alpha": ALPHA, "gates": gates}


def _summary(said: list[tuple[dict[float, int], str]], seeds: int) -> dict[str, Any]:
    counts = [*sorted(n[ALPHA] for n, _ in said if ALPHA in n), *[None] * seeds]
    names = [by for _, by in said if by]
    return {
        "named": len(names),
        f"named_at_{MANY:g}": sum(MANY in n for n, _ in said),
        "median_tokens": counts[seeds // 2],
        "tokens_for_nine_in_ten": counts[int(0.9 * seeds)],
        "by": max(set(names), key=names.count) if names else None,
    }


def drifted(make: Make, chunks: int = DRIFT, rows: int = 8192) -> dict[str, Any]:
    """How many tokens would name a rule, by the stream that drifts most over a few million. z:
    how many standard deviations its sum is off after `tokens`, which grows with the root of their
    number; a bet names about 5. extrapolated: None where z is not beyond 5."""
    world, gate = World.drawn(0), Gate(ALPHA, 0.0)
    for seed in range(chunks):
        before, tokens = make(world, rows, LENGTH, 1000 + seed)
        gate.add(**world.columns(before, tokens, ranks=True))
    _, total, variance = gate.bets.sums
    z = total / np.sqrt(np.maximum(variance, 1e-12))
    at = int(np.abs(z).argmax())
    needed = int(25 * gate.tokens / z[at] ** 2) if abs(z[at]) > 5 else None
    found = {"tokens": gate.tokens, "by": gate.bets.names[at], "z": float(z[at])}
    return found | {"extrapolated": needed}


def rounding() -> dict[str, Any]:
    """How far SmolLM2 in bfloat16 lies from itself in float32, summed exactly over the
    vocabulary at every place of plain texts, and what `mismatch` says of tokens drawn there."""
    import torch

    from outrider.scripts.api import load_target

    text = (files.ROOT / "docs/lossless.md").read_text()
    known = load_target("smollm2", "float32")
    ids = torch.tensor(known.tokenizer(text)["input_ids"][:2048]).reshape(8, 256)
    models = [known.model, load_target("smollm2", "bfloat16").model]
    with torch.inference_mode():
        logs = [
            torch.cat([m(input_ids=row[None]).logits[0] for row in ids]).double().log_softmax(-1)
            for m in models
        ]
    policy, sampler = logs
    excess = -policy + (policy.exp() * policy).sum(-1, keepdim=True)
    variance = (policy.exp() * excess**2).sum(-1)
    drift = (sampler.exp() * excess).sum(-1)
    token = torch.multinomial(sampler.exp(), 1, generator=torch.Generator().manual_seed(0))
    pair = [x.gather(1, token)[:, 0].numpy() for x in (sampler, policy)]
    ratio = ((sampler - policy).exp() - 1) ** 2 * policy.exp()
    weight = variance.sqrt().sum()
    return {
        "places": len(drift),
        "mean_total_variation": float((sampler.exp() - policy.exp()).abs().sum(-1).mean() / 2),
        "drift_of_surprise_in_deviations": float(
            drift.sum() / (len(drift) * variance.sum()).sqrt()
        ),
        "drift_over_tolerance_unit": float(drift.sum() / weight),
        "largest_allowed_by_cauchy_schwarz": float(ratio.sum(-1).mean().sqrt()),
        "mismatch_of_drawn_tokens": mismatch(*pair),
    }


def simulated(section: str, rules: dict[str, Make], size: Size) -> None:
    """Rule by rule, each written as it is done; those that are in the file stay."""
    for name, make in rules.items():
        if name in _known().get(section, {}).get("rules", {}):
            continue
        found = judged(make, size)
        known = _known()  # another section may have been written meanwhile
        rows = known.get(section, {}).get("rules", {}) | {name: found}
        files.write_json(OUT, known | {section: {"rules": rows, **files.origin()}})
        print(name, json.dumps(found["gates"]), flush=True)


def _known() -> dict[str, Any]:
    return json.loads(OUT.read_text()) if OUT.exists() else {}


def main(names: Sequence[str]) -> None:
    """Run the sections named."""
    for name in names:
        if name == "rounding":
            found = {**rounding(), **files.origin()}
            files.write_json(OUT, _known() | {name: found})
        elif name == "drift":
            rules = {rule: drifted(make) for rule, make in WEAK.items()}
            files.write_json(OUT, _known() | {name: {"rules": rules, **files.origin()}})
        elif name == "sound":
            simulated("sound", SOUND, SIZE)
        elif name == "wrong":
            simulated("wrong", WRONG, SIZE)
        else:
            simulated("weak", WEAK, LARGE)
    gate_page.refresh()


if __name__ == "__main__":
    main(sys.argv[1:])
