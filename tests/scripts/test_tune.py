"""scripts/tune.py on the tiny target: files, the choice in the head's folder, and
mistakes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode.price import Price
from outrider.decode.target import Target
from outrider.heads import head_class, save_head
from outrider.heads.drafters import resolve_drafter
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.parallel.medusa import MedusaConfig
from outrider.heads.tuned import DECODE
from outrider.scripts import tune
from outrider.scripts.reports import tune_page, tune_table, tuning_plots
from outrider.scripts.tuning import cost
from tests.helpers import pictures
from tests.helpers.commands import code_of
from tests.helpers.training import TINY, tiny_target

SMALL = [
    "target=tiny",
    *(f"target.{k}={v}" for k, v in TINY.items()),
    "dtype=float32",
    "device=cpu",
    "num_prompts=2",
    "max_new_tokens=8",
    "curve_rounds=1",
    "max_depth=2",
    "max_nodes=4",
    "max_width=2",
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


def run(*overrides: str) -> int:
    return code_of(tune.main, *SMALL, *overrides)


def test_the_choice_is_written_and_obeyed(
    tmp_path: Path, head: Path, target: Target, capsys: Any
) -> None:
    before = {p.name: p.read_bytes() for p in head.iterdir()}
    out = tmp_path / "out"
    assert run(f"drafter={head}", f"out={out}") == 0
    report = json.loads((out / "tune.json").read_text())
    parts = ("target", "settings", "environment", "latency", "acceptance", "rows", "curves")
    assert all(report[key] for key in parts)
    assert report["environment"]["commit"] and report["command"]
    names = [r["name"] for r in report["rows"]]
    assert report["chosen"]["name"] in names and any(r["default"] for r in report["rows"])
    for row in report["rows"]:
        assert row["measured"]["tokens_per_second"] > 0 and row["predicted_at_pace"] > 0
        assert row["error"] is not None and [*row["predicted"]["parts_ms"]] == [*cost.PARTS]
    left = json.loads((head / DECODE).read_text())
    assert left["best"] == report["chosen"]["settings"]
    drafter = resolve_drafter(str(head), target)
    best = left["best"]
    assert drafter.max_nodes == (best["depth"] if best["shape"] == "chain" else best["nodes"])
    assert {p.name: p.read_bytes() for p in head.iterdir() if p.name != DECODE} == before, (
        "the head itself stays"
    )
    html = (out / "tune.html").read_text()
    assert html.startswith("<!doctype html>")
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert {p.stem for p in (out / "figures").glob("*.png")} == set(tuning_plots.TUNE)
    assert "written:" in capsys.readouterr().out and not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize(
    "temperature, speeds, most",
    [(0, {2: 1.3, 4: 0.9}, 2), (1, {2: 0.9, 4: 0.8}, 1), (0, {2: 0.9, 4: 1.1}, 4)],
)
def test_with_how_many_rows_drafting_pays_is_measured(
    tmp_path: Path,
    target: Target,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    temperature: int,
    speeds: dict[int, float],
    most: int,
) -> None:
    """With what @adaptive drafts, with every number of rows that the prompts fill."""
    pictures.left_out(monkeypatch)
    asked: list[tuple[int, list[str]]] = []
    real = tune_run.Tuning.measure

    def measure(self: Any, settings: Any, batch: int) -> Any:
        asked.append((batch, list(settings)))
        found = real(self, settings, batch)
        for row in found.rows.values():
            row["speedup"] = {"mean": {1: 1.2, **speeds}[batch], "low": None, "high": None}
        return found

    monkeypatch.setattr(tune_run.Tuning, "measure", measure)
    cfg = EagleConfig(kind="eagle3", draft_vocab=0, depth=2, nodes=6, width=2)
    folder = tmp_path / "head"
    save_head(head_class("eagle3").for_target(target, cfg), folder, target.identity)
    keys = [f"drafter={folder}", f"out={tmp_path}/out", f"temperature={temperature}"]
    keys.append(f"decode={'sample' if temperature else 'greedy'}")
    assert run(*keys, "num_prompts=5", "curve_batches=[1,2,4,8]") == 0
    assert [batch for batch, _ in asked] == [1, 2, 4]
    left = json.loads((folder / DECODE).read_text())
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert left["pays_up_to"] == most and left["evidence"]["batches"] == report["batches"]
    assert [one["batch_size"] for one in report["batches"]] == [1, 2, 4]
    names = {one["name"] for one in report["batches"]}
    (row,) = [row for row in report["rows"] if {row["name"]} == names]
    assert row["settings"] == left.get("adaptive", left["best"])
    assert all(settings == [row["name"]] for batch, settings in asked[1:])
    assert f"4: {speeds[4]:.2f}" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("kind, temperature", [("eagle3", 0), ("eagle3", 1), ("medusa", 0)])
def test_prices_are_searched_and_left_for_adaptive(
    tmp_path: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    temperature: int,
) -> None:
    """By replay at T = 0, by a few measurements of drawn trees at T > 0; the fixed shapes are
    left beside them."""
    pictures.left_out(monkeypatch)
    torch.manual_seed(0)
    cfg: Any = EagleConfig(kind="eagle3", draft_vocab=0, depth=2, nodes=6, width=2)
    if kind == "medusa":
        cfg = MedusaConfig(heads=2, draft_vocab=0)
    folder = tmp_path / "head"
    save_head(head_class(kind).for_target(target, cfg), folder, target.identity)
    keys = [f"drafter={folder}@tree", f"out={tmp_path}/out", f"temperature={temperature}"]
    assert run(*keys, f"decode={'sample' if temperature else 'greedy'}") == 0
    left = json.loads((folder / DECODE).read_text())
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    priced = [r for r in report["rows"] if "price" in r["settings"]]
    assert priced and all(r["proposed"] and r["error"] is not None for r in priced)
    assert left["adaptive"] in [r["settings"] for r in priced]
    assert "price" not in left["tree"] and set(left["adaptive"]["price"]) == {"node", "level"}
    assert report["searched"] >= (0 if temperature else 36)
    drafter: Any = resolve_drafter(f"{folder}@adaptive", target)
    assert drafter.form.price == Price(**left["adaptive"]["price"])
    fixed: Any = resolve_drafter(f"{folder}@tree", target)
    assert fixed.form.price.nothing


def test_an_ngram_is_tuned_at_a_temperature(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures.left_out(monkeypatch)
    assert run("drafter=ngram", f"out={tmp_path}/out", "decode=sample", "write=true") == 0
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert {r["kind"] for r in report["rows"]} == {"chain"}
    assert "ask for it as ngram@" in capsys.readouterr().out


def test_sampled_chains_take_acceptance_from_real_cycles(
    tmp_path: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures.left_out(monkeypatch)
    assert run(f"drafter={head}@chain", f"out={tmp_path}/out", "decode=sample", "write=false") == 0
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert len(report["acceptance"]["unconditional"]) == 2 and not (head / DECODE).exists()


def test_a_drawn_tree_is_not_held_against_what_the_default_was_expected_to_do(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing predicts what it accepts: its price is taken at the length that was measured."""
    pictures.left_out(monkeypatch)
    cfg = EagleConfig(kind="eagle3", draft_vocab=0, depth=2, nodes=6, width=2)  # drafts chains
    save_head(head_class("eagle3").for_target(target, cfg), tmp_path / "head", target.identity)
    assert run(f"drafter={tmp_path}/head", f"out={tmp_path}/out", "decode=sample") == 0
    rows = json.loads((tmp_path / "out" / "tune.json").read_text())["rows"]
    drawn = [r for r in rows if r["kind"] == "tree" and r["proposed"]]
    assert any(r["default"] and r["kind"] == "chain" for r in rows) and drawn
    for row in drawn:
        mean = row["measured"]["accepted_length"]["mean"]
        assert row["predicted"]["accepted_length"] == mean and row["error_accepted_length"] == 0


