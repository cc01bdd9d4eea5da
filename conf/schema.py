"""Entry points: compose conf/NAME.yaml with the command line, check it, run, and speak in one
line.

Used as

    @entry("evaluate", EvaluateConfig)
    def main(cfg: EvaluateConfig) -> int | None: ...

    if __name__ == "__main__":
        main()

A plain command line is composed through Hydra's compose API, so that every problem (grammar,
unknown key, missing option, wrong type, broken rule) is told in one go. Hydra's own flags
(--multirun, --cfg job, --info) go through hydra.main; its run folders and its chdir are off
either way. `--help` lists the keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import re
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from outrider.conf import argv, left, packages, paths, synonyms, usage
from outrider.conf.errors import CheckFailed, Interrupted, UserError
from outrider.conf.typed import (
    convert,
    default,
    docs,
    key_of,
    keys,
    knows,
    near,
    nearest,
    nested_schema,
    raise_all,
    takes_several,
    to_typed,
    unknown_key,
    wrong_kind,
)

__all__ = ["CONF", "compose", "entry", "refused", "to_typed"]

CONF = Path(__file__).resolve().parent
QUIET = (
    "hydra.run.dir=.",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra.job.chdir=false",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
DISK = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some of your quota, or write elsewhere",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "mend the permissions, or choose another folder",
    errno.ENOTDIR: "a part of this path is a file: choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}
RECIPES = "experiment"  # the group of them
UNREADABLE = (OSError, UnicodeError, YAMLError, OmegaConfBaseException)  # of a file of options
T = TypeVar("T")


def compose(
    config_name: str, schema: type[T], overrides: Sequence[str] = (), conf_dir: Path = CONF
) -> T:
    """The typed configuration of a command line. Raises UserError that lists every problem at
    once.
    """
    value, asked = _checked(config_name, schema, overrides, conf_dir)
    return settled(value) if asked else value


def _checked(
    config_name: str, schema: type[T], overrides: Sequence[str], conf_dir: Path
) -> tuple[T, bool]:
    """(the configuration, whether its dtype is still to be settled), as `compose` raises."""
    cfg, problems = _compose(config_name, schema, overrides, conf_dir)
    if cfg is None:
        raise_all(problems)
        raise AssertionError("a failed composition names its problem")
    asked = placeholder(cfg, schema)
    try:
        value, more = convert(cfg, exact(schema, cfg))
    except UserError as error:
        raise_all([*problems, str(error)])
    refused = {line.partition("=")[0] for line in problems}  # what was given is not missing as well
    raise_all(problems + [m for m in more if m.partition(": is required")[0] not in refused])
    return value, asked


def present(value: T) -> T:
    """A configuration whose files and folders are there. Raises UserError for those that are not,
    as its method `absent` names them: before torch is loaded, and a model for nothing."""
    known: Any = value
    raise_all(known.absent() if hasattr(known, "absent") else [])
    return value


def placeholder(cfg: DictConfig, schema: type) -> bool:
    """Whether `cfg` says dtype=auto, where its schema has a method `auto` that knows what this
    is; it then says a dtype with which all else may be checked."""
    if cfg.get("dtype") != "auto" or not hasattr(schema, "auto"):
        return False
    OmegaConf.update(cfg, "dtype", "bfloat16")
    return True


def settled(value: T) -> T:
    """A configuration with what is automatic in it. Last of all: that may load torch."""
    known: Any = value
    return typing.cast(T, dataclasses.replace(known, **known.auto()))


def exact(schema: type[T], cfg: DictConfig) -> type[T]:
    """The schema of a composed configuration: where the command's own has a class method `exact`,
    the one that this leads to. Raises UserError as that does."""
    chosen = getattr(schema, "exact", None)
    return schema if chosen is None else typing.cast(type[T], chosen(cfg))


def entry(
    config_name: str, schema: type, conf_dir: Path = CONF, more: str = ""
) -> Callable[[Callable[[Any], Any]], Any]:
    """Decorator: main(cfg: schema) becomes a command. Its integer result, if any, is the exit
    code.

    UserError: one line on stderr, exit code 2. Interrupted: its line and code; Ctrl-C: 130. A
    full or unwritable disk counts as a user's mistake. Other exceptions are bugs and keep
    their traceback. Ranks above 0 print nothing. The command takes an optional list of
    arguments in place of sys.argv[1:].

    more: what `--help` says after the docstring of main's module.
    """

    def decorate(main: Callable[[Any], Any]) -> Any:
        def show_help(args: Sequence[str]) -> int:
            doc = sys.modules[main.__module__].__doc__ or config_name
            _say(help_text(doc, config_name, schema, more, conf_dir, args), sys.stdout)
            return 0

        @functools.wraps(main)
        def command(argv: Sequence[str] | None = None) -> None:
            args = list(sys.argv[1:] if argv is None else argv)
            act = functools.partial(_run, main, config_name, schema, conf_dir, args)
            if {"-h", "--help"} & set(args):
                act = functools.partial(show_help, args)
            sys.exit(_guarded(act, schema))

        command.schema = schema  # type: ignore[attr-defined]
        command.config_name = config_name  # type: ignore[attr-defined]
        return command

    return decorate


def refused(name: str, schema: type, words: Sequence[str], conf_dir: Path = CONF) -> int:
    """2, with the command's own line on stderr, where it would refuse the words; else 0. Nothing is
    run and no framework is loaded, so that a mistake costs no more than reading it."""

    def check() -> int:
        if any(word.startswith("-") for word in words):
            raise_all(dashed(words, _closest(name, schema, words, conf_dir), conf_dir))
        else:
            present(_checked(name, schema, words, conf_dir)[0])
        return 0

    return _guarded(check, schema)


def _run(
    main: Callable[[Any], Any], name: str, schema: type, conf_dir: Path, args: list[str]
) -> int:
    if not any(a.startswith("-") for a in args):
        checked: tuple[Any, bool] = _checked(name, schema, args, conf_dir)
        value = present(checked[0])
        return main(settled(value) if checked[1] else value) or 0
    raise_all(dashed(args, _closest(name, schema, args, conf_dir), conf_dir))
    codes: list[int] = []

    def job(cfg: DictConfig) -> None:
        asked = placeholder(cfg, schema)

        def run() -> int:
            value: Any = present(to_typed(cfg, exact(schema, cfg)))
            return main(settled(value) if asked else value) or 0

        codes.append(_guarded(run, schema))

    first = next((i for i, a in enumerate(args) if "=" in a and not a.startswith("-")), len(args))
    saved = sys.argv
    with tempfile.TemporaryDirectory() as sweep:  # where Hydra drops its multirun.yaml
        # They must stand beside the user's own for argparse.
        overrides = [f"hydra.sweep.dir={sweep}", *QUIET]
        sys.argv = [saved[0], *args[:first], *overrides, *args[first:]]
        _show_packages()
        try:
            hydra.main(version_base="1.3", config_path=str(conf_dir), config_name=name)(job)()
        finally:
            sys.argv = saved
    return max(codes, default=0)


def _own_key(text: str, schema: type | None) -> str:
    """A message about a key of which this command takes one where others take several, such as
    drafters, with the command's own."""
    key, colon, rest = text.partition(":")
    names = set(keys(schema)) if schema else set()
    one = key.removesuffix("s")
    return f"{one}{colon}{rest}" if key not in names and one in names else text


