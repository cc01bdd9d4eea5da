"""validate dry_run=true: its formula beside peaks that were counted operation by operation on fake
tensors (docs/results/dry_run_peaks.json) and beside one that a GPU measured (first_gpu.json)."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from outrider.conf.schema import CONF, compose
from outrider.heads.block import attention
from outrider.heads.registry import head_class
from outrider.scripts.common.files import ROOT
from outrider.train import validate
from outrider.train.config import TrainConfig, ValidateConfig, keys_of
from outrider.train.dry_run import memory, report
from outrider.train.dry_run.memory import Plan, active, attending, numbers, shipped
from outrider.train.validate import head_config
from tests.helpers.archs import HYBRID
from tests.helpers.commands import code_of
from tests.helpers.flash import Torch
from tests.helpers.training import TINY, random_batch, tiny_target

COUNTED = json.loads((ROOT / "docs/results/dry_run_peaks.json").read_text())["runs"]


def planned(*keys: str) -> Plan:
    cfg = compose("validate", ValidateConfig, ["dry_run=true", *keys])
    return report.planned(cfg, replace(cfg, head=validate.head_config(cfg.head)))


def test_the_formula_meets_the_counted_peak() -> None:
    """Also the weights that learn, and host memory. within: what was reached for this run. A host
    of 8 ranks held the whole target 8 times when these were counted, with what it sees by."""
    for name, counted in COUNTED.items():
        plan = planned(*counted["keys"])
        assert numbers(plan.head) == counted["trained_parameters"], name
        assert [plan.rows, plan.length] == counted["pass"], name
        whole, _, held = memory.target_bytes(plan)
        sees = (counted["parameters"] - numbers(plan.model.built)) * plan.width
        if plan.cfg.shard_target:
            assert held == pytest.approx(counted["host_bytes"], rel=0.01), name
        else:
            every = plan.cfg.gpus * (whole + sees)
            assert counted["host_bytes"] == pytest.approx(every, rel=0.01), name
        peak = sum(memory.parts(plan).values()) + sees
        within = counted["within"]
        assert peak == pytest.approx(counted["training_peak_bytes"], rel=within), name


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_what_a_block_head_keeps_is_what_the_formula_says(
    kind: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counting what its forward pass saves, in float32, where no weight is cast."""
    monkeypatch.setattr(attention, "kernel_for", lambda query: attention.FLASH)
    monkeypatch.setattr(attention, "torch", Torch())
    own = {"layers": 2, "block": 8, "anchors": 40, "draft_vocab": 64}
    keys = [f"head.{k}={v}" for k, v in own.items()]
    keys += [f"head={kind}", "target=tiny", "target.layers=6", "target.kv_heads=1", "gpus=1"]
    keys += ["batch_size=2", "data.max_length=240", "dtype=float32", "steps=1"]
    plan = planned(*keys, f"head.activation_checkpointing={again}")
    target = tiny_target(**TINY | {"layers": 6, "hidden": 64, "heads": 4, "vocab": 320})
    cfg = replace(plan.typed, mask_token=-1)
    head: Any = head_class(kind).for_target(target, cfg, torch.arange(320)).train()
    batch, kept = random_batch(2, 240), dict[int, int]()
    anchors, feats = head.planned(batch).anchors, target.features(batch.ids, batch.mask, head.taps)
    weights = {p.untyped_storage().data_ptr() for p in head.parameters()}

    def count(t: Tensor) -> Tensor:
        if (place := t.untyped_storage().data_ptr()) not in weights:
            kept[place] = t.untyped_storage().nbytes() // 4
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        found = next(head._unroll(batch, target, feats, [anchors], head.cfg.slots))
    said = memory.kept_by(plan).kept - numbers(plan.head) + plan.lm_head
    if again:  # keys and values of features are held by what will be called again
        kept[0] = 2 * 2 * feats[:, :, 0, 0].numel() * plan.layer["head_dim"]
    assert found.requires_grad and sum(kept.values()) == pytest.approx(said, rel=0.03)


def test_a_published_block_head_fits() -> None:
    """DFlash of 5 layers, blocks of 16, 512 anchors and 2 rows of 4,096 beside Qwen3-8B."""
    keys = ["head=dflash", "head.layers=5", "head.block=16", "head.anchors=512", "gpus=8"]
    keys += ["target=hub", "target.name=Qwen/Qwen3-8B", "data.max_length=4096", "batch_size=64"]
    plan = planned(*keys, "micro_tokens=8192", "steps=1000")
    assert (plan.rows, plan.length) == (2, 4096)
    again = plan.changed({"head.activation_checkpointing": True})
    assert sum(memory.parts(again).values()) < 45e9 < sum(memory.parts(plan).values()) < 62e9


def test_the_formula_meets_the_measured_peak() -> None:
    """On an H200, by the allocator; its data left a draft vocabulary of 18 tokens."""
    found = json.loads((ROOT / "docs/results/first_gpu.json").read_text())
    keys = [k for k in found["keys"] if k.startswith(("target", "batch", "micro", "head", "dtype"))]
    width = found["prediction"]["width"]
    more = ("head=eagle3", "head.draft_vocab=18", f"data.max_length={width}", "supervised=0.97")
    plan = planned(*keys, *more, "gpus=1", "steps=20")
    parts = memory.parts(plan)
    measured = found["training"]["step_peak_memory_bytes"]
    assert sum(parts.values()) - parts["reserve"] == pytest.approx(measured, rel=0.1)
    each = report.flops_a_token(plan, plan.length)
    rate = report.shares_of_peak(each)[1] * 989.4e12 / each
    assert rate == pytest.approx(found["training"]["tokens_per_second"], rel=0.1)


