"""Typed configuration: turn a composed config, or a JSON object of a file, into a frozen
dataclass, or say every problem that it has at once.

The dataclass is the only authority. pydantic checks each value against the type of its
field (conf/rules.py has types with ranges), and one table words what it finds. A dataclass
may define `validate(self) -> list[str]` for rules about several keys: "key: value; rule;
fix".
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import keyword
import re
import reprlib
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from outrider.conf import left, synonyms
from outrider.conf.errors import UserError, first_line

T = TypeVar("T")
SHORT = reprlib.Repr()  # how a wrong value is shown: the line stays a line
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 100
LIKE = 0.75  # of the letters are those of another word, in order: a slip of it
TOOLS = re.compile(r"# (type: ignore|noqa)")  # a comment for tools, no doc line


def to_typed(cfg: DictConfig, schema: type[T]) -> T:
    """Return the composed `cfg` as an instance of the dataclass `schema`. Raises UserError
    with every problem."""
    value, problems = convert(cfg, schema)
    raise_all(problems)
    return value


def raise_all(problems: list[str]) -> None:
    """Raise one UserError for a list of problems: the only one as it is, several as a numbered
    list."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        lines = "".join(f"\n  {i}. {line}" for i, line in enumerate(problems, 1))
        raise UserError(f"{len(problems)} problems in the configuration:{lines}")


