"""A LoRA on a head that stays frozen: what it learns, how it is kept, and what it is to others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.decode.target import Target
from outrider.heads import HEADS, load_head, resolve_drafter, save_head, words
from outrider.heads.base import Head
from outrider.heads.block.config import BlockConfig
from outrider.heads.checkpoint import read_card
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.given import vocabulary_in
from outrider.heads.lora import Base, LoraKeys
from outrider.heads.parallel.hydra_heads import HydraHeadsConfig
from outrider.heads.parallel.medusa import MedusaConfig
from outrider.heads.warm import Start
from outrider.train.begin import first_head
from outrider.train.config import ENTRIES, EagleRun
from outrider.train.loop import fit
from outrider.train.resolve import resolve
from outrider.train.signals import Interrupted
from tests.heads.test_warm import weights
from tests.helpers.training import TINY, chats, random_batch, sigterm_at_update, tiny_target

EAGLE = [
    "target=tiny",
    *(f"target.{k}={v}" for k, v in TINY.items()),
    "data.held_out=0.1",
    "data.cache=false",
    "steps=6",
    "batch_size=4",
    "dtype=float32",
    "device=cpu",
    "head.draft_vocab=0",
    "eval.every=0",
    "eval.parity=0",
    "save_every=2",
]


def config(data: Path, out: Path, *more: str) -> Any:
    return compose("eagle", EagleRun, [*EAGLE, f"data.path={data}", f"out_dir={out}", *more])


def run(data: Path, out: Path, *more: str) -> Path:
    fit(config(data, out, *more), HEADS["eagle3"])
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a short run."""
    folder = tmp_path_factory.mktemp("base")
    return run(chats(folder / "data.jsonl"), folder / "run")


@pytest.fixture(scope="module")
def adapted(base: Path) -> Path:
    """A LoRA on it, trained for six steps, with the parity gate and an evaluation."""
    more = (f"start={base}", "head.lora.rank=2", "eval.every=6", "eval.prompts=2")
    return run(base.parent / "data.jsonl", base.parent / "adapted", *more, "eval.parity=2")


def distributions(head: Head, target: Target) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([z.softmax(-1) for _, _, z in head.forced(random_batch(), target, 3)])


def test_an_adapter_is_a_small_folder_in_pefts_own_form(base: Path, adapted: Path) -> None:
    from peft import PeftModel

    folder, target = adapted / "head", tiny_target()
    assert {p.name for p in folder.iterdir()} == {
        "head.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    card = read_card(folder)
    assert card["head"]["lora"]["base"] == {
        "path": str((base / "head").resolve()),
        "sha256": weights(base / "head"),
        "words": [],
        "gone": [],
    }
    message = json.loads((folder / "adapter_config.json").read_text())
    assert message["peft_type"] == "LORA" and message["r"] == 2
    merged, frozen = load_head(folder, target), load_head(base / "head", target)
    theirs: Any = PeftModel.from_pretrained(frozen, str(folder))
    there = distributions(theirs.base_model.model, target)
    here = distributions(merged, target)
    assert (here - there).abs().max() < 1e-6
    assert (here - distributions(load_head(base / "head", target), target)).abs().max() > 1e-4
    assert all(w.requires_grad for w in merged.parameters()) and merged.lora is None


def test_checkpoints_hold_the_adapter_alone(base: Path, adapted: Path) -> None:
    part = adapted / "checkpoints/step-6/head.safetensors"
    assert part.stat().st_size < 0.6 * (base / "head/head.safetensors").stat().st_size
    target = tiny_target()
    assert distributions(load_head(part.parent, target), target).equal(
        distributions(load_head(adapted / "head", target), target)
    )


def test_a_resumed_run_ends_with_the_same_bits(base: Path, tmp_path: Path) -> None:
    data, more = base.parent / "data.jsonl", (f"start={base}", "head.lora.rank=2")
    more = (*more, "head.lora.dropout=0.2")
    whole = run(data, tmp_path / "whole", *more)
    with pytest.MonkeyPatch.context() as patch:
        sigterm_at_update(patch, 3)
        with pytest.raises(Interrupted):
            run(data, tmp_path / "part", *more)
    part = run(data, tmp_path / "part", *more)
    assert weights(whole / "head") == weights(part / "head")


def test_only_the_adapter_learns(base: Path, tmp_path: Path) -> None:
    cfg = config(tmp_path / "x", tmp_path, f"start={base}", "head.lora.rank=2", "head.steps=5")
    target = tiny_target()
    made = resolve(cfg, HEADS["eagle3"], target, torch.ones(260).long(), 1)
    head, notes = first_head(made, HEADS["eagle3"], target)
    before = {k: v.clone() for k, v in head.named_parameters() if not v.requires_grad}
    learning = [k for k, v in head.named_parameters() if v.requires_grad]
    assert learning and all("lora_" in k for k in learning)
    assert any("lm_head" in k for k in learning)
    assert "a LoRA of rank 2 on 9 layers" in notes[0] and "head.steps" in made.notes[-1]
    head.forward(random_batch(), target).sum.backward()
    torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], 0.1).step()
    after = dict(head.named_parameters())
    assert all(after[k].equal(v) for k, v in before.items())


