"""What changes with the length of a text: rotary frequencies, windows of any name, the end of
the context.

Every drafter equals transformers' `generate` token for token, alone and beside ragged
neighbours, across the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter, DraftModel, NGram, NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.scripts.proofs.greedy import Plain
from tests.decode.test_greedy_many import small_tree
from tests.helpers.archs import LONGROPE, SWITCH, build

DOUBLE = torch.float64
NEW = 30


def phi(**changes: Any) -> Any:
    return build("phi3", DOUBLE, **{**LONGROPE, **changes})


def gpt_neo(**changes: Any) -> Any:
    return build("gpt_neo", DOUBLE, **changes)


def doge(**changes: Any) -> Any:
    """Its mask depends on a learned number for every head, which starts as zero: then all
    tokens would tie.
    """
    model = build("doge", DOUBLE, **changes)
    generator = torch.Generator().manual_seed(changes.get("seed", 0))
    for name, weight in model.named_parameters():
        if name.endswith("self_attn.A"):
            weight.data = torch.randn(weight.shape, generator=generator, dtype=DOUBLE) * 3
    return model


def prompts(lengths: Sequence[int], seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 53, (n,), generator=generator).tolist() for n in lengths]


def written(model: Any, requested: list[list[int]], new: int, **more: Any) -> list[list[int]]:
    """What transformers' `generate` writes, one prompt at a time."""
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in requested:
        ids = torch.tensor([prompt])
        out = model.generate(ids, do_sample=False, max_new_tokens=new, pad_token_id=0, **more)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def decoded(
    target: Target, drafter: Drafter, requested: list[list[int]], batch_size: int, **more: Any
) -> list[list[int]]:
    requests = [Request(p, NEW, id=i) for i, p in enumerate(requested)]
    sampling = more.pop("sampling", Sampling())
    run = generate(target, drafter, requests, sampling, batch_size=batch_size, eos_ids=[], **more)
    for g in run.generations:  # every token after the first belongs to one cycle
        assert 1 + sum(c.accepted + 1 for c in g.cycles) == len(g.token_ids)
    return [g.token_ids for g in run.generations]


def drafters(target: Target, make: Callable[[], Any]) -> list[Drafter]:
    found: list[Drafter] = [NoDraft(), NGram(), DraftModel(Target(make()), 4)]
    return [*found, small_tree()] if target.support == "tree" else found


# -- rotary frequencies that change at a length


ACROSS = (
    20,
    13,
    5,
    SWITCH,
    SWITCH + 3,
)  # two rows cross soon, one late, one at once, one lies beyond


def test_texts_that_cross_the_switch_of_longrope() -> None:
    requested = prompts(ACROSS)
    want = written(phi(), requested, NEW)
    target = Target(phi())
    assert target.support == "tree" and target.switch == SWITCH
    for drafter in drafters(target, phi):
        for batch_size in (1, 3):
            assert decoded(target, drafter, requested, batch_size) == want, (
                drafter.name,
                batch_size,
            )


def test_the_switch_leaves_the_model_as_it_was() -> None:
    model, fresh = phi(), phi()
    target = Target(model)
    decoded(target, NoDraft(), prompts((20, 30)), 2)
    assert model.config.to_dict() == fresh.config.to_dict()
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.slow
def test_sampled_tokens_do_not_depend_on_neighbours_across_the_switch() -> None:
    target = Target(phi())
    requested = prompts(ACROSS)
    warm = Sampling(1.0)
    for drafter in drafters(target, lambda: phi(num_hidden_layers=1)):
        for guidance in (None, 1.7):
            settings = {"sampling": warm, "seed": 3, "guidance": guidance}
            alone = decoded(target, drafter, requested, 1, **settings)
            for batch_size in (2, 5):
                assert decoded(target, drafter, requested, batch_size, **settings) == alone, (
                    drafter.name,
                    batch_size,
                )


@pytest.mark.slow
def test_guided_texts_cross_the_switch() -> None:
    """Row and companion cross at different times."""
    requested = prompts(ACROSS)
    target = Target(phi())
    plain = decoded(target, NoDraft(), requested, 1, guidance=1.7)
    for drafter in drafters(target, phi)[1:]:
        assert decoded(target, drafter, requested, 3, guidance=1.7) == plain, drafter.name


def test_features_do_not_depend_on_longer_neighbours() -> None:
    target = Target(phi())
    short, long = (torch.tensor(p) for p in prompts((9, SWITCH + 6)))
    ids = torch.zeros(2, len(long), dtype=torch.int64)
    ids[0, :9], ids[1] = short, long
    mask = torch.arange(len(long)) < torch.tensor([[9], [len(long)]])
    found = target.features(ids, mask, (1, 2))
    for row, text in enumerate((short, long)):
        alone = target.features(text[None], torch.ones(1, len(text), dtype=torch.bool), (1, 2))
        torch.testing.assert_close(found[row, : len(text)], alone[0], atol=1e-12, rtol=1e-12)
    assert "changes the rotation of its whole row" in target.packs()


def test_scoring_beyond_the_switch_without_reading_again_is_refused() -> None:
    target = Target(phi())
    cache = target.new_cache(1, 40, 4)
    target.prefill(cache, [torch.tensor(prompts((SWITCH - 2,))[0])])
    assert target.headroom(SWITCH - 2) == 1
    target.score(cache, torch.tensor([5]), DraftTree.chain(torch.tensor([[6]])))
    with pytest.raises(
        ValueError, match=f"row 0 holds {SWITCH - 2} tokens.*depth 2.*crosses {SWITCH}"
    ):
        target.score(cache, torch.tensor([5]), DraftTree.chain(torch.tensor([[6, 7]])))


