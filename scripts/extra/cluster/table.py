"""The dry run for a reader: one table."""

from __future__ import annotations

from typing import Any

from outrider.conf.disk import size
from outrider.scripts.reports.table import Table

Row = tuple[str, str]


def table(found: dict[str, Any]) -> Table:
    """A report of scripts/extra/cluster/plan.py as a table of two columns."""
    size = found["pass"]
    run = (
        f"{found['head']} ({found['trained_parameters'] / 1e6:,.0f} M trained) for "
        f"{found['target']} ({found['parameters'] / 1e9:.2f} B) on {found['gpus']} x "
        f"{found['gpu']}, passes of {size['rows']} x {size['tokens_a_row']:,} tokens"
    )
    rest = [*_memory(found["memory"]), *_speed(found), *_hours(found), *_around(found)]
    return Table((), [("run", run), *rest])


def _memory(held: dict[str, Any]) -> list[Row]:
    rows = [(f"  {name}", size(amount)) for name, amount in held["parts"].items() if amount]
    verdict = "fits" if held["fits"] else "DOES NOT FIT"
    peak = (
        f"{size(held['peak'])} of {size(held['of'])}: {verdict}, {held['spare']:.0%} to spare "
        f"(training {size(held['training'])}, evaluation and gate "
        f"{size(held['evaluation_and_gate'])})"
    )
    host = f"{size(held['host_while_loading'])} a node while loading"
    return [*rows, ("peak memory", peak), ("host memory", host)]


def _speed(found: dict[str, Any]) -> list[Row]:
    speed = found["speed"]
    work = (
        f"{speed['flops_a_token'] / 1e9:,.1f} GFLOP and {speed['traffic_a_token'] / 1e6:,.0f} MB "
        f"of traffic a token, {speed['launches_a_pass']:,} launches a pass, "
        f"{sum(int(line.split()[0]) for line in found['host_reads_a_pass'])} host reads"
    )
    parts = ", ".join(f"{name} {seconds:.2g}" for name, seconds in speed["parts"].items())
    pace = (
        f"{speed['tokens_a_second_and_gpu']:,.0f} tokens/s a GPU, {speed['tokens_a_second']:,.0f} "
        f"in all; {speed['share_of_peak_flops']:.0%} of the peak's FLOP/s"
    )
    waste = (
        f"{speed['padding']:.0%} of the positions are padding, the slowest rank takes "
        f"{speed['slowest_rank']:.2f} times the mean one; {speed['rows_a_rank']:g} rows and "
        f"{speed['passes_a_rank']:.1f} passes a rank, lengths: {found['data']['lengths']}"
    )
    rows = [
        ("work", work),
        ("step", f"{speed['step_seconds']:.3g} s ({parts})"),
        ("waste", waste),
        ("speed", pace),
    ]
    if better := found.get("recommended"):
        message = (
            f"{better['told']}, at least {better['rows_a_rank']} rows a rank: "
            f"{better['times_as_fast']:.1f} times as many tokens/s "
            f"({better['tokens_a_second']:,.0f} in all; {size(better['peak'])}); such steps are "
            "larger and fewer, so that optim.lr and steps change with them"
        )
        rows.append(("recommended", message))
    return rows


def _hours(found: dict[str, Any]) -> list[Row]:
    """The parts of the whole, each predicted."""
    written, start, total = found["synthesis"], found["start_up"], found["total"]
    about, speed = found["assumptions"], found["speed"]
    answers = (
        f"{written['hours']:,.1f} hours for {written['answers']:,} answers of "
        f"{written['tokens_an_answer']:,.0f} tokens, {about['concurrency']:,} at a time, "
        f"{about['answer_speed']:g} tokens/s each (assumed)"
        if written["answers"]
        else "none: the data are there"
    )
    parts = ", ".join(
        f"{name.replace('_', ' ')} {seconds:,.0f}"
        for name, seconds in start.items()
        if seconds and name not in ("first", "again")
    )
    begins = (
        f"{start['first'] / 60:,.1f} minutes the first time, {start['again'] / 60:,.1f} after an "
        f"interruption (seconds: {parts})"
    )
    return [
        ("data synthesis", answers),
        ("start-up", begins),
        ("training", f"{speed['hours']:,.1f} hours, {speed['gpu_hours']:,.0f} GPU-hours"),
        ("to the end", f"{total['hours']:,.1f} hours"),
    ]


def _around(found: dict[str, Any]) -> list[Row]:
    """Data, and what the figures rest on."""
    data, about = found["data"], found["assumptions"]
    stored = (
        f"{data['tokens'] / 1e6:,.0f} M tokens, {data['epochs']:.1f} epochs; features stored: "
        f"{size(data['stored_features_bytes'])}; a checkpoint {size(data['checkpoint_bytes'])}"
    )
    rows = [("data", stored)]
    if change := found.get("changes"):
        message = f"{change['told']} ({size(change['peak'])})" if change["keys"] else change["why"]
        rows.append(("to change", message))
    if found["not_counted"]:
        rows.append(("not counted", "; ".join(found["not_counted"])))
    assumed = (
        f"{about['share_of_flops']:.0%} of {about['flops'] / 1e12:,.0f} TFLOP/s, "
        f"{about['share_of_bandwidth']:.0%} of {about['bandwidth'] / 1e12:.2f} TB/s, "
        f"{about['launch'] * 1e6:.0f} us a launch; {about['rows']:,} conversations, "
        f"{about['supervised']:.0%} supervised"
    )
    return [*rows, ("assumed", assumed)]
