"""The predictions of docs/scaling.md: the dry run of every recipe for GPUs on the hardware that it
states.

    python -m outrider.scripts.lab.pages.cluster

Writes docs/results/dry-run.json and the part of the page between its two markers.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from outrider.conf.commit import commit
from outrider.conf.schema import CONF, compose
from outrider.scripts.extra.cluster.config import DryRunConfig
from outrider.scripts.extra.cluster.plan import plan
from outrider.scripts.reports.block import Block
from outrider.scripts.reports.table import Columns, Table

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "docs/results/dry-run.json"
BLOCK = Block(
    ROOT / "docs/scaling.md",
    "<!-- dry run: python -m outrider.scripts.lab.pages.cluster -->",
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
    held, speed, total = first["memory"], first["speed"], first["total"]
    data, start, about = first["data"], first["start_up"], first["assumptions"]
    written = first["synthesis"]
    lines = [
        f"Predicted, not measured, for {first['gpus']} x {first['gpu']}: a peak of "
        f"**{held['peak'] / GB:.0f} GB** of {held['of'] / GB:.0f} on each "
        f"({held['spare']:.0%} to spare), {held['host_while_loading'] / GB:.0f} GB of host memory "
        f"while loading, a checkpoint of {data['checkpoint_bytes'] / GB:.1f} GB, "
        f"{data['stored_features_bytes'] / 1e12:.1f} TB if features were stored; and "
        f"**{total['hours']:.1f} hours** in all:",
        "",
        f"- data synthesis {written['hours']:.1f} hours: {written['answers']:,} answers of "
        f"{written['tokens_an_answer']:.0f} tokens on average, {about['concurrency']} at a time, "
        f"{about['answer_speed']:g} tokens/s each (assumed: `concurrency`, `answer_speed`);",
        f"- start-up {start['first'] / 60:.1f} minutes (tokenizing {start['tokenizing']:.0f} "
        f"seconds and hashing the weights {start['hashing_weights']:.0f}, once; imports "
        f"{start['imports']:.0f}, communicators {start['communicators']:.0f}, reading weights "
        f"{start['weights']:.0f}, first passes {start['first_passes']:.0f}); "
        f"{start['again'] / 60:.1f} minutes after an interruption;",
        f"- training {speed['hours']:.1f} hours ({speed['gpu_hours']:.0f} GPU-hours) for "
        f"{data['epochs']:.0f} passes over {about['rows']:,} conversations: "
        f"{speed['tokens_a_second_and_gpu']:,.0f} tokens/s a GPU, a step of "
        f"{speed['step_seconds']:.2f} seconds.",
        "",
        f"Assumed: rows are {data['lengths'].replace(' (assumed)', '')} tokens "
        f"({data['tokens_a_row']:.0f} on average then; `row_tokens`, `row_sigma`), "
        f"{about['supervised']:.0%} of them supervised; {about['share_of_flops']:.0%} of "
        f"{about['flops'] / 1e12:.0f} TFLOP/s and {about['share_of_bandwidth']:.0%} of "
        f"{about['bandwidth'] / 1e12:.2f} TB/s are reached, {about['launch'] * 1e6:.0f} "
        "microseconds a launch, one operation after the other, nothing of the exchange hidden.",
        "",
    ]
    recipes = Table.of(
        COLUMNS, ({"name": n, **run} for n, run in found["recipes"].items()), words=(0, 1)
    ).markdown()
    more = Table.of(MORE, found["more_gpus"], words=(-1,)).markdown()
    title = f"`{FIRST}` on more GPUs, predicted:"
    return "\n".join([*lines, recipes, "", title, "", more])


GB = 1e9
COLUMNS: Columns = (
    ("recipe", lambda r: f"`{r['name']}`"),
    ("GPUs", lambda r: f"{r['gpus']} x {r['gpu']}"),
    ("peak, GB", lambda r: f"{r['memory']['peak'] / GB:.1f}"),
    ("to spare", lambda r: f"{r['memory']['spare']:.0%}"),
    ("padding", lambda r: f"{r['speed']['padding']:.0%}"),
    ("slowest rank", lambda r: f"{r['speed']['slowest_rank']:.2f}"),
    ("tokens/s a GPU", lambda r: f"{r['speed']['tokens_a_second_and_gpu']:,.0f}"),
    ("training, hours", lambda r: f"{r['speed']['hours']:.1f}"),
)
MORE: Columns = (
    ("GPUs", lambda r: f"{r['gpus']}"),
    ("rows a rank", lambda r: f"{r['speed']['rows_a_rank']:g}"),
    ("step, s", lambda r: f"{r['speed']['step_seconds']:.2f}"),
    ("slowest rank", lambda r: f"{r['speed']['slowest_rank']:.2f}"),
    ("tokens/s", lambda r: f"{r['speed']['tokens_a_second']:,.0f}"),
    ("training, hours", lambda r: f"{r['speed']['hours']:.1f}"),
    ("recommended", lambda r: advice(r.get("recommended"))),
)


def advice(better: dict[str, Any] | None) -> str:
    """A cell of the table."""
    if better is None:
        return "as it is"
    pace = f"{better['tokens_a_second']:,.0f} tokens/s ({better['times_as_fast']:.1f} times)"
    return f"`{better['told']}`, {better['rows_a_rank']} rows a rank: {pace}"


def main() -> None:
    """Count every recipe for GPUs; write JSON and page."""
    recipes = {}
    for path in sorted((CONF / "experiment").glob("*.yaml")):
        message = stated(path.stem)
        if message and not any(key.startswith("gpu=cpu") for key in message[0]):
            print(f"counting {path.stem}", file=sys.stderr, flush=True)
            recipes[path.stem] = predicted(path.stem, message[0])
    found = {
        "command": "python -m outrider.scripts.lab.pages.cluster",
        "commit": commit(),
        "predicted": True,
        "recipes": recipes,
        "more_gpus": [predicted(FIRST, [f"gpus={gpus}"]) for gpus in (8, 16, 64)],
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    BLOCK.write(page(found))


if __name__ == "__main__":
    main()
