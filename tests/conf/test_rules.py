"""Types with rules: what they take, and what a line says of what they do not."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Interval
from omegaconf import OmegaConf

from outrider.conf.rules import (
    SEEDS,
    AboveZero,
    AtATime,
    BelowOne,
    Device,
    FileName,
    Filled,
    Inside,
    NotEmpty,
    OneOrMore,
    Seed,
    one_of,
)
from outrider.conf.typed import convert, faults, from_json


def read(hint: Any, value: Any, usual: Any = ...) -> tuple[Any, list[str]]:
    default = () if usual is ... else (usual,)
    schema = make_dataclass("Schema", [("key", hint, *default)])
    made, problems = from_json({"key": value}, schema)
    return getattr(made, "key", None), problems


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (int, 1e3, 1000),
        (int, 10**30, 10**30),
        (OneOrMore | None, None, None),
        (float, 1, 1.0),
        (str, 7, "7"),
        (list[int | str], [1, "1"], [1, "1"]),
        (BelowOne | FileName, 0, 0.0),
        (BelowOne | FileName, "file", "file"),
        (tuple[int, ...], [1, 2.0], (1, 2)),
        (str | list[str], ["a", 7], ["a", "7"]),
        (dict[str, Any], {"a": [1]}, {"a": [1]}),
        (Device, "cuda:3", "cuda:3"),
        (Seed, SEEDS - 1, SEEDS - 1),
    ],
)
def test_values_that_are_taken(hint: Any, value: Any, wanted: Any) -> None:
    found, problems = read(hint, value)
    assert problems == [] and found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (int, True, "key: True is not a whole number"),
        (int, float("nan"), "key: nan is not"),
        (float, float("inf"), "key: inf is not a number; set key=X"),
        (float, 10**400, "key: 1"),
        (bool, 2, "key: 2 is not true or false; set key=true"),
        (str, None, "key: None is not text; set key=VALUE"),
        (int | None, "x", "key: 'x' is not a whole number"),
        (list[str], "a", "key: 'a' is not a list [..]; set key=[A,B]"),
        (list[int], [1, "x", 2.5], "key: 'x' is not a whole number"),
        (dict[str, int], [1], "key: [1] is not a mapping {..}; set key={A: B}"),
        (OneOrMore, 0, "key: 0 is below 1; give 1 or more"),
        (AboveZero | None, 0, "key: 0 is not above 0; give more"),
        (Annotated[int, Interval(ge=1, le=64)], 65, "key: 65 is above 64; give 64 or less"),
        (Inside, 1, "key: 1 is not below 1; give less"),
        (BelowOne | FileName, 1.5, "key: 1.5 is not below 1; give less"),
        (BelowOne | FileName, "", "key: is empty; set key=VALUE"),
        (Filled[OneOrMore], [], "key: is empty; set key=VALUE"),
        (Filled[OneOrMore], [1, 0], "key: 0 is below 1; give 1 or more"),
        (AtATime, [1, 65], "key: 65 is above 64; give 64 or less"),
        (Literal["", "a"], "b", "key: 'b' is none of nothing, a; choose one"),
        (Literal["a"], 1, "key: 1 is none of a; choose one"),
        (Annotated[str, one_of({"x": 1, "y": 2})], "z", "key: 'z' is none of x, y; choose one"),
        (Device, "gpu", "key: 'gpu' is none of cpu, cuda, cuda:N, nothing; choose one"),
        (Seed, -1, "key: -1 is below 0; give 0 or more"),
    ],
)
def test_values_that_are_refused(hint: Any, value: Any, said: str) -> None:
    (line,) = read(hint, value)[1]
    assert line.startswith(said) and len(line) < 300 and "\n" not in line


def test_the_fix_names_what_is_usual() -> None:
    assert read(Inside, 0, 0.95)[1] == ["key: 0 is not above 0; give more (0.95 is usual)"]
    assert read(NotEmpty, "", "runs/x")[1] == ["key: is empty; set key=runs/x"]


@dataclass
class Part:
    """A group."""

    name: NotEmpty = ""


@dataclass
class Command:
    """A command."""

    part: Part = field(default_factory=Part)
    out: NotEmpty = ""


def test_a_default_that_breaks_its_own_rule_is_told_as_well() -> None:
    """So a key may be required by the default of an empty text."""
    assert from_json({"part": {}}, Command)[1] == [
        "part.name: is empty; set part.name=VALUE",
        "out: is empty; set out=VALUE",
    ]
    assert faults(Command(), "all.") == [
        "all.part.name: is empty; set part.name=VALUE",
        "all.out: is empty; set out=VALUE",
    ]


def test_a_group_that_is_no_mapping_is_one_problem() -> None:
    inner = make_dataclass("Inner", [("size", int, 1)])
    outer = make_dataclass("Outer", [("inner", inner, field(default_factory=inner))])
    for wrong in (5, [1], "x", None):
        (line,) = convert(OmegaConf.create({"inner": wrong}), outer)[1]
        assert line.startswith("inner: ") and "{..}" in line


def test_what_is_missing_or_refers_to_nothing_is_one_line_each() -> None:
    """A group that nobody set has its defaults; an interpolation ends the reading."""
    inner = make_dataclass("Inner", [("size", int)])
    groups = [("part", inner), ("out", str)]
    schema = make_dataclass("Outer", [("from_", int), *groups])
    given = {"from": 1, "part": {"size": "???"}, "out": "???"}
    assert convert(OmegaConf.create(given), schema)[1] == [
        "part.size: is required; set part.size=VALUE",
        "out: is required; set out=VALUE",
    ]
    (line,) = convert(OmegaConf.create({**given, "part": {"size": "${b.c}"}}), schema)[1]
    assert line.startswith("part.size: Interpolation key 'b.c' not found")
    made = schema(from_="x", part=inner(1), out="${x}")
    assert faults(made) == ["from: 'x' is not a whole number; set from=N"]
    data = {"from": 1, "part": {"size": 1}, "out": "${x}"}
    assert from_json(data, schema)[0].out == "${x}"
    assert from_json({**data, "${x}": 1}, schema)[1][0].startswith("${x}: no such key")
