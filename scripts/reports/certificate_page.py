"""certificate.html and the table on the terminal, both from certificate.json alone."""

from __future__ import annotations

from typing import Any

from outrider.scripts.common import names
from outrider.scripts.common.rendering import render
from outrider.scripts.reports.table import Table

TONE = {"lossless": "good", "not lossless": "bad", "undecided": "open"}  # of style.css
SHOWN = 12  # tests in the table; certificate.json has them all
OFF = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "guidance_scale": 1}
PROSE = ("evidence", "result")  # columns whose text may run over several lines


def table(certificate: dict[str, Any]) -> Table:
    """The layers and the controls, the verdict above, its reasons and the bound below."""
    layers, controls = _layers(certificate), certificate["negative_controls"]
    caught = f"{sum(c['rejected'] for c in controls)} of {len(controls)} rejected"
    rows = [*layers.rows, ["controls", "", caught]]
    target = certificate["identities"]["target"].get("name", "target")
    about = f"{certificate['identities']['drafter']['name']} on {target}, {_settings(certificate)}"
    notes = [*certificate["reasons"], certificate["bound"]["said"]]
    return Table(layers.head, rows, f"{certificate['verdict'].upper()}: {about}", notes, range(3))


def page(certificate: dict[str, Any]) -> str:
    """The whole page as text; no network, no scripts."""
    drafter = names.label(certificate["identities"]["drafter"]["name"])
    target = certificate["identities"]["target"].get("name", "target")
    sampling = [layer for layer in certificate["layers"] if layer["name"] == "sampling"]
    return render(
        "certificate.html",
        certificate=certificate,
        drafter=drafter,
        head=certificate["verdict"].capitalize(),
        tone=TONE[certificate["verdict"]],
        sub=f"{drafter} drafting for {target} · {_settings(certificate)}",
        layers=_layers(certificate),
        tests=[_tests(layer) for layer in sampling],
        controls=_controls(certificate),
        facts=_facts(certificate),
    )


def _settings(certificate: dict[str, Any]) -> str:
    s = certificate["settings"]
    words = [f"T = {s['temperature']:g}"]
    words += [f"{key} = {s[key]:g}" for key, off in OFF.items() if s[key] != off]
    return ", ".join([*words, certificate["identities"]["target"]["dtype"]])


def _evidence(layer: dict[str, Any]) -> str:
    if layer["name"] == "exact":
        return (
            f"{layer['cases']} small models, {layer['branches']} branches: distribution off by at "
            f"most {layer['max_error']:.1e}; the whole loop by {layer['loop_max_error']:.1e}"
        )
    if layer["name"] == "greedy":
        return (
            f"{layer['prompts']} prompts, {layer['tokens']} tokens ({layer['drafted_tokens']} "
            f"drafted): {layer['rounding_ties']} rounding ties, {layer['defects']} defects, "
            f"{layer['not_the_verifiers_best']} not the verifier's own best"
        )
    return (
        f"{layer['tokens']} tokens ({layer['drafted_share']:.0%} drafted), {len(layer['tests'])} "
        f"tests: p = {layer['p']:.3g} at alpha = {layer['alpha']:g}"
    )


def _layers(certificate: dict[str, Any]) -> Table:
    columns: list[tuple[str, Any]] = [
        ("layer", lambda layer: layer["name"]),
        ("result", lambda layer: "passed" if layer["passed"] else "FAILED: " + layer["why"]),
        ("evidence", _evidence),
    ]
    return Table.of(columns, certificate["layers"], prose=PROSE)


def _tests(layer: dict[str, Any]) -> Table:
    rows = [
        [t["name"], t["stratum"], f"{t['n']:,}", f"{t['statistic']:.4g}", f"{t['p']:.3g}"]
        for t in layer["tests"]
    ]
    first = f"test ({min(SHOWN, len(rows))} of {len(rows)}, smallest p)"
    return Table([first, "tokens", "n", "statistic", "p"], rows[:SHOWN])


def _controls(certificate: dict[str, Any]) -> Table:
    columns: list[tuple[str, Any]] = [
        ("wrong code", lambda c: c["name"]),
        ("layer", lambda c: c["layer"]),
        ("rejected", lambda c: "yes" if c["rejected"] else "NO"),
        ("evidence", lambda c: c["evidence"]),
    ]
    return Table.of(columns, certificate["negative_controls"], prose=PROSE)


def _facts(certificate: dict[str, Any]) -> list[tuple[str, Table]]:
    drafter, versions = dict(certificate["identities"]["drafter"]), dict(certificate["versions"])
    files = {f"sha256 {name}": value for name, value in drafter.pop("files", {}).items()}
    groups = {
        "target": certificate["identities"]["target"],
        "drafter": {**drafter, **certificate["shape"], **files},
        "settings": certificate["settings"],
        "versions": {**versions.pop("versions"), **versions},
    }
    return [
        (name, Table([], [[key, str(value)] for key, value in group.items()]))
        for name, group in groups.items()
    ]
