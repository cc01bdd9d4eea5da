"""Block heads: what a row may see, what it predicts, and that training and drafting compute
the same."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.conf.errors import UserError
from outrider.heads.batch import Batch
from outrider.heads.block import attention
from outrider.heads.block.anchors import Anchors, Slots, draw
from outrider.heads.block.config import BlockConfig
from outrider.heads.checkpoint import load_head, save_head
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.layers import mask
from outrider.heads.losses import LossWeights, Taught, chunked_loss, plain_loss
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.heads.teacher import Teacher
from tests.helpers.flash import Torch
from tests.helpers.training import tiny_target

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"kind": "dspark", "markov_rank": 4, "confidence": 1.0},
}
each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def target():
    return tiny_target("float64", layers=4)


def made(target, kind: str, **keys: Any):
    """A head in float64 whose weights are no longer those of the start."""
    cfg = BlockConfig(**{"block": 4, "draft_vocab": 0, **KINDS[kind], **keys})
    torch.manual_seed(0)
    head = (
        head_class(cfg.kind).for_target(target, cfg, torch.arange(target.vocab_size) + 1).double()
    )
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return head.eval()


def rows(sizes: tuple[int, ...] = (15, 9, 4, 11), width: int = 15) -> Batch:
    """Rows of such sizes, with padding, of whose tokens four in five are supervised."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 260, (len(sizes), width), generator=g)
    mask = torch.arange(width) < torch.tensor(sizes)[:, None]
    loss = mask & (torch.rand(mask.shape, generator=g) > 0.2)
    return Batch(ids * mask, mask, loss, torch.arange(len(sizes)))


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def by_hand(head, target, feats: Tensor, anchor: int) -> Tensor:
    """Normed outputs [rows, D] of the block whose anchor token is `anchor`, at position
    len(feats), with a loop over rows and a list of keys for each."""
    net, cfg, t = head.net, head.cfg, feats.shape[0]
    c = net.config
    heads, kv, size, eps = (
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.rms_norm_eps,
    )
    rotary = LlamaRotaryEmbedding(c).double()
    cos, sin = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(t + 32)[None])

    def turn(x: Tensor, at: int) -> Tensor:
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * cos[0, at] + half * sin[0, at]

    fused = [
        rms(net.fc.weight @ (f / net.scale).flatten(), net.hidden_norm.weight, eps) for f in feats
    ]
    first = target.embed(torch.tensor([anchor]))[0]
    rows = [first, *[net.mask] * (cfg.block - 1)]
    for layer in net.layers:
        normed = [rms(x, layer.input_layernorm.weight, eps) for x in rows]

        def keys(x: Tensor, at: int, layer=layer) -> tuple[Tensor, Tensor]:
            key = (layer.k_proj.weight @ x).view(kv, size)
            return turn(rms(key, 1.0, eps), at), (layer.v_proj.weight @ x).view(kv, size)

        cache = [keys(x, j) for j, x in enumerate(fused)]
        own = [keys(x, t + r) for r, x in enumerate(normed)]
        after = []
        for r, x in enumerate(normed):
            seen = cache + own
            query = (layer.q_proj.weight @ x).view(heads, size)
            query = turn(rms(query, layer.q_norm.weight, eps), t + r)
            out = []
            for h in range(heads):
                group = h // (heads // kv)
                scores = torch.stack([query[h] @ k[group] for k, _ in seen]) / math.sqrt(size)
                out.append(scores.softmax(0) @ torch.stack([v[group] for _, v in seen]))
            y = rows[r] + layer.o_proj.weight @ torch.cat(out)
            z = rms(y, layer.post_attention_layernorm.weight, eps)
            mlp = layer.mlp
            gate = torch.nn.functional.silu(mlp.gate_proj.weight @ z)
            after.append(y + mlp.down_proj.weight @ (gate * (mlp.up_proj.weight @ z)))
        rows = after
    return torch.stack([rms(x, net.norm.weight, eps) for x in rows])


