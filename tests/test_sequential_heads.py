"""Heads that read drafted tokens (Hydra heads, Medusa with a Markov term): alignment, start,
drafts, acceptance.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from conf.errors import UserError
from conf.schema import compose
from decode.drafters import NoDraft
from decode.engine import Request, generate
from decode.rng import Rng
from decode.sampling import Sampling
from heads import HEADS, load_head, save_head, vocab
from heads.batch import Batch
from heads.losses import LossWeights
from heads.names import Draft
from heads.parallel.hydra_heads import HydraHeads, HydraHeadsConfig
from heads.parallel.medusa import MedusaConfig, MedusaHead
from tests.training import chats, check_budgets, overrides, random_batch, tiny_target
from train.hydra_heads import HydraHeadsRun
from train.loop import fit
from train.medusa import MedusaRun

CASES = {
    "one-block": HydraHeadsConfig(heads=3, blocks=1, draft_vocab=0),
    "three-blocks": HydraHeadsConfig(heads=3, blocks=3, draft_vocab=0, share_lm_head=True),
    "prefix": HydraHeadsConfig(heads=3, blocks=2, prefix_layers=2, draft_vocab=0),
    "markov": MedusaConfig(heads=3, draft_vocab=0, markov_rank=8),
}
each = pytest.mark.parametrize("cfg", CASES.values(), ids=CASES.keys())
both_shapes = pytest.mark.parametrize("shape", ["chain", "tree"])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def fresh(target, cfg):
    torch.manual_seed(0)
    return HEADS[cfg.kind].for_target(target, cfg, torch.arange(target.vocab_size) + 1)


def trained_like(target, cfg, seed=0):
    """A head whose weights are no longer those of the start."""
    head = fresh(target, cfg)
    torch.manual_seed(seed)
    for p in head.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return head


def by_prefix(head, feats: torch.Tensor) -> torch.Tensor:
    """What the heads read of one row's features [T, D]: with prefix layers, transformers' own
    layers on top.
    """
    if getattr(head, "prefix", None) is None:
        return feats
    config = copy.deepcopy(head.prefix.config)
    config._attn_implementation = "eager"
    size = len(feats)
    rope = LlamaRotaryEmbedding(config)(feats, torch.arange(size)[None])
    future = torch.full((size, size), -torch.inf).triu(1)[None, None]
    x = feats[None]
    for i, mine in enumerate(head.prefix.layers):
        layer = LlamaDecoderLayer(config, i)
        layer.load_state_dict(mine.state_dict())
        out = layer(x, attention_mask=future, position_embeddings=rope)
        x = (out[0] if isinstance(out, tuple) else out).view_as(x)
    return x[0].detach()


def logits_by_hand(head, target, i: int, f: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Head i's logits from the feature f = f_t and tokens t + 1 .. t + i + 1, by the
    definition.
    """
    assert len(tokens) == i + 1
    table = target.model.get_input_embeddings().weight
    if head.kind == "medusa":
        h = f + F.silu(head.block_weight[i, 0] @ f + head.block_bias[i, 0])
        return head.proj[i] @ h + head.markov_out @ head.markov_in[tokens[-1]]
    scale = table[:4096].square().mean().rsqrt()
    c, width = torch.cat([f, *(table[t] * scale for t in tokens)]), len(f)
    h = head.enter[i][:width] @ c + F.silu(head.enter[i][width:] @ c + head.enter_bias[i])
    for layer in range(head.cfg.blocks - 1):
        h = h + F.silu(head.block_weight[i, layer] @ h + head.block_bias[i, layer])
    return (target.lm_head_weight if head.proj is None else head.proj[i]) @ h


