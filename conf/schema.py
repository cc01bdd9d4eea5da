"""Entry points: compose conf/NAME.yaml with the command line, check it, run, and report a
mistake in one line.

Used as

    @entry("evaluate", EvaluateConfig)
    def main(cfg: EvaluateConfig) -> int | None: ...

    if __name__ == "__main__":
        main()

A plain command line is composed through Hydra's compose API, so that every problem (grammar,
unknown key, missing option, wrong type, broken rule) is reported in one go. Hydra's own flags
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

from outrider.conf import left, packages, paths, synonyms
from outrider.conf.errors import CheckFailed, Interrupted, UserError
from outrider.conf.help import layout
from outrider.conf.typed import (
    convert,
    keys,
    knows,
    near,
    nearest,
    nested_schema,
    raise_all,
    takes_several,
    unknown_key,
    wrong_kind,
)

__all__ = ["CONF", "compose", "entry", "refused"]

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
NO_GROUPS = (".", "launch", "prompt_set", "words")  # folders of conf/ that Hydra does not read
UNREADABLE = (OSError, UnicodeError, YAMLError, OmegaConfBaseException)  # of a file of options
T = TypeVar("T")


def compose(
    config_name: str, schema: type[T], overrides: Sequence[str] = (), conf_dir: Path = CONF
) -> T:
    """Return the typed configuration of a command line. Raises UserError with every
    problem."""
    value, problems, asked = check(config_name, schema, overrides, conf_dir)
    raise_all(problems)
    return settled(value) if asked else value


def check(
    name: str, schema: type[T], words: Sequence[str], conf_dir: Path = CONF
) -> tuple[T, list[str], bool]:
    """Return the configuration of a command line, its problems, and whether its dtype is
    "auto". The value has no meaning where there are problems."""
    cfg, problems = _compose(name, schema, words, conf_dir)
    if cfg is None:
        return typing.cast(T, None), problems, False
    value, more, asked = typed(cfg, schema)
    refused = {line.partition("=")[0] for line in problems}  # what was given is not missing as well
    more = [line for line in more if line.partition(": is required")[0] not in refused]
    return value, problems + more, asked


def typed(cfg: DictConfig, schema: type[T]) -> tuple[T, list[str], bool]:
    """Do what `check` does for a composed configuration."""
    asked = cfg.get("dtype") == "auto" and hasattr(schema, "auto")
    if asked:  # all else is checked with a dtype that stands for the machine's own
        OmegaConf.update(cfg, "dtype", "bfloat16")
    try:
        return *convert(cfg, exact(schema, cfg)), asked
    except UserError as error:
        return typing.cast(T, None), [str(error)], asked


def exact(schema: type[T], cfg: DictConfig) -> type[T]:
    """Return the schema of a composed configuration: where the command's own has a class
    method `exact`, the one that this leads to. Raises UserError as that does."""
    chosen = getattr(schema, "exact", None)
    return schema if chosen is None else typing.cast(type[T], chosen(cfg))


def settled(value: T) -> T:
    """Return a configuration with the machine's own dtype in place of "auto". Last of all:
    it may load torch."""
    known: Any = value
    return typing.cast(T, dataclasses.replace(known, **known.auto()))


def present(value: T) -> T:
    """Return a configuration whose files and folders exist. Raises UserError for those that
    do not, as its method `absent` names them: before torch is loaded, and a model for
    nothing."""
    known: Any = value
    raise_all(known.absent() if hasattr(known, "absent") else [])
    return value


# Run a command
# -------------------------------------------------------------------------------------------


def entry(
    config_name: str, schema: type, conf_dir: Path = CONF, more: str = ""
) -> Callable[[Callable[[Any], Any]], Any]:
    """Make a command of main(cfg: schema), whose integer result, if any, is the exit code.

    UserError: one line on stderr, exit code 2. Interrupted: its line and code; Ctrl-C: 130. A
    full or unwritable disk counts as a user's mistake. Other exceptions are bugs and keep
    their traceback. Ranks above 0 print nothing. The command takes an optional list of
    arguments in place of sys.argv[1:].

    more: what `--help` says after the docstring of main's module.
    """

    def decorate(main: Callable[[Any], Any]) -> Any:
        def show_help(args: Sequence[str]) -> int:
            doc = sys.modules[main.__module__].__doc__ or config_name
            _say(help_text([doc, more], config_name, schema, args, conf_dir), sys.stdout)
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


def help_text(
    words: Sequence[str],
    name: str,
    schema: type,
    given: Sequence[str] = (),
    conf_dir: Path = CONF,
    spoken: Callable[[str], str] = str,
) -> str:
    """Return what `--help` says of a command. words: paragraphs before the keys. given: the
    command line, whose choices of groups hold. spoken: how commands in the words are written.
    Raises UserError for a choice that is none."""
    chosen = [word for word in given if group_options(conf_dir, word.partition("=")[0])]
    cfg, problems = _compose(name, schema, chosen, conf_dir)
    raise_all(problems)
    found: Any = cfg
    here: Any = OmegaConf.to_container(found, resolve=True)
    options = {group: options_here(conf_dir, group, schema) for group in groups(conf_dir, name)}
    with contextlib.suppress(UserError):  # a choice is missing, and so are the keys behind it
        schema = exact(schema, found)
    return layout(words, schema, here, options, spoken)


def refused(name: str, schema: type, words: Sequence[str], conf_dir: Path = CONF) -> int:
    """Return 2, with the command's own line on stderr, where it would refuse the words;
    else 0. Nothing is run and no framework is loaded, so that a mistake costs no more than
    reading it."""

    def look() -> int:
        raise_all(dashed(words, _closest(name, schema, words, conf_dir), conf_dir))
        if not any(word.startswith("-") for word in words):
            found: tuple[Any, list[str], bool] = check(name, schema, words, conf_dir)
            raise_all(found[1])
            present(found[0])
        return 0

    return _guarded(look, schema)


def _run(
    main: Callable[[Any], Any], name: str, schema: type, conf_dir: Path, args: list[str]
) -> int:
    def act(value: Any, problems: list[str], asked: bool) -> int:
        raise_all(problems)
        present(value)
        return main(settled(value) if asked else value) or 0

    if not any(a.startswith("-") for a in args):
        return act(*check(name, schema, args, conf_dir))
    raise_all(dashed(args, _closest(name, schema, args, conf_dir), conf_dir))
    codes: list[int] = []

    def job(cfg: DictConfig) -> None:
        codes.append(_guarded(lambda: act(*typed(cfg, schema)), schema))

    # The YAML files need not hold a key for it to be set.
    named = [(a, a.partition("=")[0]) for a in args]
    words = [
        f"++{a}" if knows(schema, key) and not group_options(conf_dir, key) else a
        for a, key in named
    ]
    first = next((i for i, a in enumerate(args) if "=" in a and not a.startswith("-")), len(args))
    saved = sys.argv
    with tempfile.TemporaryDirectory() as sweep:  # where Hydra drops its multirun.yaml
        # They must stand beside the user's own for argparse.
        overrides = [f"hydra.sweep.dir={sweep}", *QUIET]
        sys.argv = [saved[0], *words[:first], *overrides, *words[first:]]
        _show_packages()
        try:
            hydra.main(version_base="1.3", config_path=str(conf_dir), config_name=name)(job)()
        finally:
            sys.argv = saved
    return max(codes, default=0)


def _own_key(text: str, schema: type | None) -> str:
    """Return a message about a key of which this command takes one where others take
    several, such as drafters, with the command's own."""
    key, colon, rest = text.partition(":")
    known, one = set(keys(schema)) if schema else set(), key.removesuffix("s")
    return f"{one}{colon}{rest}" if key not in known and one in known else text


