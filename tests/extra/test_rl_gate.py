"""scripts/extra/rl_gate/gate.py: the bets are fair, rollouts of the policy pass, those of wrong engines do not;
and the parts of the GRPO example that need no TRL."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.decode.models.tiny import tiny_model
from outrider.scripts.extra.rl_gate.anytime import STAKES, Bets, Stream
from outrider.scripts.extra.rl_gate.gate import Gate, GateVerdict, from_policy, mismatch
from outrider.scripts.lab.rl import gate_power, grpo, simulated


@pytest.fixture(scope="module")
def world() -> simulated.World:
    return simulated.World.drawn(0)


def asked(
    world: simulated.World, make: Any, tokens: int, seed: int = 0, ranks: bool = True, **keys: Any
) -> GateVerdict:
    rows = tokens // gate_power.LENGTH
    before, drawn = make(world, rows, gate_power.LENGTH, seed)
    return from_policy(**world.columns(before, drawn, ranks), **keys)


@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_a_bet_is_never_worth_more_than_its_price(tolerance: float) -> None:
    """Exactly, by summing over skewed distributions of mean 0 (or off by the tolerance): the mean
    of what any stake becomes is at most 1."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(300):
        p = rng.dirichlet(np.full(6, 0.3))
        x = rng.normal(size=6) * np.exp(rng.uniform(-3, 5, 6))
        x -= (p * x).sum()
        v = (p * x**2).sum()
        x += tolerance * np.sqrt(v) * rng.choice((-1, 0, 1))
        for sign in range(2):
            became = np.zeros(len(STAKES))
            for value, share in zip(x, p, strict=True):
                bets = Bets(["one"], tolerance)
                bets.add({"one": Stream(np.array([value]), np.array([v]))})
                became += share * 2 * np.exp(bets.wealth[0, sign])  # a half of it was bet
            worst = max(worst, became.max())
    assert 0.5 < worst <= 1 + 1e-9


def test_what_begins_wrong_late_is_named(world: simulated.World) -> None:
    gate, said = Gate(), []
    sound = simulated.plain(world.p[None], 64, 640, 0)
    wrong = simulated.plain(np.eye(256)[world.p.argmax(-1)][None], 8, 64, 0)
    batches = [(b[:, i : i + 64], x[:, i : i + 64]) for b, x in [sound] for i in range(0, 640, 64)]
    for before, drawn in [*batches, wrong]:
        said.append(gate.add(**world.columns(before, drawn, True)))
    assert all(said[:-1]) and not said[-1] and said[-1].p < 1e-3
    assert "NOT from the policy" in str(said[-1]) and "from the policy: p = 1" in str(said[0])


@pytest.mark.parametrize("name", ["plain", "drafted, sampled drafts", "drafted, best tokens"])
def test_rollouts_of_the_policy_pass(world: simulated.World, name: str) -> None:
    assert all(asked(world, gate_power.SOUND[name], 4096, seed, alpha=0.05) for seed in (1, 2, 3))


@pytest.mark.parametrize(
    "name, tokens",
    [
        ("typical acceptance", 8192),
        ("greedy", 512),
        ("temperature 0.9 times", 40_000),
        ("first token of a rollout greedy", 60_000),
        ("one rollout 0.8 times, the next 1.25 times the temperature", 8192),
    ],
)
def test_wrong_engines_are_named(world: simulated.World, name: str, tokens: int) -> None:
    assert not asked(world, gate_power.WRONG[name], tokens)


def test_only_ranks_see_a_sharpening_that_keeps_the_mean_surprise(world: simulated.World) -> None:
    wrong = gate_power.balanced(world)
    excess = -world.logp - world.entropy[:, None]
    assert np.abs((wrong * excess).sum(-1)).max() < 1e-6  # it does keep it
    make = gate_power.WRONG["sharper, every mean surprise kept"]
    assert not asked(world, make, 40_000)
    assert asked(world, make, 40_000, ranks=False)


