"""scripts/doctor.py: what stands on a machine, and gpu=true in small."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.models.config import TargetConfig
from outrider.scripts.machine import gpu, look
from outrider.scripts.machine.config import DoctorConfig
from outrider.train.compiled import Compiled
from outrider.train.dry_run.memory import model_of
from tests.helpers.commands import code_of
from tests.helpers.graphs import standing_in

doctor = importlib.import_module("outrider.scripts.doctor")


def summary(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Exit code and words of the command."""
    return code_of(doctor.main, *args), capsys.readouterr().out


def wrong(lines: Iterator[str]) -> list[str]:
    return [line for line in lines if line.startswith(look.PROBLEM)]


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a problem of its own: room, caches."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(look, "LEAST_DISK", 0)
    monkeypatch.setattr(look, "LEAST_MEMORY", 0)
    return tmp_path


def test_a_sound_machine_has_no_problem(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = "device=cpu", "dtype=bfloat16", f"out_dir={sound}"
    code, said = summary(capsys, *keys)
    assert code == 0 and "no problem found" in said and "PROBLEM" not in said
    assert torch.__version__ in said and str(sound / "cache") in said
    assert "training-time test: the CPU's flash kernel in bfloat16" in said


def test_a_gpu_that_is_not_there_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(doctor.main, "device=cuda:7") == 2
    assert "device: cuda:7 asked for" in capsys.readouterr().err


def test_problems_of_disk_and_cache(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "LEAST_DISK", 1 << 60)
    problems = wrong(look.memory_and_disk(sound / "not" / "there"))
    assert len(problems) == 3 and "free some, or change the folder" in problems[0]
    monkeypatch.setattr(look, "LEAST_DISK", 0)
    (sound / "cache").write_text("a file")
    (problem,) = wrong(look.memory_and_disk(sound))
    assert problem.startswith(f"PROBLEM: cache: {sound / 'cache'} cannot be written")


def test_old_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["torch>=999", "no-such-package>=1", "numpy>=1", "pytest>=999; extra == 'dev'"]
    monkeypatch.setattr(look, "requires", lambda name: needs)
    problems = wrong(look.versions())
    assert len(problems) == 2
    assert "torch>=999 is needed" in problems[0] and "not installed" in problems[1]


def test_a_gpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="Old", major=6, minor=1)
    cuda: Any = torch.cuda
    monkeypatch.setattr(look, "gpus", lambda: 1)
    monkeypatch.setattr(cuda, "get_device_properties", lambda n: about)
    monkeypatch.setattr(cuda, "mem_get_info", lambda n: (1 << 30, 8 << 30))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    (problem,) = wrong(look.build("bfloat16"))
    assert "set dtype=float32" in problem


def test_gpu_needs_one_and_says_so_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(doctor.main, "gpu=true", "device=cpu") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: gpu: torch sees no GPU here") and said.count("\n") == 1


@pytest.mark.parametrize("head", ["eagle3", "dflash"])
def test_the_measurement_runs_on_a_cpu_in_small(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the project's own and answers; predictions lie beside the figures, all time has a
    part, and compiled passes give the same loss."""
    standing_in(monkeypatch)
    monkeypatch.setattr(gpu, "ROW", 40)
    passes = lambda head, target, _, say: Compiled(head, target, torch.device("cuda"), say, "eager")
    monkeypatch.setattr(gpu, "Compiled", passes)
    monkeypatch.setattr(gpu, "_product", lambda target: 1e9)
    model = model_of(TargetConfig(kind="tiny", layers=4, vocab=512))
    keys = [f"head={head}", "data.max_length=64", "batch_size=4", "micro_batch=2"]
    keys += ["head.draft_vocab=64", "device=cpu", "dtype=float32"]
    found = dict(gpu.measured(model, keys, steps=1))
    made, seen = found["training"], found["profile"]
    assert made["draft_vocab"] == 64 and made["tokens_per_second"] > 0
    assert made["seconds_a_step"] > 0 and made["predicted_seconds_a_step"] > 0
    assert made["flops_a_token_counted"] > 0 and made["predicted_peak_memory_bytes"] > 0
    assert {"target", "head", "loss", "backward", "optimizer"} <= seen["ms_by_part"].keys()
    assert 0.5 < sum(seen["ms_by_part"].values()) / seen["ms_a_step"] < 1.5
    assert found["compiled"]["loss_change"] < 1e-5 and not found["compiled"]["said"]
    told = found["decoding"]
    for way, captured in (("modules", False), ("graphs", True)):
        assert told[way]["plain_tokens_per_second"] > 0 and told[way]["drafted_ms_a_pass"] > 0
        assert told[way]["captured"] == captured
    assert told["logits_differ_by"] < 1e-4


@pytest.mark.parametrize("name", gpu.SHAPES)
def test_every_shape_has_a_plan(name: str) -> None:
    """Its keys are taken by the command that trains it; nothing is made yet."""
    target, keys = gpu.SHAPES[name]
    part, said = next(gpu.measured(model_of(target), ["device=cpu", "dtype=bfloat16", *keys], 1))
    assert part == "model" and said["trained"] > 2e7


def test_every_shape_is_written_as_it_is_known_and_a_failure_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"

    def measured(model: Any, keys: Any, steps: int) -> Iterator[tuple[str, Any]]:
        yield "training", {"tokens_per_second": 1.5, "said": ["a"]}
        assert json.loads(out.read_text())["shapes"]
        if "Qwen" in model.name:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "measured", measured)
    monkeypatch.setattr(gpu.files, "origin", lambda device: {})
    assert gpu.main(DoctorConfig(gpu=True, out=str(out)), "cuda") == 0
    said, shapes = capsys.readouterr().out, json.loads(out.read_text())["shapes"]
    assert [*shapes] == [*gpu.SHAPES] and said.count("CUDA out of memory") == 2
    assert '"tokens_per_second": 1.5' in said
    assert gpu.main(DoctorConfig(gpu=True, minutes=1e-9), "cuda") == 0
    assert capsys.readouterr().out.count("left out") == len(gpu.SHAPES)
    with pytest.raises(UserError, match="shape: nobody"):
        gpu.main(DoctorConfig(gpu=True, shape="nobody"), "cuda")


@pytest.mark.gpu
def test_gpu_measures_a_real_shape(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert code_of(doctor.main, "gpu=true", "shape=smollm2", "steps=4", f"out={out}") == 0
    assert json.loads(out.read_text())