def _guarded(action: Callable[[], int], schema: type | None = None) -> int:
    """Return the exit code of an action; what the user should read goes to stderr."""
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
        # A full disk behind stderr leaves the exit code alone.
        with contextlib.suppress(OSError) if stream is None else contextlib.nullcontext():
            print(text, file=stream or sys.stderr, flush=True)


# Compose a command line
# -------------------------------------------------------------------------------------------


def _compose(
    name: str, schema: type, words: Sequence[str], conf_dir: Path
) -> tuple[DictConfig | None, list[str]]:
    """(composed config without the bad words, problems found so far)."""
    problems: list[str] = []
    good: list[str] = []
    parser = OverridesParser.create()
    words = [word for text in _joined(words) for word in _named_model(text, conf_dir)]
    for text in words:
        try:
            parsed = parser.parse_override(text)
            good.append(_composable(text, parsed, schema, conf_dir))
        except HydraException:
            problems.append(_unreadable(text, schema, conf_dir))
        except UserError as error:
            problems.append(str(error))
    if problems and (closest := _closest(name, schema, words, conf_dir)) is not schema:
        return _compose(name, closest, words, conf_dir)  # it knows the keys of the chosen head
    try:
        return composed(conf_dir, name, good), problems
    except (HydraException, *UNREADABLE) as error:
        return None, [*problems, _readable(error, conf_dir)]


