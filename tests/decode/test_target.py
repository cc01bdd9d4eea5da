"""Target: tree logits equal plain passes on many architectures; probe, taps, LM head,
refusals.
"""

from __future__ import annotations

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode import attention
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeShape
from tests.helpers.archs import REFUSED, TREE, build
from tests.helpers.mirror import Mirror

BUSHY = [-1, -1, 0, 0, 1, 4, 4]
SHAPE = TreeShape.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def mirror(arch: str, dtype: torch.dtype, rows: int, guidance: float | None = None) -> Mirror:
    target = Target(build(arch, dtype))
    near = 1e-4 if dtype == torch.float32 else 1e-9
    return Mirror(target, build(arch, dtype), (rows, 48, 8), near, guidance=guidance)


def in_double(arch: str) -> bool:
    """No double-precision product of experts; Gemma 2's own softmax is single precision."""
    return arch not in ("mixtral", "gemma2", "gpt_oss")


@pytest.mark.parametrize("arch", TREE)
def test_tree_equals_plain_passes(arch: str) -> None:
    """Ragged rows, ragged trees, commits past the window, selected and appended rows, one
    after the other.
    """
    m = mirror(arch, torch.float64 if in_double(arch) else torch.float32, 3)
    # whose sinks and softcap ours does not know
    own = "eager" if arch in ("gpt_oss", "gemma2") else attention.NAME
    assert m.target.model.config._attn_implementation == own
    m.prefill([9, 4])
    tree, _ = m.score([BUSHY, [-1, 0]])
    m.commit(tree, [5, 0])
    tree, _ = m.score([[-1, 0, 1, 2], []])  # a chain beside an empty draft
    m.commit(tree, [1, -1])
    m.prefill([12])  # a request joins while others are under way
    tree, _ = m.score([[-1], BUSHY, [-1, -1, 1]])
    m.commit(tree, [0, 6, 2])
    m.select([2, 1])
    tree, _ = m.score([BUSHY, [-1, -1]])
    m.commit(tree, [6, 1])
    m.select([1])
    for _ in range(3):  # one row: the path without ragged lengths
        tree, _ = m.score([BUSHY])
        m.commit(tree, [5])
    m.check(DraftTree.empty(1))
    m.check(DraftTree.static(SHAPE, torch.tensor([m.ids(6)])))


def test_guidance_mixes_both_rows() -> None:
    m = mirror("gemma3_text", torch.float32, 2, guidance=1.7)
    m.prefill([7], uncond=[3])
    m.prefill([4])  # the default companion: the prompt's last token
    tree, step = m.score([BUSHY, [-1, 0]], taps=(1,))
    assert step.feats is not None and step.feats.shape[:2] == (2, 8)
    states = m.oracle(torch.tensor([m.texts[0]]), output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(
        step.feats[0, 0, 0], states[0, -1], atol=1e-4, rtol=1e-4
    )  # of the conditional row
    m.commit(tree, [6, 0])
    m.select([1, 0])
    tree, _ = m.score([[-1, 0, 1], BUSHY])
    m.commit(tree, [2, 2])
    m.check(DraftTree.empty(2))


@pytest.mark.parametrize("arch", REFUSED)
def test_recurrent_state_is_refused(arch: str) -> None:
    with pytest.raises(UserError, match="recurrent"):
        Target(build(arch)).new_cache(1, 8, 0)


def test_a_model_that_cannot_read_a_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.delattr(model.model, "norm")
    with pytest.raises(UserError, match=r"target: LlamaForCausalLM fails .*norm"):
        _ = Target(model).head


@pytest.mark.parametrize("arch", ["mixtral", "gemma3_text", "gpt2"])
def test_probe_accepts_half_precision(arch: str) -> None:
    Target(build(arch, torch.bfloat16)).probe()


def test_probe_falls_back_when_the_folded_attention_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An attention function that ignores the mask is found out, and the model's own used
    instead.
    """
    fold = attention.tree_attention

    def blind(module, query, key, value, attention_mask, **kwargs):
        return fold(
            module,
            query,
            key,
            value,
            None if attention_mask is None else attention_mask * 0,
            **kwargs,
        )

    monkeypatch.setitem(attention.ALL_ATTENTION_FUNCTIONS._global_mapping, attention.NAME, blind)
    target = Target(build("llama"))
    assert target.probe().tile == 1
    assert target.model.config._attn_implementation == "sdpa"


def test_probe_finds_a_model_that_ignores_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions by slot, as in ALiBi models: sibling nodes see each other's distance."""
    model = build("llama")
    rotary, inner = model.model.rotary_emb, model.model.rotary_emb.forward

    def by_slot(x, position_ids):
        return inner(x, position_ids[:, :1] + torch.arange(position_ids.shape[1]))

    monkeypatch.setattr(rotary, "forward", by_slot)
    for wrong in (model, build("bloom")):
        with pytest.raises(UserError, match="cannot score draft trees"):
            Target(wrong).probe()


@pytest.mark.parametrize("arch", ["gemma2", "granite", "cohere", "opt", "bloom"])
def test_unembed_gives_the_logits(arch: str) -> None:
    """Scale and softcap included, and the last tap is what the LM head reads."""
    target, model = Target(build(arch)), build(arch)
    ids = torch.arange(3, 13)[None]
    hidden = target.features(ids, torch.ones_like(ids, dtype=torch.bool), (target.num_layers,))[
        :, :, 0
    ]
    torch.testing.assert_close(target.unembed(hidden), model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "opt"])