@each
def test_fresh_heads_equal_the_lm_head(target, cfg) -> None:
    head, batch = fresh(target, cfg), random_batch()
    want = target.model(batch.ids).logits
    feats = target.features(batch.ids, batch.mask, head.taps)[:, :, 0]
    feats = torch.stack([by_prefix(head, f) for f in feats])
    for i in range(3):
        got = logits_by_hand(head, target, i, feats[0, 4], batch.ids[0, 5 : 6 + i].tolist())
        torch.testing.assert_close(got, want[0, 4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("terms", [LossWeights(), LossWeights(0, 1)], ids=["hard", "soft"])
@each
def test_loss_follows_the_definition(target, cfg, terms) -> None:
    """Head i reads f_t and e_{t+1} .. e_{t+i+1} and predicts x_{t+i+2}, supervised by that
    token's own mask.
    """
    head, batch = (
        trained_like(target, dataclasses.replace(cfg, loss=terms, decay=0.5, chunk=4)),
        random_batch(),
    )
    feats = target.features(batch.ids, batch.mask, head.taps)[:, :, 0]
    feats = torch.stack([by_prefix(head, f) for f in feats])
    laws = target.model(batch.ids).logits.log_softmax(-1)
    want, supervised = 0.0, batch.loss_mask.nonzero().tolist()
    for b, s in supervised:
        for i in range(min(3, s - 1)):
            t = s - i - 2
            z = logits_by_hand(
                head, target, i, feats[b, t], batch.ids[b, t + 1 : s].tolist()
            ).log_softmax(-1)
            loss = -z[batch.ids[b, s]] if terms.hard else -(laws[b, s - 1].exp() * z).sum()
            want += 0.5**i * loss.item()
    out = head(batch, target)
    assert out.count == len(supervised) and out.sum.item() == pytest.approx(want, rel=1e-4)


@each
def test_only_draft_parameters_get_gradient(target, cfg) -> None:
    head = trained_like(target, cfg)
    head(random_batch(), target).sum.backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())


@each
def test_every_parameter_of_a_fresh_head_can_learn(target, cfg) -> None:
    """No pair of zeros blocks itself: after one update everything has a gradient."""
    head = fresh(target, cfg)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        head(random_batch(), target).sum.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


@each
def test_padding_and_batch_change_nothing(target, cfg) -> None:
    head, batch = trained_like(target, cfg), random_batch()
    whole, parts = head(batch, target), []
    for b in range(3):
        n = int(batch.mask[b].sum())
        cut = [t[b : b + 1, :n] for t in (batch.ids, batch.mask, batch.loss_mask)]
        parts.append(head(Batch(*cut, torch.tensor([b])), target).sum.item())
    assert whole.sum.item() == pytest.approx(sum(parts), rel=1e-4)


def drive(drafter, tokens, feats, cuts):
    """Observe a sequence in pieces, as one row."""
    drafter.reset(1, 64)
    drafter.begin([tokens[:1]], Sampling())
    for a, b in zip([0, *cuts], [*cuts, len(tokens) - 1], strict=True):
        drafter.observe(
            tokens[None, a + 1 : b + 1], feats[None, a:b], torch.tensor([b - a]), slice(0, 1)
        )
    return drafter


@both_shapes
@each
def test_draft_is_the_definition_and_does_not_depend_on_the_pieces(target, cfg, shape) -> None:
    head = trained_like(target, dataclasses.replace(cfg, nodes=12))
    tokens = random_batch(1, 10).ids[0]
    feats = target.features(tokens[None], torch.ones(1, 10, dtype=torch.bool), head.taps)[0]
    rng = Rng(0, torch.zeros(1).long(), torch.zeros(1).long())
    drafts = [
        drive(head.drafter(target, Draft(shape=shape)), tokens, feats, cuts).propose(
            torch.tensor([3]), Sampling(), rng
        )
        for cuts in ([], [3], [2, 5, 8])
    ]
    assert all(d.tokens.equal(drafts[0].tokens) for d in drafts)
    tree = drafts[0]
    tree.validate(target.vocab_size, 12)
    read = by_prefix(head, feats[:9, 0])[8]
    got, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    assert tree.layout.levels == 3 and (shape == "chain" or len(got) == 12)
    for i, token in enumerate(got):
        path, at = [], parents[i]
        while at >= 0:
            path, at = [got[at], *path], parents[at]
        z = logits_by_hand(head, target, len(path), read, [int(tokens[9]), *path])
        assert token == int(z.argsort(descending=True)[int(tree.layout.rank[0, i])])


@each
def test_chain_at_temperature_is_drawn_from_the_law_it_states(target, cfg) -> None:
    head = trained_like(target, dataclasses.replace(cfg, draft_vocab=40))
    drafter, rows, warp = (
        head.drafter(target, Draft(shape="chain")),
        500,
        Sampling(temperature=0.7, top_k=6),
    )
    drafter.reset(rows, 8)
    drafter.begin([torch.tensor([5])] * rows, warp)
    feats = torch.randn(1, 1, 1, head.width).expand(rows, 1, 1, -1)
    drafter.observe(torch.full((rows, 1), 7), feats, torch.ones(rows).long(), slice(0, rows))
    tree = drafter.propose(
        torch.full((rows,), 3), warp, Rng(3, torch.arange(rows), torch.zeros(rows).long())
    )
    tree.validate(target.vocab_size, 3)
    assert bool(tree.sampled.all()) and len(tree.tokens.unique(dim=0)) > 10
    ids, read = head.ids(), by_prefix(head, feats[0, 0])[0]
    for b in range(0, rows, 100):
        path = [7, *tree.tokens[b].tolist()]
        for d in range(3):
            z = logits_by_hand_over(head, target, d, read, path[: d + 1], ids)
            torch.testing.assert_close(
                tree.proposal.law[b, d], warp.draft_law(z[None])[0], rtol=1e-3, atol=1e-4
            )
    share = torch.bincount(tree.tokens[:, 0], minlength=260)[ids] / rows
    assert (share - tree.proposal.law[0, 0]).abs().max() < 4 * (0.25 / rows) ** 0.5


def logits_by_hand_over(head, target, i, f, tokens, ids):
    z = logits_by_hand(head, target, i, f, tokens)
    return z[ids] if len(z) > len(ids) else z


@each
def test_budget_cuts_rows_and_select_keeps_their_order(target, cfg) -> None:
    head = trained_like(target, cfg)
    check_budgets(
        head, head.drafter(target, Draft(shape="tree")), torch.tensor([[3, 4], [5, 6], [7, 8]])
    )


@each
def test_rows_of_a_batch_draft_as_they_would_alone(target, cfg) -> None:
    """Rows of different lengths, observed in ragged pieces; one leaves in between."""
    head, batch = trained_like(target, cfg), random_batch(3, 14)
    feats = target.features(batch.ids, batch.mask, head.taps)
    every = head.drafter(target, Draft(shape="tree"))
    every.reset(3, 64)
    every.begin([row[:1] for row in batch.ids], Sampling())
    rows, at = [0, 1, 2], [0, 0, 0]
    for step, counts in enumerate(([5, 3, 4], [2, 0, 3], [1, 2], [3, 1])):
        if step == 2:
            every.select([2, 0])
            rows = [2, 0]
        n = torch.tensor(counts)
        pick = torch.stack([at[r] + torch.arange(int(n.max())) for r in rows])
        mine = torch.tensor(rows)[:, None]
        every.observe(batch.ids[mine, pick + 1], feats[mine, pick], n, slice(0, len(rows)))
        for r, c in zip(rows, counts, strict=True):
            at[r] += c
    rng = Rng(0, torch.arange(2), torch.zeros(2).long())
    got = every.propose(torch.full((2,), 3), Sampling(), rng)
    for b, r in enumerate(rows):
        alone = drive(
            head.drafter(target, Draft(shape="tree")), batch.ids[r, : at[r] + 1], feats[r], []
        )
        want = alone.propose(
            torch.tensor([3]), Sampling(), Rng(0, torch.zeros(1).long(), torch.zeros(1).long())
        )
        assert got.tokens[b].equal(want.tokens[0])


@pytest.mark.parametrize("batch_size", [1, 3])
@both_shapes
@each
def test_greedy_output_is_the_targets(target, cfg, shape, batch_size) -> None:
    head = trained_like(target, cfg)
    requests = [Request([5, 6, 7, 8 + i][: 2 + i], 14, id=i) for i in range(3)]
    want = generate(target, NoDraft(), requests, Sampling()).generations
    got = generate(
        target,
        head.drafter(target, Draft(shape=shape)),
        requests,
        Sampling(),
        batch_size=batch_size,
    ).generations
    assert [g.token_ids for g in got] == [g.token_ids for g in want]
    hot = generate(
        target,
        head.drafter(target, Draft(shape=shape)),
        requests,
        Sampling(1.0),
        batch_size=batch_size,
    ).generations
    assert all(len(g.token_ids) == 14 or g.finish == "eos" for g in hot)


def answer(target) -> list[int]:
    """A text without loops: sampled, so that no head can live on repetition."""
    run = generate(
        target, NoDraft(), [Request([40, 41, 42, 43], 24)], Sampling(1.0), seed=3, eos_ids=()
    )
    return [40, 41, 42, 43, *run.generations[0].token_ids]


@both_shapes
@each
def test_overfit_on_one_sample_is_accepted_nearly_whole(target, cfg, shape) -> None:
    tokens = answer(target)
    ids = torch.tensor([tokens])
    on = torch.arange(len(tokens))[None] >= 4
    batch = Batch(ids, torch.ones_like(on), on, torch.zeros(1, dtype=torch.int64))
    head = fresh(target, dataclasses.replace(cfg, loss=LossWeights(), decay=1.0))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0)
    for _ in range(150):
        optimizer.zero_grad()
        out = head(batch, target)
        out.sum.backward()
        optimizer.step()
    assert all(
        float(out.stats[f"top1_{i}"][0] / out.stats[f"top1_{i}"][1]) > 0.95 for i in range(3)
    )
    head.calibrate([batch], target)
    drafter = head.drafter(target, Draft(shape=shape))
    drafter.reset(1, 64)
    drafter.begin([ids[0, :4]], Sampling())
    feats = target.features(ids, batch.mask, head.taps)
    found, at = [], 4
    drafter.observe(ids[:, 1 : at + 1], feats[:, :at], torch.tensor([at]), slice(0, 1))
    while at + 3 < len(
        tokens
    ):  # the sampled text plays the target: what the draft gets right of it
        tree = drafter.propose(
            torch.tensor([3]), Sampling(), Rng(0, torch.zeros(1).long(), torch.zeros(1).long())
        )
        slots, right = [-1], 0
        for d in range(3):
            hits = [
                i
                for i in range(tree.width)
                if int(tree.parents[0, i]) in slots and int(tree.tokens[0, i]) == tokens[at + 1 + d]
            ]
            slots, right = hits, right + bool(hits)
            if not hits:
                break
        found.append(right)
        drafter.observe(
            ids[:, at + 1 : at + 2], feats[:, at : at + 1], torch.tensor([1]), slice(0, 1)
        )
        at += 1
    assert sum(found) / len(found) > 2.8