def _guarded(action: Callable[[], int], schema: type | None = None) -> int:
    """The exit code of an action; what the user should read goes to stderr."""
    try:
        return int(action())
    except UserError as error:
        _say(f"error: {_own_key(str(error), schema)}")
        return 2
    except CheckFailed as failure:
        _say(f"failed: {failure}")
        return 1
    except Interrupted as stop:
        _say(str(stop), everywhere=stop.everywhere)
        return stop.code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:  # `| head` went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        if error.errno not in DISK:
            traceback.print_exc()
            return 1
        _say(f"error: {error.filename or 'disk'}: {os.strerror(error.errno)}; {DISK[error.errno]}")
        return 2


def _say(text: str, stream: typing.TextIO | None = None, everywhere: bool = False) -> None:
    if everywhere or os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError) if stream is None else contextlib.nullcontext():
            print(
                text, file=stream or sys.stderr, flush=True
            )  # a full disk behind stderr leaves the exit code alone


def _compose(
    name: str, schema: type, overrides: Sequence[str], conf_dir: Path
) -> tuple[DictConfig | None, list[str]]:
    """(composed config without the bad overrides, problems found so far)."""
    problems: list[str] = []
    good: list[str] = []
    parser = OverridesParser.create()
    words = [w for text in argv.joined(overrides) for w in _named_model(text, conf_dir)]
    for text in words:
        try:
            parsed = parser.parse_override(text)
        except HydraException:
            problems.append(_unreadable(text, schema, conf_dir))
            continue
        key = parsed.key_or_group
        options = group_options(conf_dir, key)
        if key.startswith("hydra") and (len(key) == 5 or key[5] in "./"):
            good.append(text)
        elif options and not (parsed.is_sweep_override() or isinstance(parsed.value(), dict)):
            value = parsed.value()
            chosen = value if isinstance(value, list) else [value]
            wrong = [w for c in chosen if (w := _choice(conf_dir, schema, key, str(c)))]
            if (None in chosen or not chosen) or parsed.is_delete():
                wrong = [f"{text}: names no option; leave it out, or choose one"]
            problems += wrong
            good += [] if wrong else [text]
        elif parsed.is_delete() and knows(schema, key):
            good.append(text)
        else:
            try:
                # The schema is the authority: a key that the YAML leaves alone may be set.
                good.append("++" + _one_or_several(text.lstrip("+"), parsed, schema))
            except UserError as error:
                problems.append(str(error))
    if problems and (closest := _closest(name, schema, words, conf_dir)) is not schema:
        return _compose(name, closest, words, conf_dir)  # it knows the keys of the chosen head
    try:
        return _composed(conf_dir, name, good), problems
    except (HydraException, *UNREADABLE) as error:
        return None, [*problems, _readable(error, conf_dir)]