def convert(cfg: DictConfig, schema: type[T]) -> tuple[T, list[str]]:
    """Do the same as to_typed, but return the problems; the value has no meaning when there
    are any."""
    try:  # what nobody set is left out: the dataclass says whether it must be
        given = OmegaConf.create(_given(OmegaConf.to_container(cfg)))
        data = OmegaConf.to_container(given, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or "configuration"
        return typing.cast(T, None), [f"{key}: {first_line(error)}; mend the interpolation"]
    return from_json(data, schema)


def _given(raw: Any) -> Any:
    if not isinstance(raw, dict):
        return raw
    return {key: _given(value) for key, value in raw.items() if value != "???"}


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
    return made, [prefix + line for line in [*_truths(data, made), *_rules(made)]]


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
    found = (one for one in _options(hint) if dataclasses.is_dataclass(one))
    return typing.cast(type | None, next(found, None))


def knows(schema: type, key: str) -> bool:
    """Return whether a dotted key is a field of the schema or lies inside a dict or Any
    field."""
    return _hint(schema, key) is not None


def takes_several(schema: type, key: str) -> bool:
    """Return whether a dotted key is a field of the schema that holds a list and nothing
    else."""
    found = {typing.get_origin(option) for option in _options(_hint(schema, key))}
    return found <= {list, None} and list in found


def _hint(schema: type, key: str) -> Any:
    """Return the type of a dotted key; Any inside a dict or Any field, None for no key."""
    hint: Any = schema
    for part in key.split("."):
        nested = nested_schema(hint)
        if nested is None:
            kinds = {typing.get_origin(option) or option for option in _options(hint)}
            return Any if kinds & {Any, dict} else None
        hints = {key_of(name): one for name, one in typing.get_type_hints(nested).items()}
        hint = hints.get(part)
    return hint


def _options(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def default(field: dataclasses.Field[Any]) -> Any:
    """Return what a field holds where nobody sets it; dataclasses.MISSING where somebody
    must."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def docs(schema: type) -> dict[str, str]:
    """Return the doc line of every field by name: metadata "doc", else the comment on its
    line or right above it."""
    found = {f.name: f.metadata["doc"] for f in dataclasses.fields(schema) if "doc" in f.metadata}
    for base in filter(dataclasses.is_dataclass, schema.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except OSError:  # made at run time
            continue
        lines, tree = source.splitlines(), ast.parse(source).body[0]
        for node in tree.body if isinstance(tree, ast.ClassDef) else []:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if text := _comment(lines, node):
                found.setdefault(node.target.id, text)
    return found


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the comment behind a field, else the one above it."""
    after = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :].strip()
    if after.startswith("#") and not TOOLS.match(after):
        return after.lstrip("# ")
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    return " ".join(above)


# Words that are no key
# -------------------------------------------------------------------------------------------


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the one-line message about a key that does not exist: what left, another
    tool's name for one, that very name without a group, or a slip of one."""
    known = list(known)
    if instead := left.of_key(key):
        return instead
    group, _, name = key.rpartition(".")
    inside = [k.removeprefix(f"{group}.") for k in known if group and k.startswith(f"{group}.")]
    said = synonyms.said(key, known)
    if not said and group and name in known:
        said = f"did you mean {name}?"
    if not said and inside and (close := near(name, inside)):
        said = f"did you mean {group}.{close}?"
    if not said and inside:
        said = f"known in {group}: " + ", ".join(sorted(k for k in inside if "." not in k))
    return f"{key}: no such key; {said or nearest(key, known)}"


def near(word: str, known: Iterable[str]) -> str:
    """Return the known word, or dotted key, of which `word` is a slip or the beginning; ""
    where none is like it."""
    known = list(known)
    if close := difflib.get_close_matches(word, known, 1, LIKE):
        return close[0]
    last = {k.rpartition(".")[2]: k for k in known}
    if close := difflib.get_close_matches(word.rpartition(".")[2], list(last), 1, LIKE):
        return last[close[0]]
    longer = sorted(k for k in known if k.startswith(f"{word}_"))
    return longer[0] if longer and all(k.startswith(longer[0]) for k in longer) else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "did you mean X?" for the word that this is a slip of, or the list of what
    exists."""
    known = list(known)
    if close := near(word, known):
        return f"did you mean {close}?"
    return "known: " + ", ".join(sorted(k for k in known if "." not in k) or sorted(known))


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


def _completed(data: dict[str, Any], schema: type) -> dict[str, Any]:
    """`data` where a group that is given in part has the rest from the default of its
    field."""
    found = dict(data)
    for field in dataclasses.fields(schema):
        given, usual = data.get(key_of(field.name)), default(field)
        if isinstance(given, dict) and dataclasses.is_dataclass(usual):
            whole = {
                key_of(one.name): getattr(usual, one.name) for one in dataclasses.fields(usual)
            }
            found[key_of(field.name)] = whole | _completed(given, typing.cast(type, type(usual)))
    return found


def _truths(data: dict[str, Any], made: Any) -> list[str]:
    """Return problems of true and false, which Python takes for the numbers 1 and 0."""
    found = []
    for field in dataclasses.fields(made):
        raw, value = data.get(key_of(field.name)), getattr(made, field.name)
        if isinstance(raw, dict) and dataclasses.is_dataclass(value):
            found += [f"{field.name}.{line}" for line in _truths(raw, value)]
        elif isinstance(raw, bool) and not isinstance(value, bool):
            what = WORDS.get(type(value).__name__, WORDS["string_type"])[0]
            found.append(f"{key_of(field.name)}: {what.format(shown=raw)}")
    return found


def _rules(made: Any) -> list[str]:
    """Return what the `validate` of a dataclass and of those in it say."""
    found = []
    for field in dataclasses.fields(made):
        if dataclasses.is_dataclass(part := getattr(made, field.name)):
            found += [f"{field.name}.{line}" for line in _rules(part)]
    return [*found, *(made.validate() if hasattr(made, "validate") else [])]


def wrong_kind(cfg: DictConfig, schema: type) -> bool:
    """Return whether a group's options are of a `kind` that the schema does not take. The
    rules of other keys are not asked: some of them look a framework up."""
    rule = typing.get_type_hints(schema, include_extras=True).get("kind")
    if rule is None or "kind" not in cfg:
        return "kind" in cfg
    try:
        TypeAdapter(rule).validate_python(cfg["kind"])
    except (ValidationError, OmegaConfBaseException):
        return True
    return False


# pydantic's error -> (what is wrong, what to set instead, if that can be said)
WORDS = {
    "missing": ("is required", "VALUE"),
    "greater_than_equal": ("{shown} is below {ge}; give {ge} or more", ""),
    "less_than_equal": ("{shown} is above {le}; give {le} or less", ""),
    "greater_than": ("{shown} is not above {gt}; give more{usually}", ""),
    "less_than": ("{shown} is not below {lt}; give less{usually}", ""),
    "too_short": ("is empty", "{usual}"),
    "string_too_short": ("is empty", "{usual}"),
    "too_long": ("{shown} holds too many; give {max_length}", ""),
    "literal_error": ("{shown} is none of {expected}; choose one", ""),
    "int": ("{shown} is not a whole number", "N"),
    "float": ("{shown} is not a number", "X"),
    "finite_number": ("{shown} is not a number", "X"),
    "bool": ("{shown} is not true or false", "true"),
    "string_type": ("{shown} is not text", "VALUE"),
    "list_type": ("{shown} is not a list [..]", "[A,B]"),
    "tuple_type": ("{shown} is not a list [..]", "[A,B]"),
    "dict_type": ("{shown} is not a mapping {{..}}", "{{A: B}}"),
    "value_error": ("{error}", ""),  # of a class that checks itself
    "dataclass_type": ("{shown} is not a mapping {{..}}", "{{KEY: VALUE}}"),
}
# What other tools call a dtype. Where a key takes none of what is meant, its default is named.
ALSO = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
ALSO |= {"float": "float32", "fp64": "float64", "double": "float64"}


def _summary(errors: list[ErrorDetails], schema: type) -> list[str]:
    """pydantic's errors as "key: value; rule; fix", one for each key."""
    known, found = {*keys(schema)}, dict[str, list[ErrorDetails]]()
    for error in errors:
        place = [str(part) for part in error["loc"]]
        names_of = [".".join(place[:end]) for end in range(len(place), 0, -1)]
        key = next((name for name in names_of if name in known), names_of[-1])
        key = names_of[0] if error["type"] == "unexpected_keyword_argument" else key
        found.setdefault(key, []).append(error)
    # The other keys of a group of another kind are no mistakes: they belong to another schema.
    strange = {key.removesuffix("kind") for key in found if key.endswith(".kind")}
    lines = []
    for key, those in found.items():
        if those[0]["type"] == "unexpected_keyword_argument":
            other = f"{key.rpartition('.')[0]}." in strange
            lines += [] if other else [unknown_key(key, known)]
            continue
        # Of a union first what the fitting type says: a rule before "is not a ..".
        told = next((e for e in those if not _wrong_type(e)), those[0])
        what, fix = _worded(told, _usual(schema, key))
        if _wrong_type(told):
            here = [e for e in those if e["input"] is told["input"]]
            others = dict.fromkeys(_worded(e, None)[0].rpartition("is not ")[2] for e in here)
            what = " or ".join([what, *list(others)[1:]])
        lines.append(f"{key}: {what}" + (f"; set {key}={fix}" if fix else ""))
    return lines


def _wrong_type(error: ErrorDetails) -> bool:
    return error["type"].endswith(("_type", "_parsing", "_from_float", "finite_number"))


def _usual(schema: type, key: str) -> Any:
    """Return the default of a dotted key, None where it has none."""
    *groups, name = key.split(".")
    for group in groups:
        schema = typing.cast(type, nested_schema(typing.get_type_hints(schema)[group]))
    field = next(one for one in dataclasses.fields(schema) if key_of(one.name) == name)
    found = default(field)
    return None if found is dataclasses.MISSING else found


def _worded(error: ErrorDetails, usual: Any) -> tuple[str, str]:
    """("value; rule", fix) of one of pydantic's errors, by WORDS. usual: the default."""
    kind, found = error["type"], dict[str, Any](error.get("ctx", {}))
    found |= {k: int(v) for k, v in found.items() if isinstance(v, float) and v.is_integer()}
    if "expected" in found:  # 'a', 'b' or 'c'
        choices = found["expected"].replace("''", "nothing").replace("'", "")
        found["expected"] = choices.replace(" or ", ", ")
    common = None if usual == error["input"] else usual
    number = isinstance(common, int | float)
    found["usually"] = f" ({common} is usual)" if number else ""
    found |= {"shown": SHORT.repr(error["input"]), "usual": common or "VALUE"}
    what, fix = WORDS.get(kind, WORDS.get(kind.partition("_")[0], (error["msg"], "VALUE")))
    meant = ALSO.get(error["input"]) if isinstance(error["input"], str) else None
    if meant and kind == "literal_error":
        taken = meant in found["expected"].split(", ")
        what, fix = what.removesuffix("; choose one"), meant if taken else str(found["usual"])
    return what.format(**found), fix.format(**found)
