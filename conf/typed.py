"""A composed config, or a JSON object of a file, becomes a typed dataclass, or every problem
it has is told at once.

Hydra's own check does not see keys appended with `+`, nor ranges: here the dataclass is the
only authority. pydantic walks it once, every value by its field's type (conf/rules.py has types
with ranges), and one table words what it finds. A dataclass may define `validate(self) ->
list[str]` for what concerns several keys: "key: value; rule; fix".
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
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AllowInfNan, BeforeValidator, Field, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, SchemaValidator
from pydantic_core import core_schema as core

from outrider.conf import left, synonyms
from outrider.conf.errors import UserError, first_line

T = TypeVar("T")
SHORT = reprlib.Repr()  # how a wrong value is shown: the line stays a line
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 100
LIKE = 0.75  # of the letters are those of another word, in order: a slip of it
TOOLS = re.compile(r"# (type: ignore|noqa)")  # a comment for tools, no doc line
INVALID = object()  # stands for a value that could not be read; its problem is on the list


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
    value = _read(_plain(cfg, "", problems), schema, problems)
    return value, problems


def from_json(data: Any, schema: type[T]) -> tuple[T, list[str]]:
    """A parsed JSON object as an instance of the dataclass `schema`, and its problems; the
    value is meaningless when there are any. Nothing in the file is interpreted: "${..}" is
    text."""
    problems: list[str] = []
    if not isinstance(data, dict):
        return INVALID, [f"a {type(data).__name__}, not a JSON object"]  # type: ignore[return-value]
    return _read(data, schema, problems), problems


def faults(made: Any, prefix: str = "") -> list[str]:
    """The problems of a dataclass that Python code made, as `convert` would tell them."""
    problems: list[str] = []
    keyed = {key_of(field.name): getattr(made, field.name) for field in dataclasses.fields(made)}
    _read(keyed, type(made), problems, prefix)
    return problems


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
    return _hint(schema, key) is not None


def takes_several(schema: type, key: str) -> bool:
    """Whether a dotted key is a field of the schema that holds a list, whatever else."""
    found = {typing.get_origin(option) for option in _options(_hint(schema, key))}
    return found <= {list, None} and list in found


def _hint(schema: type, key: str) -> Any:
    """The type of a dotted key; Any inside a dict or Any field, None for no key."""
    hint: Any = schema
    for part in key.split("."):
        nested = nested_schema(hint)
        if nested is None:
            inside = any(
                o is Any or typing.get_origin(o) is dict or o is dict for o in _options(hint)
            )
            return Any if inside else None
        hints = {key_of(name): h for name, h in typing.get_type_hints(nested).items()}
        if part not in hints:
            return None
        hint = hints[part]
    return hint


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The one-line message about a key that does not exist: what left, another tool's name for
    one, that very name without a group, or a slip of one.
    """
    known = list(known)
    if instead := left.of_key(key):
        return instead
    group, _, name = key.rpartition(".")
    said = synonyms.said(key, known)
    if not said and group and name in known:
        said = f"did you mean {name}?"
    inside = [k.removeprefix(f"{group}.") for k in known if group and k.startswith(f"{group}.")]
    if not said and inside and (close := near(name, inside)):
        said = f"did you mean {group}.{close}?"
    if not said and inside:
        said = f"known in {group}: " + ", ".join(sorted(k for k in inside if "." not in k))
    return f"{key}: no such key; {said or nearest(key, known)}"


def near(word: str, known: Iterable[str]) -> str:
    """The known word, or dotted key, of which `word` is a slip or the beginning; "" where none is
    like it."""
    known = list(known)
    if close := difflib.get_close_matches(word, known, 1, LIKE):
        return close[0]
    last = {k.rpartition(".")[2]: k for k in known}
    if close := difflib.get_close_matches(word.rpartition(".")[2], list(last), 1, LIKE):
        return last[close[0]]
    longer = sorted(k for k in known if k.startswith(f"{word}_"))
    return longer[0] if longer and all(k.startswith(longer[0]) for k in longer) else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """ "did you mean X?" for the word that this is a slip of, or the list of what exists."""
    known = list(known)
    if close := near(word, known):
        return f"did you mean {close}?"
    return "known: " + ", ".join(sorted(k for k in known if "." not in k) or sorted(known))


def docs(schema: type) -> dict[str, str]:
    """Field name -> its doc line: metadata "doc", else the comment on its line or right above
    it.
    """
    found = {f.name: f.metadata["doc"] for f in dataclasses.fields(schema) if "doc" in f.metadata}
    for base in schema.__mro__:
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except OSError:  # made at run time
            continue
        lines = source.splitlines()
        tree = ast.parse(source).body[0]
        for node in tree.body if isinstance(tree, ast.ClassDef) else []:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            after = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :].strip()
            after = "" if TOOLS.match(after) else after
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


