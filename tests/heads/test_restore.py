"""What a head has measured (calibration, coverage) survives checkpoint, resume and disk, for
every kind of head.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider.conf.schema import compose
from outrider.heads.registry import head_class, kinds
from outrider.train.config import entry_of
from outrider.train.loop import fit
from tests.helpers.training import chats, overrides

CUT = ["target.layers=2", "head.from_target_layers=1"]
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "medusa with a Markov bias": ("medusa", ["head.markov_rank=3"]),
    "hydra_heads with a prefix layer": ("hydra_heads", ["head.prefix_layers=1"]),
    "small_lm as a LoRA": ("small_lm", [*CUT, "head.lora.rank=2", "head.lora.dropout=0.3"]),
    "small_lm": ("small_lm", [*CUT, "head.embedding=own"]),
    **{
        kind: (kind, [f"head={kind}", "head.draft_vocab=0"])
        for kind in ("eagle1", "eagle3", "dflash", "dspark")
    },
}


def test_every_kind_of_head_is_among_the_cases() -> None:
    assert {kind for kind, _ in VARIANTS.values()} == set(kinds())


def run(variant: str, data: Path, out: Path) -> Path:
    kind, own = VARIANTS[variant]
    name, schema = entry_of(kind)
    shared = overrides(
        data,
        out,
        "steps=2",
        "save_every=1",
        "eval.every=1",
        "eval.prompts=1",
        "eval.max_new_tokens=4",
    )
    keys = [k for k in shared if name in ("medusa", "hydra_heads") or not k.startswith("head.")]
    fit(compose(name, schema, [*keys, *own]), head_class(kind))
    return out


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=pytest.mark.slow) if v in ("eagle1", "dflash", "small_lm") else v
        for v in VARIANTS
    ],
)
def test_a_run_that_was_cut_short_ends_with_the_same_bits(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the last checkpoint and head/, then between the two checkpoints. The
    last checkpoint holds the calibration of the evaluation before, since a step is saved
    before it is evaluated.
    """
    data, parts = chats(tmp_path / "data.jsonl"), tmp_path / "parts"
    whole = run(variant, data, tmp_path / "whole")

    def check() -> None:
        run(variant, data, parts)
        for place in ("head", "checkpoints/step-2"):
            cards = [json.loads((at / place / "head.json").read_text()) for at in (whole, parts)]
            assert cards[0]["head"]["calibration"] and cards[0]["head"] == cards[1]["head"], place
            assert cards[0]["weights"] == cards[1]["weights"], place
        moments = "checkpoints/step-2/optimizer.safetensors"
        assert (parts / moments).read_bytes() == (whole / moments).read_bytes()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            "outrider.train.loop.save_head", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        run(variant, data, parts)
    assert not (parts / "head").exists()
    check()
    shutil.rmtree(parts / "head")
    shutil.rmtree(parts / "checkpoints/step-2")
    check()
