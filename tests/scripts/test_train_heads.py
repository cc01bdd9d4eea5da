"""The script that trains one head of every recipe: its commands are real, and it goes on where
it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.schema import compose
from scripts import train_heads
from scripts.common.steps import Step, run
from scripts.evaluate import SKIPPED, EvaluateConfig
from scripts.reports import matched
from scripts.train_heads import RECIPES, HeadsConfig
from tests.helpers.training import chats
from train.cache_features import CacheConfig
from train.config import ENTRIES

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
    cfg: Any = compose(config, schema, train_heads.keys(HeadsConfig(), name, Path("x"), 3))
    assert cfg.steps == 3 and cfg.out_dir == f"runs/heads/{name}"


def test_heads_are_given_alike_and_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, ran = chats(tmp_path / "data.jsonl"), []

    def trained(step: Step, job: str, folder: Path, good: object = None) -> None:
        ran.append(step.args)
        step.leaves.parent.mkdir(parents=True, exist_ok=True)
        step.leaves.write_text("{}")

    monkeypatch.setattr(train_heads, "run", trained)
    asked = [f"path={data}", f"out={tmp_path / 'heads'}", "heads=[medusa,dspark]", "flops=2e8"]
    command = [*asked, "more=[" + ",".join(f"'{k}'" for k in TINY) + "]"]
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


def test_mistakes_are_named() -> None:
    for keys, said in (
        (["heads=[meduza]"], "heads: 'meduza' is none of"),
        (["steps=0"], "steps: 0"),
        (["flops=-1"], "flops: -1 is below 0"),
        (["out="], "out: is empty"),
    ):
        with pytest.raises(UserError, match=said):
            compose("train_heads", HeadsConfig, keys)


def test_prompts_that_are_not_there_are_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_heads, "run", lambda *_: pytest.fail("a step ran"))
    out = tmp_path / "heads"
    with pytest.raises(SystemExit) as caught:
        train_heads.main([f"out={out}", f"prompts={tmp_path / 'gone.jsonl'}"])
    assert caught.value.code == 2 and not out.exists()
    assert "prompts: cannot read" in capsys.readouterr().err


def test_a_step_may_do_its_work_and_end_with_another_exit_code(tmp_path: Path) -> None:
    script, left = tmp_path / "some.py", tmp_path / "left"
    script.write_text("import sys\nopen(sys.argv[1], 'w').close()\nsys.exit(3)\n")
    step = Step("some", [str(script), str(left)], [], left)
    run(step, "heads", tmp_path, (0, 3))
    with pytest.raises(UserError, match="ended with exit code 3"):
        run(step, "heads", tmp_path)


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

    def faked(step: Step, job: str, folder: Path, good: tuple[int, ...]) -> None:
        step.leaves.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {}
        scores = step.args[0] == "scripts/evaluate.py"
        assert good == ((0, SKIPPED) if scores else (0,)), "where one is skipped the others count"
        if scores:
            cfg: Any = compose("evaluate", EvaluateConfig, step.args[1:])
            assert cfg.prompts == str(prompts) and cfg.target.kind == "tiny" and cfg.seed == 7
            assert cfg.drafters[0] == "none" and len(cfg.drafters) == 5
            found = {
                "environment": {},
                "settings": {key: getattr(cfg, key) for key in matched.ASKED},
                "drafters": [
                    row(name, [1.2, 1.4, 1.6] if "medusa" in name else [2.4, 2.8, 3.2])
                    for name in cfg.drafters[1:4]  # the last one was skipped
                ],
            }
        step.leaves.write_text(json.dumps(found))

    monkeypatch.setattr(train_heads, "run", faked)
    asked = [f"path={data}", f"out={tmp_path / 'heads'}", "heads=[medusa,eagle3]", "steps=3"]
    more = ["more=[" + ",".join(f"'{k}'" for k in TINY) + "]", f"prompts={prompts}"]
    with pytest.raises(SystemExit) as caught:
        train_heads.main([*asked, *more, "scoring=['seed=7']", "sampling=['num_prompts=2']"])
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
    assert "| T = 1 | chain | to eagle3 |" in matched.markdown(found)
    assert matched.title(found).endswith("T = 1: 2 prompts × 64 tokens, batch 1, float32")
    eagle["scores"]["1"]["chain"] |= {"speedup": None, "draft_ms": None}
    shown = matched.scores(found, "1")
    assert "| eagle3 | 2.80 [2.70, 2.90] |  | – | – |" in shown, "times that nobody vouches for"
    assert matched.title({**found, "note": "No times."}).endswith("float32. No times.")
