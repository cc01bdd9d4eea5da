"""A composed config, or a JSON object of a file, becomes a typed dataclass, or every problem
it has is told at once.

Hydra's own check does not see keys appended with `+`, nor ranges: here the dataclass is the
only authority. Field types may be bool, int, float, str, Literal, Optional and other unions,
list, tuple, dict with str keys, Any, and nested dataclasses. A dataclass may define
`validate(self) -> list[str]`: "key: value; rule; fix".
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import keyword
import math
import reprlib
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import UserError

T = TypeVar("T")
INVALID = (
    object()
)  # stands for a value that could not be converted; its problem is already on the list
SHORT = reprlib.Repr()  # how a wrong value is shown: the line stays a line
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 100
SEEDS = 1 << 63  # seeds lie below: torch and numpy take no other ones


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
    hints = typing.get_type_hints(schema)
    fields = {key_of(f.name): f for f in dataclasses.fields(schema) if f.init}
    known = list(keys(root))
    if prefix and (wrong := wrong_kind(cfg, schema)):
        problems.append(
            prefix + wrong
        )  # its keys belong to another schema: each would be a problem of its own
        return INVALID
    for key in cfg:
        if str(key) not in fields:
            problems.append(unknown_key(prefix + str(key), known))
    values: dict[str, Any] = {}
    before = len(problems)
    for name, field in fields.items():
        key = prefix + name
        absent = name not in cfg
        if absent and (field.default, field.default_factory) != (
            dataclasses.MISSING,
            dataclasses.MISSING,
        ):
            continue
        if absent or _is_missing(cfg, name):
            problems.append(f"{key}: is required; set {key}=VALUE")
            continue
        try:
            raw = cfg[name]
        except OmegaConfBaseException as error:
            problems.append(f"{key}: {str(error).splitlines()[0]}; mend the interpolation")
            continue
        value = _value(raw, hints[field.name], key, root, problems)
        if value is not INVALID:
            values[field.name] = value
    if len(problems) > before:
        return INVALID
    made = schema(**values)
    found = made.validate() if hasattr(made, "validate") else []
    for line in [*found, *_seed_problem(values)]:
        problems.append(line if line.startswith(prefix) else prefix + line)
    return made


def _is_missing(cfg: DictConfig | dict[str, Any], name: str) -> bool:
    return isinstance(cfg, DictConfig) and OmegaConf.is_missing(cfg, name)


def _seed_problem(values: dict[str, Any]) -> list[str]:
    """One rule for the `seed` of every command."""
    seed = values.get("seed")
    if type(seed) is not int or 0 <= seed < SEEDS:
        return []
    return [f"seed: {SHORT.repr(seed)} is outside 0..2**63 - 1; set seed={seed % SEEDS}"]


def wrong_kind(cfg: DictConfig | dict[str, Any], schema: Any) -> str:
    """What is wrong with the `kind` of a group's options, where the schema's own rule takes
    others; "" if nothing.
    """
    known = {field.name for field in dataclasses.fields(schema)}
    if "kind" not in known or "kind" not in cfg or _is_missing(cfg, "kind"):
        return ""
    problems: list[str] = []
    _dataclass({"kind": cfg["kind"]}, schema, "", schema, problems)
    return next(
        (line for line in problems if line.startswith("kind:") and "; set kind=" not in line), ""
    )


def _value(raw: Any, hint: Any, key: str, root: type, problems: list[str]) -> Any:
    options = _options(hint)
    nested = nested_schema(hint)
    if nested is not None and isinstance(raw, DictConfig | dict):
        return _dataclass(raw, nested, f"{key}.", root, problems)
    for option in sorted(
        options, key=lambda o: o is not type(raw)
    ):  # an exact match before a conversion
        value = _scalar(raw, option, key, root)
        if value is not INVALID:
            return value
    shown = OmegaConf.to_container(raw) if isinstance(raw, DictConfig | ListConfig) else raw
    problems.append(f"{key}: {SHORT.repr(shown)} is not {_words(hint)}; set {key}={_example(hint)}")
    return INVALID


def _scalar(raw: Any, option: Any, key: str, root: type) -> Any:
    origin, args = typing.get_origin(option), typing.get_args(option)
    if option is Any:
        return (
            OmegaConf.to_container(raw, resolve=True)
            if isinstance(raw, DictConfig | ListConfig)
            else raw
        )
    if option is type(None) or raw is None:
        return None if raw is None and option is type(None) else INVALID
    if origin is typing.Literal:
        return raw if any(raw == a and type(raw) is type(a) for a in args) else INVALID
    if origin in (list, tuple) or option in (list, tuple):
        if not isinstance(raw, ListConfig | list):
            return INVALID
        hints = [args[0] if args else Any] * len(raw)
        if origin is tuple and args[1:] != (...,):
            if len(args) != len(raw):
                return INVALID
            hints = list(args)
        items = [_value(item, h, key, root, []) for item, h in zip(raw, hints, strict=True)]
        return INVALID if any(i is INVALID for i in items) else (origin or option)(items)
    if origin is dict or option is dict:
        if not isinstance(raw, DictConfig | dict):
            return INVALID
        pairs = {str(k): _value(raw[k], args[1] if args else Any, key, root, []) for k in raw}
        return INVALID if any(v is INVALID for v in pairs.values()) else pairs
    if isinstance(raw, DictConfig | ListConfig | dict | list) or not isinstance(option, type):
        return INVALID
    if option is bool or isinstance(raw, bool):
        return raw if option is bool and isinstance(raw, bool) else INVALID
    if option is int and isinstance(raw, float):  # steps=1e3
        return int(raw) if raw.is_integer() else INVALID
    if option is float:
        return _float(raw)
    if option is str and isinstance(raw, int | float):  # a path or a revision made of digits
        return str(raw)
    return raw if isinstance(raw, option) else INVALID


def _float(raw: Any) -> Any:
    """A number that is one: no NaN, no infinity, no whole number beyond all floats."""
    try:
        value = float(raw) if isinstance(raw, int | float) else math.nan
    except OverflowError:
        return INVALID
    return value if math.isfinite(value) else INVALID


def _words(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    words = []
    for option in _options(hint):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if origin is typing.Literal:
            words.append("one of " + ", ".join(map(str, args)))
        elif origin in (list, tuple):
            words.append(
                f"a list [..] whose items are {_words(args[0])}" if args else "a list [..]"
            )
        elif origin is dict or dataclasses.is_dataclass(option):
            words.append("a mapping {..}")
        else:
            words.append(names.get(option, getattr(option, "__name__", str(option))))
    return " or ".join(words)


def _example(hint: Any) -> str:
    option = _options(hint)[0]
    if typing.get_origin(option) is typing.Literal:
        return str(typing.get_args(option)[0])
    if typing.get_origin(option) in (list, tuple):
        return "[A,B]"
    return {int: "8", float: "0.5", bool: "true"}.get(option, "VALUE")
