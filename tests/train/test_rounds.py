"""Logged rounds: what they hold is what the engine did, their laws are the target's, and heads
learn at exactly these places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.errors import UserError
from decode.engine import Request, generate
from decode.sampling import Sampling
from heads import HEADS, save_head
from heads.block.anchors import draw
from heads.block.config import BlockConfig
from heads.eagle.config import EagleConfig
from heads.names import Draft
from scripts import log_rounds
from tests.helpers.training import TINY, tiny_target
from train.config import DataConfig
from train.stored import rounds
from train.texts.batches import load_rows

KINDS: dict[str, Any] = {
    "dflash": BlockConfig(block=4, draft_vocab=0),
    "dspark": BlockConfig(kind="dspark", block=3, draft_vocab=0, markov_rank=4),
    "eagle3": EagleConfig(kind="eagle3", draft_vocab=0, steps=3, depth=3),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=4)


def made(target, kind: str):
    torch.manual_seed(0)
    return HEADS[kind].for_target(target, KINDS[kind], torch.ones(target.vocab_size)).eval()


@pytest.fixture(scope="module")
def logged(target):
    """(requests, generations, tensors) of a sampled run of a random head."""
    asked = [Request([5, 6, 7 + i, 9], 20, id=i) for i in range(3)]
    chain = made(target, "dspark").drafter(target, Draft(shape="chain"))
    rule = rounds.Rounds("traversal", asked, chain.max_depth, 8)
    options: Any = {"batch_size": 2, "eos_ids": (), "verify": rule, "coins": rule.coins}
    run = generate(target, chain, asked, Sampling(2.0), **options)
    texts = [(g.prompt_ids, g.token_ids) for g in run.generations]
    return run.generations, rule.tensors(texts)


def test_rounds_are_those_of_the_engine(logged) -> None:
    generations, found = logged
    assert rounds.problems(found) == ""
    for i, answer in enumerate(generations):
        mine = found["row"] == i
        cycles = [c for c in answer.cycles if c.proposed]
        start = len(answer.prompt_ids)
        assert found["anchor"][mine].tolist() == [start + c.start - 1 for c in cycles]
        whole = [n for n, c in enumerate(cycles) if not c.cut]
        accepted = found["accepted"][mine].tolist()
        assert [accepted[n] for n in whole] == [cycles[n].accepted for n in whole]
        text = torch.tensor([*answer.prompt_ids, *answer.token_ids])
        for anchor, right, drafted in zip(
            found["anchor"][mine], found["accepted"][mine], found["drafted"][mine], strict=True
        ):
            after = text[anchor + 1 : anchor + 1 + right]
            assert drafted[: len(after)].tolist() == after.tolist()
            if right < (drafted >= 0).sum() and anchor + 1 + right < len(text):
                assert drafted[right] != text[anchor + 1 + right]


@torch.no_grad()
def test_the_logged_law_is_the_targets(target, logged) -> None:
    """Also behind what was rejected: there the text goes on with the draft."""
    generations, found = logged
    seen = 0
    for n in range(len(found["row"])):
        answer = generations[int(found["row"][n])]
        text = [*answer.prompt_ids, *answer.token_ids][: int(found["anchor"][n]) + 1]
        drafted = [t for t in found["drafted"][n].tolist() if t >= 0]
        logits = target.model(torch.tensor([[*text, *drafted]])).logits[0, len(text) - 1 :]
        law = logits.float().softmax(-1)
        p, ids = found["law.p"][n], found["law.ids"][n].long()
        best = law.topk(8)
        torch.testing.assert_close(p[: len(law)], best.values, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            law.gather(1, ids[: len(law)]), best.values, rtol=1e-4, atol=1e-6
        )
        assert not p[len(law) :].any() and bool((p.sum(-1) <= 1 + 1e-5).all())
        seen += len(law)
    assert seen > 40


def rows_of(folder: Path, target, found, **keys: Any):
    folder.mkdir(exist_ok=True)
    rounds.write(folder, found, {})
    cfg = DataConfig(kind="rounds", path=str(folder), held_out=0.0, **keys)
    return load_rows(cfg, target.tokenizer, (), target.vocab_size, 4096)


@pytest.mark.parametrize("packing", [0, 64])
def test_heads_learn_where_they_drafted_and_no_further(target, logged, tmp_path, packing) -> None:
    _, found = logged
    rows = rows_of(tmp_path / "r", target, found)
    batch = rows.batch([0, 1, 2], packing)
    far = torch.minimum(found["accepted"] + 1, (found["drafted"] >= 0).sum(1))
    ends = rows.offsets.diff()[found["row"]]
    want = int(torch.minimum(far, ends - 1 - found["anchor"]).sum())
    anchors = draw(batch, 0, 3, (0, 0))
    assert int(anchors.real.sum()) == len(found["row"])
    for kind in ("dflash", "dspark"):
        out = made(target, kind)(batch, target)
        assert int(out.count) == want
    head = made(target, "eagle3")
    out = head(batch, target)
    assert sum(int(out.stats[f"top1_{s}"][1]) for s in range(3)) == want


def test_nothing_changes_without_rounds(target, logged, tmp_path) -> None:
    """An anchor at every place with all the reach there is: the plain loss of EAGLE-3."""
    _, found = logged
    batch = rows_of(tmp_path / "r", target, found).batch([0, 1, 2])
    head = made(target, "eagle3")
    whole, none = torch.full_like(batch.ids, 3), {"reach": None}
    fields = {n: getattr(batch, n) for n in ("ids", "mask", "loss_mask", "sample_ids")}
    alike = [head(type(batch)(**fields, **r), target).sum for r in ({"reach": whole}, none)]
    assert torch.equal(alike[0], alike[1])


def test_damage_is_named(target, logged, tmp_path: Path) -> None:
    _, found = logged
    folder = tmp_path / "r"
    rows_of(folder, target, found)
    with pytest.raises(UserError, match="rounds.json is missing"):
        rounds.read(tmp_path)
    with pytest.raises(UserError, match="data.max_length: 9"):
        rows_of(tmp_path / "s", target, found, max_length=9)
    data = bytearray((folder / rounds.WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / rounds.WEIGHTS).write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        rounds.read(folder)
    for name, value, said in (
        ("anchor", found["anchor"] + 100, "outside its text"),
        ("row", found["row"] + 3, "belongs to no text"),
        ("accepted", found["accepted"] + 9, "accepted more than was drafted"),
        ("offsets", found["offsets"][:-1], "do not fill it"),
    ):
        rounds.write(folder, {**found, name: value.clone()}, {})
        with pytest.raises(UserError, match=said):
            rounds.read(folder)


def test_the_command(target, tmp_path: Path, capsys) -> None:
    save_head(made(target, "dspark"), tmp_path / "head", target.identity)
    keys = [*(f"target.{k}={v}" for k, v in {**TINY, "layers": 4}.items()), "target=tiny"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "go"}\n{"prompt": "stop it"}\n')
    args = [*keys, f"drafter={tmp_path / 'head'}", f"prompts={tmp_path / 'p.jsonl'}"]

    def run(*more: str) -> int:
        with pytest.raises(SystemExit) as stop:
            log_rounds.main([*args, f"out={tmp_path / 'out'}", "max_new_tokens=9", *more])
        return int(stop.value.code or 0)

    assert run("dtype=float32", "device=cpu") == 0
    card = json.loads((tmp_path / "out" / rounds.CARD).read_text())
    assert (
        card["texts"] == 2 and card["rounds"] > 2 and "accepted in each" in capsys.readouterr().out
    )
    assert run() == 2 and "give another folder" in capsys.readouterr().err
    assert run("top_k=0") == 2 and "top_k: 0 is below 1" in capsys.readouterr().err
