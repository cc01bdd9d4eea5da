"""EAGLE heads learn what decoding then finds; their files, vocabulary, gradients and
configuration.

pytest tests/heads/test_eagle_learning.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.stats import accepted_length
from outrider.decode.target import Target
from outrider.heads import head_class, load_head, vocab
from outrider.heads.batch import Batch
from outrider.heads.drafters import resolve_drafter
from outrider.heads.eagle import head as head_module
from outrider.heads.eagle import modules
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.eagle.modules import RMSNorm
from outrider.heads.eagle.noise import feature_noise
from outrider.heads.eagle.rope import rope_table
from outrider.heads.eagle.shape import LayerKeys, layer_config
from outrider.heads.losses import LossWeights
from outrider.heads.names import DraftSpec
from outrider.heads.teacher import target_distribution
from outrider.train.loop import fit
from outrider.train.runs import EagleRun
from tests.heads.test_eagle import GREEDY, batch_of, drafter_state, head_of, target_of
from tests.helpers.archs import VOCAB
from tests.helpers.training import chats, overrides, tiny_target


def one_sample(target: Target, length: int = 40) -> Batch:
    """A prompt and the target's own greedy answer."""
    run = generate(target, NoDraft(), [Request([5, 9, 7], length)], GREEDY, eos_ids=())
    ids = torch.tensor([[5, 9, 7, *run.generations[0].token_ids]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    return Batch(ids, mask, mask & (torch.arange(ids.shape[1]) >= 3), torch.tensor([0]))


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_overfitting_one_sample_shows_in_decoding(kind: str, shape: str) -> None:
    """The test against "98 % in training, 10 % when decoded": after learning one answer by
    heart, the real engine accepts nearly every draft of it."""
    target = target_of()
    batch = one_sample(target)
    torch.manual_seed(0)
    cfg = EagleConfig(
        kind=kind,
        draft_vocab=0,
        taps=[1, 1, 1] if kind == "eagle3" else [],
        steps=4,
        depth=4,
        nodes=8,
        width=2,
        loss=LossWeights(hard=1.0),
    )
    head = head_class(kind).for_target(target, cfg)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=1e-2 if kind == "eagle3" else 5e-3, weight_decay=0.0
    )
    for _ in range(150):
        out = head(batch, target)
        optimizer.zero_grad()
        (out.sum / out.count).backward()
        optimizer.step()
    run = generate(
        target,
        head.drafter(target, DraftSpec(shape=shape)),
        [Request([5, 9, 7], 40)],
        GREEDY,
        eos_ids=(),
    )
    assert run.generations[0].token_ids == batch.ids[0, 3:].tolist()
    found = accepted_length([[c for c in run.generations[0].cycles if not c.cut]])
    assert found.mean > 4.5, (found.mean, {k: (v[0] / v[1]).item() for k, v in out.stats.items()})
    head.calibrate([batch], target)
    assert min(a[0] for a in head.calibration["acceptance"]) > 0.85  # the last rows end early


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_calibrated_tree_goes_below_the_steps_of_training(kind: str) -> None:
    """The static tree of sampled drafts is measured at every level that may be drafted, not
    only at those trained.
    """
    target, steps = target_of(), 1 if kind == "eagle1" else 2
    head = head_of(
        target, kind=kind, steps=steps, depth=4, nodes=12, draft_vocab=0, tree_draw="sampled"
    )
    head.calibrate([one_sample(target)], target)
    assert len(head.calibration["acceptance"]) == 4
    head.calibration["paths"] = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    assert head.drafter(target, DraftSpec(shape="tree")).form.static.depth == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_gradient_reaches_the_draft_alone(kind: str) -> None:
    """FIELD 2.6: every draft weight and no weight of the target gets a gradient; nothing of
    the target is saved.
    """
    target = target_of("qwen3")
    head = head_of(target, kind=kind, feature_loss=1.0 if kind == "eagle1" else 0.0)
    head(batch_of([12, 9]), target).sum.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in head.parameters())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    names = set(head.state_dict())
    assert "d2t" in names and not any("embed_tokens" in n for n in names)
    assert ("net.lm_head.weight" in names) == (kind == "eagle3")


def test_nothing_supervised_is_no_error() -> None:
    """A batch without a token to learn gives loss 0 and finite gradients."""
    target = target_of()
    head = head_of(target)
    batch = batch_of([8, 6], prompt=99)
    out = head(batch, target)
    out.sum.backward()
    assert float(out.sum.detach()) == 0 and float(out.count) == 0
    assert all(p.grad is None or not bool(p.grad.any()) for p in head.parameters())