# One walk
# -------------------------------------------------------------------------------------------


def _read(data: Any, schema: type, problems: list[str], prefix: str = "") -> Any:
    """An instance of the dataclass `schema`; what is wrong with its keys is added to the problems.
    prefix: before every key of a problem."""
    try:
        return _validator(schema).validate_python(data)
    except ValidationError as error:
        problems += _summary(error.errors(include_url=False), schema, prefix)
        return INVALID


@functools.cache
def _validator(schema: type) -> SchemaValidator:
    return SchemaValidator(_core(schema))


def _core(schema: Any) -> core.CoreSchema:
    """What pydantic checks of a dataclass: no other keys, each by its type, or its default; then
    its own `validate`."""
    hints, found = typing.get_type_hints(schema, include_extras=True), []
    for field in dataclasses.fields(schema):
        hint, usual = hints[field.name], default(field)
        if nested := nested_schema(hint):
            one = _core(nested)
            one = core.nullable_schema(one) if type(None) in _options(hint) else one
        else:
            value = functools.partial(_value, hint, usual)
            one = core.no_info_wrap_validator_function(value, _adapter(hint).core_schema)
        if usual is not dataclasses.MISSING:
            fresh = functools.partial(default, field)
            one = core.with_default_schema(one, default_factory=fresh, validate_default=True)
        found.append(core.dataclass_field(field.name, one, validation_alias=key_of(field.name)))
    keyed = core.dataclass_args_schema(schema.__name__, found, extra_behavior="forbid")
    names = [one["name"] for one in found]
    own = hasattr(schema, "__post_init__")
    made = core.dataclass_schema(schema, keyed, names, post_init=own, revalidate_instances="always")
    return core.no_info_after_validator_function(_sound, made)


def default(field: dataclasses.Field[Any]) -> Any:
    """What a field holds where nobody sets it; dataclasses.MISSING where somebody must."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _value(hint: Any, usual: Any, raw: Any, read: Any) -> Any:
    """A value as its type reads it. usual: the field's default."""
    if raw is INVALID:
        raise PydanticCustomError("lost", "lost")
    try:
        return read(raw)
    except ValidationError as error:
        what, fix = _worded(error.errors(include_url=False), raw, hint, usual)
        raise PydanticCustomError("said", "said", {"what": what, "fix": fix}) from None


def _sound(made: Any) -> Any:
    """An instance that keeps the rules about several keys."""
    if lines := made.validate() if hasattr(made, "validate") else []:
        raise PydanticCustomError("rules", "rules", {"lines": lines})
    return made


def _plain(raw: Any, key: str, problems: list[str]) -> Any:
    """OmegaConf's `raw` as plain values; INVALID, and a problem of the key, for what is missing
    or refers to nothing."""
    if not isinstance(raw, DictConfig):
        return OmegaConf.to_container(raw, resolve=True) if isinstance(raw, ListConfig) else raw
    found: dict[str, Any] = {}
    for place in raw:
        name = str(place)
        inner = f"{key}.{name}" if key else name
        try:
            missing = OmegaConf.is_missing(raw, place)
            found[name] = INVALID if missing else _plain(raw[place], inner, problems)
            problems += [f"{inner}: is required; set {inner}=VALUE"] if missing else []
        except OmegaConfBaseException as error:
            found[name] = INVALID
            problems.append(f"{inner}: {first_line(error)}; mend the interpolation")
    return found


def wrong_kind(cfg: DictConfig, schema: type) -> bool:
    """Whether a group's options are of a `kind` that the schema does not take. The rules of other
    keys are not asked: some of them look a framework up."""
    rule = typing.get_type_hints(schema, include_extras=True).get("kind")
    if rule is None or "kind" not in cfg:
        return "kind" in cfg
    try:
        _adapter(rule).validate_python(cfg["kind"])
    except (ValidationError, OmegaConfBaseException):
        return True
    return False


# What a value may be
# -------------------------------------------------------------------------------------------


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


