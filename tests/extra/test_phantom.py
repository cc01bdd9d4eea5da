"""Training, calibration, the parity gate and decoding on an accelerator that is not there: every
tensor on the right device, host reads counted and named.

The bars only fall: a smaller count is written down here, a larger one is a mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from outrider.decode.price import FREE, Price
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

from outrider.conf.schema import compose
from outrider.decode import attention
from outrider.decode.engine import Engine, Request, generate
from outrider.decode.models.load import tiny_from
from outrider.decode.ngram import NGram
from outrider.decode.probed import LMHead
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.heads import kinds, parity
from outrider.heads.names import DraftSpec
from outrider.scripts.extra.cluster import count
from outrider.scripts.extra.cluster.config import DryRunConfig
from outrider.scripts.extra.cluster.models import model_of
from outrider.scripts.extra.cluster.phantom import NAME, Phantom, missing, phantom
from outrider.train.validate import head_config

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "torch has it")
# kind -> host reads of a pass, forward and backward: of each pass through a model of
# transformers one, which asks whether positions begin anew within a row. A head has none.
READS = {
    "eagle3": 1,
    "p_eagle": 1,
    "eagle1": 1,
    "medusa": 1,
    "hydra_heads": 1,
    "medusa2": 2,
    "small_lm": 2,
    "dflash": 1,
    "dflash_causal": 1,
    "dspark": 1,
}
KINDS = [k if k in ("eagle3", "medusa") else pytest.param(k, marks=pytest.mark.slow) for k in READS]
DECODE = [k if k == "medusa" else pytest.param(k, marks=pytest.mark.slow) for k in READS]
# Host reads of a decoding cycle, of a prefill and, where the drafter reads a prompt by itself, of
# that. An n-gram's text lies on the host: it reads the new tokens as well.
CYCLE, PREFILL = 1, 2
PROMPTS = {"ngram": 3}
# kind -> launches of a decoding cycle outside the target's own pass, the drafter's passes
# included, of two rows: a chain at T = 0 and T = 1, a tree at both.
LAUNCHES = {
    "eagle3": (262, 425, 389, 616),
    "p_eagle": (226, 343, 312, 510),
    "eagle1": (251, 414, 378, 609),
    "medusa": (93, 218, 116, 363),
    "hydra_heads": (136, 288, 136, 495),
    "medusa2": (93, 218, 116, 363),
    "small_lm": (619, 781, 723, 818),
    "dflash": (236, 316, 299, 475),
    "dflash_causal": (236, 316, 299, 475),
    "dspark": (257, 392, 320, 597),
}
PASS, TOKENS = "the target's pass", 16
UPDATE = 1  # host read of a step, beside its passes: what the loop asks for once


def parts(kind: str) -> tuple[Any, Any]:
    """(model, typed keys) of a tiny run."""
    more = ["head.from_target_layers=2"] if kind == "small_lm" else []
    keys = ["target=tiny", "target.layers=4", f"head={kind}", "head.draft_vocab=64", *more]
    cfg = compose("validate", DryRunConfig, ["data.path=none", *keys])
    return cfg, head_config(cfg.head)


def made(ghost: Phantom, kind: str, probe: Any = None) -> tuple[Target, Any]:
    """A fake target of four layers, taken to be what the real one was found to be, and a head."""
    cfg, typed = parts(kind)
    target = model_of(cfg.target).target(4, torch.float32, ghost.device)
    target._probe = probe
    if probe is not None:
        target.model.set_attn_implementation(attention.NAME)
    return target, count._head(ghost, target, typed, "float32")


@pytest.fixture(scope="module")
def probe() -> Any:
    """What the real tiny target can do."""
    target = Target(tiny_from(parts("medusa")[0].target))
    found = target.probe()
    assert found.support == "tree"
    return found


# The phantom itself
# -------------------------------------------------------------------------------------------


def test_a_tensor_on_the_cpu_is_found() -> None:
    with phantom() as ghost:
        there = torch.ones(3, device=ghost.device)
        with pytest.raises(FakeTensorDeviceMismatchError):
            there + torch.ones(3)
        with pytest.raises(FakeTensorDeviceMismatchError):
            there[:2] @ torch.ones(2)


def test_host_reads_are_answered_and_counted() -> None:
    with phantom() as ghost:
        mask = ghost.own(torch.tensor([[True, True, False], [True, False, False]]), ghost.device)
        assert mask.sum(1).tolist() == [2, 1] and int(mask.sum()) == 3
        assert mask.nonzero().shape == (3, 2) and mask.cpu().tolist()[0] == [True, True, False]
        weights = torch.randn(3, 4000, device=ghost.device)
        assert weights[mask[:, :1].any(1).new_ones(3)].shape == (3, 4000)
        assert bool(weights.isfinite().all()) and weights.argmax(-1).tolist() == [0, 0, 0]
        assert sum(ghost.reads.values()) == 7
        ghost.restart()
        (torch.ones(3, device=ghost.device) * 2).sum()
        torch.arange(5).sum().item()  # of the CPU: nothing waits
        assert not ghost.reads and sum(ghost.launches.values()) == 3


def test_a_copy_to_the_host_that_nobody_waits_for_is_found() -> None:
    with phantom() as ghost:
        there = torch.ones(3, device=ghost.device)
        there.cpu(), there.to("cpu"), torch.ones(3).to(ghost.device, non_blocking=True)
        assert not ghost.races
        there.to("cpu", non_blocking=True)
        torch.ones(3).copy_(there)
        assert sum(ghost.races.values()) == 1
        torch.ones(3).copy_(there, non_blocking=True)
        with torch.inference_mode():
            there.to("cpu", torch.float64, non_blocking=True)
        assert sum(ghost.races.values()) == 3


def test_memory_follows_storages() -> None:
    with phantom() as ghost:
        a = torch.empty(1 << 20, device=ghost.device)
        with ghost.within("other part"):
            b = a.view(-1)[10:] + 1
        assert ghost.live["other"] == 4 << 20 and ghost.most == sum(ghost.peak.values())
        kept = ghost.live["other part"]
        del a
        assert ghost.live["other"] == 0 and ghost.live["other part"] == kept > 4e6
        del b
        assert not any(ghost.live.values()) and ghost.most > 8e6


def test_a_window_makes_attention_cheaper() -> None:
    """Of causal attention half of the scores are computed; inside a window fewer, as many as
    the window has for all rows but the first ones."""

    def flops(**window: int) -> float:
        with phantom() as ghost:
            part = torch.empty(1024, 2, 16, dtype=torch.bfloat16, device=ghost.device)
            cuts = torch.empty(2, dtype=torch.int32, device=ghost.device)
            ghost.restart()
            torch.ops.aten._flash_attention_forward(
                *(part, part, part, cuts, cuts, 1024, 1024, 0.0, True, False), **window
            )
            return sum(ghost.flops.values())

    whole = flops()
    assert whole == 4 * 1024 * 1024 * 16 * 2 / 2
    assert flops(window_size_left=1023, window_size_right=0) == whole
    assert flops(window_size_left=127, window_size_right=0) / whole == pytest.approx(
        2 * (1 / 8 - 1 / 128)
    )


def test_it_leaves_nothing_behind() -> None:
    plain = torch.nn.functional.scaled_dot_product_attention, torch.Generator, torch.Tensor.numpy
    with pytest.raises(KeyError), phantom():
        raise KeyError
    after = torch.nn.functional.scaled_dot_product_attention, torch.Generator, torch.Tensor.numpy
    assert plain == after and not torch.accelerator.is_available()
    weight = torch.nn.Linear(2, 2)
    weight(torch.ones(1, 2)).sum().backward()
    assert weight.to(torch.float64).weight.dtype == torch.float64
    assert torch.ones(2).tolist() == [1.0, 1.0]


# Training
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_training(kind: str) -> None:
    """Forward, backward and update as train/loop.py does them: nothing on a wrong device, and no
    more host reads than the bar of the head's kind."""
    with phantom() as ghost:
        target, head = made(ghost, kind)
        groups = [{"params": [p for p in head.parameters() if p.requires_grad], "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, fused=True)
        batch = count.full_batch(ghost, count.PassShape(2, 24, 0.5), head)
        head.train()
        head.begin_step(0)
        target.features(batch.ids, batch.mask, head.taps or (4,))  # what it asks of itself once
        ghost.restart()
        out = head(batch, target)
        out.sum.backward()
        reads = ghost.list_reads()
        assert sum(ghost.reads.values()) <= READS[kind], reads
        ghost.restart()
        gradients = [p.grad for p in head.parameters() if p.grad is not None]
        assert {g.device.type for g in gradients} == {NAME}
        assert not ghost.races
        norm = torch.nn.utils.get_total_norm(gradients).to(ghost.device)
        packed = torch.cat([t.double().reshape(-1) for t in out.stats.values()])
        torch.cat([packed, norm.double()[None]]).tolist()
        torch._foreach_mul_(gradients, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert sum(ghost.reads.values()) == UPDATE, ghost.list_reads()


def test_every_kind_of_head_has_a_bar() -> None:
    assert {parts(kind)[1].kind for kind in READS} == set(kinds())


@pytest.mark.parametrize("kind", DECODE)
def test_calibration_and_gate_run_to_their_end(kind: str, probe: Any, imagined: None) -> None:
    with phantom() as ghost:
        target, head = made(ghost, kind, probe)
        head.eval()
        batch = count.full_batch(ghost, count.PassShape(2, 24, 0.5))
        head.calibrate([batch], target)
        found = parity.check(head, target, [[5, 6, 7], [5, 6, 7, 8]], 10, batch_size=2)
        assert found.prompts == 2
        assert not ghost.races, "the host reads what is still under way"


# Decoding
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", DECODE)
def test_decoding_cycles(
    kind: str, shape: str, temperature: float, probe: Any, imagined: None
) -> None:
    """To the end of two answers: the host waits for the device once a cycle, whatever drafts,
    and launches are no more than the bar of the kind."""
    launches = decode(kind, shape, temperature, probe)
    bar = LAUNCHES[kind][2 * (shape == "tree") + int(temperature)]
    assert launches <= bar, f"{launches} of {bar}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", DECODE)
def test_decoding_cycles_at_a_price(
    kind: str, shape: str, temperature: float, probe: Any, imagined: None
) -> None:
    """A draft that leaves out what is not faster asks no more of the host. Launches are listed
    (pytest -s), without a bar."""
    decode(kind, shape, temperature, probe, Price(0.05, 0.1))


@pytest.fixture
def imagined(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a phantom cannot know of itself."""
    # Draws are answered by a script here, so siblings may be equal.
    same = lambda tree, vocab_size: torch.zeros_like(tree.size, dtype=torch.bool)
    monkeypatch.setattr(DraftTree, "doubtful", same)
    # What a draft model of two layers would be found to be, by passes that really run.
    small = dataclasses.replace(probe, shapes=probe.shapes[:2])

    def probe_draft(target: Target) -> Any:
        target.model.set_attn_implementation(attention.NAME)
        return small

    monkeypatch.setattr("outrider.decode.target.probe_target", probe_draft)
    monkeypatch.setattr("outrider.decode.target.probe_head", lambda target: LMHead(exact=True))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_decoding_cycles_of_an_ngram(shape: str, probe: Any) -> None:
    assert decode("ngram", shape, 0.0, probe) <= {"chain": 89, "tree": 111}[shape]


def decode(kind: str, shape: str, temperature: float, probe: Any, price: Price = FREE) -> int:
    """Launches of the middle one of all cycles, outside the target's pass."""
    with phantom() as ghost, counted(ghost) as launched:
        target, head = made(ghost, "medusa" if kind == "ngram" else kind, probe)
        head.eval()
        drafter = NGram(nodes=4 * (shape == "tree"))
        if kind != "ngram":
            drafter = head.drafter(target, DraftSpec(shape=shape, price=price))
        requested = [Request([5, 6, 7], TOKENS, id=0), Request([5, 6, 8, 9], TOKENS, id=1)]
        ghost.restart()
        sampling = Sampling(temperature)
        run = generate(target, drafter, requested, sampling, batch_size=2, eos_ids=())
        cycles = max(len(g.cycles) for g in run.generations)
        assert [len(g.token_ids) for g in run.generations] == [TOKENS] * 2 and cycles
        launches = statistics.median_high(launched)
        print(f"{kind} {shape}, T = {temperature}: {launches} launches a cycle")
        print(*ghost.list_reads(), sep="\n")
        assert launches > 10 and not ghost.races
        bar = PREFILL + (CYCLE + (kind == "ngram")) * cycles + PROMPTS.get(kind, 0)
        assert sum(ghost.reads.values()) <= bar, ghost.list_reads()
        return launches


@contextlib.contextmanager
def counted(ghost: Phantom) -> Iterator[list[int]]:
    """Launches of every cycle so far, without the target's own pass."""
    found: list[int] = []
    score, cycle = Engine._score, Engine._cycle

    def apart(*args: Any) -> Any:
        with ghost.within(PASS):
            return score(*args)

    def whole(*args: Any) -> None:
        before = ghost.launches.copy()
        cycle(*args)
        new = ghost.launches - before
        found.append(sum(new.values()) - new[PASS])

    patch = mock.patch.object
    with patch(Engine, "_score", apart), patch(Engine, "_cycle", whole):
        yield found


def test_bars_are_those_of_the_count() -> None:
    """The dry run tells the same reads."""
    cfg, typed = parts("eagle3")
    run = (model_of(cfg.target), typed, "float32", count.PassShape(2, 24, 0.5), None, False)
    found = count.count(count.PassSpec(*run, NAME, lambda flops, traffic: 0.0))
    assert sum(int(line.split()[0]) for line in found.reads) <= READS["eagle3"]
    assert dataclasses.replace(found).peak == found.peak
