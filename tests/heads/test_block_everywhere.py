"""Drafters that guess a block in one pass go wherever a head goes: trained with the parity gate,
evaluated, tuned, certified and talked to, on the tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.schema import compose
from outrider.heads import head_class
from outrider.scripts import evaluate
from outrider.train.loop import fit
from outrider.train.runs import BlockRun, EagleRun
from tests.helpers.training import chats, overrides

SHAPE = ("target.hidden=64", "target.layers=4", "target.heads=4", "target.kv_heads=2")
RECIPES: dict[str, tuple[str, type, list[str]]] = {
    "dflash": ("block", BlockRun, ["head=dflash", "head.block=4"]),
    "dspark": ("block", BlockRun, ["head=dspark", "head.block=3", "head.markov_rank=8"]),
    "p_eagle": ("eagle", EagleRun, ["head=p_eagle", "head.steps=3"]),
}
DEEPER = {"p_eagle": 6}  # levels that no block was trained with


@pytest.fixture(scope="module", params=RECIPES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(recipe, run folder) of a short run that ended with the gate."""
    entry, schema, keys = RECIPES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    given = overrides(chats(folder / "data.jsonl"), folder / "run", "steps=12", "eval.parity=2")
    given = [k for k in given if not k.startswith(("head.heads", "target."))]
    cfg: Any = compose(entry, schema, [*given, "target=tiny", *SHAPE, *keys])
    fit(cfg, head_class(cfg.head.kind))
    return request.param, folder / "run"


def run(main: Any, *args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["target=tiny", *SHAPE, "dtype=float32", "device=cpu", *args])
    return int(stop.value.code or 0)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    rows = [{"question_id": i, "category": "a", "turns": [t]} for i, t in enumerate(("ab", "go!"))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_the_gate_let_it_pass(trained) -> None:
    _, folder = trained
    assert json.loads((folder / "parity.json").read_text())["passed"] is True


@pytest.mark.slow
def test_it_is_evaluated(trained, prompts: Path, tmp_path: Path) -> None:
    kind, head = trained
    shapes = ["@chain", "@tree", f"@chain:{DEEPER.get(kind, 3)}"]
    drafters = ",".join(f"{head}{shape}" for shape in shapes)
    out = tmp_path / "out"
    args = (f"prompts={prompts}", "max_new_tokens=12", "quiet=true", "temperature=0")
    assert run(evaluate.main, *args, f"out={out}", f"drafters=[none,{drafters}]") == 0
    report = json.loads((out / "report.json").read_text())
    assert len(report["drafters"]) == 4 and not report["skipped"]
