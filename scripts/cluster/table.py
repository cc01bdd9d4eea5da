"""The dry run for a reader: one table."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def table(found: dict[str, Any]) -> Table:
    """A report of scripts/cluster/plan.py as a table of two columns."""
    held, speed = found["memory"], found["speed"]
    data, start = found["data"], found["start_up"]
    shown = Table(box=None, show_header=False, pad_edge=False)
    shown.add_column(style="bold")
    shown.add_column()
    size = found["pass"]
    shown.add_row(
        "run",
        f"{found['head']} ({found['trained_parameters'] / 1e6:,.0f} M trained) for "
        f"{found['target']} ({found['parameters'] / 1e9:.2f} B) on {found['gpus']} x "
        f"{found['gpu']}, passes of {size['rows']} x {size['tokens_a_row']:,} tokens",
    )
    for name, amount in held["parts"].items():
        if amount:
            shown.add_row(f"  {name}", _size(amount))
    verdict = "fits" if held["fits"] else "DOES NOT FIT"
    shown.add_row(
        "peak memory",
        f"{_size(held['peak'])} of {_size(held['of'])}: {verdict}, {held['spare']:.0%} to spare "
        f"(training {_size(held['training'])}, evaluation and gate "
        f"{_size(held['evaluation_and_gate'])})",
    )
    shown.add_row("host memory", f"{_size(held['host_while_loading'])} a node while loading")
    shown.add_row(
        "work",
        f"{speed['flops_a_token'] / 1e9:,.1f} GFLOP and {speed['traffic_a_token'] / 1e6:,.0f} MB "
        f"of traffic a token, {speed['launches_a_pass']:,} launches a pass, "
        f"{sum(int(line.split()[0]) for line in found['host_reads_a_pass'])} host reads",
    )
    parts = ", ".join(f"{name} {seconds:.2g}" for name, seconds in speed["parts"].items())
    shown.add_row("step", f"{speed['step_seconds']:.3g} s ({parts})")
    shown.add_row(
        "speed",
        f"{speed['tokens_a_second_and_gpu']:,.0f} tokens/s a GPU, {speed['tokens_a_second']:,.0f} "
        f"in all; {speed['share_of_peak_flops']:.0%} of the peak's FLOP/s",
    )
    shown.add_row("to the end", f"{speed['hours']:,.1f} hours, {speed['gpu_hours']:,.0f} GPU-hours")
    shown.add_row(
        "data",
        f"{data['tokens'] / 1e6:,.0f} M tokens, {data['epochs']:.1f} epochs; features stored: "
        f"{_size(data['stored_features_bytes'])}; a checkpoint {_size(data['checkpoint_bytes'])}",
    )
    shown.add_row(
        "start-up",
        f"{start['first'] / 60:,.1f} minutes the first time (tokenizing "
        f"{start['tokenizing'] / 60:,.1f}), {start['again'] / 60:,.1f} afterwards",
    )
    if change := found.get("changes"):
        told = f"{change['told']} ({_size(change['peak'])})" if change["keys"] else change["why"]
        shown.add_row("to change", told)
    if found["not_counted"]:
        shown.add_row("not counted", "; ".join(found["not_counted"]))
    about = found["assumptions"]
    shown.add_row(
        "assumed",
        f"{about['share_of_flops']:.0%} of {about['flops'] / 1e12:,.0f} TFLOP/s, "
        f"{about['share_of_bandwidth']:.0%} of {about['bandwidth'] / 1e12:.2f} TB/s, "
        f"{about['launch'] * 1e6:.0f} us a launch; {about['rows']:,} conversations of "
        f"{about['row_tokens']:,} tokens, {about['supervised']:.0%} supervised",
    )
    return shown


def _size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count / 1e3:,.0f} kB"