def test_another_head_starts_from_an_adapter_and_takes_its_vocabulary(
    base: Path, adapted: Path, tmp_path: Path
) -> None:
    target = tiny_target()
    old = load_head(adapted / "head", target)
    new = Eagle3Head.for_target(target, old.cfg)
    assert "100.0%" in Start(str(adapted), "eagle3", target).give(new)
    assert distributions(new.eval(), target).equal(distributions(old, target))

    counts = torch.arange(260) + 1
    small = Eagle3Head.for_target(target, EagleConfig(draft_vocab=60), counts)
    save_head(small, tmp_path / "small", target.identity)
    small.adapt(LoraKeys(2), Base(str(tmp_path / "small"), weights(tmp_path / "small")))
    save_head(small, tmp_path / "lora", target.identity)
    assert vocabulary_in(str(tmp_path / "lora"), 260).equal(small.ids())


def counted(tokens: range) -> torch.Tensor:
    """Counts of data that hold these tokens alone, the first ones most often."""
    counts = torch.zeros(260, dtype=torch.int64)
    counts[list(tokens)] = 2 * len(tokens) - torch.arange(len(tokens))
    return counts


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "hydra_heads", "dflash", "dspark"])
def test_a_frozen_head_learns_the_words_of_other_data(name: str, tmp_path: Path) -> None:
    """Else a LoRA drafts none of the words of a domain that the first data lacked."""
    target = tiny_target(layers=4)
    cfg = replace(FAMILIES[name], draft_vocab=60)
    first = HEADS[cfg.kind].for_target(target, cfg, counted(range(10, 100)))
    generator = torch.Generator().manual_seed(1)
    for weight in first.parameters():  # as if trained
        weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    save_head(first, tmp_path / "base", target.identity)
    run: Any = compose(
        *ENTRIES[cfg.kind],
        [
            *(f"target.{k}={v}" for k, v in TINY.items()),
            *("target=tiny", "data.path=x", f"out_dir={tmp_path}", "steps=1"),
            *(f"start={tmp_path / 'base'}", "head.lora.rank=2", "dtype=float32"),
        ],
    )
    kind, counts = HEADS[cfg.kind], counted(range(40, 110))

    def begun(lora: LoraKeys) -> tuple[Head, list[str]]:
        made = resolve(replace(run, head=replace(cfg, lora=lora)), kind, target, counts, 1)
        return first_head(made, kind, target)

    head, notes = begun(LoraKeys(2))
    ids, old = head.ids(), first.ids()
    assert ids is not None and old is not None and head.coverage > 0.85
    assert ids.tolist() == [*range(40, 100)] and old.tolist() == [*range(10, 70)]
    assert "30 of 60 draft tokens are new" in " ".join(notes)

    fresh = HEADS[cfg.kind].for_target(target, cfg, counted(range(40, 100)))
    parts = [
        {key.replace(".base_layer", ""): weight for key, weight in one.named_parameters()}
        for one in (head, first)
    ]
    for key, weight in fresh.named_parameters():
        axis = words.axis_of(key, weight, fresh)
        if axis is None:
            continue
        kept, both = (parts[i][key].narrow(axis, 0 if i == 0 else 30, 30) for i in (0, 1))
        assert kept.equal(both)
        assert parts[0][key].narrow(axis, 30, 30).equal(weight.narrow(axis, 30, 30))

    for weight in head.parameters():
        weight.data += 0.02 * torch.randn_like(weight) * weight.requires_grad
    save_head(head, tmp_path / "lora", target.identity)
    loaded = load_head(tmp_path / "lora", target)
    assert (distributions(loaded, target) - distributions(head.eval(), target)).abs().max() < 1e-4
    assert vocabulary_in(str(tmp_path / "lora"), 260).equal(ids)
    assert vocabulary_in(str(tmp_path / "base"), 260).equal(old)

    head, _ = begun(LoraKeys(2, words=False))
    assert head.ids().equal(old)  # type: ignore[union-attr]