def test_loss_mask_is_the_predicted_tokens_own() -> None:
    """At a turn boundary: the first supervised token is learned from the last rows of the
    prompt, the token behind the answer from nowhere."""
    target = target_of(dtype=torch.float64)
    head = head_of(target, steps=2, loss=LossWeights(hard=1.0, soft=0.0), draft_vocab=0).double()
    batch = batch_of([12])
    batch.loss_mask[:] = False
    batch.loss_mask[0, 5:7] = True
    want = head(batch, target)
    assert float(want.count) == 2 and want.stats["top1_1"][1] == 2
    ids = batch.ids.clone()
    ids[0, 7:] = 3  # nothing behind the answer is read
    torch.testing.assert_close(
        head(Batch(ids, batch.mask, batch.loss_mask, batch.sample_ids), target).sum, want.sum
    )
    ids[0, 6] = (ids[0, 6] + 1) % VOCAB
    assert not torch.isclose(
        head(Batch(ids, batch.mask, batch.loss_mask, batch.sample_ids), target).sum, want.sum
    )


def test_draft_vocabulary_maps() -> None:
    """FIELD 2.4: d2t is an int64 offset, ids ascend; a token outside is never drafted and
    gives misses, no loss.
    """
    target = target_of()
    counts = torch.ones(VOCAB, dtype=torch.int64)
    counts[10:30] = 5
    head = Eagle3Head.for_target(
        target, EagleConfig(draft_vocab=20, taps=[1, 1, 1], steps=2), counts
    )
    assert head.d2t is not None and head.d2t.dtype == torch.int64
    assert torch.equal(head.d2t + torch.arange(20), torch.arange(10, 30))
    assert torch.equal(vocab.to_t2d(head.ids(), VOCAB).nonzero()[:, 0], torch.arange(10, 30))  # type: ignore[arg-type]
    torch.testing.assert_close(head.net.lm_head.weight, target.lm_head_weight[10:30])
    ids = torch.full((1, 9), 40)
    batch = Batch(ids, ids > 0, ids > 0, torch.tensor([0]))
    out = head(batch, target)
    assert float(out.sum.detach()) == 0 and out.stats["top1_0"].tolist() == [0, 7]
    tree = drafter_state(head, target, ids[0], [9]).propose(
        torch.tensor([5]), GREEDY, Rng(0, torch.tensor([0]), torch.tensor([0]))
    )
    assert bool(((tree.tokens >= 10) & (tree.tokens < 30)).all())


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_sampled_drafts_come_from_the_distribution_they_state(shape: str) -> None:
    """T > 0: chain and sampled tree. First siblings follow the stated distribution, second
    ones that distribution without the first; the output distribution is then verify's
    business. Also with a distribution of two tokens below three siblings."""
    target = target_of()
    head = head_of(target, nodes=6, width=3, depth=3, tree_draw="sampled", draft_vocab=12)
    ids = batch_of([9]).ids[0]
    drafter = drafter_state(head, target, ids, [9], shape)
    sampling, count = Sampling(temperature=0.8), 4000
    cache = drafter.cache
    drafter.reset(count, 12)
    drafter.cache.keys[:] = 0
    for new, old in ((drafter.cache.keys, cache.keys), (drafter.cache.values, cache.values)):
        new[:, :, :, :9] = old[:, :1, :, :9]
    one = drafter_state(head, target, ids, [9], shape)
    drafter.h[:] = one.h
    drafter.lengths = list(one.lengths) * count
    rng = Rng(3, torch.arange(count), torch.zeros(count, dtype=torch.int64))
    tree = drafter.propose(torch.full((count,), 3), sampling, rng)
    tree.validate(VOCAB, drafter.max_nodes)
    assert tree.proposal is not None and tree.sampled is not None and bool(tree.sampled.all())
    places = vocab.places(head.ids(), tree.tokens)  # type: ignore[arg-type]
    distribution = tree.proposal.probs[0, 0].double()
    seen = torch.bincount(places[:, 0], minlength=12).double() / count
    assert float((seen - distribution).abs().sum()) < 0.06
    siblings = (tree.parents[0] == -1).nonzero()[:, 0]
    if shape == "tree":
        assert len(siblings) > 1
        without = distribution * (
            distribution / (1 - distribution)
        ).sum() - distribution * distribution / (
            1 - distribution
        )  # sum over the first of p(first) p / (1 - p(first))
        seen = torch.bincount(places[:, siblings[1]], minlength=12).double() / count
        assert float((seen - without).abs().sum()) < 0.08
    deeper = (tree.layout.depth.expand_as(tree.parents)[0] == 1).nonzero()[0, 0]
    distributions = tree.proposal.probs[:, int(tree.proposal.row[0, deeper])].double()
    assert (
        float(
            (distributions.mean(0) - torch.bincount(places[:, deeper], minlength=12) / count)
            .abs()
            .sum()
        )
        < 0.08
    )
    narrow = drafter.propose(torch.full((count,), 3), Sampling(temperature=0.8, top_k=1), rng)
    narrow.validate(VOCAB, drafter.max_nodes)


