"""A run that starts from another head's weights, and a head that drafts for a relative."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.conf.jsonl import records
from outrider.conf.schema import compose
from outrider.decode.models.identity import sha256_state
from outrider.heads.checkpoint import load_head, read_card, save_head, trained_for
from outrider.heads.drafters import resolve_drafter
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.medusa.head import MedusaConfig, MedusaHead
from outrider.heads.registry import head_class, kinds
from outrider.heads.warm import MEANING, Start
from outrider.train.config import keys_of
from outrider.train.loop import fit
from tests.helpers.training import chats, overrides, run, tiny_target


def medusa(target: Any, **keys: Any) -> MedusaHead:
    torch.manual_seed(3)
    keys = {"heads": 3, "draft_vocab": 0, **keys}
    head = MedusaHead.for_target(
        target, MedusaConfig(**keys), torch.arange(target.vocab_size) + 1
    ).eval()
    for weight in head.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return head


def test_a_run_starts_from_a_run_and_resumes(tmp_path: Path) -> None:
    data = chats(tmp_path / "data.jsonl")
    first = run(data, tmp_path / "first")
    still = ("optim.lr=1e-12", f"start={first}")
    second = run(data, tmp_path / "second", *still)
    before, after = (load_head(path / "head", tiny_target()) for path in (first, second))
    assert torch.allclose(before.block_weight, after.block_weight, atol=1e-6)
    assert not before.proj.equal(MedusaHead.for_target(tiny_target(), before.cfg).proj)

    part = run(data, tmp_path / "part", f"start={first}", "steps=3", "save_every=3")
    moved = tmp_path / "moved"
    first.rename(moved)  # the same weights elsewhere
    run(data, part, f"start={moved}", "steps=3")
    with pytest.raises(UserError, match="start_sha256: .* in the checkpoint, not set now"):
        run(data, part, "steps=3")
    with pytest.raises(UserError, match="^start: "):
        run(data, tmp_path / "fourth", f"start={first}")


def starting(data: Path, out: Path, *more: str) -> tuple[Path, list[float]]:
    """A run of Medusa heads whose draft vocabulary nobody names, its losses step by step."""
    given = [key for key in overrides(data, out, *more) if key != "head.draft_vocab=0"]
    fit(compose("medusa", keys_of("medusa"), [*given, "log_every=1"]), head_class("medusa"))
    return out, [line["loss"] for line in records(out / "metrics.jsonl") if "loss" in line]


def test_a_start_keeps_its_draft_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens that it lacks would begin beside rows that were trained: a run on the same
    data began with a loss of 9.6 where the head had ended at 7.0."""
    data, few = chats(tmp_path / "data.jsonl"), "head.draft_vocab=17"
    first, taught = starting(data, tmp_path / "first", few, "optim.lr=0.02", "steps=12")
    still = (f"start={first}", "optim.lr=1e-12", "steps=1")
    second, begun = starting(data, tmp_path / "second", *still)
    old, new = (load_head(path / "head", tiny_target()).ids() for path in (first, second))
    assert old.numel() == 17 and old.equal(new)
    assert begun[0] < taught[0] and begun[0] < taught[-1] + 0.5
    assert "the start's 17 tokens cover 9" in capsys.readouterr().err

    with pytest.raises(UserError, match="head.draft_vocab: 19 with a start whose head has 17"):
        starting(data, tmp_path / "asked", *still, "head.draft_vocab=19")


