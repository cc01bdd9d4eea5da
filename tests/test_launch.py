"""Launch files: Accelerate reads them as they are meant, and the SLURM script requeues after a saved stop alone."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from conf.schema import CONF

ROOT = CONF.parent
FILES = sorted((CONF / "launch").glob("*.yaml"))
BATCH = ROOT / "scripts/slurm.sbatch"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_accelerate_reads_the_file_and_its_own_command_line(path: Path) -> None:
    config = load_config_from_file(str(path))
    wanted = {"one_gpu": ("NO", 1, 1), "ddp": ("MULTI_GPU", 1, 8), "fsdp2": ("MULTI_GPU", 1, 8),
              "multi_node": ("MULTI_GPU", 2, 16)}[path.stem]
    assert (str(config.distributed_type).rpartition(".")[2], config.num_machines, config.num_processes) == wanted
    assert str(config.mixed_precision) == "no" and not config.use_cpu and not config.fsdp_config
    named = re.search(r"accelerate launch (--config_file conf/launch/(\w+)\.yaml [^\n]*?) \.\.\.", path.read_text())
    assert named and named[2] == path.stem
    line = named[1].replace("--machine_rank R", "--machine_rank 1")
    args = launch_command_parser().parse_args(line.split())
    assert (ROOT / args.training_script).is_file()


def fake_cluster(tmp_path: Path, codes: list[int]) -> dict[str, str]:
    """srun runs one task per code and gives the last bad one; scontrol notes what it was asked."""
    tasks = "\n".join(f"SLURM_PROCID={i} SLURM_LOCALID={i} CODE={c} \"$@\" || code=$?" for i, c in enumerate(codes))
    scripts = {"srun": f"shift\ncode=0\n{tasks}\nexit $code",
               "scontrol": f'[ "$1" = show ] && echo node7 && echo node8\necho "$@" >> {tmp_path}/asked',
               "python": f'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $@" >> {tmp_path}/ranks\nexit $CODE'}
    (tmp_path / "bin").mkdir()
    for name, text in scripts.items():
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": "python", "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NTASKS": str(len(codes)), "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_CPUS_PER_TASK": "4"}


@pytest.mark.parametrize("codes, again", [([75, 75], True), ([0, 0], False), ([2, 2], False)])
def test_the_batch_script_requeues_after_a_saved_stop_alone(codes: list[int], again: bool, tmp_path: Path) -> None:
    env = fake_cluster(tmp_path, codes)
    done = subprocess.run(["bash", str(BATCH), "train/eagle.py", "data.path=a b.jsonl"], env=env, check=False,
                          capture_output=True, text=True)
    assert done.returncode == codes[-1], done.stderr
    ranks = (tmp_path / "ranks").read_text().splitlines()
    assert ranks == [f"{r} {r} 2 node7 train/eagle.py data.path=a b.jsonl" for r in range(2)]
    assert ("requeue 77" in (tmp_path / "asked").read_text()) == again


def test_the_batch_script_asks_for_signals_that_a_run_answers() -> None:
    from train.signals import CODES

    header = dict(re.findall(r"^#SBATCH --(\S+?)(?:=(\S+))?$", BATCH.read_text(), re.M))
    name, _, seconds = header["signal"].partition("@")
    assert {s.name for s in CODES} >= {f"SIG{name}", "SIGTERM"} and int(seconds) >= 60 and "requeue" in header