def test_an_adapter_on_an_adapter(
    base: Path, adapted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = base.parent / "data.jsonl"
    second = run(data, tmp_path / "second", f"start={adapted}", "head.lora.rank=1", "steps=2")
    assert "optim.lr: 0.006, usual for a LoRA on eagle3 on a target 32" in capfd.readouterr().err
    target = tiny_target()
    below, above = (load_head(path / "head", target) for path in (adapted, second))
    assert 0 < (distributions(below, target) - distributions(above, target)).abs().max() < 0.1


def test_it_is_a_drafter_by_name(adapted: Path) -> None:
    target = tiny_target()
    assert resolve_drafter(f"{adapted}@chain", target).max_depth == 5


FAMILIES: dict[str, Any] = {
    "eagle1": EagleConfig(kind="eagle1", draft_vocab=0),
    "eagle3": EagleConfig(draft_vocab=60),
    "hydra_heads": HydraHeadsConfig(draft_vocab=60, heads=3, prefix_layers=1),
    "dflash": BlockConfig(draft_vocab=60, block=4),
    "dspark": BlockConfig(kind="dspark", draft_vocab=60, block=3, markov_rank=4, confidence=1.0),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_linear_layers(name: str, tmp_path: Path) -> None:
    target, cfg = tiny_target(layers=4), FAMILIES[name]
    head = HEADS[cfg.kind].for_target(target, cfg, torch.arange(260) + 1).eval()
    save_head(head, tmp_path / "base", target.identity)
    plain = distributions(head, target)
    head.adapt(LoraKeys(2), Base(str(tmp_path / "base"), weights(tmp_path / "base")))
    assert distributions(head, target).equal(plain)  # a fresh one changes nothing
    for weight in head.parameters():
        weight.data += 0.02 * torch.randn_like(weight) * weight.requires_grad
    save_head(head, tmp_path / "lora", target.identity)
    loaded = load_head(tmp_path / "lora", target)
    # float32 by two orders of summation; an EAGLE-1 head is very sure of its tokens
    apart = (distributions(loaded, target) - distributions(head, target)).abs().max()
    assert apart < 1e-4 < (distributions(head, target) - plain).abs().max()
    head.drafter(target)


def refused(tmp_path: Path, *more: str) -> str:
    with pytest.raises(UserError) as message:
        cfg = config(tmp_path / "x", tmp_path / "out", *more)
        target, kind = tiny_target(), HEADS["eagle3"]
        first_head(resolve(cfg, kind, target, torch.ones(260).long(), 1), kind, target)
    return str(message.value)


def test_what_is_refused(base: Path, tmp_path: Path) -> None:
    start = f"start={base}"
    assert refused(tmp_path, start, "head.lora.dropout=0.1").startswith("head.lora.rank: 0 is no")
    assert "start=FOLDER" in refused(tmp_path, "head.lora.rank=2")
    for wrong in ("nothing", "lm_head", "norm"):
        more = f"head.lora.targets=[{wrong}]", "head.lora.words=false"
        message = refused(tmp_path, start, "head.lora.rank=2", *more)
        assert message.startswith("head.lora.targets: ") and "down_proj" in message
    medusa = HEADS["medusa"].for_target(tiny_target(), MedusaConfig(draft_vocab=0))
    with pytest.raises(UserError, match=r"^head\.lora\.rank: .*no linear layers"):
        medusa.adapt(LoraKeys(2), Base("", ""))


def test_a_base_that_is_gone_or_another_one_is_named(
    base: Path, adapted: Path, tmp_path: Path
) -> None:
    target, data = tiny_target(), base.parent / "data.jsonl"
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    made = run(data, tmp_path / "made", f"start={moved}", "head.lora.rank=1", "steps=1") / "head"
    load_head(made, target)
    shutil.rmtree(moved / "head")
    with pytest.raises(UserError, match=r"head\.lora\.base: .*no such file; put the head with"):
        load_head(made, target)
    shutil.copytree(base / "head", moved / "head")
    load_head(made, target)
    other = Eagle3Head.for_target(target, EagleConfig(draft_vocab=0))
    save_head(other, moved / "head", target.identity)
    with pytest.raises(UserError, match=r"head\.lora\.base: .*holds other weights"):
        load_head(made, target)


def test_a_strangers_card_does_no_harm(adapted: Path, tmp_path: Path) -> None:
    from outrider.heads.checkpoint import _card_sha256, text_of

    target = tiny_target()

    def loading(**change: Any) -> str:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapted / "head", folder)
        card = read_card(folder)
        card["head"]["lora"] |= change
        if "itself" in change:
            card["head"]["lora"].pop("itself")
            sha = card["weights"]["sha256"]
            card["head"]["lora"]["base"] = {"path": str(folder), "sha256": sha}
        card["sha256"] = _card_sha256(card)
        (folder / "head.json").write_text(text_of(card))
        with pytest.raises(UserError) as message:
            load_head(folder, target)
        assert "\n" not in str(message.value)
        return str(message.value)

    assert "lora.rank" in loading(rank=0)
    assert "lora.rank" in loading(rank="many")
    assert "different heads" in loading(rank=3)
    assert "lora.targets" in loading(targets=["net.nothing"])
    assert "lora.targets" in loading(targets=[])
    assert "lora.base" in loading(base={"path": "/nowhere", "sha256": ""})
    known = read_card(adapted / "head")["head"]["lora"]["base"]
    for swap in ({"words": [3]}, {"words": [3], "gone": [4]}, {"words": ["x"], "gone": [4]}):
        assert "lora.base.words" in loading(base=known | swap)
    assert "adapter on itself" in loading(itself=True)


def test_an_export_is_that_of_the_merged_weights(tmp_path: Path) -> None:
    from outrider.heads.interop import Facts, find_layout

    target, cfg = tiny_target(layers=4), EagleConfig(draft_vocab=60, taps=[1, 2, 3])
    head = Eagle3Head.for_target(target, cfg, torch.arange(260) + 1).eval()
    save_head(head, tmp_path / "base", target.identity)
    folders = []
    for number in range(2):  # two adapters on one head
        head = load_head(tmp_path / "base", target)
        head.adapt(LoraKeys(2), Base(str(tmp_path / "base"), weights(tmp_path / "base")))
        for weight in head.parameters():
            weight.data += 0.05 * torch.randn_like(weight) * weight.requires_grad
        folders.append(tmp_path / f"lora{number}")
        save_head(head, folders[-1], target.identity)
    one, other = (load_head(folder, target) for folder in folders)
    assert not distributions(one, target).equal(distributions(other, target))
    save_head(one, tmp_path / "merged", target.identity)
    merged = load_head(tmp_path / "merged", target)
    assert (distributions(merged, target) - distributions(one, target)).abs().max() < 1e-6
    layout, facts = find_layout("vllm", one), Facts.of(target, "tiny")
    exports = [layout.write(h, target, facts, torch.float32) for h in (one, merged)]
    assert exports[0][0] == exports[1][0]
    assert all(exports[0][1][k].equal(v) for k, v in exports[1][1].items())
