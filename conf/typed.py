"""A composed config, or a JSON object of a file, becomes a typed dataclass, or every problem
it has is told at once.

Hydra's own check does not see keys appended with `+`, nor ranges: here the dataclass is the
only authority. pydantic reads every value by its field's type (conf/rules.py has types with
ranges); groups are walked here, so that one that is wrong hides no mistake of the others. A
dataclass may define `validate(self) -> list[str]` for what concerns several keys: "key: value;
rule; fix".
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import keyword
import reprlib
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AllowInfNan, BeforeValidator, Field, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from conf.errors import UserError, first_line

T = TypeVar("T")
INVALID = (
    object()
)  # stands for a value that could not be converted; its problem is already on the list
SHORT = reprlib.Repr()  # how a wrong value is shown: the line stays a line
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 100


def to_typed(cfg: DictConfig, schema: type[T]) -> T:
    """The composed `cfg` as an instance of the dataclass `schema`. Raises UserError with every
    problem.
    """
    value, problems = convert(cfg, schema)
    raise_all(problems)
    return value


def raise_all(problems: list[str]) -> None:
    """Raise one UserError for a list of problems: itself if there is one, a numbered list
    otherwise.
    """
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        lines = "".join(f"\n  {i}. {line}" for i, line in enumerate(problems, 1))
        raise UserError(f"{len(problems)} problems in the configuration:{lines}")


def convert(cfg: DictConfig, schema: type[T]) -> tuple[T, list[str]]:
    """Like to_typed, but hands the problems back; the value is meaningless when there are any."""
    problems: list[str] = []
    value = _dataclass(cfg, schema, "", schema, problems)
    return value, problems


def from_json(data: Any, schema: type[T]) -> tuple[T, list[str]]:
    """A parsed JSON object as an instance of the dataclass `schema`, and its problems; the
    value is meaningless when there are any. Nothing in the file is interpreted: "${..}" is
    text."""
    problems: list[str] = []
    if not isinstance(data, dict):
        return INVALID, [f"a {type(data).__name__}, not a JSON object"]  # type: ignore[return-value]
    value = _dataclass(data, schema, "", schema, problems)
    return value, problems


def key_of(name: str) -> str:
    """The key of a field: its name, without the underscore behind a word that Python keeps for
    itself (`from_`).
    """
    return name[:-1] if keyword.iskeyword(name[:-1]) and name.endswith("_") else name


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a schema, groups included (`optim`, `optim.lr`)."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        yield prefix + key_of(field.name)
        nested = nested_schema(hints[field.name])
        if nested is not None:
            yield from keys(nested, f"{prefix}{field.name}.")


def nested_schema(hint: Any) -> type | None:
    """The dataclass inside a type hint, looking through Optional."""
    for option in _options(hint):
        if dataclasses.is_dataclass(option):
            return typing.cast(type, option)
    return None


def knows(schema: type, key: str) -> bool:
    """Whether a dotted key is a field of the schema or lies inside a dict or Any field."""
    hint: Any = schema
    for part in key.split("."):
        nested = nested_schema(hint)
        if nested is None:
            return any(
                o is Any or typing.get_origin(o) is dict or o is dict for o in _options(hint)
            )
        hints = {key_of(name): h for name, h in typing.get_type_hints(nested).items()}
        if part not in hints:
            return False
        hint = hints[part]
    return True


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The one-line message about a key that does not exist, with the nearest one that does."""
    known = list(known)
    group = key.rpartition(".")[0]
    inside = [k for k in known if group and k.startswith(group + ".")]
    return f"{key}: no such key; {nearest(key, inside or known)}"


def nearest(word: str, known: Iterable[str]) -> str:
    """ "did you mean X?" for the closest known word, or the list of what exists."""
    known = list(known)
    close = difflib.get_close_matches(word, known, 1, 0.5)
    if not close:  # lr -> optim.lr: compare the last parts as well
        last = {k.rpartition(".")[2]: k for k in known}
        close = [
            last[w] for w in difflib.get_close_matches(word.rpartition(".")[2], list(last), 1, 0.7)
        ]
    if close:
        return f"did you mean {close[0]}?"
    return "known: " + ", ".join(sorted(k for k in known if "." not in k) or sorted(known))