def test_every_batch_of_a_simulation_says_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long rollout of a table ends among nearly certain tokens, which tell of no rule."""
    seen: list[np.ndarray] = []

    def said_no(world: simulated.World, rollouts: Any, *kind: Any) -> tuple[dict, str]:
        seen.append(world.entropy[rollouts[0]].mean((1, 2)))
        return {}, ""

    monkeypatch.setattr(gate_power, "said_no", said_no)
    gate_power.judged(simulated.drafted, gate_power.Size(2, 16, 40, 1))
    first, last = np.mean(seen, 0)[:8].mean(), np.mean(seen, 0)[-8:].mean()
    assert last == pytest.approx(first, rel=0.2)


def test_a_drift_says_how_many_tokens_would_do() -> None:
    """A temperature off by a tenth, which the gate names within 40,000; of a sound engine nothing."""
    wrong = gate_power.drifted(gate_power.cooled(0.9), chunks=1, rows=2048)
    assert wrong["tokens"] == 2048 * 64 and 1_000 < wrong["extrapolated"] < 40_000
    sound = gate_power.drifted(gate_power.SOUND["plain"], chunks=1, rows=2048)
    assert sound["extrapolated"] is None and abs(sound["z"]) < 5


def test_an_engine_that_goes_wrong_halfway_is_sound_before(world: simulated.World) -> None:
    before, tokens = gate_power.late(world, 800, gate_power.LENGTH, 0)
    rare = world.p[before, tokens] <= np.minimum(0.09, 0.3 * np.exp(-world.entropy))[before]
    assert rare[:400].mean() > 1.5 * rare[400:].mean()


def test_rounding_is_tolerated_and_measured(world: simulated.World) -> None:
    """The same drift is named without a tolerance and forgiven with one that covers it."""
    make = gate_power.cooled(0.985)
    assert not asked(world, make, 400_000, ranks=False, tolerance=0.0)
    assert asked(world, make, 400_000, ranks=False, tolerance=0.02)
    rounded = gate_power.rounded(0.03)(world)
    before, drawn = simulated.plain(rounded[None], 8, 2000, 0)
    seen = mismatch(np.log(rounded[before, drawn]).ravel(), world.logp[before, drawn].ravel())
    exact = ((rounded - world.p) ** 2 / world.p.clip(1e-300)).sum(-1)[before].mean() ** 0.5
    assert seen == pytest.approx(exact, rel=0.1)


def test_tokens_without_probability() -> None:
    one = np.full((1, 100), -1.0), np.full((1, 100), 1.0), np.ones((1, 100))
    one[0][0, 3] = -np.inf
    few, none = Gate(), Gate(tolerance=0.0)
    assert few.add(*one) and few.impossible == 1
    assert not none.add(*one) and none.p == 0
    one[0][0, :9] = -np.inf
    assert not few.add(*one)


def test_padding_does_not_count_and_shapes_are_checked(world: simulated.World) -> None:
    before, drawn = simulated.plain(world.p[None], 4, 32, 0)
    numbers = [*world.columns(before, drawn, False).values()]
    mask = np.arange(32) < np.array([[32], [20], [1], [7]])
    padded = [np.where(mask, column, np.nan) for column in numbers]
    assert Gate().add(*padded, mask=mask).tokens == mask.sum()
    with pytest.raises(ValueError, match="not finite"):
        Gate().add(*padded)
    with pytest.raises(ValueError, match="not -log p"):
        Gate().add(-numbers[0], *numbers[1:])
    with pytest.raises(ValueError, match="shapes differ"):
        Gate().add(*numbers, mask=mask[:, 1:])


def test_it_loads_numpy_alone() -> None:
    code = "import sys, outrider.gate; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_columns_of_logits() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 3
    tokens = torch.randint(50, (2, 3), generator=torch.Generator().manual_seed(1))
    found = grpo.columns(logits, tokens)
    p = logits.double().softmax(-1).numpy()
    own = np.take_along_axis(p, tokens.numpy()[..., None], -1)
    entropy = -(p * np.log(p)).sum(-1)
    assert found["logprob"] == pytest.approx(np.log(own)[..., 0], abs=1e-5)
    assert found["entropy"] == pytest.approx(entropy, abs=1e-5)
    assert found["variance"] == pytest.approx((p * np.log(p) ** 2).sum(-1) - entropy**2, abs=1e-4)
    far = np.abs(np.log(p) + entropy[..., None])
    other = far > np.take_along_axis(far, tokens.numpy()[..., None], -1)
    assert found["beyond"] == pytest.approx((p * other).sum(-1), abs=1e-5)
    assert found["above"] == pytest.approx((p * (p > own)).sum(-1), abs=1e-5)


@pytest.mark.parametrize("name", grpo.ENGINES)
def test_the_example_without_trl(name: str) -> None:
    """Rollouts of the drafted engine for a policy that has moved since it was loaded."""
    rollouts = grpo.engine(grpo.ENGINES[name], Gate())
    policy = tiny_model(vocab=grpo.VOCAB)
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.1)
    prompts = [f"{i} and" for i in range(16)]
    if name == "exact":
        found = rollouts(prompts, SimpleNamespace(model=policy))
        assert rollouts.verdicts[-1] and len(found["completion_ids"]) == 16
        assert list(map(len, found["logprobs"])) == list(map(len, found["completion_ids"]))
        text = torch.tensor([found["prompt_ids"][0] + found["completion_ids"][0]])
        logp = policy(input_ids=text).logits[0, :-1].log_softmax(-1)
        own = logp.gather(1, text[0, 1:, None])[-len(found["logprobs"][0]) :, 0]
        assert found["logprobs"][0] == pytest.approx(own.tolist(), abs=1e-4)
        return
    with pytest.raises(grpo.NotFromPolicy, match="NOT from the policy"):
        for _ in range(8):
            rollouts(prompts, SimpleNamespace(model=policy))
