"""The table of architectures that work: what it says is so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.conf.errors import UserError
from outrider.scripts import cache_features
from tests.helpers.commands import code_of
from tests.helpers.targets import EVERY, PAGE, TABLE, page, saved, trained, tried
from tests.helpers.training import chats

KEPT = json.loads(TABLE.read_text())
SOME = ("qwen3_next", "qwen3_vl")


def test_the_page_shows_every_architecture_of_the_table() -> None:
    assert KEPT.keys() == EVERY.keys() and PAGE.read_text() == page(KEPT)


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[pytest.mark.slow] * (a not in SOME)) for a in EVERY]
)
def test_what_the_table_says_of(arch: str, tmp_path: Path) -> None:
    assert tried(arch, tmp_path)[0] == KEPT[arch]


def test_a_head_learns_on_stored_features_of_a_hybrid(tmp_path: Path) -> None:
    folder, data, out = saved("lfm2", tmp_path), tmp_path / "chats.jsonl", tmp_path / "features"
    keys = ["target=local", f"target.path={folder}", f"data.path={chats(data, 24)}"]
    keys += ["data.cache=false", "data.held_out=0.1", "dtype=float32", "device=cpu"]
    taps = ("heads=[]", "taps=[0,1,3]", f"out={out}")
    assert code_of(cache_features.main, *keys, *taps) == 0
    trained("eagle3", folder, tmp_path / "run", more=(f"data.features={out}",))


def test_a_target_that_cannot_be_decoded_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="BloomForCausalLM"):
        trained("medusa", saved("bloom", tmp_path), tmp_path / "run")
    assert not [*(tmp_path / "run").glob("head")] and not [*(tmp_path / "run").glob("*.jsonl")]