def test_the_certificates_plain_passes_know_the_switch() -> None:
    """Texts on either side of the switch and across it, in one call: each place as in a pass
    of its own.
    """
    target, oracle = Target(phi()), phi()
    requested = [(ids, 3) for ids in prompts((SWITCH + 5, 9, SWITCH + 1, SWITCH + 2))]
    requested.append((prompts((SWITCH + 9,), seed=8)[0], SWITCH + 4))
    plain = Plain(target)
    for at, found in plain.in_batches(requested):
        ids, start = requested[at]
        want = torch.stack(
            [oracle(torch.tensor([ids[:k]])).logits[0, -1] for k in range(start, len(ids))]
        )
        torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-12)
    assert plain.rounding(prompts((SWITCH - 3, SWITCH + 3)))["logit"] < 1e-6


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_texts_end_at_the_switch_where_generate_reads_nothing_again(kind: str) -> None:
    """Llama's `generate` would go on with keys rotated by other frequencies than its queries."""
    given = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    longest = SWITCH if kind == "dynamic" else 128
    if kind == "longrope":
        given = LONGROPE["rope_parameters"]

    def make() -> Any:
        return build("llama", DOUBLE, rope_parameters=given, max_position_embeddings=longest)

    target = Target(make())
    assert target.context_length == SWITCH and target.switch is None
    requested = prompts((20, 13, 5))
    want = [
        w[: SWITCH - len(p)]
        for w, p in zip(written(make(), requested, SWITCH - 5), requested, strict=True)
    ]
    for drafter in (NGram(), small_tree()):
        assert decoded(target, drafter, requested, 3) == want, drafter.name
    with pytest.raises(
        UserError, match=f"the prompt has {SWITCH} tokens and the target's context holds {SWITCH}"
    ):
        decoded(target, NoDraft(), prompts((SWITCH,)), 1)


# -- windows of any name


def test_a_window_in_a_buffer_is_probed_at_its_own_length() -> None:
    """GPT-Neo cuts by slots, so trees and ragged rows at one common offset are wrong from two
    windows on.
    """
    requested = prompts((40, 27, 5))
    want = written(gpt_neo(), requested, NEW)
    target = Target(gpt_neo())
    assert target.support == "chain" and target.probe().tested > 2 * 12
    for drafter in drafters(target, gpt_neo):
        for batch_size in (1, 3):
            assert decoded(target, drafter, requested, batch_size) == want, (
                drafter.name,
                batch_size,
            )


def test_a_window_too_long_to_be_probed_is_refused() -> None:
    with pytest.raises(UserError, match="window_size=1100 .* set window_size=null"):
        Target(gpt_neo(window_size=1100, max_position_embeddings=1200)).probe()


def test_a_window_that_no_text_can_fill_is_not_probed() -> None:
    target = Target(gpt_neo(window_size=1100))
    assert target.support == "tree" and target.probe().tested < 20


@pytest.mark.parametrize("seed", range(4))
def test_a_window_that_keeps_the_best_tokens_is_refused(seed: int) -> None:
    """Doge ranks tokens by themselves: repeated ones tie, and which of them stay depends on
    the length of a pass.
    """
    with pytest.raises(UserError, match=r"once its window \(keep_window_size=12\) is full"):
        Target(doge(seed=seed)).probe()


def test_windows_of_any_name_and_form_are_shortened_and_restored() -> None:
    model = build("llama")
    inner = {"sliding_window_size": 99, "window_pattern": 7, "size": 99}
    model.config.attn_config = inner
    model.config.keep_windows = [64, 2, 0]
    model.config.max_window_layers = 28
    layer = model.model.layers[0].self_attn
    layer.local_window = 50
    seen: dict[str, Any] = {}
    hook = layer.register_forward_pre_hook(
        lambda *_: seen.update(
            inner, kept=list(model.config.keep_windows), local=layer.local_window
        )
    )
    from outrider.decode import probe

    with probe._short_windows(Target(model)):
        model(torch.tensor([[5, 6]]))
    hook.remove()
    assert seen == {
        "sliding_window_size": 4,
        "window_pattern": 7,
        "size": 99,
        "kept": [4, 2, 0],
        "local": 4,
    }
    assert inner["sliding_window_size"] == 99 and layer.local_window == 50
    assert model.config.keep_windows == [64, 2, 0] and model.config.max_window_layers == 28


def test_the_probe_reaches_beyond_two_windows() -> None:
    found = Target(build("mistral")).probe()
    assert found.support == "tree" and found.tested >= 3 * 4


# -- the end of the context


@pytest.mark.parametrize("arch", ["mpt", "gpt_neo"])
def test_chains_end_at_a_table_of_positions(arch: str) -> None:
    """A row near its end beside one that drafts more: padding is not run behind the last
    position.
    """
    key = "max_seq_len" if arch == "mpt" else "max_position_embeddings"

    def make() -> Any:
        return build(arch, DOUBLE, **{key: 32})

    requested = [[7, 8, 9] * 9, [7, 8, 9] * 3]
    model = make()
    want = [written(model, [p], min(NEW, 32 - len(p)))[0] for p in requested]
    target = Target(model)
    assert target.support == "chain"
    for drafter in (NGram(), DraftModel(Target(make()), 4)):
        for guidance in (None, 1.7):
            for batch_size in (1, 2):
                found = decoded(target, drafter, requested, batch_size, guidance=guidance)
                assert guidance is not None or found == want, (drafter.name, batch_size)
