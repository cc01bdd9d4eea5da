"""A separate small draft model: cut, trained, resumed, saved as an ordinary model, drafting
chains and trees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.grow import Form
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import TreeShape
from outrider.heads.checkpoint import load_head
from outrider.heads.drafters import resolve_drafter
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.heads.small_lm.config import LoraKeys, SmallLMConfig
from outrider.heads.small_lm.head import SmallLM
from outrider.heads.small_lm.net import chosen_layers, cut
from outrider.train.config import keys_of
from outrider.train.loop import fit
from tests.helpers.archs import build
from tests.helpers.decoding import texts
from tests.helpers.training import chats, overrides, random_batch, tiny_target

PROMPTS = [[5, 6, 7, 8, 9, 5, 6], [10, 11], [30] * 12]


def run(folder: Path, out: Path, *more: str) -> Path:
    data = folder / "data.jsonl"
    if not data.exists():
        chats(data)
    base = [x for x in overrides(data, out) if not x.startswith(("head.", "target.layers"))]
    cfg = compose("draft", keys_of("draft"), [*base, "target.layers=3", "steps=4", *more])
    fit(cfg, head_class("small_lm"))
    return out


def requested(count: int = 3, tokens: int = 12) -> list[Request]:
    return [Request(p, tokens, id=i) for i, p in enumerate(PROMPTS[:count])]


@pytest.mark.parametrize("more", [[], ["head.lora.rank=2"]])
def test_the_finished_head_is_an_ordinary_model_and_an_assistant(
    tmp_path: Path, more: list[str]
) -> None:
    out = run(tmp_path, tmp_path / "run", "head.from_target_layers=2", *more)
    names = {p.name for p in (out / "head").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "head.json",
    } <= names
    assert "head.safetensors" not in names and len(list((out / "head").glob("*.safetensors"))) == 1
    target = tiny_target(layers=3)
    plain = AutoModelForCausalLM.from_pretrained(out / "head", dtype=target.dtype)
    assert AutoTokenizer.from_pretrained(out / "head").get_vocab() == target.tokenizer.get_vocab()
    ids = torch.tensor(PROMPTS[:1])
    for place in (
        out / "head",
        out / "checkpoints/step-4",
    ):  # the checkpoint holds what resumes: adapters apart
        draft = load_head(place, target).drafter(target, DraftSpec(shape="chain")).draft
        torch.testing.assert_close(plain(ids).logits, draft.model(ids).logits, rtol=0, atol=0)
    want = generate(target, NoDraft(), requested(1), Sampling()).generations[0].token_ids
    if not more:
        got = target.model.generate(
            ids, assistant_model=plain, do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert got[0, ids.shape[1] :].tolist() == want
    for spec in (f"{out}@chain", f"{out}@tree"):
        found = generate(
            target, resolve_drafter(spec, target), requested(), Sampling(), batch_size=2
        )
        assert found.generations[0].token_ids == want, spec


def test_cutting_leaves_the_chosen_layers() -> None:
    """The cut model is the target with its other layers taken out."""
    assert chosen_layers(30, 6) == [0, 6, 12, 17, 23, 29] and chosen_layers(3, 1) == [0]
    with pytest.raises(UserError, match="^head.from_target_layers: 3 of"):
        chosen_layers(3, 3)
    target = Target(build("gemma2", num_hidden_layers=3))
    model, _ = cut(target, [0, 2])
    assert (
        len(model.state_dict()) < len(target.model.state_dict())
        and model.config.num_hidden_layers == 2
    )
    stack = next(
        m for m in target.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3
    )
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]])
    with torch.no_grad():
        got = model(ids).logits
        stack[1].forward = lambda hidden_states, *a, **k: hidden_states  # type: ignore[assignment]
        want = target.model(ids, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_cut_without_attention_is_refused() -> None:
    """With the counts that keep some of it, each of which drafts."""
    target = Target(build("lfm3"))  # the two in the middle attend
    with pytest.raises(UserError, match=r"^head.from_target_layers: 2 would .* draft .*give 3, "):
        SmallLM.for_target(target, SmallLMConfig(from_target_layers=2))
    head = SmallLM.for_target(target, SmallLMConfig(from_target_layers=3))
    assert all(map(len, texts(target, head.drafter(target), requested(1))))
    with pytest.raises(UserError, match=r"layers; give a smaller model \(head.path or head.name"):
        cut(Target(build("bamba")), [0])


def test_frozen_weights_are_the_targets_own_and_not_stored(tmp_path: Path) -> None:
    target = tiny_target(layers=3)
    head = SmallLM.for_target(target, SmallLMConfig(from_target_layers=2))
    words = target.model.get_input_embeddings().weight
    assert head.net.get_input_embeddings().weight.data_ptr() == words.data_ptr()
    assert not any("embed" in k or "lm_head" in k for k in head.state_dict())
    head(random_batch(), target).sum.backward()
    assert words.grad is None and all(
        p.grad is not None for p in head.parameters() if p.requires_grad
    )
    lora = SmallLM.for_target(target, SmallLMConfig(from_target_layers=2, lora=LoraKeys(rank=2)))
    assert all("lora_" in k for k in lora.state_dict()) and lora.state_dict()
    own = SmallLM.for_target(target, SmallLMConfig(from_target_layers=2, embedding="own"))
    assert own.net.get_input_embeddings().weight.data_ptr() != words.data_ptr()


def test_a_relative_starts_it_and_a_stranger_is_refused(tmp_path: Path) -> None:
    target = tiny_target(layers=3)
    small = tiny_target(layers=1, hidden=16, seed=4)
    small.model.save_pretrained(tmp_path / "small")
    small.tokenizer.save_pretrained(tmp_path / "small")
    out = run(tmp_path, tmp_path / "run", f"head.path={tmp_path}/small", "head.embedding=own")
    head = load_head(out / "head", target)
    assert isinstance(head, SmallLM) and head.net.config.hidden_size == 16
    assert load_head(out / "checkpoints/step-4", target).net.config.hidden_size == 16
    drafter = resolve_drafter(
        f"{tmp_path}/small@tree", target
    )  # an ordinary folder is a drafter, too
    assert texts(target, drafter, requested()) == texts(target, NoDraft(), requested())
    odd = tiny_target(layers=1, vocab=261)
    odd.tokenizer.add_tokens(["<real>"])
    odd.model.save_pretrained(tmp_path / "odd")
    odd.tokenizer.save_pretrained(tmp_path / "odd")
    for attempt in (
        lambda: resolve_drafter(f"{tmp_path}/odd", target),
        lambda: SmallLM.for_target(target, SmallLMConfig(path=str(tmp_path / "odd"))),
    ):
        with pytest.raises(UserError, match="another tokenizer than the target's: .*<real>"):
            attempt()


# -- drafting


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Target]:
    return tiny_target("float64"), tiny_target("float64", layers=2, seed=3)


def drafters(draft: Target) -> dict[str, DraftModel]:
    static = TreeShape.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    return {
        "chain": DraftModel(draft, 4),
        "dynamic": DraftModel(draft, Form.tree(4, nodes=9, width=3)),
        "static": DraftModel(draft, Form.tree(3, static=static)),
    }


def test_a_short_context_ends_drafting_not_decoding(pair: Any) -> None:
    target, _ = pair
    short = tiny_target("float64", context=16)
    for name, drafter in drafters(short).items():
        got = generate(
            target, drafter, requested(tokens=24), Sampling(), batch_size=2, eos_ids=()
        ).generations
        want = texts(target, NoDraft(), requested(tokens=24), eos_ids=())
        assert [g.token_ids for g in got] == want, name
        assert all(g.cycles[-1].proposed == 0 for g in got)
        for request, g in zip(requested(tokens=24), got, strict=True):
            for cycle in g.cycles:  # as deep as the draft can read, and not one token less
                room = max(0, 16 + 1 - len(request.prompt) - cycle.start)
                left = request.max_new_tokens - cycle.start - 1
                most = min(drafter.max_depth, room, left)
                assert cycle.proposed == most or name == "dynamic" and cycle.proposed <= most
    long = [Request(list(range(40, 70)), 6)]
    assert len(texts(target, drafters(short)["chain"], long, eos_ids=())[0]) == 6


def test_vocabularies_of_other_sizes(pair: Any) -> None:
    """A padded draft proposes only what the target knows; a shorter one draws from the tokens
    it has.
    """
    target, _ = pair
    for rows, sampling in ((256, Sampling(1.0)), (300, Sampling()), (300, Sampling(1.0))):
        draft = Target(build("llama", torch.float64, vocab_size=rows))
        drafter = DraftModel(draft, 3, vocab_size=target.vocab_size)
        made = texts(target, drafter, requested(), sampling, eos_ids=())
        assert all(len(text) == 12 for text in made)
        if sampling.greedy:
            assert made == texts(target, NoDraft(), requested(), eos_ids=())


def test_a_perfect_draft_is_always_accepted() -> None:
    """Sliding windows and softcaps, chains and trees."""
    static = TreeShape.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    forms = [
        Form.chain(3),
        Form.tree(3, nodes=9, width=3),
        Form.tree(3, static=static),
    ]
    target = Target(build("gemma2", torch.float64))
    for form in forms:
        requests = [Request([5, 6, 7, 8, 9, 10, 11, 12], 10, id=0), Request([9, 10], 10, id=1)]
        drafter = DraftModel(target, form)
        made = generate(target, drafter, requests, Sampling(), batch_size=2, eos_ids=())
        clean = [c.accepted for g in made.generations for c in g.cycles if not c.cut]
        assert clean and all(accepted == 3 for accepted in clean), form