def docs(schema: type) -> dict[str, str]:
    """Field name -> its doc line: metadata "doc", else the comment on its line or right above
    it.
    """
    found = {f.name: f.metadata["doc"] for f in dataclasses.fields(schema) if "doc" in f.metadata}
    for base in schema.__mro__:
        if not dataclasses.is_dataclass(base):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        tree = ast.parse(source).body[0]
        for node in tree.body if isinstance(tree, ast.ClassDef) else []:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            after = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :].strip()
            at = node.lineno - 2
            above: list[str] = []
            while at >= 0 and lines[at].strip().startswith("#"):
                above.insert(0, lines[at].strip().lstrip("# "))
                at -= 1
            text = after.lstrip("# ") if after.startswith("#") else " ".join(above)
            if text:
                found.setdefault(node.target.id, text)
    return found


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _dataclass(
    cfg: DictConfig | dict[str, Any], schema: Any, prefix: str, root: type, problems: list[str]
) -> Any:
    hints = typing.get_type_hints(schema, include_extras=True)
    fields = {key_of(f.name): f for f in dataclasses.fields(schema) if f.init}
    before = len(problems)
    if not (prefix and wrong_kind(cfg, schema)):  # else its keys belong to another schema
        unknown = [prefix + str(key) for key in cfg if str(key) not in fields]
        problems += [unknown_key(key, keys(root)) for key in unknown]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        key, hint, usual = prefix + name, hints[field.name], default(field)
        raw = usual
        if name in cfg:
            try:
                raw = dataclasses.MISSING if _is_missing(cfg, name) else cfg[name]
            except OmegaConfBaseException as error:
                problems.append(f"{key}: {first_line(error)}; mend the interpolation")
                continue
        if raw is dataclasses.MISSING:
            problems.append(f"{key}: is required; set {key}=VALUE")
            continue
        nested = nested_schema(hint)
        if nested is None:
            value, found = _value(raw, hint, key, usual)
            problems += found
        elif isinstance(raw, DictConfig | dict):
            value = _dataclass(raw, nested, f"{key}.", root, problems)
        elif isinstance(raw, nested) or (raw is None and type(None) in _options(hint)):
            value = raw
        else:
            problems.append(f"{key}: {SHORT.repr(raw)} is not a mapping {{..}}; set its keys")
            continue
        values[field.name] = value
    if len(problems) > before:
        return INVALID
    made = schema(**values)
    problems += [prefix + line for line in _rules(made)]
    return made


def faults(made: Any, prefix: str = "") -> list[str]:
    """The problems of a dataclass that Python code made, as `convert` would tell them."""
    found: list[str] = []
    hints = typing.get_type_hints(type(made), include_extras=True)
    for field in dataclasses.fields(made):
        value, key = getattr(made, field.name), prefix + key_of(field.name)
        if dataclasses.is_dataclass(value):
            found += faults(value, f"{key}.")
        else:
            found += _value(value, hints[field.name], key, default(field))[1]
    return found or [prefix + line for line in _rules(made)]