@each
def test_saved_and_loaded_head_drafts_the_same(target, cfg, tmp_path: Path) -> None:
    head = trained_like(target, dataclasses.replace(cfg, draft_vocab=50))
    head.calibrate([random_batch()], target)
    save_head(head, tmp_path / "head", target.identity)
    loaded = load_head(tmp_path / "head", target)
    assert loaded.cfg == head.cfg and loaded.calibration == head.calibration
    requests = [Request([5, 6, 7], 20)]
    runs = [
        generate(target, h.drafter(target, Draft(shape="tree")), requests, Sampling()).generations[
            0
        ]
        for h in (head, loaded)
    ]
    assert runs[0].cycles == runs[1].cycles


RUNS = {
    "hydra_heads": (HydraHeadsRun, "hydra_heads", ["head.prefix_layers=1"]),
    "markov": (MedusaRun, "medusa", ["head.markov_rank=4"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_resumes_bitwise(tmp_path: Path, name: str) -> None:
    schema, config, more = RUNS[name]
    data = chats(tmp_path / "data.jsonl")
    evals = ["eval.every=3", "eval.prompts=1", "eval.max_new_tokens=6", "data.held_out=0.2"]

    def run(out: Path, *extra: str) -> str:
        cfg = compose(config, schema, [*overrides(data, out), *evals, *more, *extra])
        fit(cfg, HEADS[cfg.head.kind])
        return hashlib.sha256((out / "head/head.safetensors").read_bytes()).hexdigest()

    whole = run(tmp_path / "whole", "save_every=3")
    cut = tmp_path / "cut"
    run(cut, "save_every=3")
    shutil.rmtree(cut / "head")
    shutil.rmtree(cut / "checkpoints/step-6")
    assert run(cut, "save_every=3") == whole
    assert load_head(cut / "head", tiny_target()).calibration["positions"] > 0


@pytest.mark.parametrize(
    "change, said",
    [
        ("head.blocks=0", "head.blocks: 0"),
        ("head.markov_rank=3", "head.markov_rank"),
        ("head.kind=medusa", "head.kind: 'medusa' is not hydra_heads"),
    ],
)
def test_mistakes_in_the_configuration_are_named(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        compose("hydra_heads", HydraHeadsRun, [*overrides(tmp_path / "x", tmp_path), change])
    assert said in str(caught.value)


def test_kinds() -> None:
    assert HEADS["hydra_heads"] is HydraHeads and HEADS["medusa"] is MedusaHead


@each
@both_shapes
def test_drawn_candidates_follow_their_own_laws(target, cfg, shape) -> None:
    """T > 0: every node is drawn from the law of its own path, without its elder siblings;
    over many rows what is drawn is on average what the stated laws say."""
    head = trained_like(
        target, dataclasses.replace(cfg, draft_vocab=12, share_lm_head=False, nodes=7)
    )
    rows, depth = 3000, 3
    head.calibration = {"paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]}
    feats = torch.randn(1, 1, 1, head.width, generator=torch.Generator().manual_seed(0))

    def drafted(requests: torch.Tensor):
        drafter, count = head.drafter(target, Draft(shape=shape)), len(requests)
        drafter.reset(count, 8)
        drafter.begin([torch.tensor([5])] * count, Sampling())
        one = torch.ones(count).long()
        drafter.observe(7 * one[:, None], feats.expand(count, 1, 1, -1), one, slice(0, count))
        found = drafter.propose(depth * one, Sampling(temperature=1.2), Rng(3, requests, 0 * one))
        found.validate(target.vocab_size, drafter.max_nodes)
        return found

    tree = drafted(torch.arange(rows))
    for alone in (5, 17):
        assert torch.equal(drafted(torch.tensor([alone])).tokens[0], tree.tokens[alone]), (
            "the batch matters"
        )
    assert bool(tree.sampled.all()) and tree.proposal.replacement is False
    places = vocab.places(head.ids(), tree.tokens)
    parents = tree.parents[0].tolist()
    for i, above in enumerate(parents):
        law = tree.proposal.law[torch.arange(rows), tree.proposal.row[:, i]].double()
        for elder in (j for j in range(i) if parents[j] == above):
            law = law.scatter(1, places[:, elder, None], 0.0)
        law /= law.sum(1, keepdim=True)
        share = torch.nn.functional.one_hot(places[:, i], 12).double()
        assert float((share - law).mean(0).abs().max()) < 4.5 * (0.25 / rows) ** 0.5, i
    if shape == "tree":  # children of different tokens have laws of their own
        first = [tree.proposal.law[r, tree.proposal.row[0, parents.index(0)]] for r in range(2)]
        same = bool(tree.tokens[0, 0] == tree.tokens[1, 0])
        assert len({int(r) for r in tree.proposal.row[0]}) == 5 and torch.equal(*first) == same
