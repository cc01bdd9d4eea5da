"""EAGLE heads: what training computes is what decoding computes, and nothing but the drafter
learns.

pytest tests/heads/test_eagle.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.decode.grow import Nodes
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.batch import Batch
from outrider.heads.eagle import drafter as drafter_module
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import EagleHead
from outrider.heads.losses import LossWeights
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from tests.helpers.archs import VOCAB, build

GREEDY = Sampling()


def target_of(arch: str = "llama", dtype: torch.dtype = torch.float32, **changes: object) -> Target:
    return Target(build(arch, dtype, **changes))  # type: ignore[arg-type]


def head_of(target: Target, seed: int = 0, **changes: object) -> EagleHead:
    """A random head with weights large enough that every input matters."""
    taps = [] if changes.get("kind") == "eagle1" else [1, 1, 2]
    cfg = EagleConfig(**{"draft_vocab": 40, "taps": taps, **changes})  # type: ignore[arg-type]
    torch.manual_seed(seed)
    head = head_class(cfg.kind).for_target(target, cfg, torch.arange(VOCAB, 0, -1))
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            else:
                weight.uniform_(0.5, 1.5)
        if cfg.kind == "eagle3":
            head.net.lm_head.weight.mul_(3)  # preferences: deep paths are among the best
    return head  # type: ignore[return-value]


def batch_of(lengths: list[int], prompt: int = 4, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)), generator=generator)
    at = torch.arange(max(lengths))
    mask = at < torch.tensor(lengths)[:, None]
    return Batch(ids * mask, mask, mask & (at >= prompt), torch.arange(len(lengths)))


def test_a_tree_inside_a_window_is_what_training_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node that trees of several rows ever read, over rounds with partial accepts and a
    prompt read in pieces: its logits are those of a training pass over the row's text and the
    path to the node."""
    monkeypatch.setattr(drafter_module, "PIECE", 3)
    target = target_of(dtype=torch.float64)
    head = head_of(target, steps=4, depth=4, nodes=8, width=3, sliding_window=6).double()
    ids, proj = batch_of([30, 30, 30], seed=3).ids, head.projection(target)
    feats = target.features(ids, torch.ones_like(ids, dtype=torch.bool), head.taps)
    drafter = head.drafter(target, DraftSpec(shape="tree"))
    drafter.reset(3, 64)
    drafter.begin([row[:1] for row in ids], GREEDY)
    read: list[tuple[int, list[list[int]], Tensor]] = []
    level, paths = drafter.level, {}

    def noted(nodes: Nodes) -> Tensor:
        logits = level(nodes)
        for row, tokens in enumerate(nodes.tokens.tolist()):
            above = [[]] if nodes.level == 1 else paths[row]
            spots = torch.arange(len(tokens)) if nodes.above is None else nodes.above
            spots = spots[row] if spots.dim() > 1 else spots
            paths[row] = [above[s] + [t] for s, t in zip(spots.tolist(), tokens, strict=True)]
            read.append((row, paths[row], logits[row]))
        return logits

    monkeypatch.setattr(drafter, "level", noted)
    before, compared = [1, 1, 1], 0
    for after in ([14, 5, 9], [15, 9, 9], [18, 14, 13]):
        new = max(b - a for a, b in zip(before, after, strict=True))
        tokens, states = ids.new_zeros(3, new), feats.new_zeros(3, new, *feats.shape[2:])
        for row, (a, b) in enumerate(zip(before, after, strict=True)):
            tokens[row, : b - a], states[row, : b - a] = ids[row, a:b], feats[row, a - 1 : b - 1]
        counts = torch.tensor(after) - torch.tensor(before)
        drafter.observe(tokens, states, counts, slice(0, 3))
        drafter.propose(torch.full((3,), 4), GREEDY, Rng(0, torch.arange(3), torch.zeros(3).long()))
        for row, found, logits in read:
            for path, z in zip(found, logits, strict=True):
                text = torch.cat([ids[row, : after[row]], torch.tensor([*path, 0])])[None]
                on = torch.ones_like(text, dtype=torch.bool)
                last = torch.arange(text.shape[1])[None] == text.shape[1] - 1
                batch = Batch(text, on, last, torch.zeros(1, dtype=torch.int64))
                _, hidden = head._unroll(batch, target, head.planned(batch))
                want = head.net.read(hidden[len(path)][0]) @ proj.T
                torch.testing.assert_close(z, want, rtol=0, atol=1e-9)
                compared += 1
        read.clear()
        before = after
    assert compared > 60


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_loss_gradient_is_that_of_a_plain_formula(kind: str) -> None:
    """Packed rows, shared target distribution, chunks: the loss and its gradient equal a
    direct per-token computation. What is accepted is counted by the target's own
    probabilities, what is imitated by those among the draft tokens.
    """
    target = target_of(dtype=torch.float64)
    loss = LossWeights(hard=0.3, soft=0.7, lk=0.2)
    near = 0.5 if kind == "eagle1" else 0.0
    head = head_of(target, kind=kind, steps=3, loss=loss, chunk=5, feature_loss=near).double()
    batch = batch_of([12, 8])
    out = head(batch, target)
    out.sum.backward()
    got = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    places = head.planned(batch)
    (last, hidden), flat, valid = head._unroll(batch, target, places), places.flat, places.valid
    ids = head.ids()
    place = vocab.places(ids, batch.ids.reshape(-1)[flat])
    own = torch.softmax(target.unembed(last[flat - 1]), -1)[:, ids]
    p = own / own.sum(-1, keepdim=True)
    total = torch.zeros((), dtype=torch.float64)
    for step, h in enumerate(hidden):
        logq = torch.log_softmax(head.net.read(h) @ head.projection(target).T, -1)
        rate = torch.minimum(own, logq.exp()).sum(-1)
        each = (
            -0.3 * logq.gather(1, place.clamp(min=0)[:, None])[:, 0]
            - 0.7 * (p * logq).sum(-1)
            - 0.2 * rate.log()
        )
        each = each * (place >= 0) * valid[step]
        if kind == "eagle1":
            far = torch.nn.functional.smooth_l1_loss(h, last[flat - 1], reduction="none")
            each = each + 0.5 * far.mean(-1) * valid[step]
        total = total + 0.8**step * each.sum()
    torch.testing.assert_close(out.sum, total)
    total.backward()
    assert set(got) == {n for n, p in head.named_parameters() if p.grad is not None}
    for name, grad in got.items():
        torch.testing.assert_close(grad, dict(head.named_parameters())[name].grad, msg=name)
