"""scripts/tune.py on the tiny target: files, the choice in the head's folder, and
mistakes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode.target import Target
from outrider.heads.checkpoint import save_head
from outrider.heads.drafters import resolve_drafter
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.registry import head_class
from outrider.heads.tuned import DECODE
from outrider.scripts import tune
from outrider.scripts.tuning import run as tune_run
from outrider.scripts.tuning.search import Tunable
from tests.helpers.commands import code_of
from tests.helpers.training import TINY, tiny_target

SMALL = [
    "target=tiny",
    *(f"target.{k}={v}" for k, v in TINY.items()),
    "dtype=float32",
    "device=cpu",
    "num_prompts=2",
    "max_new_tokens=8",
    "max_depth=2",
    "max_nodes=4",
    "confirm=2",
    "quiet=true",
]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def head(tmp_path: Path, target: Target) -> Path:
    torch.manual_seed(0)
    made = head_class("medusa").for_target(target, MedusaConfig(heads=2, draft_vocab=0))
    save_head(made, tmp_path / "head", target.identity)
    return tmp_path / "head"


@pytest.fixture(params=[True, False], ids=["pays", "does not pay"])
def pays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the choice is taken for faster than plain decoding, whatever this machine says."""
    measured = tune_run.run

    def decided(*given: Any) -> Any:
        report = measured(*given)
        report["chosen"]["pays"] = request.param
        return report

    monkeypatch.setattr(tune_run, "run", decided)
    return bool(request.param)


def run(*overrides: str) -> int:
    return code_of(tune.main, *SMALL, *overrides)


def test_the_choice_is_written_where_it_pays_and_obeyed(
    tmp_path: Path, head: Path, target: Target, capsys: Any, pays: bool
) -> None:
    before = {p.name: p.read_bytes() for p in head.iterdir()}
    out = tmp_path / "out"
    assert run(f"drafter={head}", f"out={out}") == 0
    report = json.loads((out / "tune.json").read_text())
    assert all(report[key] for key in ("target", "settings", "environment", "tried", "rows"))
    names = [r["name"] for r in report["rows"]]
    settings = [json.dumps(r["settings"]) for r in report["rows"]]
    assert len({*settings}) == len(settings), "the default is no second row of a setting"
    assert report["chosen"]["name"] in names and any(r["default"] for r in report["rows"])
    assert {r["kind"] for r in report["rows"]} == {"chain", "tree"}
    for row in report["rows"]:
        assert row["measured"]["tokens_per_second"] > 0
    said = capsys.readouterr().out
    assert ("written:" in said) == ("nothing is written" not in said) == pays
    if pays:
        left, best = json.loads((head / DECODE).read_text()), report["chosen"]["settings"]
        assert left["best"] == best and {"chain", "tree"} <= set(left)
        size = best.get("depth" if best["shape"] == "chain" else "nodes")
        assert size in (None, resolve_drafter(str(head), target).max_nodes)
    assert (head / DECODE).exists() == pays
    after = {p.name: p.read_bytes() for p in head.iterdir() if p.name != DECODE}
    assert after == before and not list(tmp_path.rglob(".tmp-*")), "the head itself stays"


def test_an_ngram_is_tuned_at_a_temperature(tmp_path: Path, capsys: Any, pays: bool) -> None:
    assert run("drafter=ngram", f"out={tmp_path}/out", "decode=sample", "write=true") == 0
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert {r["kind"] for r in report["rows"]} == {"chain"}
    assert ("ask for it as ngram@chain" in capsys.readouterr().out) == pays


def test_one_shape_is_searched_at_a_temperature(tmp_path: Path, head: Path) -> None:
    keys = [f"drafter={head}@chain", f"out={tmp_path}/out", "decode=sample"]
    assert run(*keys) == 0
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert {r["kind"] for r in report["rows"]} == {"chain"}
    assert {r["settings"]["shape"] for r in report["tried"]} == {"chain"}


def test_the_fastest_of_every_shape_are_confirmed() -> None:
    tried = [{"settings": {"shape": "tree", "nodes": n}} for n in (8, 16, 32)]
    tried.append({"settings": {"shape": "chain", "depth": 2}})
    shapes = [(one.shape, one.nodes) for one in tune_run.confirmed(tried, 3)]
    assert shapes == [("tree", 8), ("chain", None), ("tree", 16)]
    assert len(tune_run.confirmed(tried, 1)) == 2 and not tune_run.confirmed([], 3)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "small_lm", "dflash"])
def test_every_setting_of_the_table_is_another_draft(kind: str) -> None:
    keys = {"eagle3": {"depth": 3}, "small_lm": {"depth": 3, "from_target_layers": 1}}
    cfg: Any = head_class(kind).Config(kind=kind, draft_vocab=0, **keys.get(kind, {}))
    target = tiny_target(layers=2)
    torch.manual_seed(0)
    tunable = Tunable(target, head_class(kind).for_target(target, cfg), ("chain", "tree"))
    table = tunable.settings(3, 8)
    assert {one.shape for one in table} == {"chain", "tree"}
    sizes = []
    for one in table:
        drafter = tunable.drafter(one)
        assert drafter.max_depth <= 3 and drafter.max_nodes <= 8
        sizes.append((one.shape, drafter.max_depth, drafter.max_nodes))
    assert len({*sizes}) == len(sizes) > 4
