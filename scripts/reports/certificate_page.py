"""certificate.html and the table on the terminal, both from certificate.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from outrider.scripts.reports import plots
from outrider.scripts.reports.rendering import Drawing, render
from outrider.scripts.reports.table import Table
from outrider.scripts.scoring import names

TONE = {"lossless": "good", "not lossless": "bad", "undecided": "open"}  # of style.css
SHOWN = 24  # tests in the table; certificate.json has them all
OFF = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "guidance_scale": 1}
PROSE = ("evidence", "result")  # columns whose text may run over several lines
# what the power does not speak of
KEYED = "a bias that a key sets anew in every context (a watermark) needs more"


def table(paper: dict[str, Any]) -> Table:
    """The layers and the controls, the verdict above and its reasons below: of a certificate
    of scripts/certify.py, of this engine or of a server."""
    controls = paper["negative_controls"]
    caught = f"{sum(c['rejected'] for c in controls)} of {len(controls)} rejected{_origin(paper)}"
    layers = _layers(paper)
    rows = [*layers.rows, ["controls", "", caught if controls else "not run"]]
    if "server" in paper:
        about = f"{paper['server']['url']} ({paper['server']['kind']})"
    else:
        target = paper["identities"]["target"].get("name", "target")
        about = f"{paper['identities']['drafter']['name']} on {target}, {_settings(paper)}"
    least = paper["power"].get("min_detectable")
    if least is not None:
        families = paper["power"]["families"]
        found = f"smallest bias of {len(families)} families that is surely found: {least:.3f}"
        rows.append(["power", "", f"{found} (total variation){_missed(paper['power'])}; {KEYED}"])
    notes = [*paper["reasons"], *paper.get("notes", ())]
    if least is not None:
        notes.append(f"families: {'; '.join(families)}")
    return Table(layers.head, rows, f"{paper['verdict'].upper()}: {about}", notes, range(3))


def never_found(power: dict[str, Any]) -> dict[str, float]:
    """Families whose largest biases the run could miss, and how large they are: the power
    counts them with the most that they can move (proofs/power.py)."""
    return {
        name: row["largest"]
        for name, row in power.get("families", {}).items()
        if (row.get("min_detectable") or 0.0) > row.get("largest", 1.0)  # 1: an older certificate
    }


def _missed(power: dict[str, Any]) -> str:
    missed = [f"{name} (at most {most:.1%})" for name, most in never_found(power).items()]
    return f"; not surely found at any size: {', '.join(missed)}" if missed else ""


def _origin(paper: dict[str, Any]) -> str:
    """Where the controls come from, when not from this run."""
    origin = paper.get("controls", {})
    borrowed = "created" in origin
    return f", in the certificate {origin['from']} of {origin['created']}" if borrowed else ""


def _settings(paper: dict[str, Any]) -> str:
    s = paper["settings"]
    words = [f"T = {s['temperature']:g}"]
    words += [f"{key} = {s[key]:g}" for key, off in OFF.items() if s[key] != off]
    return ", ".join([*words, f"verify = {s['verify']}", paper["identities"]["target"]["dtype"]])


def _evidence(layer: dict[str, Any]) -> str:
    server = {"greedy": "drafted_tokens", "sampling": "drafted_share"}  # what it does not tell
    if server.get(layer["name"], "name") not in layer:
        return f"{layer['tokens']:,} tokens" + (f", p = {layer['p']:.3g}" if "p" in layer else "")
    if layer["name"] == "exact":
        return (
            f"{layer['cases']} toy worlds, {layer['branches']} branches: distribution off "
            "by at most "
            f"{layer['max_error']:.1e}; {layer['edge_cases']} at the edges of float32 by "
            f"{layer['edge_max_error']:.1e}; the whole loop by {layer['loop_max_error']:.1e}"
        )
    if layer["name"] == "greedy":
        return (
            f"{layer['prompts']} prompts, {layer['tokens']} tokens ({layer['drafted_tokens']} "
            f"drafted): {layer['rounding_ties']} rounding ties, {layer['defects']} defects, "
            f"{layer['not_the_verifiers_best']} not the verifier's own best"
        )
    if layer["name"] == "passes":
        return (
            "mean total variation between the verifier's and plain decoding's distribution "
            f"{layer['variation']:.2g}; two plain computations "
            f"{layer['two_plain_computations']['variation']:.2g}"
        )
    return (
        f"{layer['tokens']} tokens ({layer['drafted_share']:.0%} drafted), {len(layer['tests'])} "
        f"tests: p = {layer['p']:.3g} at alpha = {layer['alpha']:g}"
    )


def page(paper: dict[str, Any]) -> str:
    """The whole page as text; no network, no scripts."""
    drafter = names.label(paper["identities"]["drafter"]["name"])
    target = paper["identities"]["target"].get("name", "target")
    sampling = next((layer for layer in paper["layers"] if layer["name"] == "sampling"), None)
    drawn, tables = [], []
    if sampling:
        passes = next(layer for layer in paper["layers"] if layer["name"] == "passes")
        drawn = [_drawing(_histogram, sampling), _drawing(_power, paper["power"])]
        tables = [_families(paper["power"]), _strata(passes), _tests(sampling)]
    return render(
        "certificate.html",
        paper=paper,
        drafter=drafter,
        head=paper["verdict"].capitalize(),
        tone=TONE[paper["verdict"]],
        sub=f"{drafter} drafting for {target} · {_settings(paper)}",
        cards=_cards(paper),
        layers=_layers(paper),
        drawn=drawn,
        tables=tables,
        origin=_origin(paper),
        controls=_controls(paper),
        facts=_facts(paper),
    )


def _cards(paper: dict[str, Any]) -> list[tuple[str, str]]:
    power, controls = paper["power"], paper["negative_controls"]
    least = power.get("min_detectable")
    caught = f"{sum(c['rejected'] for c in controls)} / {len(controls)}"
    cards = [
        (caught, "negative controls rejected") if controls else ("not run", "negative controls")
    ]
    if power["tokens"]:
        cards += [
            (f"{power['tokens']:,}", "emitted tokens tested"),
            (
                "none" if least is None else f"{least:.1%}",
                f"total variation found with power 0.99, each of the {len(power['families'])} "
                f"families below{_missed(power)}; {KEYED}",
            ),
            (f"{power['alpha']:g}", "false-alarm rate, all tests together"),
        ]
    return cards


def _layers(paper: dict[str, Any]) -> Table:
    columns: list[tuple[str, Any]] = [
        ("layer", lambda layer: layer["name"]),
        ("result", lambda layer: "passed" if layer["passed"] else "FAILED: " + layer["why"]),
        ("evidence", _evidence),
    ]
    return Table.of(columns, paper["layers"], prose=PROSE)


def _tests(layer: dict[str, Any]) -> Table:
    rows = [
        [t["name"], t["stratum"], f"{t['n']:,}", f"{t['statistic']:.4g}", f"{t['p']:.3g}"]
        for t in layer["tests"]
    ]
    first = f"test ({SHOWN} of {len(layer['tests'])}, smallest p)"
    return Table([first, "tokens", "n", "statistic", "p"], rows[:SHOWN])


def _families(power: dict[str, Any]) -> Table:
    """Power by family of biases and mean total variation."""

    def percent(x: float | None) -> str:
        return "–" if x is None else f"{x:.0%}"

    def surely(name: str, least: float | None) -> str:
        if name in missed:
            return f"never, at most {missed[name]:.1%}"
        return "none" if least is None else f"{least:.1%}"

    missed = never_found(power)
    shown = list(next(iter(power["families"].values()))["power_at"])
    rows = [
        [
            name,
            *(percent(row["power_at"][x]) for x in shown),
            percent(row["at_detect"]),
            surely(name, row["min_detectable"]),
        ]
        for name, row in power["families"].items()
    ]
    head = [
        "bias (found with this probability)",
        *(f"total variation {x}" for x in shown),
        f"{power['detect']:g}",
    ]
    return Table([*head, "found with 99 % from"], rows)


def _strata(layer: dict[str, Any]) -> Table:
    plainly = layer["two_plain_computations"]
    columns: list[tuple[str, Any]] = [
        ("verifier's distribution beside plain decoding's", lambda s: s["stratum"]),
        ("tokens", lambda s: f"{s['tokens']:,}"),
        ("mean total variation", lambda s: f"{s['variation']:.2g}"),
        ("shifted far", lambda s: str(s["far"])),
    ]
    last = {**plainly, "stratum": "two plain computations", "far": 0}
    return Table.of(columns, [*layer["strata"], last])


def _controls(paper: dict[str, Any]) -> Table:
    def evidence(c: dict[str, Any]) -> str:
        if c["p"] is not None:
            message = f"p = {c['p']:.2g} after {c['tokens']:,} tokens, drafter {c['drafter']}"
            if own := c.get("faint"):
                message = (
                    f"T = 1: {message}; at T = {own['temperature']:g} all but right, p = "
                    f"{own['p']:.2g} after {own['tokens']:,}"
                )
            return message
        if "defects" in c:
            message = f"{c['defects']} of {c['prompts']} outputs differ"
            strange = c["not_the_verifiers_best"]
            return f"{message}, {strange} tokens not the verifier's best" if strange else message
        if "variation" in c:
            message = f"mean total variation {c['variation']:.2g}"
            return f"{message}, two plain computations {c['two_plain']:.2g}"
        return f"{c['measured']:.3g} (correct code {c['correct_code']:.2g}, limit {c['limit']:g})"

    rows = [
        [c["name"], c["layer"], "yes" if c["rejected"] else "NO", evidence(c)]
        for c in paper["negative_controls"]
    ]
    return Table(["wrong code", "caught by", "rejected", "evidence"], rows, prose=PROSE)


def _facts(paper: dict[str, Any]) -> list[tuple[str, Table]]:
    target = paper["identities"]["target"]
    files = paper["identities"]["drafter"].get("files", {})
    versions = dict(paper["versions"])
    groups = {
        "target": target,
        "drafter": {
            **{k: v for k, v in paper["identities"]["drafter"].items() if k != "files"},
            **paper["shape"],
            **{f"sha256 {k}": v for k, v in files.items()},
        },
        "settings": paper["settings"],
        "versions": {**versions.pop("versions"), **versions},
    }
    return [
        (name, Table([], [[key, str(value)] for key, value in group.items()]))
        for name, group in groups.items()
    ]


def _drawing(draw: Callable[[Axes, dict[str, Any]], None], shown: dict[str, Any]) -> Drawing:
    figure = plots.figure(draw, shown, 4.4)
    return Drawing(plots.svg(figure, draw.__name__.strip("_")), (draw.__doc__ or "").strip())


def _histogram(ax: Axes, layer: dict[str, Any]) -> None:
    """Density of the transforms of the emitted tokens, a line per stratum; 1 is the
    distribution's."""
    for i, (name, counts) in enumerate(layer["histograms"].items()):
        total, cells = sum(counts), len(counts)
        ax.stairs(
            np.array(counts) * cells / total,
            np.linspace(0, 1, cells + 1),
            label=name,
            linewidth=1.8,
            color=plots.COLORS[i],
        )
    total = sum(layer["histograms"]["all tokens"])
    width = 3 * math.sqrt(cells / total)
    ax.axhspan(1 - width, 1 + width, color=plots.MUTED, alpha=0.15, linewidth=0)
    ax.set_ylim(0, None)
    ax.set_title("Density of the transforms")
    ax.set_xlabel(
        "1 = as the target's distribution says; band: three standard deviations of all tokens"
    )
    plots.legend(ax)


def _power(ax: Axes, power: dict[str, Any]) -> None:
    """Power against the mean total variation of a bias, a line per family of biases."""
    for i, (name, row) in enumerate(power["families"].items()):
        y = np.array([math.nan if v is None else v for v in row["curve"]])
        dashes = "-" if i < len(plots.COLORS) else (0, (4, 2))
        color = plots.COLORS[i % len(plots.COLORS)]
        ax.plot(power["grid"], y, label=name, linewidth=1.6, color=color, linestyle=dashes)
    ax.axvline(power["detect"], color="#b42318", linewidth=1, linestyle=(0, (3, 3)))
    ax.set_xscale("log")
    ax.set_xticks([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5], minor=False)
    ax.set_xticklabels(["0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5"])
    ax.minorticks_off()
    ax.set_ylim(0, 1.02)
    ax.set_title("Power by mean total variation of the bias")
    ax.set_xlabel("dashed: detect")
    plots.legend(ax, 2)  # inside it would hide a curve