@pytest.mark.parametrize("shape, kinds", [("@tree", {"tree"}), ("", {"chain", "tree"})])
def test_drawn_trees_are_measured_where_nothing_can_be_replayed(
    tmp_path: Path,
    head: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    kinds: set[str],
) -> None:
    pictures.left_out(monkeypatch)
    assert run(f"drafter={head}{shape}", f"out={tmp_path}/out", "decode=sample", "max_nodes=9") == 0
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    trees = [r for r in report["rows"] if r["kind"] == "tree" and r["proposed"]]
    assert {r["settings"]["nodes"] for r in trees} == {8, 9}
    assert {r["kind"] for r in report["rows"]} == kinds
    assert any("cannot be replayed" in note for note in report["notes"])
    assert all(r["measured"]["tokens_per_second"] > 0 and r["error"] is not None for r in trees)
    left = json.loads((head / DECODE).read_text())
    drafter: Any = resolve_drafter(f"{head}@tree", target)
    assert left["tree"]["nodes"] == drafter.max_nodes and drafter.form.drawn


def test_a_choice_is_in_doubt_where_its_own_speed_is() -> None:
    """Plain passes of unlike times put no speed in doubt whose interval is narrow."""

    def row(name: str, span: float) -> dict[str, Any]:
        speed = {"mean": 1.5, "low": 1.5 - span / 2, "high": 1.5 + span / 2}
        return {"name": name, "measured": {"speedup": speed}}

    report = {
        "drafter": "ngram",
        "plain_pass_ms": {"low": 18.0, "high": 30.0, "steady": False},
        "rows": [row("chain:2", 0.2), row("chain:4", 0.6)],
        "chosen": {"name": "chain:2", "pays": True, "speedup": {"mean": 1.5}},
    }
    assert tune_table.in_doubt(report) == ["chain:4"]
    assert tune_page.headline(report).endswith("1.50× plain decoding")
    report["chosen"] |= {"name": "chain:4"}
    assert tune_page.headline(report).endswith("too busy to time")
    report["plain_pass_ms"] |= {"steady": True}
    assert tune_table.in_doubt(report) == []