def _strict(hint: Any, digits: bool = True) -> Any:
    """A type hint whose plain types are read as READ says. digits: a number may be text."""
    args, origin = typing.get_args(hint), typing.get_origin(hint)
    if not args or origin is Literal:
        return Annotated[str, Strict()] if hint is str and not digits else READ.get(hint, hint)
    if origin is Annotated:
        return Annotated[(_strict(args[0], digits), *args[1:])]
    if origin not in (typing.Union, types.UnionType):
        return origin[tuple(_strict(one) for one in args)]
    plain = {getattr(one, "__origin__", one) for one in args}
    inner = tuple(_strict(one, not plain & {int, float}) for one in args)
    if len(plain - {type(None)}) == 1:
        return typing.Union[inner]  # noqa: UP007
    return Annotated[typing.Union[inner], Field(union_mode="left_to_right")]  # noqa: UP007


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_strict(hint))


# What is said of one that is not
# -------------------------------------------------------------------------------------------

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
    "int_type": ("{shown} is not a whole number", "N"),
    "float_type": ("{shown} is not a number", "X"),
    "finite_number": ("{shown} is not a number", "X"),
    "bool_type": ("{shown} is not true or false", "true"),
    "string_type": ("{shown} is not text", "VALUE"),
    "list_type": ("{shown} is not a list [..]", "[A,B]"),
    "tuple_type": ("{shown} is not a list [..]", "[A,B]"),
    "dict_type": ("{shown} is not a mapping {{..}}", "{{A: B}}"),
    "value_error": ("{error}", ""),  # of a class that checks itself
    "dataclass_type": ("{shown} is not a mapping {{..}}", "{{KEY: VALUE}}"),
}
WRONG_TYPE = ("_type", "finite_number")
# What other tools call a dtype. Where a key takes none of what is meant, its default is told.
ALSO = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
ALSO |= {"float": "float32", "fp64": "float64", "double": "float64"}


def _summary(errors: list[ErrorDetails], schema: type, prefix: str) -> list[str]:
    """pydantic's errors as "key: value; rule; fix"."""
    found = {".".join(map(str, error["loc"])): error for error in errors}
    # The other keys of a group of another kind are no mistakes: they belong to another schema.
    strange = {key[: -len("kind")] for key in found if key.endswith(".kind")}
    lines = []
    for key, error in found.items():
        kind, ctx = error["type"], error.get("ctx", {})
        if error["input"] is INVALID:
            continue
        if kind == "rules":
            lines += [f"{prefix}{key}.{line}" if key else prefix + line for line in ctx["lines"]]
        elif kind == "unexpected_keyword_argument":
            known = f"{key.rpartition('.')[0]}." in strange
            lines += [] if known else [unknown_key(key, keys(schema))]
        else:
            said = (ctx["what"], ctx["fix"]) if kind == "said" else _worded([error], None, None)
            fix = f"; set {prefix}{key}={said[1]}" if said[1] else ""
            lines.append(f"{prefix}{key}: {said[0]}{fix}")
    return lines


def _worded(
    errors: list[ErrorDetails], raw: Any, hint: Any, usual: Any = dataclasses.MISSING
) -> tuple[str, str]:
    """("value; rule", fix) of pydantic's errors about the value `raw`. usual: the default."""
    broken = [error for error in errors if not error["type"].endswith(WRONG_TYPE)]
    first = (broken or errors)[0]  # of a list the first wrong item
    what, fix = _filled(first, usual)
    if not broken:  # by every type that it may have
        same = [_filled(e, usual)[0] for e in errors if e["input"] is first["input"]]
        same += ["is not null"] if first["input"] is raw and type(None) in _options(hint) else []
        what = " or ".join([what, *(one.rpartition("is not ")[2] for one in same[1:])])
        fix = fix if first["input"] is raw or raw is None else f"[{fix}]"
    return what, fix


def _filled(error: ErrorDetails, usual: Any) -> tuple[str, str]:
    """The words of WORDS about an error."""
    found: dict[str, Any] = {
        name: int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        for name, bound in error.get("ctx", {}).items()
    }
    if "expected" in found:  # 'a', 'b' or 'c'
        choices = found["expected"].replace("''", "nothing").replace("'", "")
        found["expected"] = choices.replace(" or ", ", ")
    common = "" if usual is dataclasses.MISSING or usual == error["input"] else usual
    found["usually"] = f" ({common} is usual)" if isinstance(common, int | float) else ""
    found |= {"shown": SHORT.repr(error["input"]), "usual": common or "VALUE"}
    what, fix = WORDS.get(error["type"], (error["msg"], "VALUE"))
    meant = ALSO.get(error["input"]) if isinstance(error["input"], str) else None
    if meant and error["type"] == "literal_error":
        taken = meant in found["expected"].split(", ")
        what, fix = what.removesuffix("; choose one"), meant if taken else str(found["usual"])
    return what.format(**found), fix.format(**found)
