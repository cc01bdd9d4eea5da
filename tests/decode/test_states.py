"""Hybrids: chains over layers with recurrent and convolution states, put back where a draft was
refused; what cannot be scored is said in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.conf.errors import UserError
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, generate
from outrider.decode.grow import Form
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.states import BEHIND, StateCache
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeShape
from outrider.decode.union import Union
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.medusa.config import MedusaConfig
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.train.dry_run.memory import model_of
from tests.helpers.archs import HYBRID, VOCAB, build
from tests.helpers.decoding import texts
from tests.helpers.engine_distribution import TableDrafter, engine_distribution
from tests.helpers.mirror import Mirror

BY_SLOT = ("inkling_text", "inkling2_text")  # positions follow from the cache's slots
SERVED = [arch for arch in HYBRID if arch not in BY_SLOT]
# A delta rule, Mamba-2 beside attention, convolutions beside two kinds of attention, a scan that
# goes on by one token alone, a cache of its own.
FEW = ["qwen3_next", "falcon_h1", "lfm3", "jamba", "minimax"]
LENGTHS = (9, 4, 12, 9, 1, 20, 7, 15)
CHAIN = [-1, 0, 1, 2, 3, 4]
TIE = 1e-4  # between the two likeliest tokens, which rounding decides


class Told:
    """A chain of the answer itself, one token in three of which is wrong."""

    name, shape = "told", "chain"
    taps: tuple[int, ...] = ()

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], depth: int = 3) -> None:
        self.known = {tuple(p): p + a + [3] * depth for p, a in zip(prompts, answers, strict=True)}
        self.max_depth = self.max_nodes = depth

    def reset(self, rows: int, max_len: int) -> None:
        self.rows: list[list[int]] = []
        self.at: list[int] = []
        self.dice = random.Random(1)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.rows += [self.known[tuple(p.tolist())] for p in prompts]
        self.at += [1] * len(prompts)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        self.at[rows] = [at + more for at, more in zip(self.at[rows], n.tolist(), strict=True)]

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        right = [
            text[at : at + self.max_depth] for text, at in zip(self.rows, self.at, strict=True)
        ]
        drawn = [[t if self.dice.random() < 0.7 else (t + 1) % VOCAB for t in row] for row in right]
        return DraftTree.chain(torch.tensor(drawn), budget.clamp(0, self.max_depth))

    def select(self, rows: list[int]) -> None:
        self.rows, self.at = [self.rows[r] for r in rows], [self.at[r] for r in rows]


def mirror(arch: str, rows: int, guidance: float | None = None) -> Mirror:
    return Mirror(Target(build(arch)), build(arch), (rows, 90, 6), 2e-4, guidance=guidance)


@torch.no_grad()
def same(model: Any, prompt: list[int], found: list[int], wanted: list[int]) -> bool:
    """Whether two answers are equal up to a place where the model itself has a tie."""
    place = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), None)
    if place is None:
        return True
    logits = model(torch.tensor([prompt + wanted[:place]]), use_cache=False).logits[0, -1]
    return bool((logits.max() - logits[[found[place], wanted[place]]] < TIE).all())


@torch.no_grad()
def generated(target: Target, prompt: list[int], count: int) -> list[int]:
    """What transformers' own loop answers."""
    keys: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    with target.as_loaded() as model:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, **keys)
    return out[0, len(prompt) :].tolist()


def drafters(arch: str, target: Target, prompts: list[list[int]], answers: Any) -> list[Drafter]:
    """The answer, n-grams, a small model, and two heads, one of which reads hidden states of
    several layers."""
    heads = EagleConfig(draft_vocab=0, depth=3), MedusaConfig(heads=3, draft_vocab=0)
    counts = torch.arange(VOCAB) + 1
    made = [head_class(cfg.kind).for_target(target, cfg, counts).drafter(target) for cfg in heads]
    return [Told(prompts, answers), NGram(3), DraftModel(Target(build("llama")), 3), *made]


