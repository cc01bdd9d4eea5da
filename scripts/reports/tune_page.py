"""The files of a tuning run: tune.json, tune.html (one file, no network) and figures/*.png."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.common import files
from scripts.reports import page, plots, tune_table
from scripts.reports import tuning_plots as more_plots
from scripts.scoring import names

WORDS = [
    (
        "accepted length",
        "tokens that one target pass commits, the bonus token counted. Predicted: the "
        "recorded drafts "
        "replayed along the target's own answers; trees on texts they were not grown from.",
    ),
    (
        "predicted tokens/s",
        "replayed cycles, each priced by the fitted latency curves, at the pace at which plain "
        "decoding ran while the settings were measured.",
    ),
    ("break-even", "the accepted length below which plain decoding is faster on this machine."),
    (
        "K, nodes, width",
        "tokens of a chain; candidates a tree verifies; candidates it goes on from at every level.",
    ),
    ("brackets", "95 % bootstrap intervals over prompts; settings took turns prompt by prompt."),
]


def write(report: dict[str, Any], out: Path) -> None:
    """Write everything; tune.json comes last, so that its presence means that the others are
    there.
    """
    drawn = {
        "tuning": {
            _label(report): {
                "curves": report["curves"],
                "rows": report["rows"],
                "latency": report["latency"]["fit"],
                "samples": report["latency"]["samples"],
            }
        },
        **{k: report[k] for k in ("breakdown", "acceptance")},
    }
    panels = more_plots.present(more_plots.TUNE, drawn)
    for name, (draw, _) in panels.items():
        files.write_bytes(out / "figures" / f"{name}.png", plots.png(plots.figure(draw, drawn)))
    figures = {
        name: (plots.svg(plots.figure(draw, drawn), name), words)
        for name, (draw, words) in panels.items()
    }
    files.write_text(out / "tune.html", html(report, figures))
    files.write_json(out / "tune.json", report)


def _label(report: dict[str, Any]) -> str:
    return names.label(report["drafter"])


def html(report: dict[str, Any], figures: dict[str, tuple[str, str]]) -> str:
    """The page as text."""
    esc, chosen = page.esc, report["chosen"]
    mean = chosen["speedup"]["mean"] or 0.0
    steady = report["plain_pass_ms"]["steady"]
    if not chosen["pays"]:
        head = f"{_label(report)} does not pay here: plain decoding is faster"
    elif steady:
        head = f"{_label(report)} drafts best as {chosen['name']}: {mean:.2f}× plain decoding"
    else:
        head = f"{_label(report)} drafts best as {chosen['name']}, on a machine too busy to time"
    row = next(r for r in report["rows"] if r["name"] == chosen["name"])
    cards = [
        (f"{mean:.2f}×", "decoding speed, measured"),
        (tune_table.number(row["measured"]["accepted_length"]["mean"]), "tokens per target pass"),
        (f"{chosen['break_even']:.2f}", "tokens per pass to break even"),
        (tune_table.percent(row["error"]), "error of the prediction"),
        (f"{report['searched']:,}", "settings searched"),
    ]
    shown = "".join(
        f'<div class="card"><b>{esc(a)}</b><span>{esc(b)}</span></div>' for a, b in cards
    )
    header = "".join(f"<th>{esc(name)}</th>" for name in tune_table.HEADER)
    body = []
    for one, cells in tune_table.cells(report):
        parts = [cell.partition(" [") for cell in cells]
        text = "".join(
            f"<td>{esc(v)}{f' <small>[{esc(rest)}</small>' if b else ''}</td>"
            for v, b, rest in parts
        )
        body.append(f"<tr{' class=best' if one['name'] == chosen['name'] else ''}>{text}</tr>")
    notes = "".join(
        f'<p class="note{" warn" if t.startswith("UNSTEADY") else ""}">{esc(t)}</p>'
        for t in tune_table.sentences(report)
    )
    settings = {
        k: v
        for k, v in report["settings"].items()
        if k not in ("target", "prompts_sha256", "device", "out")
    }
    env = {**report["environment"], **report["environment"]["versions"]}
    env.pop("versions")
    target = {
        k: (v[:16] if k.endswith("sha256") else v)
        for k, v in report["target"].items()
        if k != "path"
    }
    facts = "".join(
        f'<div class="panel"><table>{page._rows(part)}</table></div>'
        for part in (target, settings, env)
    )
    terms = "".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in WORDS)
    made = f'<p class="note">Made {esc(report["created"])} by <code>{esc(report["command"])}</code></p>'
    return page.shell(
        head,
        "Outrider tuning report",
        tune_table.title(report),
        f"""<div class="cards">{shown}</div>
<h2>Measured settings</h2><div class="panel"><table><thead><tr>{header}</tr></thead><tbody>{"".join(body)}</tbody>
</table></div>{notes}
<h2>Figures</h2><div class="grid">{page.figures(figures)}</div>
<h2>What the words mean</h2><div class="panel"><dl>{terms}</dl></div>
<h2>Settings and environment</h2><div class="facts">{facts}</div>{made}""",
    )
