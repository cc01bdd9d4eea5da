"""scripts/doctor.py: what stands on a machine, and its first ten minutes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from outrider.conf.errors import UserError
from outrider.scripts.common.files import ROOT
from outrider.scripts.extra import first_gpu
from outrider.scripts.machine import kernels, look
from outrider.scripts.machine.kernels import Compared, compared
from outrider.train.launch_keys import HONOURED, of_file, refusals
from tests.helpers.commands import code_of

doctor = importlib.import_module("outrider.scripts.doctor")


def summary(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Exit code and words of the command."""
    return code_of(doctor.main, *args), capsys.readouterr().out


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a problem of its own: room, caches, no accelerate config."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(look, "LEAST_DISK", 0)
    monkeypatch.setattr(look, "LEAST_MEMORY", 0)
    monkeypatch.setattr(look, "_config_file", lambda: None)
    return tmp_path


def test_a_sound_machine_has_no_problem(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = "device=cpu", "dtype=bfloat16", f"out_dir={sound}"
    code, said = summary(capsys, *keys, f"out={sound / 'found.json'}")
    assert code == 0 and "no problem found" in said and "PROBLEM" not in said
    assert torch.__version__ in said and str(sound / "cache") in said
    assert "training-time test: the CPU's flash kernel in bfloat16" in said
    names = [part["name"] for part in json.loads((sound / "found.json").read_text())["parts"]]
    assert names[0] == "versions" and len(names) == 7


@pytest.mark.parametrize("able", [True, False])
def test_what_dtype_auto_is_on_a_cpu_is_said(
    sound: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, able: bool
) -> None:
    monkeypatch.setattr(look, "bfloat16_on_cpu", lambda: able)
    code, said = summary(capsys, "device=cpu", f"out_dir={sound}")
    assert code == 0 and ("dtype=auto is float32 here" in said) == (not able)


def test_a_gpu_that_is_not_there_is_one_problem(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = summary(capsys, "device=cuda:7")
    assert code == 1 and said.count("PROBLEM:") == 1
    assert "device: cuda:7 asked for" in said and "1 problem(s)" in said


CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({"num_processes": 1, "mixed_precision": "no"}, []),
    "agrees": ({"mixed_precision": "bf16", "distributed_type": "NO"}, []),
    "accumulates": ({"gradient_accumulation_steps": 4}, ["gradient_accumulation_steps: 4"]),
    "fsdp": ({"distributed_type": "FSDP", "fsdp_config": {"a": 1}}, ["fsdp_config: "]),
    "fp16": ({"mixed_precision": "fp16"}, ["mixed_precision: fp16"]),
    "dynamo": ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, ["dynamo_backend: INDUCTOR"]),
    "deepspeed": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        ["deepspeed_config: FSDP2 shards"],
    ),
    "sagemaker": ({"compute_environment": "AMAZON_SAGEMAKER"}, ["SAGEMAKER"]),
    "no mapping of its own": ({"deepspeed_config": None, "dynamo_config": []}, []),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerates_config_is_read_as_a_run_reads_it(
    sound: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config, problems = CONFIGS[name]
    path = sound / "default_config.yaml"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setattr(look, "_config_file", lambda: path)
    part = look.accelerate_config("bfloat16")
    assert len(part.problems) == len(problems), part.problems
    for line, piece in zip(part.problems, problems, strict=True):
        assert piece in line and str(path) in line and "\n" not in line


@pytest.mark.parametrize("text", ["{", "- 1\n- 2", "\x00", "a: [", ""])
def test_a_broken_config_is_one_problem(
    sound: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = sound / "default_config.yaml"
    path.write_text(text)
    monkeypatch.setattr(look, "_config_file", lambda: path)
    assert len(look.accelerate_config("bfloat16").problems) == (1 if text else 0)


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "launch").glob("*.yaml")))
def test_the_shipped_launch_files_are_honoured(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    assert not refusals(of_file(config), "bfloat16")
    known = {*HONOURED, "mixed_precision", "distributed_type", "compute_environment"}
    assert set(config) <= known


def test_problems_of_disk_and_cache(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "LEAST_DISK", 1 << 60)
    problems = look.memory_and_disk(sound / "not" / "there").problems
    assert len(problems) == 3 and "free some, or choose another folder" in problems[0]
    (sound / "cache").write_text("a file")
    (problem,) = look.caches().problems
    assert "no file can be written and locked" in problem and "\n" not in problem


def test_old_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["torch>=999", "no-such-package>=1", "numpy>=1", "pytest>=999; extra == 'dev'"]
    monkeypatch.setattr(look, "requires", lambda name: needs)
    problems = look.versions().problems
    assert len(problems) == 2
    assert "torch>=999 is needed" in problems[0] and "not installed" in problems[1]


def test_a_gpu_of_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that torch has no code for, and that knows no bfloat16."""
    about = SimpleNamespace(name="Old", major=6, minor=1)
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "get_device_properties", lambda n: about)
    monkeypatch.setattr(cuda, "mem_get_info", lambda n: (1 << 30, 8 << 30))
    monkeypatch.setattr(cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    part = look.ReportPart("torch")
    look._gpu(part, 0, "bfloat16")
    assert len(part.problems) == 2 and "built for sm_80, sm_90" in part.problems[0]
    assert "set dtype=float32" in part.problems[1] and "another process" in part.facts[1]


# Kernels and the first ten minutes
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpus_kernels_are_right(dtype: str) -> None:
    found = list(compared("cpu", dtype, large=False))
    assert all(row.passed for row in found), found
    there = [row.name for row in found if not row.missing]
    assert len(there) >= 6 and {"sdpa flash", "sdpa math"} <= set(there)
    ours = [name for name in there if name.startswith("training-time test")]
    assert len(ours) == 8 and sum("window 10" in name for name in ours) == 4


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads the future, one whose gradient is off, one that gives NaN."""
    real = kernels.ttt.merged
    for change in (
        lambda out: out + 0.02 * out.roll(-1, 0),
        lambda out: out + 0.05 * (out - out.detach()),
        lambda out: out * float("nan"),
    ):
        monkeypatch.setattr(kernels.ttt, "merged", lambda *args, change=change: change(real(*args)))
        rows = [row for row in compared("cpu", "float32", False) if "training" in row.name]
        assert rows and not any(row.passed for row in rows)


def test_a_kernel_that_is_not_there_is_no_failure() -> None:
    assert Compared("x", "float32", "1", missing="none").passed
    assert not Compared("x", "float32", "1", error=float("nan"), limit=1.0).passed


def test_nothing_is_confirmed_on_a_cpu() -> None:
    parts = {n: {"passed": True} for n in ("kernels", "training", "decoding")}
    found = {"device": "cpu", **parts, "memory": {"near": True}}
    assert first_gpu.confirmed(found) == []
    assert first_gpu.confirmed({**found, "device": "cuda"}) == [*parts, "memory"]
    far = {**found, "device": "cuda", "memory": {"near": False}}
    assert first_gpu.confirmed({**far, "training": {"passed": False}}) == ["kernels", "decoding"]


@pytest.mark.slow
def test_the_first_ten_minutes_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps with a tiny target; the JSON has what would be confirmed."""
    monkeypatch.setitem(first_gpu.SIZES, "cpu", (96, 4, 2, 2, 24))
    out = tmp_path / "first.json"
    keys = ("device=cpu", f"work={tmp_path / 'work'}", f"out={out}", "steps=8", "prompts=2")
    code = code_of(first_gpu.main, *keys, "max_new_tokens=12")
    said = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert code == 0, said
    assert found["confirmed"] == [] and "nothing, this is no GPU" in said
    assert found["training"]["traces"] and found["training"]["tflops_per_device"] > 0
    assert 0.5 < found["memory"]["predicted_over_measured"] < 2
    assert found["decoding"]["tokens"] == 24 and found["decoding"]["best_in_float32"] > 0.5
    assert found["training"]["parity"] is True


def test_a_step_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> dict[str, Any]:
        raise UserError("no such thing")

    for name in ("training_step", "prediction_step", "decoding_step"):
        monkeypatch.setattr(first_gpu, name, failing)
    out = tmp_path / "first.json"
    assert code_of(first_gpu.main, "device=cpu", f"work={tmp_path / 'work'}", f"out={out}") == 1
    found = json.loads(out.read_text())
    assert found["kernels"]["passed"]
    assert found["training"]["problem"] == "no such thing" and not found["memory"]["passed"]
    assert "prediction, training, memory, decoding failed" in capsys.readouterr().out
