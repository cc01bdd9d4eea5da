"""Figures of README and docs: each is a value of docs/results/figures.json, rounded as printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.train.dry_run.report import report
from tests.conf.test_docs import PAGES, ROOT
from tests.train.test_dry_run import planned

RESULTS = ROOT / "docs/results"
NUMBER = r"(?<![\w.\-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?(?!\w|\.\d|,\d)"
INTERVAL = re.compile(rf"({NUMBER}) ?([×%]?) \[({NUMBER}), ({NUMBER})\]")
SPEEDUP = re.compile(r"(?<![\w.])(\d+\.\d\d)(×)")
ALONE = re.compile(rf"({NUMBER}) ?([×%]?)")
SPEED = re.compile(r"(speed|\bratio)(?!.*: (low|high)$)")
HOURS = re.compile(r"(\d+\.\d to \d+\.\d)(?= hours|\) for )")

Value = tuple[str, tuple[float, ...]]  # where it is; itself alone, or mean, low and high


def values(node: Any, where: str) -> Iterator[Value]:
    """Every number of a JSON file, and every estimate with its interval."""
    if isinstance(node, dict):
        if {"mean", "low", "high"} <= node.keys() and None not in node.values():
            yield where, (node["mean"], node["low"], node["high"])
        for key, inner in node.items():
            yield from values(inner, f"{where}: {key}")
    elif isinstance(node, list):
        for inner in node:
            yield from values(inner, where)
    elif isinstance(node, int | float):
        yield where, (node,)


@cache
def measured() -> dict[str, list[Value]]:
    """The values of every entry of figures.json by its id, of other files of docs/results by name."""
    files = {path.stem: json.loads(path.read_text()) for path in RESULTS.iterdir()}
    entries = {key: entry["values"] for key, entry in files.pop("figures")["figures"].items()}
    return {key: [*values(node, key)] for key, node in {**entries, **files}.items()}


def distance(texts: tuple[str, ...], unit: str, value: Value) -> float:
    """How far a value is from what is printed, in units of the last digit. With % a value may be
    printed as a share, a change or a loss."""
    forms = [lambda x: x]
    if unit == "%":
        forms = [lambda x: 100 * x, lambda x: 100 * x - 100, lambda x: 100 - 100 * x]
    if len(texts) != len(value[1]):
        return float("inf")
    printed = [Decimal(text.replace(",", "")) for text in texts]
    mean, *ends = value[1]
    return min(
        max(
            abs(float(number) - x) / 10.0 ** int(number.as_tuple().exponent)
            for number, x in zip(printed, (form(mean), *sorted(map(form, ends))), strict=True)
        )
        for form in forms
    )


def unknown(text: str, known: list[Value], alone: re.Pattern[str] = SPEEDUP) -> list[str]:
    """The figures of a text that no known value prints as, each with the nearest values."""
    wrong = []
    found = [((m[1], m[3], m[4]), m[2], m[0]) for m in INTERVAL.finditer(text)]
    found += [((m[1],), m[2], m[0]) for m in alone.finditer(INTERVAL.sub("", text))]
    for texts, unit, shown in found:
        lone = unit == "×" and len(texts) == 1  # says little: it has to be of a speed
        of = [value for value in known if SPEED.search(value[0])] if lone else known
        near = sorted((distance(texts, unit, value), value) for value in of)[:3]
        if not near or near[0][0] > 0.5 + 1e-6:
            nearest = "; ".join(f"{where} {numbers}" for _, (where, numbers) in near)
            wrong.append(f"{shown}: no such figure; nearest: {nearest}")
    return wrong


def linked(text: str) -> list[Value]:
    """The values that a paragraph may print: of figures.json, and of a JSON that it links."""
    barred = {p.stem for p in RESULTS.iterdir()} - {*re.findall(r"results/([\w-]+)\.json\)", text)}
    return [value for key, of in measured().items() if key not in barred for value in of]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_of_a_page_are_measured(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    if page.name == "results.md":
        paragraphs = [part for part in paragraphs if not part.startswith("|")]  # below
    wrong = [line for part in paragraphs for line in unknown(part, linked(part))]
    assert not wrong, "\n".join(wrong)


def test_a_row_of_results_has_the_figures_of_its_entries() -> None:
    """Every number of it; a row for every entry; an entry says where it is from."""
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", (ROOT / "docs/results.md").read_text(), re.M)
    wrong, named = [], set()
    for what, result, ids in rows:
        if ids != "id":
            named |= {*ids.split(", ")}
            known = [value for key in ids.split(", ") for value in measured()[key]]
            wrong += [f"{what}: {line}" for line in unknown(result, known, ALONE)]
    assert not wrong, "\n".join(wrong)
    files = [*RESULTS.iterdir()]
    entries = json.loads((RESULTS / "figures.json").read_text())["figures"]
    assert len(files) <= 8 and entries and not entries.keys() - named, entries.keys() - named
    for key, entry in entries.items():
        for field in ("what", "target", "drafter", "engine", "hardware", "command", "commit"):
            assert entry[field].strip(), (key, field)
        assert re.fullmatch(r"[0-9a-f]{8}:docs/results/[\w-]+\.json", entry["source"]), key
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"]), key


@pytest.mark.parametrize("wrong", ["1.71× [1.63, 1.82]", "0.69×", "7.2 % [3.0, 11.9]"])
def test_a_wrong_digit_is_told_with_what_is_near(wrong: str) -> None:
    known = linked("")
    right = "1.71× [1.63, 1.81], 0.64×, lost 7.1 % [3.0, 11.9], +102 % [+88, +119]"
    assert not unknown(right, known)
    (said,) = unknown(f"{right}, {wrong}", known)
    assert said.startswith(wrong) and "nearest: " in said


def test_hours_of_the_pages_are_the_dry_runs() -> None:
    """Of the command in train.md, with rows of both lengths; the code may have moved on."""
    command = ("experiment=qwen3_8b_eagle3", "rows=200000", "gpus=8", "gpu=h100-80gb")
    plans = [report(planned(*command, f"row_tokens={length}"))[1] for length in (800, 2500)]
    said = {hours for plan in plans for hours in HOURS.findall(plan)}
    told = {hours for page in PAGES for hours in HOURS.findall(page.read_text())}
    assert said and told <= said, f"the dry run says {said}"
