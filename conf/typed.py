"""Typed configuration: turn a composed config, or a JSON object of a file, into a frozen
dataclass, or say every problem that it has at once.

The dataclass is the only authority. pydantic checks each value against the type of its field
(conf/rules.py has types with ranges) and says what it should be. A dataclass may define
`validate(self) -> list[str]` for rules about several keys: "key: value; rule; fix".
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import keyword
import re
import reprlib
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from outrider.conf.errors import UserError, first_line
from outrider.conf.words import left, synonym

T = TypeVar("T")
SHORT = reprlib.Repr()  # how a wrong value is shown: the line stays a line
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 100
LIKE = 0.75  # of the letters are those of another word, in order: a slip of it


def raise_all(problems: list[str]) -> None:
    """Raise one UserError for a list of problems: the only one as it is, several as a numbered
    list."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        lines = "".join(f"\n  {i}. {line}" for i, line in enumerate(problems, 1))
        raise UserError(f"{len(problems)} problems in the configuration:{lines}")


def convert(cfg: DictConfig, schema: type[T]) -> tuple[T, list[str]]:
    """Return a composed configuration as an instance of the dataclass `schema`, and its
    problems; the value has no meaning when there are any."""
    try:
        data = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or "configuration"
        return typing.cast(T, None), [f"{key}: {first_line(error)}; mend the interpolation"]
    return from_json(_renamed(_given(data), schema), schema)


def _given(data: Any) -> Any:
    """Leave out what nobody set: the dataclass says whether it must be."""
    if not isinstance(data, dict):
        return data
    return {key: _given(value) for key, value in data.items() if value != "???"}


def from_json(data: Any, schema: type[T], prefix: str = "") -> tuple[T, list[str]]:
    """Return a parsed JSON object as an instance of the dataclass `schema`, and its
    problems; the value has no meaning when there are any. Nothing in it is interpreted:
    "${..}" is text. prefix: before every key of a problem."""
    if not isinstance(data, dict):
        return typing.cast(T, None), [f"a {type(data).__name__}, not a JSON object"]
    try:
        made = _adapter(typing.cast(Any, schema)).validate_python(_completed(data, schema))
    except ValidationError as error:
        problems = _summary(error.errors(include_url=False), schema)
        return typing.cast(T, None), [prefix + line for line in problems]
    return made, [prefix + line for line in _rules(made)]


def faults(made: Any, prefix: str = "") -> list[str]:
    """Return the problems of a dataclass that Python code made, as `convert` would."""
    data = {key_of(field.name): getattr(made, field.name) for field in dataclasses.fields(made)}
    return from_json(data, type(made), prefix)[1]


# The keys of a schema
# -------------------------------------------------------------------------------------------


def key_of(name: str) -> str:
    """Return the key of a field: its name, without the underscore behind a word that Python
    keeps for itself (`from_`)."""
    return name[:-1] if keyword.iskeyword(name[:-1]) and name.endswith("_") else name


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield all dotted keys of a schema, groups included (`optim`, `optim.lr`)."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        yield prefix + key_of(field.name)
        if nested := nested_schema(hints[field.name]):
            yield from keys(nested, f"{prefix}{field.name}.")


def nested_schema(hint: Any) -> type | None:
    """Return the dataclass inside a type hint, looking through Optional."""
    found = (one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one))
    return typing.cast(type | None, next(found, None))


def default(field: dataclasses.Field[Any]) -> Any:
    """Return what a field holds where nobody sets it; dataclasses.MISSING where somebody
    must."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


# Words that are no key
# -------------------------------------------------------------------------------------------


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the one-line message about a key that does not exist: what left, another
    tool's name for one, that very name without a group, or a slip of one."""
    known, (group, _, name) = list(known), key.rpartition(".")
    if gone := left("keys", key) or left("keys", group):
        return gone
    said = synonym(key, known)
    if not said and group and name in known:
        said = f"did you mean {name}?"
    inside = [one for one in known if group and one.startswith(f"{group}.")]
    return f"{key}: no such key; {said or nearest(key, inside or known)}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "did you mean X?" for the word, or dotted key, that this is a slip of, or the list
    of what exists."""
    known = list(known)
    last = {one.rpartition(".")[2]: one for one in known}
    whole = difflib.get_close_matches(word, known, 1, LIKE)
    part = difflib.get_close_matches(word.rpartition(".")[2], list(last), 1, LIKE)
    if close := [*whole, *(last[one] for one in part)]:
        return f"did you mean {close[0]}?"
    least = min((one.count(".") for one in known), default=0)
    names = sorted(one.split(".")[-1] for one in known if one.count(".") == least)
    return f"known: {', '.join(names)}"


# The check of a value
# -------------------------------------------------------------------------------------------

CHECKED = ConfigDict(
    extra="forbid",
    alias_generator=key_of,
    coerce_numbers_to_str=True,  # a path or a revision made of digits is text
    validate_default=True,
    revalidate_instances="always",
    allow_inf_nan=False,
)


@functools.cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    """pydantic's check of a dataclass and of those in it."""
    for nested in filter(None, map(nested_schema, typing.get_type_hints(schema).values())):
        _adapter(nested)
    schema.__pydantic_config__ = CHECKED  # type: ignore[attr-defined]
    return TypeAdapter(schema)


