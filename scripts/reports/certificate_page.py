"""certificate.html and the table on the terminal, both from certificate.json alone."""

from __future__ import annotations

from typing import Any

from outrider.scripts.common.names import label
from outrider.scripts.common.rendering import render
from outrider.scripts.reports.table import Table

TONE = {"lossless": "good", "not lossless": "bad", "undecided": "open"}  # of style.css
SHOWN = 12  # tests in the table; certificate.json has them all
OFF = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "guidance_scale": 1}
PROSE = ("evidence", "result")  # columns whose text may run over several lines
EVIDENCE = {
    "exact": "{cases} small models, {branches} branches: distribution off by at most "
    "{max_error:.1e}",
    "greedy": "{prompts} prompts, {tokens} tokens ({drafted_tokens} drafted): {rounding_ties} "
    "rounding ties, {defects} defects, {not_the_verifiers_best} not the verifier's own best",
    "sampling": "{tokens} tokens ({drafted_share:.0%} drafted), {count} tests: p = {p:.3g} at "
    "alpha = {alpha:g}",
}


def table(certificate: dict[str, Any]) -> Table:
    """Return the layers and the controls, the verdict above, its reasons and the bound below."""
    layers, controls = _layers(certificate), certificate["negative_controls"]
    caught = f"{sum(c['rejected'] for c in controls)} of {len(controls)} rejected"
    rows = [*layers.rows, ["controls", "", caught]]
    about = f"{certificate['identities']['drafter']['name']} on {_about(certificate)}"
    notes = [*certificate["reasons"], certificate["bound"]["said"]]
    return Table(layers.head, rows, f"{certificate['verdict'].upper()}: {about}", notes, range(3))


def page(certificate: dict[str, Any]) -> str:
    """Return the whole page as text; no network, no scripts."""
    drafter = label(certificate["identities"]["drafter"]["name"])
    return render(
        "certificate.html",
        certificate=certificate,
        drafter=drafter,
        head=certificate["verdict"].capitalize(),
        tone=TONE[certificate["verdict"]],
        sub=f"{drafter} drafting for {_about(certificate)}",
        layers=_layers(certificate),
        tests=[_tests(layer["tests"]) for layer in certificate["layers"] if "tests" in layer],
        controls=_controls(certificate["negative_controls"]),
        facts=_facts(certificate),
    )


def _about(certificate: dict[str, Any]) -> str:
    """Return the target and how it was asked."""
    s, target = certificate["settings"], certificate["identities"]["target"]
    words = [target.get("name", "target"), f"T = {s['temperature']:g}"]
    words += [f"{key} = {s[key]:g}" for key, off in OFF.items() if s[key] != off]
    return ", ".join([*words, target["dtype"]])


def _layers(certificate: dict[str, Any]) -> Table:
    rows = [
        [
            layer["name"],
            "passed" if layer["passed"] else f"FAILED: {layer['why']}",
            EVIDENCE[layer["name"]].format(**layer, count=len(layer.get("tests", ()))),
        ]
        for layer in certificate["layers"]
    ]
    return Table(("layer", "result", "evidence"), rows, prose=PROSE)


def _tests(tests: list[dict[str, Any]]) -> Table:
    rows = [
        [t["name"], t["stratum"], f"{t['n']:,}", f"{t['statistic']:.4g}", f"{t['p']:.3g}"]
        for t in tests[:SHOWN]
    ]
    first = f"test ({len(rows)} of {len(tests)}, smallest p)"
    return Table((first, "tokens", "n", "statistic", "p"), rows)


def _controls(controls: list[dict[str, Any]]) -> Table:
    rows = [
        [c["name"], c["layer"], "yes" if c["rejected"] else "NO", c["evidence"]] for c in controls
    ]
    return Table(("wrong code", "layer", "rejected", "evidence"), rows, prose=PROSE)


def _facts(certificate: dict[str, Any]) -> list[tuple[str, Table]]:
    drafter, versions = dict(certificate["identities"]["drafter"]), dict(certificate["versions"])
    files = {f"sha256 {name}": value for name, value in drafter.pop("files", {}).items()}
    groups = {
        "target": certificate["identities"]["target"],
        "drafter": {**drafter, **certificate["shape"], **files},
        "settings": certificate["settings"],
        "versions": {**versions.pop("versions"), **versions},
    }
    return [(name, Table.listed(group)) for name, group in groups.items()]