def _joined(words: Sequence[str]) -> list[str]:
    """Return the words, where those of a list that a space parted are one: [none, ngram]."""
    found: list[str] = []
    for word in words:
        if found and found[-1].count("[") > found[-1].count("]") and "=" not in word:
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def composed(conf_dir: Path, name: str, overrides: list[str]) -> DictConfig:
    """Return what Hydra composes of words without a mistake."""
    _show_packages()
    with hydra.initialize_config_dir(str(conf_dir), version_base="1.3", job_name=name):
        return hydra.compose(name, overrides)


def _composable(text: str, parsed: Override, schema: type, conf_dir: Path) -> str:
    """Return a word as Hydra takes it. Raises UserError for an option or a key that there
    is not."""
    key = parsed.key_or_group
    options = group_options(conf_dir, key)
    if key.partition(".")[0].partition("/")[0] == "hydra":
        return text
    if options and not (parsed.is_sweep_override() or isinstance(parsed.value(), dict)):
        value = parsed.value()
        chosen = value if isinstance(value, list) else [value]
        if None in chosen or not chosen or parsed.is_delete():
            raise UserError(f"{text}: names no option; leave it out, or choose one")
        raise_all([w for c in chosen if (w := _choice(conf_dir, schema, key, str(c)))])
        return text
    if parsed.is_delete() and knows(schema, key):
        return text
    # The schema is the authority: a key that the YAML leaves alone may be set.
    return "++" + _one_or_several(text.lstrip("+"), parsed, schema)


def _closest(name: str, schema: type, words: Sequence[str], conf_dir: Path) -> type:
    """Return the schema that the chosen groups lead to (`exact`), by which a mistake is
    answered."""
    if not hasattr(schema, "exact"):
        return schema
    chosen = [word for word in words if group_options(conf_dir, word.partition("=")[0])]
    try:
        return exact(schema, composed(conf_dir, name, chosen))
    except (UserError, HydraException, *UNREADABLE):
        return schema


def _named_model(text: str, conf_dir: Path) -> list[str]:
    """Return the words for target=OWNER/NAME and target=FOLDER; of any other word the word
    itself."""
    group, _, value = text.lstrip("+").partition("=")
    bare = value.strip("'\"")
    named = paths.model(bare) if group == "target" else None
    if named is None or value in group_options(conf_dir, group):
        return [text]
    if value == bare and ("," not in bare or Path(bare).is_dir()):
        value = "'{}'".format(bare.replace("'", r"\'"))  # it holds what words of ours do not
    return [f"{group}={named[0]}", f"{group}.{named[1]}={value}"]


def _one_or_several(text: str, parsed: Override, schema: type) -> str:
    """Return the word with its key as this schema has it: drafter=X for drafters=X and the
    other way round, [A,B] for A,B where a key takes several. Raises UserError for a key
    that there is not, and for several values of one that takes one."""
    key, _, given = text.partition("=")
    value = None if parsed.is_sweep_override() else parsed.value()
    several = parsed.is_sweep_override() or isinstance(value, list)
    here, more, one = knows(schema, key), f"{key}s", key.removesuffix("s")
    if takes_several(schema, more) and (several or not here):
        key = more
    elif not here and one != key and knows(schema, one):
        if isinstance(value, list) and len(value) != 1:
            raise UserError(f"{one}: {len(value)} of them, and this command takes one; give one")
        key, given = one, given.strip("[]") if several else given
    elif not here:
        raise UserError(unknown_key(key, keys(schema)))
    if takes_several(schema, key) and not isinstance(value, list | dict) and given != "null":
        return f"{key}=[{given}]"
    if parsed.is_sweep_override():
        raise UserError(f"{text}: several values need --multirun; quote a value that holds a comma")
    return f"{key}={given}"