def default(field: dataclasses.Field[Any]) -> Any:
    """What a field holds where nobody sets it; dataclasses.MISSING where somebody must."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _rules(made: Any) -> list[str]:
    return made.validate() if hasattr(made, "validate") else []


def _is_missing(cfg: DictConfig | dict[str, Any], name: str) -> bool:
    return isinstance(cfg, DictConfig) and OmegaConf.is_missing(cfg, name)


def wrong_kind(cfg: DictConfig | dict[str, Any], schema: Any) -> str:
    """What is wrong with the `kind` of a group's options, where the schema takes others; "" if
    nothing.
    """
    hint = typing.get_type_hints(schema, include_extras=True).get("kind")
    if hint is None or "kind" not in cfg or _is_missing(cfg, "kind"):
        return ""
    found = _value(cfg["kind"], hint, "kind", dataclasses.MISSING)[1]
    return found[0] if found else ""


def _whole(raw: Any) -> Any:
    """steps=1e3 is a whole number."""
    return int(raw) if isinstance(raw, float) and raw.is_integer() else raw


def _text(raw: Any) -> Any:
    """A path or a revision made of digits is text."""
    return str(raw) if type(raw) in (int, float) else raw


READ: dict[Any, Any] = {
    bool: Annotated[bool, Strict()],
    int: Annotated[int, Strict(), BeforeValidator(_whole)],
    float: Annotated[float, Strict(), AllowInfNan(False)],
    str: Annotated[str, Strict(), BeforeValidator(_text)],
}


def _read(hint: Any, digits: bool = True) -> Any:
    """A type hint whose plain types are read as READ says. digits: a number may be text."""
    args, origin = typing.get_args(hint), typing.get_origin(hint)
    if not args or origin is Literal:
        return Annotated[str, Strict()] if hint is str and not digits else READ.get(hint, hint)
    if origin is Annotated:
        return Annotated[(_read(args[0], digits), *args[1:])]
    if origin not in (typing.Union, types.UnionType):
        return origin[tuple(_read(one) for one in args)]
    plain = {getattr(one, "__origin__", one) for one in args}
    inner = tuple(_read(one, not plain & {int, float}) for one in args)
    if len(plain - {type(None)}) == 1:
        return typing.Union[inner]  # noqa: UP007
    return Annotated[typing.Union[inner], Field(union_mode="left_to_right")]  # noqa: UP007


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_read(hint))


def _value(raw: Any, hint: Any, key: str, usual: Any) -> tuple[Any, list[str]]:
    """(a value as its type reads it, what is wrong with it). usual: the field's default."""
    if isinstance(raw, DictConfig | ListConfig):
        raw = OmegaConf.to_container(raw, resolve=True)
    try:
        return _adapter(hint).validate_python(raw), []
    except ValidationError as error:
        return INVALID, [f"{key}: {_told(error.errors(include_url=False), raw, hint, key, usual)}"]


def _choices(expected: str) -> str:
    """pydantic's list of choices, 'a', 'b' or 'c', without the quotes."""
    words = expected.replace("''", "nothing").replace("'", "")
    return words.replace(" or ", ", ")


WORDS = {
    "int_type": ("a whole number", "8"),
    "float_type": ("a number", "0.5"),
    "finite_number": ("a number", "0.5"),
    "bool_type": ("true or false", "true"),
    "string_type": ("text", "VALUE"),
    "list_type": ("a list [..]", "[A,B]"),
    "tuple_type": ("a list [..]", "[A,B]"),
    "dict_type": ("a mapping {..}", "{A: B}"),
}


def _told(errors: list[ErrorDetails], raw: Any, hint: Any, key: str, usual: Any) -> str:
    """pydantic's errors about one value in our words: "value; rule; fix"."""
    for error in errors:
        if line := _broken(error, key, usual):
            return line
    shown = errors[0]["input"]  # of a list the first wrong item, by every type it may have
    same = [error for error in errors if error["input"] is shown]
    pairs = [WORDS.get(error["type"], (error["msg"], "VALUE")) for error in same]
    words = [*dict.fromkeys(word for word, _ in pairs)]
    words += ["null"] if shown is raw and type(None) in _options(hint) else []
    fix = pairs[0][1] if shown is raw else f"[{pairs[0][1]}]"
    return f"{SHORT.repr(shown)} is not {' or '.join(words)}; set {key}={fix}"


def _broken(error: ErrorDetails, key: str, usual: Any) -> str:
    """The rule that a value of the right type breaks; "" where the type is wrong."""
    shown = SHORT.repr(error["input"])
    bounds = {
        name: int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        for name, bound in error.get("ctx", {}).items()
    }
    common = "" if usual is dataclasses.MISSING or usual == error["input"] else usual
    near = f"{common} is usual" if isinstance(common, int | float) else ""
    match error["type"]:
        case "greater_than_equal":
            return f"{shown} is below {bounds['ge']}; give {bounds['ge']} or more"
        case "less_than_equal":
            return f"{shown} is above {bounds['le']}; give {bounds['le']} or less"
        case "greater_than":
            return f"{shown} is not above {bounds['gt']}; {near or 'give more'}"
        case "less_than":
            return f"{shown} is not below {bounds['lt']}; {near or 'give less'}"
        case "too_short" | "string_too_short":
            return f"is empty; set {key}={common or 'VALUE'}"
        case "too_long":
            return f"{shown} holds too many; give {bounds['max_length']}"
        case "literal_error":
            return f"{shown} is none of {_choices(error['ctx']['expected'])}; choose one"
    return ""
