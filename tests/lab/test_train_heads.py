"""The script that trains one head of every recipe: its commands are real, and it goes on where
it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.recipes import RECIPES
from outrider.conf.schema import compose
from outrider.scripts.common.pipeline import Command, Pipeline
from outrider.scripts.evaluate import SKIPPED, EvaluateConfig
from outrider.scripts.lab import train_heads
from outrider.scripts.lab.pages import matched
from outrider.scripts.lab.train_heads import HeadJob, HeadsConfig
from outrider.train.cache_features import CacheConfig
from outrider.train.config import ENTRIES
from tests.helpers.training import chats

TINY = [
    "target=tiny",
    "target.layers=2",
    "target.hidden=32",
    "target.vocab=260",
    "head.draft_vocab=0",
    "dtype=float32",
    "device=cpu",
    "data.cache=false",
    "batch_size=4",
]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_real_command(name: str) -> None:
    config, schema = ENTRIES[RECIPES[name][0]]
    for head, folder in ((HeadJob(name), name), (HeadJob(name, 7), f"{name}-seed7")):
        cfg: Any = compose(config, schema, train_heads.keys(HeadsConfig(), head, Path("x"), 3))
        assert cfg.steps == 3 and cfg.out_dir == f"runs/heads/{folder}"
        assert cfg.seed == (head.seed or 0)


def test_heads_are_given_alike_and_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, ran = chats(tmp_path / "data.jsonl"), []

    def trained(_: Pipeline, step: Command) -> int:
        ran.append(step.argv)
        step.leaves.parent.mkdir(parents=True, exist_ok=True)
        step.leaves.write_text("{}")
        return 0

    monkeypatch.setattr(Pipeline, "_call", trained)
    requested = [f"path={data}", f"out={tmp_path / 'heads'}", "heads=[medusa,dspark]", "flops=2e8"]
    command = [*requested, "more=[" + ",".join(f"'{k}'" for k in TINY) + "]"]
    for _ in range(2):
        with pytest.raises(SystemExit) as caught:
            train_heads.main(command)
        assert caught.value.code == 0
    assert [args[0] for args in ran] == [
        "scripts/cache_features.py",
        "train/medusa.py",
        "train/block.py",
    ]
    assert capsys.readouterr().out.count("done already") == 3
    cache: Any = compose("cache_features", CacheConfig, ran[0][1:])
    assert cache.heads == ["dspark", "medusa"] and cache.target.kind == "tiny"
    assert all(f"data.features={cache.out}" in args for args in ran[1:])
    found = json.loads((tmp_path / "heads/heads.json").read_text())
    for name, args in zip(("medusa", "dspark"), ran[1:], strict=True):
        row = found["heads"][name]
        assert f"steps={row['steps']}" in args and row["steps"] > 1
        assert abs(row["flops"] - 2e8) <= row["flops_per_step"] / 2
    assert len(found["data_sha256"]) == 64


def test_prompts_that_are_not_there_are_message_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Pipeline, "_call", lambda *_: pytest.fail("a step ran"))
    out = tmp_path / "heads"
    with pytest.raises(SystemExit) as caught:
        train_heads.main([f"out={out}", f"prompts={tmp_path / 'gone.jsonl'}"])
    assert caught.value.code == 2 and not out.exists()
    assert "prompts: cannot read" in capsys.readouterr().err


def test_heads_of_several_seeds_read_features_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, store, ran = chats(tmp_path / "data.jsonl"), tmp_path / "features", []
    monkeypatch.setattr(train_heads, "counted", lambda *_: 2e6)

    def trained(_: Pipeline, step: Command) -> int:
        ran.append(step.argv)
        step.leaves.parent.mkdir(parents=True, exist_ok=True)
        step.leaves.write_text("{}")
        return 0

    monkeypatch.setattr(Pipeline, "_call", trained)
    requested = [f"path={data}", f"out={tmp_path / 'heads'}", f"store={store}", "flops=1e7"]
    command = [*requested, "heads=[medusa,eagle3_portable]", "seeds=[1,5]"]
    with pytest.raises(SystemExit) as caught:
        train_heads.main(command)
    assert caught.value.code == 2 and not ran
    assert f"store: {store} holds no stored features" in capsys.readouterr().err
    store.mkdir()
    (store / "manifest.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        train_heads.main(command)
    assert caught.value.code == 0
    names = [next(k for k in args if k.startswith("out_dir=")).rsplit("/", 1)[1] for args in ran]
    assert names == [
        "medusa",
        "eagle3_portable",
        "medusa-seed1",
        "eagle3_portable-seed1",
        "medusa-seed5",
        "eagle3_portable-seed5",
    ]
    assert all(f"data.features={store}" in args and "steps=5" in args for args in ran)
    found = json.loads((tmp_path / "heads/heads.json").read_text())
    assert list(found["heads"]) == names and found["heads"]["medusa-seed5"]["flops"] == 1e7
    with pytest.raises(SystemExit):
        train_heads.main(command)
    assert len(ran) == len(names), "done already"
    (store / "manifest.json").write_text('{"other": 1}')
    with pytest.raises(SystemExit):
        train_heads.main(command)
    assert len(ran) == 2 * len(names), "other features: all learn again"


def test_seeds_are_counted_together_and_paired_by_prompt() -> None:
    def row(lengths: list[float], cycles: int) -> dict[str, Any]:
        prompts = [
            {"prompt_id": str(i), "category": "x", "accepted_length": x, "cycles": cycles}
            for i, x in enumerate(lengths)
        ]
        return {"accepted_length": {"mean": sum(lengths) / len(lengths)}, "per_prompt": prompts}

    names = ["eagle3", "eagle3-seed1", "medusa", "medusa-seed1", "dspark"]
    rows = [
        row([2.0, 4.0], 10),
        row([2.0, 4.0], 30),
        row([1.0, 2.0], 30),
        row([2.0, 4.0], 10),
        row([3.0, 3.0], 10),
    ]
    drafters = [{**one, "name": f"f/{name}@chain"} for name, one in zip(names, rows, strict=True)]
    found = matched.over_seeds({name: f"f/{name}" for name in names}, {"0": {"drafters": drafters}})
    assert set(found) == {"eagle3", "medusa"}, "one seed says nothing about seeds"
    medusa = found["medusa"]["0"]["chain"]
    assert medusa["lengths"] == [1.5, 3.0]
    assert medusa["against"]["mean"] == pytest.approx((30 * 3 + 10 * 6) / 80 / 3)
    assert medusa["against"]["low"] == pytest.approx(0.625), "the same ratio for every prompt"
    assert found["eagle3"]["0"]["chain"]["against"]["mean"] == pytest.approx(1)
    assert "tree" not in found["medusa"]["0"]
    known = {"training": {}, "speedup": None, "draft_ms": None, "acceptance_by_position": []}
    drafters[1] |= row([4.0, 8.0], 30)
    report = {
        "settings": dict.fromkeys(matched.REQUESTED),
        "drafters": [x | known for x in drafters],
    }
    trained: Any = {"data_sha256": "", "heads": {name: {} for name in names}}
    heads = matched.matched(trained, {n: f"f/{n}" for n in names}, {"0": report})["heads"]
    against = [heads[n]["scores"]["0"]["chain"]["against"]["mean"] for n in names[1:4]]
    assert against == pytest.approx([1.0, 0.5, 0.5]), "each to the reference from its own seed"
    shown = matched.seeds({"seeds": found}).markdown()
    assert shown.startswith("| all seeds together | chain, T = 0 | to eagle3 |")
    assert "| medusa | 2.250 (1.500 to 3.000) | -37.5% [-37.5%, -37.5%] |" in shown
    assert "| eagle3 | 3.000 (3.000 to 3.000) |  |" in shown


def test_scores_join_cost_and_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, prompts = chats(tmp_path / "data.jsonl"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"question_id": 1, "category": "x", "turns": ["Hi"]}\n')

    def row(name: str, lengths: list[float]) -> dict[str, Any]:
        mean = sum(lengths) / len(lengths)
        return {
            "name": name,
            "training": {"tokens_seen": 5e5, "cpu_seconds": 90.0},
            "accepted_length": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1},
            "speedup": {"mean": 1.1, "low": 1.0, "high": 1.2},
            "draft_ms": 2.0,
            "acceptance_by_position": [{"conditional": 0.5}, {"conditional": None}],
            "per_prompt": [
                {"prompt_id": str(i), "category": "x", "accepted_length": x, "cycles": 10}
                for i, x in enumerate(lengths)
            ],
        }

    def faked(_: Pipeline, step: Command) -> int:
        step.leaves.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {}
        scores = step.argv[0] == "scripts/evaluate.py"
        good = (0, SKIPPED) if scores else (0,)
        assert step.good == good, "where one is skipped the others count"
        if scores:
            cfg: Any = compose("evaluate", EvaluateConfig, step.argv[1:])
            assert cfg.prompts == str(prompts) and cfg.target.kind == "tiny" and cfg.seed == 7
            assert cfg.drafters == ["none"] and len(cfg.candidates) == 4
            found = {
                "environment": {},
                "settings": {key: getattr(cfg, key) for key in matched.REQUESTED},
                "drafters": [
                    row(name, [1.2, 1.4, 1.6] if "medusa" in name else [2.4, 2.8, 3.2])
                    for name in cfg.candidates[:3]  # the last one was skipped
                ],
            }
        step.leaves.write_text(json.dumps(found))
        return 0

    monkeypatch.setattr(Pipeline, "_call", faked)
    requested = [f"path={data}", f"out={tmp_path / 'heads'}", "heads=[medusa,eagle3]", "steps=3"]
    more = ["more=[" + ",".join(f"'{k}'" for k in TINY) + "]", f"prompts={prompts}"]
    with pytest.raises(SystemExit) as caught:
        train_heads.main([*requested, *more, "scoring=['seed=7']", "sampling=['num_prompts=2']"])
    assert caught.value.code == 0
    found = json.loads((tmp_path / "heads/matched.json").read_text())
    medusa, eagle = found["heads"]["medusa"], found["heads"]["eagle3"]
    assert medusa["steps"] == 3 and medusa["tokens"] == 5e5 and medusa["cpu_seconds"] == 90
    chain = medusa["scores"]["1"]["chain"]
    assert chain["against"]["mean"] == pytest.approx(0.5) and chain["conditional"] == [0.5, None]
    assert chain["against"]["high"] <= 0.5 + 1e-9, "paired: every prompt has this very ratio"
    assert "tree" not in eagle["scores"]["0"], "a drafter that was skipped has no score"
    out = capsys.readouterr().out
    assert "| medusa | 3 | 0 | 0.50 | 2 | 50% | – | – | – |" in out
    half = "-50.0% [-50.0%, -50.0%]"
    assert f"| medusa | 1.40 [1.30, 1.50] | {half} | 2.0 | 1.10× [1.00, 1.20] | 1.40" in out
    assert "| eagle3 | 2.80 [2.70, 2.90] |  | 2.0 | 1.10× [1.00, 1.20] | – | – | – | – |" in out
    assert "| T = 1 | chain | to eagle3 |" in matched.scores(found, "1").markdown()
    chains = json.loads(json.dumps(found))
    for head in chains["heads"].values():
        head["scores"]["0"].pop("tree", None)
    assert "tree" not in matched.scores(chains, "0").head
    assert "tree" in matched.scores(chains, "1").head
    assert matched.title(found).endswith("T = 1: 2 prompts × 64 tokens, batch 1, float32")
    with pytest.raises(SystemExit) as caught:
        train_heads.main([*requested, *more, "scoring=['seed=7']", "timed=false"])
    assert caught.value.code == 0
    untimed = json.loads((tmp_path / "heads/matched.json").read_text())
    for head in untimed["heads"].values():
        for score in (shape for shapes in head["scores"].values() for shape in shapes.values()):
            assert score["speedup"] is None and score["draft_ms"] is None
    same = untimed["heads"]["medusa"]["scores"]["0"]["chain"]
    assert same["accepted_length"] == medusa["scores"]["0"]["chain"]["accepted_length"]
    assert same["against"] == medusa["scores"]["0"]["chain"]["against"]
    assert "| eagle3 | 2.80 [2.70, 2.90] |  | – | – |" in matched.scores(untimed, "1").markdown()
    assert matched.title(untimed).endswith("float32. No times: the machine did other work.")
    assert "note" not in found
