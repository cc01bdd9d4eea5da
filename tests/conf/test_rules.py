"""Types with rules: what they take, and what a line says of what they do not."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from outrider.conf.rules import (
    SEEDS,
    BelowOne,
    Device,
    FileName,
    Filled,
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


TAKEN: list[tuple[Any, Any, Any]] = [
    (int, 1e3, 1000),
    (OneOrMore | None, None, None),
    (float, 1, 1.0),
    (str, 7, "7"),
    (list[int | str], [1, "1"], [1, "1"]),
    (BelowOne | FileName, 0, 0.0),
    (BelowOne | FileName, "file", "file"),
    (tuple[int, ...], [1, 2.0], (1, 2)),
    (list[str], "a", ["a"]),
    (dict[str, Any], {"a": [1]}, {"a": [1]}),
    (Device, "cuda:3", "cuda:3"),
    (Seed, SEEDS - 1, SEEDS - 1),
]
REFUSED: list[tuple[Any, Any, str]] = [
    (float, float("inf"), "inf should be a finite number"),
    (bool, 2, "2 should be a valid boolean"),
    (str, None, "None should be a valid string"),
    (int | None, "x", "'x' should be a valid integer"),
    (list[int], [1, "x", 2.5], "'x' should be a valid integer"),
    (int, [1, 2], "[1, 2] should be a valid integer; --multirun"),
    (dict[str, int], [1], "[1] should be a valid dictionary"),
    (OneOrMore, 0, "0 should be greater than or equal to 1"),
    (BelowOne | FileName, 1.5, "1.5 should be less than 1"),
    (BelowOne | FileName, "", "is empty"),
    (Filled[OneOrMore], [], "is empty"),
    (Literal["", "a"], "b", "'b' should be '' or 'a'"),
    (Annotated[str, one_of({"x": 1, "y": 2})], "z", "'z' is none of x, y"),
    (Device, "gpu", "'gpu' should match"),
    (Seed, -1, "-1 should be greater"),
]


def test_values_that_are_taken_or_refused() -> None:
    for hint, value, wanted in TAKEN:
        found, problems = read(hint, value)
        assert problems == [] and found == wanted and type(found) is type(wanted), hint
    for hint, value, said in REFUSED:
        (line,) = read(hint, value)[1]
        assert line.startswith(f"key: {said}") and len(line) < 300 and "\n" not in line, hint


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
    assert faults(made) == [
        "from: 'x' should be a valid integer, unable to parse string as an integer"
    ]
    data = {"from": 1, "part": {"size": 1}, "out": "${x}"}
    assert from_json(data, schema)[0].out == "${x}"
    assert from_json({**data, "${x}": 1}, schema)[1][0].startswith("${x}: no such key")
