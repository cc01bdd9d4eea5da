"""Several data files, their weights, a held-out file, and epochs in place of steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import Interrupted, UserError
from outrider.decode.models.tiny import byte_tokenizer
from outrider.heads.registry import head_class
from outrider.train import setup
from outrider.train.config import usual_rate
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows
from outrider.train.loop import fit
from tests.helpers.training import chats, run, run_config, sigterm_at_update

EOS = (2,)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Chat files of 30, 12 and 8 rows."""
    sizes = (("a", 30), ("b", 12), ("c", 8))
    return [chats(tmp_path / f"{name}.jsonl", rows) for name, rows in sizes]


def load(*paths: Path, **keys: Any) -> JoinedRows:
    path = [str(p) for p in paths] if len(paths) > 1 else str(paths[0])
    cfg = DataConfig(path=path, max_length=256, **{"cache": False, **keys})
    return load_rows(cfg, byte_tokenizer(), EOS, 260, 1024)


def tokens(rows: JoinedRows, row: int) -> list[int]:
    return rows.ids[int(rows.offsets[row]) : int(rows.offsets[row + 1])].tolist()


def test_files_are_joined_row_by_row(files: list[Path]) -> None:
    """Rows, masks, lines, counts and sums are those of the files one behind the other."""
    alone = [load(f, cache=True) for f in files]
    rows = load(*files, cache=True)
    wanted = [tokens(one, r) for one in alone for r in range(one.lines.numel())]
    assert [tokens(rows, r) for r in range(rows.lines.numel())] == wanted
    places = [one.where(r) for one in alone for r in range(one.lines.numel())]
    assert [rows.where(r) for r in range(len(places))] == places
    assert torch.equal(rows.counts(260), sum(one.counts(260) for one in alone))
    assert rows.totals.supervised == sum(one.totals.supervised for one in alone)
    assert rows.counted["turns"] == 50 and len({f.sha256 for f in rows.files}) == 3
    batch = rows.batch([0, 29, 30, 49])
    for b, row in enumerate([0, 29, 30, 49]):
        assert batch.ids[b][batch.mask[b]].tolist() == wanted[row]


def test_lines_of_several_files_are_skipped_by_name(files: list[Path]) -> None:
    a, b, _ = files
    rows = load(a, b, held_out=0.0)
    plan = BatchPlan(rows, 2, 4, 0, skip=[f"{b}:3", f"{a}:30"])
    assert plan.skipped == 2
    left = set(range(42)) - set(plan.train.tolist())
    assert sorted(rows.where(r) for r in left) == sorted([f"{b}:3", f"{a}:30"])
    with pytest.raises(UserError, match="skip: 3 is a line of which of the 2 files"):
        BatchPlan(rows, 2, 4, 0, skip=[3])
    with pytest.raises(UserError, match="no such file is read"):
        BatchPlan(rows, 2, 4, 0, skip=["z.jsonl:3"])
    alone = load(a, held_out=0.0)
    assert BatchPlan(alone, 2, 4, 0, skip=[4, f"{a}:5"]).skipped == 2


def test_a_mixed_run_resumes_by_content(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and moved it goes on; with other files or held-out rows it does not."""
    a, b, c = files
    moved = [tmp_path / f"moved-{f.name}" for f in files]
    for old, new in zip(files, moved, strict=True):
        new.write_bytes(old.read_bytes())

    def mixed(out: str, *more: str, paths: list[Path] = files) -> Path:
        cfg = run_config(Path("x"), tmp_path / out, *more)
        data = replace(cfg.data, held_out=str(paths[2]), path=[str(p) for p in paths[:2]])
        fit(replace(cfg, data=data), head_class("medusa"))
        return tmp_path / out / "head" / "head.safetensors"

    want = mixed("whole").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        sigterm_at_update(patch, 3)
        mixed("run")
    for wrong, said in (
        ([b, a, c], "data.sha256"),
        ([a, b, a.with_name("moved-a.jsonl")], "data.sha256.2"),
    ):
        with pytest.raises(UserError, match=said):
            mixed("run", paths=wrong)
    assert mixed("run", paths=moved).read_bytes() == want


# Epochs in place of steps, and a rate for the target's size
# -------------------------------------------------------------------------------------------


def test_epochs_are_steps(
    files: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """1.5 epochs are as many steps, to the same bits; a further epoch goes on from there."""
    data = files[0]
    counted = run(data, tmp_path / "epochs", "steps=0", "epochs=1.5", "data.held_out=0.0")
    said = capfd.readouterr().err
    assert "steps: 10, epochs=1.5 of 7 batches" in said and "10 steps" in said
    given = run(data, tmp_path / "steps", "steps=10", "data.held_out=0.0")
    assert digest(counted) == digest(given)
    run(data, counted, "steps=0", "epochs=2", "data.held_out=0.0")
    assert "steps: 10 -> 14" in capfd.readouterr().err
    run(data, counted, "steps=16", "data.held_out=0.0")
    with pytest.raises(UserError, match="steps: 16 in the checkpoint, 7 now"):
        run(data, counted, "steps=0", "epochs=1", "data.held_out=0.0")


def digest(out: Path) -> bytes:
    return (out / "head" / "head.safetensors").read_bytes()


def test_the_rate_goes_down_with_the_width() -> None:
    for width, rate in ((32, 1e-3), (576, 1e-3), (960, 6e-4), (4096, 1.4e-4)):
        assert usual_rate(width) == rate and usual_rate(width, narrows=False) == 1e-3


def test_a_rate_is_chosen_said_and_kept(
    files: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Without optim.lr the width decides and the header says so; one that is given wins; a run
    that began with another value goes on with that one."""
    run(files[0], tmp_path / "run", "steps=2")
    assert "optim.lr: 0.001, usual for medusa on a target 32 wide" in capfd.readouterr().err
    given = run(files[0], tmp_path / "given", "steps=2", "optim.lr=2e-3")
    assert "usual for" not in capfd.readouterr().err
    run(files[0], given, "steps=4")
    said = capfd.readouterr().err
    assert "optim.lr: 0.002, with which this run began" in said and "-> " not in said.replace(
        "steps: 2 -> 4", ""
    )
    rates = [json.loads(x).get("lr") for x in (given / "metrics.jsonl").read_text().splitlines()]
    assert rates[-2] == pytest.approx(1e-4)  # 5 % of 2e-3, where the schedule ends
    monkeypatch.setattr(setup, "usual_rate", lambda width, narrows: 5e-4)
    run(files[0], tmp_path / "run", "steps=4")
    assert "optim.lr: 0.001, with which this run began" in capfd.readouterr().err
    run(files[0], tmp_path / "run", "steps=5", "optim.lr=3e-3")
    assert "optim.lr: 0.001 -> 0.003" in capfd.readouterr().err
