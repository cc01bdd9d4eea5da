"""Tokens, heads and a run of an earlier version: what every later one must still write, load
and go on with.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.target import Target
from outrider.heads.checkpoint import load_head, read_card
from outrider.heads.folders import find_head
from outrider.heads.registry import head_class, kinds
from outrider.train.loop import fit
from tests.golden import cases
from tests.golden.__main__ import config, losses

GOLDEN: dict[str, Any] = json.loads(cases.TOKENS.read_text())
LOSSES: dict[str, list[float]] = json.loads(cases.LOSSES.read_text())


@pytest.fixture(scope="module")
def target() -> Target:
    return cases.target()


def test_every_kind_of_head_is_in_the_golden_file() -> None:
    found = {read_card(find_head(str(cases.HEADS_FOLDER / name)))["kind"] for name in cases.KINDS}
    assert found == set(kinds()) and list(GOLDEN) == cases.specs()


@pytest.mark.parametrize("spec", cases.specs())
def test_a_drafter_writes_the_golden_tokens(spec: str, target: Target) -> None:
    """Also the accepted lengths: at T = 0 the tokens alone say nothing about the draft."""
    assert cases.written(spec, target) == GOLDEN[spec]


def test_greedy_tokens_are_those_of_plain_decoding() -> None:
    """And the file is no row of misses: every kind of head has something accepted."""
    plain = GOLDEN["none"]["0"]["tokens"]
    for spec, rows in GOLDEN.items():
        assert rows["0"]["tokens"] == plain, spec
    for kind in cases.KINDS:
        for shape in cases.SHAPES:
            accepted = [
                c for row in GOLDEN[f"{kind}{shape}"].values() for p in row["accepted"] for c in p
            ]
            assert sum(accepted) > 0, f"{kind}{shape}"


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_golden_head_keeps_its_calibration(kind: str, target: Target) -> None:
    folder = cases.HEADS_FOLDER / kind
    head = load_head(folder, target)
    saved = json.loads((folder / "head.json").read_text())["head"]
    assert head.calibration == saved["calibration"] and head.calibration["positions"] > 0


def test_a_golden_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    shutil.copytree(cases.RUN, out)
    fit(config("eagle3", out, "steps=3", "save_every=0", "eval.every=1"), head_class("eagle3"))
    assert "at step 2 of 3" in capsys.readouterr().err
    assert read_card(out / "head")["extra"]["step"] == 3
    assert load_head(out / "head", cases.target()).calibration["positions"] > 0


@pytest.mark.slow
def test_smollm2_writes_the_golden_tokens() -> None:
    assert cases.smollm2() == json.loads(cases.SMOLLM2.read_text())


@pytest.mark.parametrize("kind", LOSSES)
def test_the_first_steps_of_training_lose_what_they_lost(kind: str, tmp_path: Path) -> None:
    assert losses(kind, tmp_path / "run") == pytest.approx(LOSSES[kind], abs=2e-6)
