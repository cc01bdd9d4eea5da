"""The predictions of docs/scaling.md: the dry run of every recipe for GPUs on the hardware that it
states.

    python -m scripts.lab.pages.cluster

Writes docs/results/dry-run.json and the part of the page between its two markers.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from conf.commit import commit
from conf.schema import CONF, compose
from scripts.extra.cluster.config import DryRunConfig
from scripts.extra.cluster.plan import plan
from scripts.reports.block import Block
from scripts.reports.table import Table

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "docs/results/dry-run.json"
BLOCK = Block(
    ROOT / "docs/scaling.md",
    "<!-- dry run: python -m scripts.lab.pages.cluster -->",
    "<!-- end of dry run -->",
)
FIRST = "qwen3_8b_eagle3"
STATED = re.compile(r"^# dry run: gpus=(\d+) gpu=(\S+) margin=([\d.]+)$", re.M)


def stated(name: str) -> tuple[list[str], float] | None:
    """([gpus=.., gpu=..], margin) that a recipe states of itself, None where it does not."""
    found = STATED.search((CONF / "experiment" / f"{name}.yaml").read_text())
    return ([f"gpus={found[1]}", f"gpu={found[2]}"], float(found[3])) if found else None


def predicted(name: str, keys: list[str]) -> dict[str, Any]:
    """The dry run of a recipe."""
    return plan(compose("validate", DryRunConfig, [f"experiment={name}", "data.path=none", *keys]))


def page(found: dict[str, Any]) -> str:
    """What stands between the markers, from the JSON alone."""
    first = found["recipes"][FIRST]
    held, speed = first["memory"], first["speed"]
    data, start, about = first["data"], first["start_up"], first["assumptions"]
    gib = 1e9
    lines = [
        f"Predicted, not measured, for {first['gpus']} x {first['gpu']}: a peak of "
        f"**{held['peak'] / gib:.0f} GB** of {held['of'] / gib:.0f} on each "
        f"({held['spare']:.0%} to spare), {speed['tokens_a_second_and_gpu']:,.0f} tokens/s a GPU, "
        f"**{speed['hours']:.1f} hours** for {data['epochs']:.0f} passes over {about['rows']:,} "
        f"conversations of {about['row_tokens']} tokens ({speed['gpu_hours']:.0f} GPU-hours), "
        f"{start['first'] / 60:.1f} minutes of start-up before that, {start['again']:.0f} seconds "
        f"after an interruption; {held['host_while_loading'] / gib:.0f} GB of host memory while "
        f"loading, a checkpoint of {data['checkpoint_bytes'] / gib:.1f} GB, and "
        f"{data['stored_features_bytes'] / 1e12:.1f} TB if features were stored.",
        "",
        f"Assumed: {about['share_of_flops']:.0%} of {about['flops'] / 1e12:.0f} TFLOP/s and "
        f"{about['share_of_bandwidth']:.0%} of {about['bandwidth'] / 1e12:.2f} TB/s are reached, "
        f"{about['launch'] * 1e6:.0f} microseconds a launch, {about['supervised']:.0%} of the "
        f"tokens supervised, one operation after the other, nothing of the exchange hidden.",
        "",
    ]
    head = ("recipe", "GPUs", "peak, GB", "to spare", "tokens/s a GPU", "hours")
    rows = []
    for name, run in found["recipes"].items():
        held, speed = run["memory"], run["speed"]
        rows.append(
            [
                f"`{name}`",
                f"{run['gpus']} x {run['gpu']}",
                f"{held['peak'] / gib:.0f}",
                f"{held['spare']:.0%}",
                f"{speed['tokens_a_second_and_gpu']:,.0f}",
                f"{speed['hours']:.1f}",
            ]
        )
    return "\n".join([*lines, Table(head, rows, words=(0, 1)).markdown()])


def main() -> None:
    """Count every recipe for GPUs; write JSON and page."""
    recipes = {}
    for path in sorted((CONF / "experiment").glob("*.yaml")):
        told = stated(path.stem)
        if told and not any(key.startswith("gpu=cpu") for key in told[0]):
            print(f"counting {path.stem}", file=sys.stderr, flush=True)
            recipes[path.stem] = predicted(path.stem, told[0])
    command = "python -m scripts.lab.pages.cluster"
    found = {"command": command, "commit": commit(), "predicted": True, "recipes": recipes}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    BLOCK.write(page(found))


if __name__ == "__main__":
    main()
