"""Heads on disk, and drafters by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.heads.checkpoint import load_head, recover, save_head, staged
from outrider.heads.folders import find_head
from outrider.heads.medusa.head import MedusaConfig, MedusaHead
from tests.helpers.training import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def saved(target, tmp_path: Path) -> Path:
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    head = MedusaHead.for_target(target, MedusaConfig(heads=2, draft_vocab=64), counts)
    torch.manual_seed(0)
    for p in head.parameters():
        p.data.normal_()
    head.calibration = {
        "positions": 3,
        "acceptance": [],
        "paths": [[0], [1], [0, 0]],
        "values": [0.5, 0.2, 0.1],
    }
    save_head(head, tmp_path / "run/head", target.identity, {"step": 5})
    return tmp_path / "run/head"


def test_a_head_of_another_target_is_refused_by_hash(saved: Path) -> None:
    other = tiny_target()
    other.identity = dataclasses.replace(other.identity, template_sha256="0" * 64)
    for what, made in (
        ("weights_sha256", tiny_target(seed=9)),
        ("tokenizer_sha256", tiny_target(vocab=300)),
        ("template_sha256", other),
    ):
        with pytest.raises(UserError, match=what):
            load_head(saved, made)


@pytest.mark.parametrize("file", ["head.safetensors", "head.json"])
def test_every_damage_names_the_file(target, saved: Path, file: str) -> None:
    good = (saved / file).read_bytes()
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(good), (12,), generator=generator).tolist()
    same = [good.replace(b" ", b"\t", 1), good + b"\n"] if file == "head.json" else []
    for bad in [
        b"",
        good[: len(good) // 2],
        good[:-1],
        *same,
        *(good[:p] + bytes([good[p] ^ 4]) + good[p + 1 :] for p in places),
    ]:
        (saved / file).write_bytes(bad)
        with pytest.raises(UserError, match=re.escape(str(saved / file))):
            load_head(saved, target)
    (saved / file).unlink()
    with pytest.raises(UserError, match=f"{file}: no such file"):
        load_head(saved, target)


def test_a_failed_save_leaves_the_old_head(
    target, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (saved / "head.safetensors").read_bytes()

    def full(path: Path) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr("outrider.heads.checkpoint.sync", full)
    with pytest.raises(OSError):
        save_head(load_head(saved, target), saved, target.identity)
    assert (saved / "head.safetensors").read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["head"]


def test_recover_mends_the_instant_between_two_renames(tmp_path: Path) -> None:
    final = tmp_path / "head"
    with staged(final) as stage:
        (stage / "a").write_text("1")
    final.rename(tmp_path / ".old-head")
    (tmp_path / ".tmp-head").mkdir()
    recover(final)
    assert (final / "a").read_text() == "1" and [p.name for p in tmp_path.iterdir()] == ["head"]


def test_a_run_folder_means_its_final_head_then_its_best_then_its_newest_checkpoint(
    target, saved: Path
) -> None:
    run, head = saved.parent, load_head(saved, target)
    for name in ("best", "checkpoints/step-9", "checkpoints/step-10"):
        save_head(head, run / name, target.identity)
    assert find_head(str(run)) == run / "head"
    saved.rename(run / "x")
    assert find_head(str(run)) == run / "best"
    (run / "best").rename(run / "y")
    assert find_head(str(run)) == run / "checkpoints/step-10"