def test_what_cannot_start_a_head_is_refused(tmp_path: Path) -> None:
    target, counts = tiny_target(layers=4), torch.arange(260) + 1
    save_head(medusa(target), tmp_path / "medusa", target.identity)
    with pytest.raises(UserError, match="^start: .* a medusa head cannot start a eagle3 head"):
        Start(str(tmp_path / "medusa"), "eagle3", target)
    with pytest.raises(UserError, match="^start: .*no head there"):
        Start(str(tmp_path / "nothing"), "eagle3", target)
    old = Eagle3Head.for_target(target, EagleConfig(draft_vocab=60, taps=[1, 2]), counts)
    save_head(old, tmp_path / "two", target.identity)
    new = Eagle3Head.for_target(target, EagleConfig(draft_vocab=60), counts)
    with pytest.raises(UserError, match=r"^start: .*; give 'head.taps=\[1,2\]'$"):
        Start(str(tmp_path / "two"), "eagle3", target).give(new)
    with pytest.raises(UserError, match="^start: .*hidden_size"):
        Start(str(tmp_path / "two"), "eagle3", tiny_target(layers=4, hidden=64))
    levels = MedusaHead.for_target(target, MedusaConfig(heads=2, draft_vocab=0))
    with pytest.raises(UserError, match=r"^start: .*proj is \[3, .*\[2, .* here; give the"):
        Start(str(tmp_path / "medusa"), "medusa", target).give(levels)
    (tmp_path / "two/head.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match="^start: .*damaged"):
        Start(str(tmp_path / "two"), "eagle3", target)


def test_weights_are_not_read_with_another_meaning(tmp_path: Path) -> None:
    """They fit in shape, so that nothing else would tell."""
    target, counts = tiny_target(layers=4), torch.arange(260) + 1
    first, second = (
        Eagle3Head.for_target(target, EagleConfig(draft_vocab=60, **keys), counts)
        for keys in ({"norm_before_fc": True, "norm_output": True}, {})
    )
    save_head(first, tmp_path, target.identity)
    with pytest.raises(UserError, match="^start: .*mean something else") as raised:
        Start(str(tmp_path), "eagle3", target).give(second)
    assert str(raised.value).endswith("=true head.norm_output=true")


def test_layers_of_another_make_start_no_head(tmp_path: Path) -> None:
    """As an imported head may have them: equal shapes, other sums."""
    target, counts = tiny_target(layers=4), torch.arange(260) + 1
    old = Eagle3Head.for_target(target, EagleConfig(draft_vocab=60), counts)
    old.net.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    save_head(old, tmp_path, target.identity)
    new = Eagle3Head.for_target(target, EagleConfig(draft_vocab=60), counts)
    with pytest.raises(UserError, match="^start: .* its layers have rope"):
        Start(str(tmp_path), "eagle3", target).give(new)


def test_of_every_switch_it_is_known_what_it_does_to_old_weights() -> None:
    """A new one has to be put among those that are refused, or of no matter to them."""
    no_matter = {"activation_checkpointing", "look_back"}  # how a step is taken, how a head begins
    for kind in map(head_class, kinds()):
        switches = {f.name for f in dataclasses.fields(kind.Config) if f.type in (bool, "bool")}
        assert switches <= {*MEANING, *no_matter, "share_lm_head"}, kind.kind


def relative(target: Any) -> Any:
    """The target after some fine-tuning: other weights under the same tokenizer."""
    torch.manual_seed(8)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight += 0.01 * torch.randn_like(weight)
    sha = sha256_state(target.model.state_dict())
    target.identity = dataclasses.replace(target.identity, name="tuned", weights_sha256=sha)
    return target


def test_a_head_drafts_for_a_relative_where_that_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, other = tiny_target(), relative(tiny_target())
    save_head(medusa(target), tmp_path, target.identity)
    with pytest.raises(UserError, match="target.allow_other=true"):
        resolve_drafter(str(tmp_path), other)
    new = MedusaHead.for_target(other, MedusaConfig(heads=3, draft_vocab=0))
    Start(str(tmp_path), "medusa", other).give(new)
    assert new.proj.equal(medusa(target).proj), "it starts a head in any case"
    other.relatives = True
    resolve_drafter(str(tmp_path), other)
    assert "was trained for tiny-llama" in capsys.readouterr().err
    card = read_card(tmp_path)
    assert trained_for(card, other).startswith("tiny-llama") and trained_for(card, target) == ""
    # another tokenizer is another language: never
    other.identity = dataclasses.replace(other.identity, tokenizer_sha256="0" * 64)
    with pytest.raises(UserError, match="tokenizer_sha256"):
        resolve_drafter(str(tmp_path), other)


def test_a_card_may_hold_keys_that_left_but_for_values_that_changed_the_head() -> None:
    target = tiny_target(layers=4)
    for head, harmless, wrong in (
        (Eagle3Head.for_target(target, EagleConfig(draft_vocab=0)), "llama", "target"),
        (medusa(target), False, True),
    ):
        key = "layer" if head.kind == "eagle3" else "activation_checkpointing"
        saved = json.loads(json.dumps(head.config_json()))
        saved["config"] |= {key: harmless, "tune": {"rank": 0, "start": "runs/medusa"}}
        assert type(head).from_json(saved, target).cfg == head.cfg
        saved["config"][key] = wrong
        with pytest.raises(UserError, match=rf"^head\.config\.{key}: .* is the last that reads it"):
            type(head).from_json(saved, target)