def test_fresh_final_norm_and_scale_are_the_targets() -> None:
    """Gemma stores norm weights minus one, Granite and Cohere scale their logits: both end up
    in the fresh head.
    """
    for arch in ("gemma2", "granite", "cohere"):
        target = target_of(arch)
        with torch.no_grad():
            target.model.base_model.norm.weight.uniform_(0.5, 1.5)
        head = Eagle3Head.for_target(target, EagleConfig(draft_vocab=0, taps=[1, 1, 1]))
        x = torch.randn(3, 32)
        if arch != "cohere":  # Cohere's norm also takes off the mean
            ratio = head.net.norm(x) / target.model.base_model.norm(x)
            torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-3, atol=1e-3)
        assert (
            float(
                (head.net.lm_head.weight * head.net.norm.weight)
                .detach()
                .square()
                .sum(1)
                .mean()
                .sqrt()
            )
            <= 1.501
        )
        scale = {"gemma2": 1.0, "granite": 0.25, "cohere": 0.0625}[arch]
        torch.testing.assert_close(head.net.lm_head.weight, target.lm_head_weight * scale)


def test_the_layer_takes_after_the_target() -> None:
    """FIELD 2.7: heads, groups, head size, rotary base and scaling, width, activation,
    epsilon.
    """
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    shape = layer_config(
        target_of("llama", head_dim=12, rope_parameters=rope, rms_norm_eps=1e-4), 1, LayerKeys()
    )
    assert (
        shape["head_dim"] == 12
        and shape["num_key_value_heads"] == 2
        and shape["rms_norm_eps"] == 1e-4
    )
    assert shape["rope_parameters"] == rope and shape["intermediate_size"] == 48
    gemma = layer_config(target_of("gemma3_text"), 1, LayerKeys())
    assert gemma["hidden_act"] == "silu" and gemma["rope_parameters"]["rope_theta"] == 1e6
    assert layer_config(target_of("gpt2"), 1, LayerKeys())["intermediate_size"] == 128
    nested = target_of("llama")  # Gemma 3n says a size for every layer
    vars(nested.model.config)["intermediate_size"] = [48, 64]
    assert layer_config(nested, 1, LayerKeys())["intermediate_size"] == 64


def test_norm_equals_transformers() -> None:
    """Our backward pass against autograd through LlamaRMSNorm's formula; decoding's path
    against training's.
    """
    x = torch.randn(5, 7, 16, dtype=torch.float64, requires_grad=True)
    norm = RMSNorm(16, 1e-5).double()
    nn.init.uniform_(norm.weight)
    assert torch.autograd.gradcheck(norm, (x,))
    want = norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    torch.testing.assert_close(norm(x), want)
    grads = [torch.autograd.grad(o.square().sum(), [x, norm.weight]) for o in (norm(x), want)]
    torch.testing.assert_close(grads[0], grads[1])
    with torch.no_grad():
        torch.testing.assert_close(norm(x), want)


def test_noise_depends_on_sample_and_update_alone() -> None:
    """The same sample in another batch gets the same noise; the next update gives another;
    evaluation gives none.
    """
    target = target_of()
    head = head_of(target, kind="eagle1", noise=0.2)
    batch = batch_of([9, 7])
    g = torch.zeros(2, 9, 32)
    first = feature_noise(batch, g, head.step, 0.2)
    alone = Batch(
        batch.ids[1:, :7], batch.mask[1:, :7], batch.loss_mask[1:, :7], batch.sample_ids[1:]
    )
    assert torch.equal(
        feature_noise(alone, g[1:, :7], head.step, 0.2)[0], first[1, :7]
    ) and not bool(first[1, 7:].any())
    assert 0 < float(first[0].abs().max()) <= 0.1 * 512 / 9
    head.begin_step(1, 2)
    assert not torch.equal(feature_noise(batch, g, head.step, 0.2), first)
    head.eval()
    assert torch.equal(head(batch, target).sum, head(batch, target).sum)


