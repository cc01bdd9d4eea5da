"""A cycle by parts: what is measured, that it goes on, and what is foretold from few layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.config import TargetConfig
from outrider.scripts.common.pipeline import Deadline
from outrider.scripts.lab import cycle_parts
from outrider.scripts.lab.pages import cycle_parts as page

KEYS = ["target=tiny", "target.layers=3", "target.vocab=512", "draft_vocab=300", "context=12"]
KEYS += ["layers=[2,1]", "drafted=[0,3]", "rounds=2", "cycles=4"]


def test_every_depth_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, left, turns = tmp_path / "cycle-parts-tiny.json", Deadline.left, []

    def over(end: Deadline) -> None:
        turns.append(1)
        if len(turns) == 5:
            raise end.stopped(75)

    for code in (75, 0):
        monkeypatch.setattr(Deadline, "left", over)
        with pytest.raises(SystemExit) as end:
            cycle_parts.main([*KEYS, f"out={out}"])
        assert end.value.code == code and out.exists() is not bool(code)
    assert left and len(turns) == 3 * 3 + 1, "a round that was there is not made again"
    report = json.loads(out.read_text())
    assert report["layers"] == 3 and [d["layers"] for d in report["depths"]] == [3, 2, 1]
    assert report["depths"][0]["bytes"] > report["depths"][1]["bytes"]
    for depth in report["depths"]:
        assert len(depth["rounds"]) == 2
        for drafted, parts in depth["rounds"][0].items():
            assert parts["target"] > 0 and parts["matrices"] > 0
            assert (parts["drafter"] > 0) and 0 <= parts["accepted"] <= int(drafted)
    text = page.table([report]).markdown()
    assert "| tiny" in text and "1.00 [1.00, 1.00]" in text, "a plain token costs one"


def test_a_chain_drafts_what_it_is_asked_in_every_cycle() -> None:
    cfg = cycle_parts.CyclePartsConfig("out", context=8, draft_vocab=300, cycles=5)
    shape = TargetConfig(kind="tiny", vocab=512, layers=2)
    target = cycle_parts.load_target(shape, "bfloat16", "cpu")
    cycles = cycle_parts.Cycles(cfg, target)
    drafter, proposed = cycles.drafter(4), []
    propose = drafter.propose

    def counted(budget: Any, *more: Any) -> Any:
        proposed.append(int(budget[0]))
        return propose(budget, *more)

    cycles.drafter = lambda drafted: drafter  # type: ignore[method-assign]
    drafter.propose = counted  # type: ignore[method-assign]
    cycles.parts(4)
    assert proposed == [4] * 5, "the limit shortens no draft"
    assert len(cycles.products) >= 2 * 4 + 1, "attention and MLP of two layers, the LM head"


def report(name: str, layers: int, depths: list[int], each: float, fixed: float) -> dict[str, Any]:
    """Passes of `each` ms a layer, twice that for 4 drafted tokens, and `fixed` ms of drafting."""

    def turn(count: int, noise: float) -> dict[str, Any]:
        rest = dict.fromkeys(("cache", "distribution", "verify", "python"), 0.0)
        plain = {**rest, "target": each * count + noise, "drafter": 0.0, "matrices": 1.0}
        drafted = {**plain, "target": 2 * plain["target"], "drafter": fixed}
        return {"0": plain, "4": drafted}

    rows = [
        {"layers": n, "bytes": n * each, "rounds": [turn(n, x) for x in (0.0, 0.001, -0.001)]}
        for n in depths
    ]
    return {"target": name, "layers": layers, "depths": rows, "settings": {"drafted": [0, 4]}}


def test_few_layers_foretell_a_whole_target() -> None:
    small = report("small", 10, [10, 4, 2], 1.0, 5.0)
    large = report("large", 100, [4, 2], 3.0, 30.0)
    assert page.whole(small) and not page.whole(large)
    assert page.miss([small, large]) < 1e-3
    price = page.price(large, "4", 0.05)
    assert price["mean"] == pytest.approx(2.1, rel=1e-3)
    assert price["low"] < 0.96 * price["mean"] and price["high"] > 1.04 * price["mean"]
    assert page.price(small, "4", 0.05)["mean"] == pytest.approx(2.5, rel=1e-3)
    found = page.best(large, [0.8, 0.6, 0.4, 0.3, 0.1], 0.0)
    assert found["drafted"] == 4 and found["gain"]["mean"] == pytest.approx(3.1 / 2.1, rel=1e-3)
    text = page.gains([small, large], {"eagle3": [0.8, 0.6, 0.4, 0.3]}).markdown()
    assert "large (predicted)" in text and "small (predicted)" not in text


def test_a_wrong_prediction_widens_the_interval() -> None:
    """Layers that cost more than the first ones: the miss is seen on the target that was measured
    whole."""
    small = report("small", 10, [10, 4, 2], 1.0, 5.0)
    for turn in small["depths"][0]["rounds"]:
        turn["4"]["target"] *= 1.2
    assert page.miss([small]) == pytest.approx(1 - 2.5 / 2.9, rel=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_shape_alone_makes_a_target(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**cycle_parts.SHAPES["llama31_8b"], "hidden_size": 64, "intermediate_size": 96}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    monkeypatch.setitem(cycle_parts.SHAPES, "llama31_8b", small)
    cfg = cycle_parts.CyclePartsConfig(
        "out", shape="llama31_8b", layers=[1, 2], context=8, dtype=dtype
    )
    seen = []
    for target in cycle_parts.depths(cfg):
        cycles = cycle_parts.Cycles(cfg, target)
        assert cycles.parts(2)["target"] > 0 and str(target.dtype) == f"torch.{dtype}"
        seen.append((target.num_layers, len(cycles.products), bool(target.packing.places)))
    (two, of_two, packed), (one, of_one, again) = seen
    assert (two, one) == (2, 1) and packed == again, "each depth packs its own"
    assert of_two - of_one == of_one - 1, "the LM head beside equal layers"