def test_taps_are_hidden_states_everywhere(arch: str) -> None:
    """prefill, score and features agree with the hidden states of an untouched model; padding
    is inert.
    """
    m = mirror(arch, torch.float32, 2)
    taps = tuple(range(m.target.num_layers + 1))
    prompts = [torch.tensor(m.ids(8)), torch.tensor(m.ids(5))]
    step = m.target.prefill(m.cache, prompts, taps)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    for b, prompt in enumerate(prompts):
        ids[b, : len(prompt)], mask[b, : len(prompt)] = prompt, True
    feats = m.target.features(ids, mask, taps)
    assert step.feats is not None and step.feats.shape == feats.shape == (
        2,
        8,
        len(taps),
        m.target.hidden_size,
    )
    last = torch.tensor([3, 4])
    tree = DraftTree(
        torch.tensor([[5, 6], [7, 8]]), torch.tensor([[-1, -1], [-1, 0]]), torch.tensor([2, 2])
    )
    scored = m.target.score(m.cache, last, tree, taps).feats
    assert scored is not None
    for b, prompt in enumerate(prompts):
        n = len(prompt)
        wanted = torch.stack(m.oracle(prompt[None], output_hidden_states=True).hidden_states, 2)[0]
        torch.testing.assert_close(step.feats[b, :n], wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(feats[b, :n], wanted, atol=1e-4, rtol=1e-4)
        path = torch.cat(
            [prompt, last[b : b + 1], tree.tokens[b, 1:] if b == 0 else tree.tokens[b]]
        )
        wanted = torch.stack(m.oracle(path[None], output_hidden_states=True).hidden_states, 2)[
            0, -1
        ]
        torch.testing.assert_close(scored[b, 2], wanted, atol=1e-4, rtol=1e-4)
    only = m.target.features(
        ids, mask, (m.target.num_layers,)
    )  # read without the list of all states
    torch.testing.assert_close(only[:, :, 0], feats[:, :, -1])


def test_a_target_is_in_evaluation_mode() -> None:
    assert not Target(build("llama").train()).model.training


def test_learned_positions_end_at_the_context() -> None:
    """Up to the last position all is exact; padding of a tree cut by its size does no harm."""
    model = build("gpt2", n_positions=16)
    m = Mirror(Target(model), build("gpt2", n_positions=16), (1, 20, 8), 1e-4)
    m.prefill([13])  # positions 0..12; the last token takes 13, two more nodes fit
    cut = DraftTree.static(TreeShape.chain(6), torch.tensor([m.ids(6)]), torch.tensor([2]))
    m.check(cut)


@pytest.mark.parametrize("arch", ["gemma2", "gpt2", "opt", "mixtral"])
def test_taps_are_caught_on_the_way_and_are_those_of_the_list(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in any order, and no pass lists all hidden states once that is known."""
    target = Target(build(arch))
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    real, deep = torch.ones_like(ids, dtype=torch.bool), target.num_layers
    real[1, 6:] = False
    for taps in ((0, deep), (1, 1, deep - 1), (deep, 0)):
        caught = target.features(ids, real, taps)
        layers, target.tapped_layers = target.tapped_layers, []
        assert layers
        assert torch.equal(target.features(ids, real, taps), caught)
        target.tapped_layers = layers
    requested = []
    body = target.body.forward
    monkeypatch.setattr(
        target.body,
        "forward",
        lambda *a, **k: requested.append(k.get("output_hidden_states")) or body(*a, **k),
    )
    target.features(ids, real, (1, deep))
    assert requested == [None]
    assert not any(m._forward_pre_hooks for m in target.body.modules())