def _renamed(data: dict[str, Any], schema: type) -> dict[str, Any]:
    """Return the keys of a command line as the schema has them: drafters=[A] for drafter=A where
    it takes several, and the other way round."""
    hints, found = typing.get_type_hints(schema), dict(data)
    for key, value in data.items():
        more, one = f"{key}s", key.removesuffix("s")
        several = isinstance(value, list) and typing.get_origin(hints.get(key)) is not list
        if typing.get_origin(hints.get(more)) is list and (several or key not in hints):
            found[more] = found.pop(key)
        elif key not in hints and one in hints and one not in data:
            alone = isinstance(value, list) and len(value) == 1
            found[one] = found.pop(key)[0] if alone else found.pop(key)
    return found


def _completed(data: dict[str, Any], schema: type) -> dict[str, Any]:
    """Return `data` where a key that holds a list has one, and where a group that is given in
    part has the rest from the default of its field."""
    hints, found = typing.get_type_hints(schema), dict(data)
    for field in dataclasses.fields(schema):
        key = key_of(field.name)
        given, usual, hint = found.get(key), default(field), hints[field.name]
        nested = type(usual) if dataclasses.is_dataclass(usual) else nested_schema(hint)
        if isinstance(given, dict) and nested:
            rest = {key_of(k): v for k, v in getattr(usual, "__dict__", {}).items()}
            found[key] = rest | _completed(given, nested)
        elif typing.get_origin(hint) is list and isinstance(given, str | int | float):
            found[key] = [given]
    return found


def _rules(made: Any) -> list[str]:
    """Return what the `validate` of a dataclass and of those in it say."""
    found = []
    for field in dataclasses.fields(made):
        if dataclasses.is_dataclass(part := getattr(made, field.name)):
            found += [f"{field.name}.{line}" for line in _rules(part)]
    return [*found, *(made.validate() if hasattr(made, "validate") else [])]


def _summary(errors: list[ErrorDetails], schema: type) -> list[str]:
    """pydantic's errors as "key: value; rule; fix", one for each key."""
    known, found = {*keys(schema)}, dict[str, list[ErrorDetails]]()
    for error in errors:
        place = [str(part) for part in error["loc"]]
        names = [".".join(place[:end]) for end in range(len(place), 0, -1)]
        key = next((name for name in names if name in known), names[-1])
        strange = error["type"] == "unexpected_keyword_argument"
        found.setdefault(names[0] if strange else key, []).append(error)
    # The other keys of a group of another kind are no mistakes: they belong to another schema.
    others = tuple(key.removesuffix("kind") for key in found if key.endswith(".kind"))
    lines = []
    for key, those in found.items():
        types = ("_type", "_parsing", "_from_float", "finite_number")
        # Of a union what the fitting type says.
        error = min(those, key=lambda one: one["type"].endswith(types))
        if error["type"] != "unexpected_keyword_argument":
            lines.append(f"{key}: {_worded(error, key)}")
        elif not key.startswith(others):
            lines.append(unknown_key(key, known))
    return lines


def _worded(error: ErrorDetails, key: str) -> str:
    """Return "value; rule; fix" of one of pydantic's errors."""
    kind, given = error["type"], error["input"]
    if kind == "missing" or kind.endswith("too_short"):
        return f"{'is required' if kind == 'missing' else 'is empty'}; set {key}=VALUE"
    own = error.get("ctx", {}).get("error")  # of a rule of ours
    said = str(own) if own else re.sub(r"^\w+ (?=should)", "", error["msg"])
    runs = "; --multirun runs each" if isinstance(given, list) and "list" not in said else ""
    return f"{SHORT.repr(given)} {said}{runs}"