def test_top_k_distillation() -> None:
    """HASS: the distribution keeps the target's k most probable tokens and sums to one."""
    target = target_of()
    head = head_of(target, kind="eagle1", steps=3, top_k=4, draft_vocab=0)
    last, flat = torch.randn(10, 32), torch.arange(1, 10)
    distribution = target_distribution(
        target, head.probs_rows(target), last, flat - 1, None, flat, "token", head.cfg.top_k
    )
    p, _, usable = distribution(slice(0, 9))
    assert ((p > 0).sum(1) == 4).all() and bool(usable.all())
    full = torch.softmax(target.unembed(last[:9]), -1)
    assert torch.equal(p.topk(4).indices, full.topk(4).indices)
    torch.testing.assert_close(p.sum(1), torch.ones(9))


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("llama", {"taps": [1, 9]}, "head.taps: 9"),
        ("llama", {"draft_vocab": 62}, "head.draft_vocab: 62 is larger"),
    ],
)
def test_mistakes_are_named(arch: str, changes: dict, words: str) -> None:
    """A user's mistake is one line that names the key."""
    cfg = EagleConfig(**{"draft_vocab": 0, "taps": [1], **changes})
    with pytest.raises(UserError, match=words):
        Eagle3Head.for_target(target_of(arch), cfg, torch.ones(VOCAB, dtype=torch.int64))


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_a_whole_run_saves_a_head_that_decodes(head: str, tmp_path: Path) -> None:
    """train/eagle.py's loop on a tiny target: two steps, evaluation, and the saved head drafts
    through the engine.
    """
    chats(tmp_path / "chats.jsonl")
    small = [
        *overrides(tmp_path / "chats.jsonl", tmp_path / "run"),
        f"head={head}",
        "head.nodes=6",
        "head.width=2",
        "head.depth=3",
        "steps=2",
        "eval.every=2",
        "eval.prompts=2",
        "eval.max_new_tokens=8",
    ]
    cfg = compose("eagle", EagleRun, [o for o in small if not o.startswith("head.heads")])
    fit(cfg, head_class(cfg.head.kind))
    target = tiny_target()
    saved = load_head(tmp_path / "run" / "head", target)
    assert saved.kind == head
    requests = [Request([5, 6, 7], 10)]
    want = generate(target, NoDraft(), requests, GREEDY).generations[0].token_ids
    for shape in ("chain", "tree"):
        drafter = resolve_drafter(f"{tmp_path / 'run'}@{shape}", target)
        assert generate(target, drafter, requests, GREEDY).generations[0].token_ids == want


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_weights_are_cast_once_a_pass(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the gradients are bit for bit those of a cast at every step."""
    target, batch = target_of(dtype=torch.bfloat16), batch_of([14, 9])
    head = head_of(target, steps=4, activation_checkpointing=again)
    cast: list[int] = []
    plain = modules.cast_once

    @contextlib.contextmanager
    def counted(net: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
        with plain(net, dtype):
            cast.extend(
                m.kept.numel() for m in net.modules() if getattr(m, "kept", None) is not None
            )
            yield

    found = []
    for once in (counted, lambda *_: contextlib.nullcontext()):
        monkeypatch.setattr(head_module, "cast_once", once)
        out = head(batch, target)
        out.sum.backward()
        found.append([out.sum, *(p.grad.clone() for p in head.parameters())])
        head.zero_grad()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    weights = [
        m for n, m in head.net.named_modules() if n != "lm_head" and type(m) is modules.Linear
    ]
    assert cast == [m.weight.numel() for m in weights]
    assert not any(m.kept is not None for m in weights)


def test_a_table_of_angles_serves_many_passes() -> None:
    net = head_of(target_of()).net
    short, again = (net.rope(n, torch.float32, torch.device("cpu")) for n in (40, 70))
    assert short[0].data_ptr() == again[0].data_ptr() and len(again[0]) == 70
    for n in (40, 70, 3000):
        for one, other in zip(
            net.rope(n, torch.float32, torch.device("cpu")),
            rope_table(net.config, n, torch.float32, torch.device("cpu")),
            strict=True,
        ):
            assert torch.equal(one, other)
    assert net.rope(9, torch.bfloat16, torch.device("cpu"))[0].dtype == torch.bfloat16
    net.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert len(net.rope(2, torch.float32, torch.device("cpu"))[0]) == 2
