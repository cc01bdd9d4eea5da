"""Medusa-2: a LoRA on the target beside the heads. What it learns from, what it saves, and
whose losslessness it is.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.heads import load_head, resolve_drafter, save_head
from outrider.heads.checkpoint import read_card
from outrider.heads.losses import LossWeights
from outrider.heads.names import DraftSpec
from outrider.heads.parallel.medusa import MedusaConfig, MedusaHead, TargetLoraConfig
from outrider.heads.parallel.medusa2 import Medusa2Head
from outrider.heads.warm import Start
from outrider.train.loop import fit
from outrider.train.medusa import MedusaRun
from tests.helpers.decoding import texts
from tests.helpers.training import chats, overrides, random_batch, tiny_target

CFG = MedusaConfig(
    kind="medusa2", heads=2, draft_vocab=0, tune=TargetLoraConfig(rank=4, dropout=0.0)
)
TUNE = ["head=medusa2", "head.tune.rank=4"]


def fresh(target, **tune):
    torch.manual_seed(0)
    return Medusa2Head.for_target(
        target, dataclasses.replace(CFG, tune=dataclasses.replace(CFG.tune, **tune))
    )


def shaken(target, **tune):
    """A head and adapter that are no longer those of the start."""
    head = fresh(target, **tune)
    torch.manual_seed(1)
    for p in head.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return head.eval()


def test_fresh_head_and_adapter_change_nothing() -> None:
    plain, target, batch = tiny_target(), tiny_target(), random_batch()
    head = fresh(target)
    torch.testing.assert_close(target.model(batch.ids).logits, plain.model(batch.ids).logits)
    feats = target.features(batch.ids, batch.mask, head.taps)[:, :, 0]
    logits = head.hidden(
        feats.reshape(1, -1, feats.shape[-1]).expand(2, -1, -1)
    ) @ head.proj.transpose(1, 2)
    want = plain.model(batch.ids).logits.reshape(-1, plain.vocab_size)
    torch.testing.assert_close(logits[1], want, rtol=1e-5, atol=1e-5)
    assert float(head(batch, target).stats["kl"][0]) == pytest.approx(0, abs=1e-5)


def test_loss_and_gradients_follow_the_definition() -> None:
    """distil * KL(without || with adapter) + head_weight * Medusa's loss on tuned features;
    the target takes part.
    """
    plain, target, batch = tiny_target(), tiny_target(), random_batch()
    head = shaken(target, distil=0.7, head_weight=0.3)
    head.cfg = dataclasses.replace(head.cfg, chunk=4)
    out = head(batch, target)
    out.sum.backward()
    got = {k: p.grad.clone() for k, p in head.named_parameters()}
    for p in head.parameters():
        p.grad = None
    old = plain.model(batch.ids).logits.log_softmax(-1).detach()
    whole = target.model(batch.ids, output_hidden_states=True)
    new, feats = whole.logits.log_softmax(-1), whole.hidden_states[-1]
    want = torch.zeros(())
    for b, s in batch.loss_mask.nonzero().tolist():
        want = want + 0.7 * (old[b, s - 1].exp() * (old[b, s - 1] - new[b, s - 1])).sum()
        for i in range(min(2, s - 1)):
            f = feats[b, s - i - 2]
            h = f + torch.nn.functional.silu(head.block_weight[i, 0] @ f + head.block_bias[i, 0])
            want = want - 0.3 * 0.8**i * (head.proj[i] @ h).log_softmax(-1)[batch.ids[b, s]]
    assert out.sum.item() == pytest.approx(want.item(), rel=1e-4)
    want.backward()
    for name, p in head.named_parameters():
        assert p.grad is not None and p.grad.any()
        torch.testing.assert_close(got[name], p.grad, rtol=1e-3, atol=1e-4)


def test_gradient_reaches_heads_and_adapter_alone_and_the_target_stays_in_eval() -> None:
    target = tiny_target()
    head = shaken(target, dropout=0.5)
    head.train()
    head(random_batch(), target).sum.backward()
    mine = {id(p) for p in head.parameters()}
    assert all(p.grad is not None for p in head.parameters())
    for name, p in target.model.named_parameters():
        assert (
            (p.requires_grad and "lora_" in name)
            if id(p) in mine
            else (not p.requires_grad and p.grad is None)
        )
    on = [
        n
        for n, m in target.model.named_modules()
        if m.training and not isinstance(m, torch.nn.ModuleDict)
    ]
    assert on and all("lora_dropout" in n for n in on)
    head.eval()
    assert not any(m.training for m in target.model.modules())
    rates = [(g["lr_scale"], {id(p) for p in g["params"]}) for g in head.parameter_groups()]
    assert [r for r, _ in rates] == [4.0, 1.0] and rates[1][1] == {
        id(p) for p in head.adapter.values()
    }
    assert rates[0][1] | rates[1][1] == mine and not rates[0][1] & rates[1][1]


def test_ramp_of_the_heads_loss() -> None:
    head = fresh(tiny_target(), ramp=0.5)
    seen = []
    for step in range(10):
        head.begin_step(step, 10)
        seen.append(head.strength)
    assert seen == sorted(seen) and 0 < seen[0] < 0.5 and seen[4:] == [1.0] * 6


def test_loading_tunes_the_target_and_names_it(tmp_path: Path) -> None:
    """The loaded target speaks as the trained one did, has an identity of its own, and no LoRA
    layer is left in it.
    """
    target, batch = tiny_target(), random_batch()
    head = shaken(target)
    base = target.identity
    save_head(head, tmp_path / "two", target.identity)
    want = target.model(batch.ids).logits
    again = tiny_target()
    loaded = load_head(tmp_path / "two", again)
    torch.testing.assert_close(again.model(batch.ids).logits, want, rtol=1e-4, atol=1e-4)
    assert not [n for n, _ in again.model.named_parameters() if "lora" in n]
    assert not any(p.requires_grad for p in again.model.parameters()) and not again.model.training
    assert again.identity.differences(base) and "tuned by Medusa-2" in again.identity.name
    assert again.identity.tokenizer_sha256 == base.tokenizer_sha256 and again.tuning.startswith(
        "LoRA "
    )
    logits = again.model(batch.ids).logits
    same = load_head(
        tmp_path / "two", again
    )  # a second system of the same head: the adapter counts once
    torch.testing.assert_close(again.model(batch.ids).logits, logits, rtol=0, atol=0)
    for a, b in zip(loaded.state_dict().values(), same.state_dict().values(), strict=True):
        assert a.equal(b)
    save_head(loaded, tmp_path / "copy", base)
    cards = [read_card(tmp_path / name)["head"] for name in ("copy", "two")]
    assert cards[0]["adapter_sha256"] == cards[1]["adapter_sha256"]
    requests = [Request([5, 6, 7 + i], 12, id=i) for i in range(3)]
    want = texts(again, NoDraft(), requests)
    assert texts(tiny_target(), NoDraft(), requests) != want
    for shape in ("chain", "tree"):
        for size in (1, 3):
            drafter = resolve_drafter(f"{tmp_path / 'two'}@{shape}", again)
            assert texts(again, drafter, requests, batch_size=size) == want


def test_heads_of_the_original_do_not_fit_the_tuned_target(tmp_path: Path) -> None:
    target = tiny_target()
    save_head(
        MedusaHead.for_target(target, MedusaConfig(heads=2, draft_vocab=0)),
        tmp_path / "one",
        target.identity,
    )
    save_head(shaken(target), tmp_path / "two", target.identity)
    tuned = tiny_target()
    load_head(tmp_path / "two", tuned)
    with pytest.raises(
        UserError, match="trained for another target .*weights_sha256 .* tuned by Medusa-2"
    ):
        load_head(tmp_path / "one", tuned)
    with pytest.raises(UserError, match="trained for another target"):
        load_head(tmp_path / "two", tiny_target(seed=5))
    original = tiny_target()
    load_head(tmp_path / "one", original)
    with pytest.raises(
        UserError, match="two: loading it tunes the target, and a head of the original"
    ):
        load_head(tmp_path / "two", original)


def test_a_running_training_takes_its_own_weights_only(tmp_path: Path) -> None:
    target = tiny_target()
    head = shaken(target)
    save_head(head, tmp_path / "two", target.identity)
    before = target.model(random_batch().ids).logits
    load_head(tmp_path / "two", target)
    torch.testing.assert_close(target.model(random_batch().ids).logits, before, rtol=0, atol=0)
    next(iter(head.adapter.values())).data += 1
    with pytest.raises(UserError, match="carries an adapter with other weights"):
        load_head(tmp_path / "two", target)


def test_targets_that_cannot_train_are_refused() -> None:
    with pytest.raises(
        UserError, match="dtype: a LoRA cannot be trained on a target loaded as float16"
    ):
        fresh(tiny_target("float16"))
    with pytest.raises(UserError, match="head.tune.targets: "):
        fresh(tiny_target(), targets=["nowhere"])


def test_the_loop_multiplies_the_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, message = [], []
    original = Medusa2Head.begin_step
    monkeypatch.setattr(
        Medusa2Head, "begin_step", lambda self, *a: (message.append(a), original(self, *a))[1]
    )
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self, c=None: seen.append([g["lr"] for g in self.param_groups]),
    )
    data = chats(tmp_path / "data.jsonl")
    more = [
        "steps=2",
        "optim.lr=0.01",
        "optim.warmup=0",
        "optim.schedule=constant",
        "head.tune.head_lr=3",
    ]
    fit(
        compose("medusa", MedusaRun, [*overrides(data, tmp_path / "run"), *TUNE, *more]),
        Medusa2Head,
    )
    assert seen == [[pytest.approx(0.03), 0.01]] * 2 and message == [(0, 2), (1, 2)]


def test_starts_from_heads_of_stage_one(tmp_path: Path) -> None:
    target = tiny_target()
    first = MedusaHead.for_target(target, MedusaConfig(heads=2, draft_vocab=0))
    first.proj.data += 1
    save_head(first, tmp_path / "run/head", target.identity)
    head = fresh(target)
    Start(str(tmp_path / "run"), "medusa2", target).give(head)
    assert head.proj.equal(first.proj)


def test_self_distillation_keeps_the_target_and_overfit_is_accepted() -> None:
    """One sample, real engine: the heads learn the tuned target's own continuation, which
    stays the original's.
    """
    target, plain = tiny_target(), tiny_target()
    head = fresh(target, head_weight=0.2, ramp=0.0, head_lr=50.0, distil=5.0)
    head.cfg = dataclasses.replace(head.cfg, decay=1.0, loss=LossWeights(hard=1.0))
    prompt = [40, 41, 42, 43]
    text = (
        generate(plain, NoDraft(), [Request(prompt, 24)], Sampling(), eos_ids=())
        .generations[0]
        .token_ids
    )
    batch = random_batch(1, 28)
    on = torch.arange(28)[None] >= 4
    batch = dataclasses.replace(
        batch, ids=torch.tensor([[*prompt, *text]]), mask=on | True, loss_mask=on
    )
    groups = [{**g, "lr": 2e-4 * g["lr_scale"]} for g in head.parameter_groups()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0)
    for _ in range(80):
        optimizer.zero_grad()
        out = head(batch, target)
        out.sum.backward()
        optimizer.step()
    assert float(out.stats["kl"][0]) / 24 < 0.02
    run = generate(
        target,
        head.drafter(target, DraftSpec(shape="chain")),
        [Request(prompt, 24)],
        Sampling(),
        eos_ids=(),
    ).generations[0]
    assert run.token_ids == text
    clean = [c.accepted for c in run.cycles if not c.cut]
    assert 1 + sum(clean) / len(clean) > 2.8
