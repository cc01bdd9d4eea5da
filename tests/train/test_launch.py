"""Launch files and accelerate's settings: read as they are meant, or refused in a line; the SLURM
script requeues after a saved stop alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from outrider.conf.errors import UserError
from outrider.conf.schema import CONF
from outrider.train import accelerator
from outrider.train.accelerator import REFUSED, device_of, on_processors, refusals, start
from outrider.train.launch import asked

ROOT = CONF.parent
FILES = sorted((CONF / "launch").glob("*.yaml"))
BATCH = ROOT / "scripts/slurm.sbatch"


WANTED = {
    "one_gpu": ("NO", 1, 1),
    "ddp": ("MULTI_GPU", 1, 8),
    "fsdp2": ("MULTI_GPU", 1, 8),
    "multi_node": ("MULTI_GPU", 2, 16),
}


def test_accelerate_reads_the_shipped_files_and_a_run_honours_them() -> None:
    for path in FILES:
        config = load_config_from_file(str(path))
        kind = str(config.distributed_type).rpartition(".")[2]
        assert (kind, config.num_machines, config.num_processes) == WANTED[path.stem]
        assert str(config.mixed_precision) == "no" and not config.use_cpu and not config.fsdp_config
        args = launch_command_parser().parse_args(summary(path))
        assert (ROOT / args.training_script).is_file()
        assert args.config_file == f"conf/launch/{path.name}"
        given = asked(["--config_file", str(path), "train/eagle.py"])
        assert not refusals(vars(given), "bfloat16")


def summary(path: Path, rank: int = 1) -> list[str]:
    """What a launch file tells to put behind `accelerate launch`."""
    named = re.search(
        r"accelerate launch (--config_file conf/launch/\w+\.yaml [^\n]*?) \.\.\.", path.read_text()
    )
    assert named
    return (
        named[1]
        .replace("--machine_rank R", f"--machine_rank {rank}")
        .replace("HOST", "127.0.0.1")
        .split()
    )


def test_what_a_run_would_not_honour_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REFUSED:
        assert not refusals({name: "no", "mixed_precision": None}, "bfloat16")
        (line,) = refusals({name: "4"}, "bfloat16")
        assert line.startswith(f"{name}: 4: ") and "\n" not in line
    assert not refusals({"mixed_precision": "bf16"}, "bfloat16")
    for precision, dtype in (("bf16", "float32"), ("fp16", "bfloat16")):
        assert len(refusals({"mixed_precision": precision}, dtype)) == 1
    words = ["accelerate", "launch", "--gradient_accumulation_steps", "4", "train/eagle.py"]
    monkeypatch.setattr(accelerator, "launch_words", lambda _: words[2:])
    with pytest.raises(UserError, match="gradient_accumulation_steps: 4: a step reads batch_size"):
        start(4, "float32", "cpu")
    words[2:4] = ["--gradient_clipping=1.0"]
    with pytest.raises(UserError, match="gradient_clipping: 1.0: set optim.clip"):
        start(4, "float32", "cpu")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"batch_size: 7 .* 2 ranks; give 6 or 8$"):
        accelerator.check_ranks(7, 0, 2)
    with pytest.raises(UserError, match="give 4$"):
        accelerator.check_ranks(3, 0, 4)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="use_fsdp"):
        start(4, "float32", "cpu")


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device: cuda"):
        device_of("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_of("cuda") == "" and device_of("cuda:3") == "cuda:3"
    for name, value in (("A", ""), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match="device: cuda:4"):
            device_of("cuda:4")


def test_several_processes_without_a_gpu_meet_on_the_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a launch file for GPUs starts them there too, each for itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert on_processors("")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert on_processors("cpu") and not on_processors("") and not on_processors("cuda")


def test_what_is_done_with_memory_is_said_before_torch_reads_it() -> None:
    """By the process that trains, since no file of Accelerate can; what the user set stays."""
    line = (
        "import os, runpy, sys; sys.modules['torch'] = None\n"
        "try: runpy.run_path(sys.argv[1])\n"
        "except ImportError as error: assert error.name == 'torch', error\n"
        "print(*(f'{k}={v}' for k, v in os.environ.items() if k.endswith('ALLOC_CONF')))"
    )
    kept = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    ours = "PYTORCH_ALLOC_CONF=expandable_segments:True"
    theirs = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"
    for own, want in (({}, ours), (dict([theirs.split("=")]), theirs)):
        command = [sys.executable, "-c", line, "train/medusa.py"]
        env = {**kept, **own, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=ROOT, env=env, check=True, capture_output=True, text=True
        )
        assert done.stdout.strip() == want


@pytest.mark.parametrize("code, again", [(75, True), (2, False)])
def test_the_batch_script_requeues_after_a_saved_stop_alone(
    code: int, again: bool, tmp_path: Path
) -> None:
    """srun runs a task for each rank and gives their code; scontrol notes what it was asked."""
    tasks = "\n".join(f'SLURM_PROCID={i} SLURM_LOCALID={i} "$@" || code=$?' for i in range(2))
    scripts = {
        "srun": f"shift\ncode=0\n{tasks}\nexit $code",
        # Noted first: `head -n 1` may have left before the second name is written.
        "scontrol": f'echo "$@" >> {tmp_path}/asked\n[ "$1" = show ] && echo node7 && echo node8',
        "python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $@" >> '
        f"{tmp_path}/ranks\nexit {code}",
    }
    (tmp_path / "bin").mkdir()
    for name, text in scripts.items():
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    nodes = {"JOB_ID": "77", "JOB_NODELIST": "node[7-8]", "NTASKS": "2", "NTASKS_PER_NODE": "1"}
    env = {f"SLURM_{name}": value for name, value in {**nodes, "CPUS_PER_TASK": "4"}.items()}
    env |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": "python"}
    command = ["bash", str(BATCH), "train/eagle.py", "data.path=a b.jsonl"]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    ranks = (tmp_path / "ranks").read_text().splitlines()
    assert ranks == [f"{r} {r} 2 node7 train/eagle.py data.path=a b.jsonl" for r in range(2)]
    assert ("requeue 77" in (tmp_path / "asked").read_text()) == again