@each
@torch.no_grad()
def test_the_mask_is_a_loop_over_blocks(target, kind: str) -> None:
    """Overlapping anchors at every place of the rows."""
    head, batch = made(target, kind), rows()
    chosen = [[*range(1, size)] for size in batch.sizes()]
    anchors = Anchors.of(chosen, torch.device("cpu"))
    feats = target.features(batch.ids, batch.mask, head.taps)
    got = next(head._unroll(batch, target, feats, [anchors], head.cfg.slots))
    for b, places in enumerate(chosen):
        for a, place in enumerate(places):
            want = by_hand(head, target, feats[b, :place], int(batch.ids[b, place]))
            torch.testing.assert_close(got[b, a], want[head.cfg.before :], rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", ["parts", "flash"])
def test_no_way_of_attention_changes_a_value_or_gradient(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few anchors at a time and again in the backward pass, and all calls of flash attention
    with their merge, against all scores at once: anchors on both sides of strides, documents that
    end early, one without an anchor."""
    chosen = [[1, 3, 4, 7, 8, 9, 12, 13], [2, 3, 5], [], [4, 8, 12]]
    anchors, g = Anchors.of(chosen, torch.device("cpu")), torch.Generator().manual_seed(0)
    shapes = ((4, 6, 24, 4), *[(4, 2, 15, 4)] * 2, *[(4, 2, 24, 4)] * 2)
    given = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
    query, key, value, *own = given
    weight = torch.randn(query.shape, generator=g, dtype=torch.float64)
    want = attention.attend_blocks(*given, anchors.place)
    monkeypatch.setattr(attention, "STRIDE", 4)
    monkeypatch.setattr(attention, "MOST", 30)
    monkeypatch.setattr(attention, "BLOCK", 2 * 3 * 4 * 6 * 15)
    if way == "flash":
        monkeypatch.setattr(attention, "kernel_for", lambda query: attention.FLASH)
        monkeypatch.setattr(attention, "torch", Torch())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = attention.BlockAttention(anchors, 3, [(key, value)])(0, query, (own[0], own[1]))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad((out * weight).sum(), given) for out in (found, want)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert kept and max(t.numel() for t in kept) <= query.numel()  # scores are 4 times as many


@each
@torch.no_grad()
def test_the_loss_is_its_definition(target, kind: str) -> None:
    """Slot k of a block at t predicts x_{t+k}, supervised by that token's own mask and those
    of the slots before it; the Markov term reads x_{t+k-1}."""
    head, batch = made(target, kind, decay=3.0), rows()
    cfg = head.cfg = dataclasses.replace(head.cfg, confidence=0.0)
    net = head.net
    net.confidence = None
    anchors = draw(batch, 0, cfg.slots, (head.seed, head.step))
    feats = target.features(batch.ids, batch.mask, head.taps)
    fall = [math.exp(-k / 3.0) for k in range(cfg.slots)]
    total, count = 0.0, 0
    for b in range(len(batch.ids)):
        for place in anchors.place[b][anchors.real[b]].tolist():
            h = by_hand(head, target, feats[b, :place], int(batch.ids[b, place]))
            for k in range(1, cfg.slots + 1):
                s = place + k
                if s >= 15 or not bool(batch.loss_mask[b, s]):
                    break
                z = net.lm_head.weight @ h[k if cfg.kind == "dflash" else k - 1]
                if net.markov_in is not None:
                    z = z + net.markov_out @ net.markov_in[batch.ids[b, s - 1]]
                weight = fall[k - 1] * cfg.slots / sum(fall)
                total -= weight * float(z.log_softmax(0)[batch.ids[b, s]])
                count += 1
    out = head(batch, target)
    assert count > 10 and float(out.count) == count
    assert float(out.sum) == pytest.approx(total, rel=1e-9)


# --- anchors


def test_anchors_depend_on_seed_step_and_row_alone(target) -> None:
    batch = rows()
    together = draw(batch, 3, 3, (7, 5))
    for b, size in enumerate(batch.sizes()):
        cut = [t[b : b + 1, :size] for t in (batch.ids, batch.mask, batch.loss_mask)]
        one = draw(Batch(*cut, torch.tensor([b])), 3, 3, (7, 5))
        alone = one.place[one.real].tolist()
        assert together.place[b][together.real[b]].tolist() == alone
        assert all(p > 0 and batch.loss_mask[b, p + 1] for p in alone)
    on = torch.ones(1, 200, dtype=torch.bool)
    row = Batch(on.long(), on, on, torch.tensor([4]))
    drawn = {tuple(draw(row, 9, 3, key).place[0].tolist()) for key in ((0, 0), (0, 1), (1, 0))}
    assert len(drawn) == 3
    assert draw(row, 0, 7, (0, 0)).real.sum() == math.ceil(2 * 198 / 7)
    assert draw(row, 500, 7, (0, 0)).real.sum() == 198  # all there are


# --- losses


def test_loss_and_gradient_with_weights_by_the_block() -> None:
    """Against autograd on whole logits, with a low-rank term and a distribution."""
    g = torch.Generator().manual_seed(0)
    on = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]]).bool()
    n, vocab = int(on.sum()), 7
    shapes = ((n, 5), (vocab, 5), (n, 2), (vocab, 2))
    given = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
    place = torch.randint(-1, vocab, (n,), generator=g)
    p = torch.randn(n, vocab, generator=g, dtype=torch.float64).softmax(-1)
    terms, usable = LossWeights(0.7, 0.2, 0.3, 0.1, mask="all"), torch.ones(n, dtype=torch.bool)
    fall = torch.exp(-torch.arange(3).double() / 2)
    z = given[0] @ given[1].T + given[2] @ given[3].T
    loss = plain_loss(z, Teacher(p, p, usable), place, terms)
    want = (loss * (fall / fall.mean()).expand(5, 3)[on]).sum()
    wanted = torch.autograd.grad(want, given)
    for chunk in (1, 6):
        taught = Taught(
            place,
            torch.ones(1, n, dtype=torch.bool),
            terms,
            torch.ones(1, dtype=torch.float64),
            lambda part: Teacher(p[part], p[part], usable[part]),
            chunk,
            Slots.of(on).decaying(2.0),
            rated=True,
        )
        total, found = chunked_loss(given[0][None], given[1], taught, (given[2], given[3]))
        torch.testing.assert_close(total, want, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.loss[0], loss, rtol=0, atol=1e-10)
        rate = torch.minimum(p, z.softmax(-1)).sum(-1)
        torch.testing.assert_close(found.rate[0], rate, rtol=0, atol=1e-12)
        for one, other in zip(torch.autograd.grad(total, given), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [2, 3])
def test_the_shortest_documents(target, size: int) -> None:
    """One block stands in a document of three tokens: its anchor has a token before it, whose
    feature is there, and one behind it. A shorter one gives no loss, but a gradient."""
    head, ids = made(target, "dflash").train(), torch.tensor([[5, 6, 7][:size]])
    on = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(ids, on, on, torch.zeros(1, dtype=torch.int64))
    out = head(batch, target)
    out.sum.backward()
    found = [(flat.tolist(), level) for flat, level, _ in head.teacher_forced(batch, target, 2)]
    assert found == [([2] if size == 3 else [], 0), ([], 1)]
    assert float(out.count) == (size == 3) and bool(out.sum.isfinite())
    assert all(
        p.grad is not None and (size == 3 or not p.grad.any())
        for p in head.parameters()
        if p.requires_grad
    )


# --- mistakes


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"taps": [1, 4]}, "head.taps: 4"),
        ({"mask_token": 7}, "head.mask_token: the tokenizer uses 7"),
        ({"mask_token": 99999}, "head.mask_token: 99999"),
        ({"draft_vocab": 300}, "head.draft_vocab: 300"),
    ],
)
def test_what_does_not_fit_the_target_is_named(target, keys, said: str) -> None:
    with pytest.raises(UserError, match=said):
        made(target, "dflash", **keys)


def test_a_special_token_without_a_role_may_be_the_mask(
    target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 names its reserved tokens nowhere but among the added ones."""
    assert mask.chosen(target, None) == 259  # <|reserved_259|>
    monkeypatch.setattr(mask, "RESERVED", re.compile("nobody"))
    assert mask.chosen(target, None) == -1  # <|im_start|> stands in the template
    monkeypatch.setattr(mask, "specials", lambda tokenizer: {"<x>": 64, "<y>": 65})
    assert mask.chosen(target, None) == 65
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    mask.check(65, target, counts)
    counts[65] = 1
    assert mask.chosen(target, counts) == 64
    for token, known in ((65, counts), (66, None), (target.tokenizer.eos_token_id, None)):
        with pytest.raises(UserError, match="^head.mask_token: "):
            mask.check(token, target, known)


@pytest.mark.parametrize("kind", ["dflash", "p_eagle"])
def test_a_tokens_mask_is_the_targets_row_in_any_dtype(kind: str, tmp_path: Path) -> None:
    """A head that was trained beside a target in bfloat16 is exported beside one in float32."""
    low, high = tiny_target("bfloat16", layers=4), tiny_target("float32", layers=4)
    cfg: Any = BlockConfig(draft_vocab=0, mask_token=259)
    if kind == "p_eagle":
        cfg = EagleConfig(draft_vocab=0, parallel=True, mask_token=259)
    save_head(head_class(cfg.kind).for_target(low, cfg), tmp_path, None)
    net = load_head(tmp_path, high).net
    row = (net.mask if kind == "dflash" else net.mask_embed).view(-1)
    assert row.equal(high.embedding_weight[259])
    assert not row.equal(low.embedding_weight[259].float())


def test_more_slots_than_a_bidirectional_head_was_trained_with(target) -> None:
    with pytest.raises(UserError, match="decode settings: 4 levels"):
        made(target, "dflash").drafter(target, DraftSpec(shape="chain", depth=4))
