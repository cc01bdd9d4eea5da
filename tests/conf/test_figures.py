"""Figures of README and docs: each is a value of docs/results/figures.json, rounded as printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider.train.dry_run.report import report
from tests.conf.test_docs import PAGES, ROOT
from tests.train.test_dry_run import planned

RESULTS = ROOT / "docs/results"
NUMBER = r"(?<![\w.\-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?(?!\w|\.\d|,\d)"
INTERVAL = re.compile(rf"({NUMBER}) ?([×%]?) \[({NUMBER}), ({NUMBER})\]")
SPEEDUP = re.compile(r"(?<![\w.])(\d+\.\d\d)(×)")
SPEED = re.compile(r"(speed|\bratio)(?!.*: (low|high)$)")
HOURS = re.compile(r"(\d+\.\d to \d+\.\d)(?= hours|\) for )")
ALONE = re.compile(rf"({NUMBER})( ?[×%]?)")


class Value(NamedTuple):
    """A measured value. numbers: itself alone, or mean, low and high."""

    where: str
    numbers: tuple[float, ...]


def values(node: Any, where: str) -> Iterator[Value]:
    """Every number of a JSON file, and every estimate with its interval."""
    if isinstance(node, dict):
        if {"mean", "low", "high"} <= node.keys() and None not in node.values():
            yield Value(where, (node["mean"], node["low"], node["high"]))
        for key, inner in node.items():
            yield from values(inner, f"{where}: {key}")
    elif isinstance(node, list):
        for inner in node:
            yield from values(inner, where)
    elif isinstance(node, int | float):
        yield Value(where, (node,))


@cache
def measured(name: str = "figures") -> dict[str, list[Value]]:
    """The values of figures.json by id; of another file of docs/results by its name."""
    read = json.loads((RESULTS / f"{name}.json").read_text())
    if name != "figures":
        return {name: [*values(read, name)]}
    return {key: [*values(entry["values"], key)] for key, entry in read["figures"].items()}


def printed(value: Value, unit: str) -> list[tuple[float, ...]]:
    """The forms in which a value is printed; for % a share, a change and a loss."""
    if unit.strip() != "%":
        return [value.numbers]
    mean, *rest = value.numbers
    forms = (lambda x: 100 * x, lambda x: 100 * x - 100, lambda x: 100 - 100 * x)
    return [(form(mean), *sorted(map(form, rest))) for form in forms]


def distance(texts: tuple[str, ...], unit: str, value: Value) -> float:
    """How far a value is from what is printed, in units of the last printed digit."""
    numbers = [Decimal(text.replace(",", "")) for text in texts]
    units = [10.0 ** int(number.as_tuple().exponent) for number in numbers]
    far = float("inf")
    for form in printed(value, unit):
        if len(form) == len(texts):
            parts = zip(numbers, form, units, strict=True)
            far = min(far, max(abs(float(n) - x) / u for n, x, u in parts))
    return far


def unknown(text: str, known: list[Value], alone: re.Pattern[str] = SPEEDUP) -> list[str]:
    """The figures of a text that no known value prints as, each with the nearest values."""
    wrong = []
    found = [((m[1], m[3], m[4]), m[2], m[0]) for m in INTERVAL.finditer(text)]
    found += [((m[1],), m[2], m[0]) for m in alone.finditer(INTERVAL.sub("", text))]
    for texts, unit, shown in found:
        lone = unit == "×" and len(texts) == 1  # says little: it has to be of a speed
        of = [value for value in known if SPEED.search(value.where)] if lone else known
        near = sorted((distance(texts, unit, value), value) for value in of)
        if not near or near[0][0] > 0.5 + 1e-6:
            nearest = "; ".join(
                f"{v.where} {[round(x, 4) for x in v.numbers]}" for _, v in near[:3]
            )
            wrong.append(f"{shown}: no such figure; nearest: {nearest}")
    return wrong


def linked(text: str) -> list[Value]:
    """The values that a paragraph may print: of figures.json, and of a JSON that it links."""
    names = {"figures", *re.findall(r"results/([\w-]+)\.json\)", text)}
    return [v for name in sorted(names) for known in measured(name).values() for v in known]


def rows() -> list[list[str]]:
    """The cells of the rows of docs/results.md: what, result, ids."""
    lines = (ROOT / "docs/results.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if len(row) == 3 and row[-1] != "id"]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "results.md"], ids=lambda page: page.name
)
def test_figures_of_a_page_are_measured(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    wrong = [line for part in paragraphs for line in unknown(part, linked(part))]
    assert not wrong, "\n".join(wrong)


def test_hours_of_the_pages_are_the_dry_runs() -> None:
    """Of the command in train.md, with rows of both lengths; the code may have moved on."""
    command = ("experiment=qwen3_8b_eagle3", "rows=200000", "gpus=8", "gpu=h100-80gb")
    plans = [report(planned(*command, f"row_tokens={length}"))[1] for length in (800, 2500)]
    said = {hours for plan in plans for hours in HOURS.findall(plan)}
    told = {hours for page in PAGES for hours in HOURS.findall(page.read_text())}
    assert said and told <= said, f"the dry run says {said}"


def test_results_rows_are_their_entries() -> None:
    """Every number of a result is of the entries whose ids the row names, and none is left over."""
    wrong, named = [], set()
    for what, result, ids in rows():
        known = []
        for key in ids.split(", "):
            file = measured(key) if (RESULTS / f"{key}.json").exists() else measured()
            assert key in file, f"{what}: no entry {key} in figures.json"
            known += file[key]
            named.add(key)
        wrong += [f"{what}: {line}" for line in unknown(result, known, ALONE)]
    assert not wrong, "\n".join(wrong)
    assert len(named) > 30 and not measured().keys() - named, measured().keys() - named


def test_an_entry_says_where_it_is_from() -> None:
    read = json.loads((RESULTS / "figures.json").read_text())["figures"]
    for key, entry in read.items():
        for field in ("what", "target", "drafter", "engine", "hardware", "command", "commit"):
            assert entry[field].strip(), (key, field)
        assert re.fullmatch(r"[0-9a-f]{8}:docs/results/[\w-]+\.json", entry["source"]), key
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"]) and entry["values"], key
    assert len(list(RESULTS.iterdir())) <= 8


@pytest.mark.parametrize(
    "wrong", ["1.71× [1.63, 1.82]", "1.72× [1.63, 1.81]", "0.69×", "7.2 % [3.0, 11.9]"]
)
def test_a_wrong_digit_is_told_with_what_is_near(wrong: str) -> None:
    known = linked("")
    right = "1.71× [1.63, 1.81], 0.64×, lost 7.1 % [3.0, 11.9], +102 % [+88, +119]"
    assert not unknown(right, known)
    (said,) = unknown(f"{right}, {wrong}", known)
    assert said.startswith(wrong) and "nearest: " in said