def _closest(name: str, schema: type, words: Sequence[str], conf_dir: Path) -> type:
    """The schema that the chosen groups lead to (`exact`), by which a mistake is answered."""
    if not hasattr(schema, "exact"):
        return schema
    chosen = [word for word in words if group_options(conf_dir, word.partition("=")[0])]
    try:
        return exact(schema, _composed(conf_dir, name, chosen))
    except (UserError, HydraException, *UNREADABLE):
        return schema


def _named_model(text: str, conf_dir: Path) -> list[str]:
    """The words for target=OWNER/NAME and target=FOLDER; of any other word the word itself."""
    group, _, value = text.lstrip("+").partition("=")
    bare = value.strip("'\"")
    named = paths.model(bare) if group == "target" else None
    if named is None or value in group_options(conf_dir, group):
        return [text]
    if value == bare and ("," not in bare or Path(bare).is_dir()):
        value = "'{}'".format(bare.replace("'", r"\'"))  # it holds what words of ours do not
    return [f"{group}={named[0]}", f"{group}.{named[1]}={value}"]


def _one_or_several(text: str, parsed: Override, schema: type) -> str:
    """The word with its key as this schema has it: drafter=X for drafters=X and the other way
    round, [A,B] for A,B where a key takes several. Raises UserError for a key that there is
    not, and for several values of one that takes one."""
    key, _, given = text.partition("=")
    value = None if parsed.is_sweep_override() else parsed.value()
    several = parsed.is_sweep_override() or isinstance(value, list)
    here, more, one = knows(schema, key), f"{key}s", key.removesuffix("s")
    if takes_several(schema, more) and (several or not here):
        key = more
    elif not here and one != key and knows(schema, one):
        if isinstance(value, list) and len(value) != 1:
            raise UserError(
                f"{one}: {len(value)} of them, and this command takes one; give {one}=X"
            )
        key, given = one, given.strip("[]") if several else given
    elif not here:
        raise UserError(unknown_key(key, keys(schema)))
    if takes_several(schema, key) and not isinstance(value, list | dict) and given != "null":
        return f"{key}=[{given}]"
    if parsed.is_sweep_override():
        raise UserError(f"{text}: several values need --multirun; quote a value that holds a comma")
    return f"{key}={given}"


def _unreadable(text: str, schema: type, conf_dir: Path) -> str:
    """What is said of a word that is no KEY=VALUE."""
    if "=" in text:
        return f"{text}: cannot be read as KEY=VALUE; quote it: \"key='a value'\""
    if text in left.WORDS:
        return left.line(text, left.WORDS[text])
    if text in keys(schema) or group_options(conf_dir, text):
        return f"{text}: has no value; write {text}=VALUE, without spaces around ="
    if synonyms.said(text, [*keys(schema)]):
        return unknown_key(text, keys(schema))
    chosen = [group for group in _groups(conf_dir) if text in group_options(conf_dir, group)]
    said = f"did you mean {chosen[0]}={text}?" if chosen else f"write KEY={text}, or quote a list"
    return f"{text}: is no KEY=VALUE; {said}"


