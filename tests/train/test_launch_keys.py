"""Settings of `accelerate launch`: each is honoured, or refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.scripts.common.files import ROOT
from outrider.train import launch_keys
from outrider.train.config import TrainConfig
from outrider.train.launch_keys import REFUSED, check_settings, device_of, on_processors
from tests.helpers.training import run_config


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return run_config(tmp_path / "data.jsonl", tmp_path / "run")


VALUES = {
    "gradient_accumulation_steps": "4",
    "gradient_clipping": "1.0",
    "dynamo_backend": "INDUCTOR",
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_not_honoured_are_refused_and_neutral_ones_are_not(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    variable, neutral, instead = REFUSED[name]
    for value in neutral:
        monkeypatch.setenv(variable, value.upper())
        check_settings(cfg)
    monkeypatch.setenv(variable, VALUES.get(name, "true"))
    with pytest.raises(UserError) as caught:
        check_settings(cfg)
    said = str(caught.value)
    assert said.startswith("accelerate's settings: ") and name in said and instead in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "precision, dtype, good",
    [
        ("no", "float32", True),
        ("bf16", "bfloat16", True),
        ("bf16", "float32", False),
        ("fp16", "bfloat16", False),
        ("fp8", "bfloat16", False),
    ],
)
def test_mixed_precision_must_say_what_dtype_says(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: str, good: bool
) -> None:
    monkeypatch.setenv(launch_keys.PRECISION, precision)
    cfg = replace(cfg, dtype=dtype)
    if good:
        return check_settings(cfg)
    with pytest.raises(UserError, match=f"mixed_precision: {precision}.*dtype={dtype}"):
        check_settings(cfg)


LAUNCHED = """
import json, sys
from accelerate.commands import launch
from accelerate.utils import launch as env
found = {}
for path in sys.argv[1:]:
    args = launch.launch_command_parser().parse_args(["--config_file", path, "train/eagle.py"])
    args, _, _ = launch._validate_launch_command(args)
    if args.multi_gpu:
        found[path] = env.prepare_multi_gpu_env(args)
    else:
        found[path] = env.prepare_simple_launcher_cmd_env(args)[1]
kept = {p: {k: v for k, v in e.items() if k.startswith("ACCEL")} for p, e in found.items()}
print(json.dumps(kept))
"""


def test_shipped_configs_are_taken(cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher makes of our own files is neutral."""
    shipped = [str(path) for path in sorted((ROOT / "conf/launch").glob("*.yaml"))]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHED, *shipped],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-400:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert list(made) == shipped and len(shipped) >= 4
    for settings in made.values():
        with monkeypatch.context() as patch:
            for key, value in settings.items():
                patch.setenv(key, value)
            check_settings(cfg)


def test_devices_that_are_not_there(cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = replace(cfg, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device: cuda asked for, but .*set device=cpu"):
        device_of(cfg)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_of(cfg) == ""
    assert device_of(replace(cfg, device="cuda:3")) == "cuda:3"
    cfg = replace(cfg, device="cuda:4")
    with pytest.raises(UserError, match="device: cuda:4, but there are 4 GPUs"):
        device_of(cfg)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="is one GPU, but there are several processes"):
        device_of(cfg)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(UserError, match="use_cpu"):
        device_of(cfg)


def test_several_processes_without_a_gpu_meet_on_the_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a launch file for GPUs starts them there too, each for itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert on_processors("")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert on_processors("cpu") and not on_processors("") and not on_processors("cuda")