def test_models_have_as_many_parameters_as_their_cards_say() -> None:
    for path in (ROOT / "train/dry_run/models").glob("*.json"):
        said = json.loads(path.read_text())
        model = shipped()[said["repository"].lower()]
        text = said["parameters"] - said.get("beside_the_language_model", 0)
        assert numbers(model.built) == pytest.approx(text, rel=1e-9), path.name


def test_a_run_that_does_not_fit_is_told_keys_with_which_it_does() -> None:
    large = ("experiment=llama31_70b_eagle3", "shard_target=false")
    fits, said = report.report(planned(*large))
    assert not fits and "DOES NOT FIT\nto change: shard_target=true: " in said
    assert report.report(planned(*large, "gpu=b200-180gb"))[0]
    assert "to change: no key makes it fit" in report.report(planned(*large, "gpu=a100-40gb"))[1]


def test_hours_follow_the_hardware_and_what_does_not_fit_has_none() -> None:
    def hours(*keys: str) -> list[float]:
        said = report.report(planned("experiment=qwen3_8b_eagle3", "rows=200000", *keys))[1]
        line = next(line for line in said.splitlines() if line.startswith("training: "))
        return [float(n) for n in re.findall(r"\d+\.\d+", line)[:3]]

    likely, fast, slow = hours("gpus=8")
    assert hours("gpus=4") == pytest.approx([2 * n for n in (likely, fast, slow)], rel=0.05)
    assert fast < likely and slow == pytest.approx(1.25 * likely, rel=0.02)
    assert not hours("gpus=1", "gpu=rtx4090-24gb")


def test_the_command_says_it_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(validate.main, "dry_run=true", "target=tiny", "steps=3", "gpus=1") == 0
    said = capsys.readouterr().out
    table = said.partition("peak of training:")[2].partition("training: ")[0]
    assert ": fits" in said and not re.search(r"\d [MkT]?B\b", table)
    sizes = [float(n.replace(",", "")) for n in re.findall(r"([\d,.]+) GB", table)]
    assert len(sizes) > 3 and max(sizes) == 80 and all(size < 10 for size in sizes[:3]), sizes
    for key in ("rows", "row_tokens", "supervised", "steps", "epochs"):
        assert re.search(rf"\b{key}\b", said), key


def test_ranks_of_a_host_share_the_files_of_a_target() -> None:
    whole, _, held = memory.target_bytes(planned("experiment=gpt_oss_20b_eagle3", "gpus=8"))
    assert whole < held < 1.3 * whole


def test_a_target_in_fp8_takes_half_the_bytes_of_its_layers() -> None:
    keys = ("experiment=qwen3_8b_eagle3", "gpus=1")
    plain, less = planned(*keys), planned(*keys, "target.quantize=torchao-fp8")
    saved = memory.target_bytes(plain)[0] - memory.target_bytes(less)[0]
    assert saved == pytest.approx(numbers(plain.model.layers), rel=0.02)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_targets_with_recurrent_layers(kind: str, tmp_path: Path) -> None:
    """Layers without keys and values look back at none; their pass holds more than attention's."""
    for arch, given in HYBRID.items():
        AutoConfig.for_model(arch, **copy.deepcopy(given)).save_pretrained(tmp_path / arch)
        keys = ["target=local", f"target.path={tmp_path / arch}", f"head={kind}", "gpus=2"]
        plan = planned(*keys, "batch_size=8", "steps=10", "head.draft_vocab=0")
        assert report.report(plan)[0], arch
        kinds = plan.model.text.layer_types
        without = kinds.count("linear_attention") + kinds.count("conv")
        assert attending(plan.model.text) <= len(kinds) - without, arch
        more = report.flops_a_token(plan, 4000) - report.flops_a_token(plan, 2000)
        assert more > 0, arch


def test_a_recipe_for_a_hybrid_of_80_billion() -> None:
    plan = planned("experiment=qwen3_next_80b_eagle3", "gpus=8", "gpu=h100-80gb")
    assert attending(plan.model.text) == 12 and active(plan.model) == pytest.approx(
        3.25e9, rel=0.01
    )
    whole, here, _ = memory.target_bytes(plan)
    assert whole == pytest.approx(159.3e9, rel=0.01) and here < whole / 5
    assert report.report(plan)[0]
    wide = plan.changed({"micro_tokens": 1 << 16})
    assert memory._target_pass(wide) == 4 * memory.STATES * 12288 * wide.tokens


# Every conf/experiment composes; tests/scripts/test_served.py trains and exports what it names
# -------------------------------------------------------------------------------------------


RECIPES = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))
SCRIPTS = {"eagle": "eagle", "medusa": "medusa", "draft": "draft"}
SCRIPTS |= {"hydra": "hydra_heads", "demo": "eagle"}


def drawn_up(name: str) -> tuple[str, type[TrainConfig]]:
    """The script and the schema of a recipe."""
    script = next(script for word, script in SCRIPTS.items() if f"_{word}" in name)
    return script, keys_of(script)


def test_every_recipe_is_taken_by_its_script_and_by_validate() -> None:
    for name in RECIPES:
        given = [f"experiment={name}", "data.path=x", "out_dir=y"]
        cfg = compose(*drawn_up(name), given)
        again = compose("validate", ValidateConfig, given)
        assert head_config(again.head) == cfg.head and again.steps == cfg.steps, name
        on_gpus = not name.startswith("smollm2")
        assert cfg.micro_batch <= cfg.batch_size and cfg.eval.every <= (cfg.steps or 2000), name
        assert (cfg.steps == 0 < cfg.epochs) if on_gpus else cfg.steps > 0 == cfg.epochs, name