def check_answers(arch: str, count: int) -> None:
    """Chains of three, batches of 1 and 4: every drafter's answers are `generate`'s."""
    target = Target(build(arch))
    target.eos_ids = ()
    dice = random.Random(3)
    prompts = [[dice.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]
    answers = [generated(target, prompt, count) for prompt in prompts]
    requests = [Request(prompt, count, id=i) for i, prompt in enumerate(prompts)]
    for drafter in drafters(arch, target, prompts, answers):
        for size in (1, 4):
            found = texts(target, drafter, requests, batch_size=size)
            for prompt, ours, theirs in zip(prompts, found, answers, strict=True):
                assert same(target.model, prompt, ours, theirs), (arch, drafter.name, size)


@pytest.mark.parametrize("arch", FEW)
def test_every_logit_is_a_plain_pass_s(arch: str) -> None:
    """Rows of several lengths, accepted whole, in part and not at all, further back than what is
    read again at once; rows join, leave and change places."""
    m, dice = mirror(arch, 3), random.Random(0)
    m.prefill([9, 4])
    for cycle in range(12):
        sizes = [dice.choice((0, 2, 4)) for _ in m.texts]
        tree, _ = m.score([CHAIN[:size] for size in sizes])
        whole = cycle % 4 == 3
        m.commit(tree, [size - 1 if whole else dice.randrange(-1, size) for size in sizes])
        if cycle == 4:
            m.prefill([7])
        if cycle == 8:
            m.select([2, 0])
    m.check(DraftTree.empty(2))
    m.select([1])
    for _ in range(2 * BEHIND):  # one row that falls back by a token at a time
        tree, _ = m.score([CHAIN[:2]])
        m.commit(tree, [-1])


def test_hidden_states_stand_behind_the_tokens_asked() -> None:
    m = mirror("qwen3_next", 2)
    m.prefill([8, 5])
    tree, _ = m.score([CHAIN[:3], CHAIN[:3]])
    m.commit(tree, [0, 2])  # row 0 is read again
    tree, step = m.score([CHAIN[:2], CHAIN[:1]], taps=(1, 3))
    assert step.feats is not None and step.feats.shape == (2, 3, 2, m.target.hidden_size)
    for row, count in ((0, 2), (1, 1)):
        text = torch.tensor([m.texts[row] + tree.tokens[row, :count].tolist()])
        states = m.oracle(text, output_hidden_states=True).hidden_states
        wanted = torch.stack([states[1], states[3]], 2)[0, -count - 1 :]
        torch.testing.assert_close(step.feats[row, : count + 1], wanted, atol=2e-4, rtol=1e-3)


def test_guidance_keeps_the_states_of_both_rows() -> None:
    m = mirror("falcon_h1", 2, guidance=1.7)
    m.prefill([7], uncond=[3])
    m.prefill([4])
    for nodes in ([2, 0], [-1, 1], [2, 2]):
        tree, _ = m.score([CHAIN[:3], CHAIN[:3]])
        m.commit(tree, nodes)
    m.select([1, 0])
    m.check(DraftTree.empty(2))


@pytest.mark.parametrize("arch", ["qwen3_next", "jamba"])
def test_answers_are_generate_s(arch: str) -> None:
    check_answers(arch, 24)


@pytest.mark.slow
@pytest.mark.parametrize("arch", SERVED)
def test_answers_of_every_hybrid_are_generate_s(arch: str) -> None:
    check_answers(arch, 60)


@pytest.mark.parametrize(
    ("arch", "dtype", "most"),
    [("bamba", torch.float64, 1e-9), ("qwen3_5_text", torch.float32, 1e-5)],  # its rule is single
)
def test_the_distribution_is_the_target_s(arch: str, dtype: torch.dtype, most: float) -> None:
    """Every branch of chains of two, on four tokens: no probability is off."""
    model = build(arch, dtype, vocab_size=4, eos_token_id=0)
    model.generation_config.eos_token_id = 0
    drafter = TableDrafter(TreeShape.chain(2), "iid", 4)
    found = engine_distribution(Target(model), drafter, [1, 2], 4, Sampling(temperature=1.0))
    assert found.error < most and found.branches > 100


@pytest.mark.parametrize("arch", ["qwen3_next", "lfm2"])
def test_states_that_are_not_put_back_are_found(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the probe, which then reads token by token: a cache that goes on from a refused draft."""
    keep = StateCache._keep

    def leak(self: StateCache, counts: list[int]) -> list[int]:
        self.kept = self.state
        return keep(self, counts)

    monkeypatch.setattr(StateCache, "_keep", leak)
    states = Target(build(arch)).probe().states
    assert states is not None and states.single


@pytest.mark.parametrize("arch", ["jamba", "zamba", "bamba"])
def test_a_scan_that_forgets_is_read_token_by_token(arch: str) -> None:
    """However little it weighs: Zamba's states move the logits by less than rounding may."""
    states = Target(build(arch)).probe().states
    assert states is not None and states.single == (arch != "bamba")


def test_trees_are_refused_for_chains() -> None:
    """Where one was asked for: a head whose own draft is a tree drafts a chain."""
    target = Target(build("lfm2"))
    head = head_class("medusa").for_target(target, MedusaConfig(draft_vocab=0), torch.ones(VOCAB))
    tree = head.drafter(target, DraftSpec(shape="tree"))
    assert head.drafter(target).shape == "chain"
    for drafter in (NGram(3, 6), tree):
        with pytest.raises(UserError, match=r"drafter: \S+ drafts a tree, .*@chain"):
            texts(target, drafter, [Request([5, 6], 4)])
    union = Union([head.drafter(target), NGram(3)])
    with pytest.raises(UserError, match=r"joins drafts .* singly.* \(medusa@chain, ngram\)"):
        texts(target, union, [Request([5, 6], 4)])
    with pytest.raises(UserError, match=r"Lfm2Model has .*states.*; draft a chain"):
        DraftModel(target, Form.tree(3))
    cache = target.new_cache(1, 8, 3)
    target.prefill(cache, [torch.tensor([5, 6])])
    target.score(cache, torch.tensor([7]), DraftTree.chain(torch.tensor([[8, 9]])))
    with pytest.raises(ValueError, match="no chain"):
        cache.commit(torch.tensor([[1]]), torch.tensor([1]))


@pytest.mark.parametrize("arch", ["qwen3_next", "lfm3", "jamba"])
def test_a_hybrid_drafts_what_it_would_say(arch: str) -> None:
    """Of a target with its weights, every token is accepted: also of rows of several lengths."""
    target, drafter = Target(build(arch)), DraftModel(Target(build(arch)), 3)
    requests = [Request([*range(5, 5 + n)], 30 - n, id=n) for n in (3, 7, 1, 5)]
    for size, warm in ((1, 0.0), (3, 0.0), (3, 1.0)):
        run = generate(target, drafter, requests, Sampling(temperature=warm), batch_size=size)
        cycles = [cycle for answer in run.generations for cycle in answer.cycles]
        assert cycles and all(c.accepted == c.proposed or c.cut for c in cycles)


def test_a_hybrid_that_outgrows_its_context_drafts_alike_in_a_batch() -> None:
    """A row whose accepted tokens wait to be read has outgrown it as early as one alone."""
    target = Target(build("llama", torch.float64))
    target.eos_ids = ()
    draft = DraftModel(Target(build("lfm2", torch.float64, max_position_embeddings=16)), 5)
    requests = [Request([22, 5], 20, id=0), Request([7, 27, 9, 4], 20, id=1)]
    found = [
        generate(target, draft, some, Sampling(temperature=1.0), batch_size=2, seed=5).generations
        for some in (requests[:1], requests)
    ]
    assert found[0][0].token_ids == found[1][0].token_ids


@pytest.mark.parametrize("arch", ["lfm2", "jamba", "llama"])
def test_a_row_without_news_stays_as_it_is(arch: str) -> None:
    """Where others in a union have more accepted than fits into a pass, one row waits: what it
    predicts next is what it predicts alone."""
    draft = DraftModel(Target(build(arch, max_position_embeddings=40)), 1)
    texts = [torch.randint(3, VOCAB, (40,)).split([30, 8, 1, 1])]
    texts += [torch.randint(3, VOCAB, (38,)).split([5, 1, 30, 2])]

    def told(rows: list[Any]) -> Tensor:
        draft.reset(len(rows), 60)
        draft.begin([row[0][:1] for row in rows], Sampling())
        for each in zip(*rows, strict=True):
            new = [ids[len(ids) in (30, 5) :] for ids in each]
            counts = torch.tensor([len(ids) for ids in new])
            draft.observe(pad_sequence(new, True), None, counts, slice(0, len(rows)))
        return draft.state

    both = told(texts)
    for row, alone in zip(both, texts, strict=True):
        torch.testing.assert_close(row, told([alone])[0], atol=2e-4, rtol=1e-3)


def test_kernels_that_are_not_installed_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: Any, **keys: Any) -> Tensor:
        raise ImportError("mamba_ssm is required\nby this layer")

    model = build("bamba")
    monkeypatch.setattr(type(model.model.layers[0].mamba), "forward", absent)
    with pytest.raises(UserError, match=r"target: Bamba\S+ cannot run .*mamba_ssm") as caught:
        Target(model).new_cache(1, 8, 3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arch", BY_SLOT)
def test_positions_by_slot_are_refused(arch: str) -> None:
    with pytest.raises(UserError, match="cannot score draft chains"):
        Target(build(arch)).probe()


def test_states_outside_the_cache_are_refused() -> None:
    """RecurrentGemma keeps them in its modules, and hands no cache out."""
    keys = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}
    keys |= {"num_attention_heads": 4, "lru_width": 32, "intermediate_size": 48}
    config = AutoConfig.for_model("recurrent_gemma", **keys)
    with pytest.raises(UserError, match="target: RecurrentGemmaForCausalLM keeps no K/V cache"):
        Target(AutoModelForCausalLM.from_config(config)).probe()


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("deepseek_v32", "DeepseekV32ForCausalLM has sparse attention"),
        ("deepseek_v4", "sparse attention"),
        ("glm_moe_dsa", "sparse attention"),
        ("mamba", "MambaForCausalLM is recurrent alone"),
        ("mamba2", "recurrent alone"),
        ("rwkv", "recurrent alone"),
    ],
)
def test_what_cannot_be_scored_is_said_before_weights_are_read(
    kind: str, match: str, tmp_path: Path
) -> None:
    name = {"deepseek_v32": "DeepseekV32ForCausalLM", "mamba": "MambaForCausalLM"}.get(kind, kind)
    AutoConfig.for_model(kind, architectures=[name]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"target: .*{match}") as caught:
        load_target(TargetConfig(kind="local", path=str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("lfm2", {"num_hidden_layers": 9, "layer_types": ["conv"]}, "num_hidden_layers"),
        ("qwen2_5_vl", {"text_config": [1]}, "text_config"),
    ],
)
def test_a_config_that_contradicts_itself_is_named(
    kind: str, change: dict[str, Any], match: str, tmp_path: Path
) -> None:
    """By loading, and by what a run is foretold from."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **change}))
    cfg = TargetConfig(kind="local", path=str(tmp_path))
    for asked, where in ((load_target, str(path)), (lambda c: model_of(c).built, tmp_path.name)):
        with pytest.raises(UserError, match=f"target: .*{where}.*{match}") as caught:
            asked(cfg)
        assert "\n" not in str(caught.value)