class _PackagedConf(SearchPathPlugin):
    """Hydra finds the YAML files of packages behind our own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for root in packages.roots():
            search_path.append(packages.POINTS, f"file://{root}")


@functools.cache
def _show_packages() -> None:
    Plugins.instance().register(_PackagedConf)


# Groups and their options
# -------------------------------------------------------------------------------------------


def group_options(conf_dir: Path, group: str) -> dict[str, Path]:
    """Return the options of a config group by name; empty when there is no such group."""
    if not group or "." in group or not (conf_dir / group).is_dir():
        return {}
    return packages.options(conf_dir, group)


def options_here(conf_dir: Path, group: str, schema: type) -> set[str]:
    """Return those options of a group whose `kind` the command's schema takes: train/medusa.py
    knows no head=eagle3."""
    nested = nested_schema(typing.get_type_hints(schema).get(group))
    options = group_options(conf_dir, group)
    if nested is None:
        return set(options)
    return {name for name, path in options.items() if _kind_fits(path, nested)}


def groups(conf_dir: Path, name: str) -> Iterator[str]:
    """Yield the groups that the defaults of a command's file choose from, and those of the
    files that it begins from."""
    found = typing.cast(DictConfig, OmegaConf.load(conf_dir / f"{name}.yaml"))
    for item in found.get("defaults") or []:
        if isinstance(item, DictConfig):
            yield from map(str, item)
        elif item != "_self_":
            yield from groups(conf_dir, item)


def _every_group(conf_dir: Path) -> list[str]:
    found = {str(p.parent.relative_to(conf_dir)) for p in conf_dir.rglob("*.yaml")}
    return sorted(found - {*NO_GROUPS})


def _kind_fits(option: Path, nested: type) -> bool:
    try:
        found = OmegaConf.load(option)
    except UNREADABLE:  # a package's: it is reported to whoever chooses it
        return False
    return not isinstance(found, DictConfig) or not wrong_kind(found, nested)


# The line about a mistake
# -------------------------------------------------------------------------------------------


def _choice(conf_dir: Path, schema: type, group: str, name: str) -> str:
    """Return what is wrong with an option of a group, "" if nothing."""
    options, fitting = group_options(conf_dir, group), options_here(conf_dir, group, schema)
    if f"{group}={name}" in left.CHOICES:
        return left.line(f"{group}={name}", left.CHOICES[f"{group}={name}"])
    if group == packages.GROUP and name in left.KINDS:
        return left.line(f"{group}={name}", left.KINDS[name])
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


def _unreadable(text: str, schema: type, conf_dir: Path) -> str:
    """Return what is said of a word that is no KEY=VALUE."""
    if "=" in text:
        return f"{text}: cannot be read as KEY=VALUE; quote it: \"key='a value'\""
    if text in left.WORDS:
        return left.line(text, left.WORDS[text])
    if text in keys(schema) or group_options(conf_dir, text):
        return f"{text}: has no value; write {text}=VALUE, without spaces around ="
    if synonyms.said(text, [*keys(schema)]):
        return unknown_key(text, keys(schema))
    chosen = [group for group in _every_group(conf_dir) if text in group_options(conf_dir, group)]
    said = f"did you mean {chosen[0]}={text}?" if chosen else f"write KEY={text}, or quote a list"
    return f"{text}: is no KEY=VALUE; {said}"


def dashed(args: Sequence[str], schema: type, conf_dir: Path = CONF) -> list[str]:
    """Return a line for each key that is written --key value; Hydra refuses other flags."""
    found = []
    for i, flag in enumerate(args):
        key, _, value = flag.lstrip("-").partition("=")
        key = key.replace("-", "_")
        if not flag.startswith("--"):
            continue
        after = "".join(args[i + 1 : i + 2])
        if not value and "=" not in after and not after.startswith("-"):
            value = after
        known = any(knows(schema, k) for k in (key, f"{key}s", key.removesuffix("s")))
        if known or group_options(conf_dir, key):
            found.append(f"{flag}: keys have no dashes; write {key}={value or 'VALUE'}")
        elif synonyms.said(key, [*keys(schema)]) or left.of_key(key):
            found.append(f"{flag}: {unknown_key(key, keys(schema)).removeprefix(f'{key}: ')}")
    return found


def _readable(error: Exception, conf_dir: Path) -> str:
    """Return the line about what Hydra cannot compose."""
    text = str(error)
    group = re.search(r"Could not override '([^']+)'(?:\n|.)*No match in the defaults list", text)
    if not group:
        return " ".join(text.split()) + "; see --help"
    others = [name for name in _every_group(conf_dir) if name != group[1]]
    known = len(others) < len(_every_group(conf_dir))
    way = "leave it out" if known else nearest(group[1], others)
    return f"{group[1]}: this command has no such group; {way}"