def dashed(args: Sequence[str], schema: type, conf_dir: Path = CONF) -> list[str]:
    """A line for each word that is written --key value, or is a flag that nobody knows."""
    found = []
    for i, flag in enumerate(args):
        if not flag.startswith("-") or flag.partition("=")[0] in argv.FLAGS:
            continue
        key, value = argv.undashed(flag, args[i + 1 : i + 2])
        other = f"{key}s", key.removesuffix("s")
        if not (any(knows(schema, k) for k in (key, *other)) or group_options(conf_dir, key)):
            said = unknown_key(key, keys(schema)).removeprefix(f"{key}: ")
        else:
            said = f"keys have no dashes; write {key}={value or 'VALUE'}"
        found.append(f"{flag}: {said}")
    return found


def _composed(conf_dir: Path, name: str, overrides: list[str]) -> DictConfig:
    _show_packages()
    with hydra.initialize_config_dir(str(conf_dir), version_base="1.3", job_name=name):
        return hydra.compose(name, overrides)


class _PackagedConf(SearchPathPlugin):
    """Hydra finds the YAML files of packages behind our own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for root in packages.roots():
            search_path.append(packages.POINTS, f"file://{root}")


@functools.cache
def _show_packages() -> None:
    Plugins.instance().register(_PackagedConf)


def group_options(conf_dir: Path, group: str) -> dict[str, Path]:
    """The options of a config group by name; empty when there is no such group."""
    if not group or "." in group or not (conf_dir / group).is_dir():
        return {}
    return packages.options(conf_dir, group)


def _choice(conf_dir: Path, schema: type, group: str, name: str) -> str:
    """What is wrong with an option of a group, "" if nothing."""
    options, fitting = group_options(conf_dir, group), options_here(conf_dir, group, schema)
    if f"{group}={name}" in left.CHOICES:
        return left.line(f"{group}={name}", left.CHOICES[f"{group}={name}"])
    if group == packages.GROUP and name in left.KINDS:
        return left.line(f"{group}={name}", left.KINDS[name])
    if group == RECIPES and name in options:
        return _strange_recipe(name, options, options_here(conf_dir, packages.GROUP, schema))
    if name in fitting:
        return ""
    if name in options:
        known = ", ".join(sorted(fitting))
        return f"{group}={name}: another command takes this one; choose one of {known}"
    try:
        missing = packages.missing(name) if group == packages.GROUP else ""
    except UserError as error:
        missing = str(error)
    model = "" if group != "target" or near(name, fitting) else "write target=OWNER/NAME; "
    return missing or f"{group}={name}: no such option; {model}{nearest(name, fitting)}"


def _strange_recipe(name: str, recipes: dict[str, Path], heads: set[str]) -> str:
    """What is wrong with a recipe where only some heads are trained, "" if nothing."""
    head = _head_of(name, recipes)
    if not head or head in heads:
        return ""
    fitting = [other for other in recipes if _head_of(other, recipes) in heads]
    near = nearest(name, fitting) if fitting else "there is none for this one: leave it out"
    return f"{RECIPES}={name}: is a recipe of head={head}, which another command takes; {near}"


def options_here(conf_dir: Path, group: str, schema: type) -> set[str]:
    """Those options of a group whose `kind` the command's schema takes: train/medusa.py knows
    no head=eagle3.
    """
    nested = nested_schema(typing.get_type_hints(schema).get(group))
    options = group_options(conf_dir, group)
    if nested is None:
        return set(options)
    return {name for name, path in options.items() if _kind_fits(path, nested)}


def _head_of(recipe: str, known: dict[str, Path]) -> str:
    """The head that a recipe chooses, itself or by the one that it begins from; "" where it leaves
    that open, or cannot be read."""
    try:
        found = OmegaConf.load(known[recipe])
    except UNREADABLE:
        return ""
    given = (found.get("defaults") or []) if isinstance(found, DictConfig) else []
    key, heads = f"override /{packages.GROUP}", [""]
    for item in given:
        if isinstance(item, DictConfig):
            heads += [str(item[key])] if key in item else []
        elif item in known:
            others = {name: path for name, path in known.items() if name != recipe}
            heads.append(_head_of(item, others) if item in others else "")
    return next(filter(None, reversed(heads)), "")


def _kind_fits(option: Path, nested: type) -> bool:
    try:
        found = OmegaConf.load(option)
    except UNREADABLE:  # a package's: it is told to whoever chooses it
        return False
    return not isinstance(found, DictConfig) or not wrong_kind(found, nested)


def _readable(error: Exception, conf_dir: Path) -> str:
    text = str(error)
    no_match = re.search(
        r"Could not override '([^']+)'\.?\s*(?:\n|.)*No match in the defaults list", text
    )
    if no_match:
        others = [group for group in _groups(conf_dir) if group != no_match[1]]
        way = (
            "leave it out" if len(others) < len(_groups(conf_dir)) else nearest(no_match[1], others)
        )
        return f"{no_match[1]}: this command has no such group; {way}"
    missing = re.search(
        r"(?:Could not find|Could not load|Cannot find primary config) '([^']+)'", text
    )
    if missing:
        return f"{missing[1]}: no such file under conf/; choose an option that exists"
    required = re.search(r"You must specify '([^']+)', e\.g, ([^\n]+)", text)
    if required:
        return f"{required[1]}: is required; set {required[1]}=OPTION"
    return " ".join(text.split()) + "; see --help"


def _groups(conf_dir: Path) -> list[str]:
    found = {str(p.parent.relative_to(conf_dir)) for p in conf_dir.rglob("*.yaml")}
    # Not of Hydra: files of the launcher, what `prompts` names, words in messages.
    return sorted(found - {".", "launch", "prompt_set", "words"})


def help_text(
    doc: str,
    name: str,
    schema: type,
    more: str = "",
    conf_dir: Path = CONF,
    words: Sequence[str] = (),
    spoken: Callable[[str], str] = str,
) -> str:
    """What `--help` says of a command: its words, what must be given, its groups, its keys with
    their defaults, as wide as the terminal. words: the command line, whose choices of groups hold.
    spoken: how the commands in its words are written. Raises UserError for a choice that is
    none."""
    chosen = [word for word in words if group_options(conf_dir, word.partition("=")[0])]
    composed, problems = _compose(name, schema, chosen, conf_dir)
    if composed is None:
        raise_all(problems)
        raise AssertionError("a failed composition names its problem")
    here: Any = OmegaConf.to_container(composed, resolve=True)
    chosen_schema = schema
    with contextlib.suppress(UserError):  # a choice is missing, and so are the keys behind it
        chosen_schema = exact(schema, composed)
    groups = sorted(_chosen_in(conf_dir, name))
    options = {group: sorted(options_here(conf_dir, group, schema)) for group in groups}
    if RECIPES in options:
        heads = {word.partition("=")[2] for word in chosen if word.startswith(f"{packages.GROUP}=")}
        heads = heads or options_here(conf_dir, packages.GROUP, schema)
        recipes = group_options(conf_dir, RECIPES)
        options[RECIPES] = [n for n in options[RECIPES] if _head_of(n, recipes) in {*heads, ""}]
    options = {group: names for group, names in options.items() if names}
    columns = usage.width()
    parts = [usage.prose(spoken(text.strip()), columns) for text in (doc, more) if text]
    rows = [replace(row, about=spoken(row.about)) for row in _rows(chosen_schema, here)]
    kind = str((here.get("target") or {}).get("kind", ""))
    tables = usage.tables(rows, options, kind, columns)
    return "\n\n".join([*parts, "\n".join(tables)])


def _chosen_in(conf_dir: Path, name: str) -> Iterator[str]:
    """The groups that the defaults of a command's file choose from, and those of the files that it
    begins from."""
    found = typing.cast(DictConfig, OmegaConf.load(conf_dir / f"{name}.yaml"))
    for item in found.get("defaults") or []:
        if isinstance(item, DictConfig):
            yield from map(str, item)
        elif item != "_self_":
            yield from _chosen_in(conf_dir, item)


def _rows(schema: type, here: dict[str, Any], prefix: str = "") -> list[usage.HelpRow]:
    rows, about, hints = [], docs(schema), typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        nested = nested_schema(hints[field.name])
        if nested is not None:
            rows += _rows(nested, here.get(field.name) or {}, f"{prefix}{field.name}.")
            continue
        key = prefix + key_of(field.name)
        value = here.get(key_of(field.name), default(field))  # the YAML files win over the schema
        needed = value is dataclasses.MISSING or value == "???"
        shown = None if needed else _shown(value)
        rows.append(usage.HelpRow(key, shown, about.get(field.name, "")))
    return rows


def _shown(value: Any) -> str:
    """A value as one would type it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_shown(v)}" for k, v in value.items()) + "}"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
