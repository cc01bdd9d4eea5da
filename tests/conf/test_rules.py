"""Types with rules: what they take, and what a line says of what they do not."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Annotated, Any, Literal

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
from outrider.conf.typed import faults, from_json


def read(hint: Any, value: Any) -> tuple[Any, list[str]]:
    schema = make_dataclass("Schema", [("key", hint)])
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


def test_a_default_that_breaks_its_own_rule_is_told_as_well() -> None:
    """So a key may be required by the default of an empty text."""
    part = make_dataclass("Part", [("name", NotEmpty, "")])
    schema = make_dataclass("Command", [("part", part), ("out", NotEmpty, "")])
    wanted = ["part.name: is empty; set part.name=VALUE", "out: is empty; set out=VALUE"]
    assert from_json({"part": {}}, schema)[1] == faults(schema(part())) == wanted
