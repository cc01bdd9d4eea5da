"""Entry points: compose conf/NAME.yaml with the command line, check it, run, and report a
mistake in one line.

Used as

    @entry("evaluate", EvaluateConfig)
    def main(cfg: EvaluateConfig) -> int | None: ...

    if __name__ == "__main__":
        main()

A command line is composed through Hydra's compose API, so that every problem (grammar, unknown
key, missing option, wrong type, broken rule) is reported in one go. `--help` lists the usual keys,
`--help all` every one, with the values that the chosen groups have; `--multirun KEY=A,B` runs the
command for each value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from outrider.conf import packages, paths
from outrider.conf.errors import CheckFailed, Interrupted, UserError
from outrider.conf.help import layout
from outrider.conf.typed import convert, keys, nearest, raise_all, unknown_key
from outrider.conf.words import left

CONF = Path(__file__).resolve().parent
HELP, SEVERAL = {"-h", "--help"}, {"-m", "--multirun"}
# A disk that is full, may not be written or has no such place is a user's to mend.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.ENAMETOOLONG)
T = TypeVar("T")


def compose(
    config_name: str, schema: type[T], overrides: Sequence[str] = (), conf_dir: Path = CONF
) -> T:
    """Return the typed configuration of a command line. Raises UserError with every
    problem."""
    value, problems = check(config_name, schema, overrides, conf_dir)
    raise_all(problems)
    return settled(value)


def check(
    name: str, schema: type[T], given: Sequence[str], conf_dir: Path = CONF
) -> tuple[T, list[str]]:
    """Return the configuration of a command line and its problems. The value has no meaning
    where there are problems; its dtype may be "auto"."""
    taken, problems = overrides_of(name, given, conf_dir)
    try:
        cfg = composed(conf_dir, name, taken)
        value, more = convert(cfg, exact(cfg, schema))
    except UserError as error:
        value, more = typing.cast(T, None), [str(error)]
    refused = {line.partition("=")[0] for line in problems}  # what was given is not missing as well
    more = [line for line in more if line.partition(": is required")[0] not in refused]
    return value, problems + more


def composed(conf_dir: Path, name: str, overrides: list[str]) -> DictConfig:
    """Return what Hydra composes; it finds the YAML files of packages behind our own. Raises
    UserError with what it says."""
    roots = [f"'file://{root}'" for root in packages.roots()]
    search = [f"hydra.searchpath=[{','.join(roots)}]"] if roots else []
    try:
        with hydra.initialize_config_dir(str(conf_dir), version_base="1.3", job_name=name):
            return hydra.compose(name, [*overrides, *search])
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, UnicodeError) as error:
        raise UserError(" ".join(str(error).split()) + "; see --help") from None


def exact(cfg: DictConfig, schema: type[T]) -> type[T]:
    """Return the schema of a composed configuration: where the command's own has a class
    method `exact`, the one that this leads to. Raises UserError as that does."""
    found: Any = schema
    return found.exact(cfg) if hasattr(schema, "exact") else schema


def settled(value: T) -> T:
    """Return a configuration with the machine's own dtype in place of "auto". Last of all:
    it may load torch."""
    known: Any = value
    auto = getattr(known, "dtype", "") == "auto"
    return typing.cast(T, dataclasses.replace(known, **known.auto())) if auto else value


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
        def show_help(args: Sequence[str]) -> None:
            about = [sys.modules[main.__module__].__doc__ or config_name, more]
            _say(help_text(about, config_name, schema, args, conf_dir), sys.stdout)

        @functools.wraps(main)
        def command(argv: Sequence[str] | None = None) -> None:
            args = list(sys.argv[1:] if argv is None else argv)
            run = functools.partial(_run, main, config_name, schema, conf_dir)
            act: Callable[..., Any] = show_help if HELP & {*args} else run
            sys.exit(guarded(lambda: act(args), schema))

        command.schema = schema  # type: ignore[attr-defined]
        command.config_name = config_name  # type: ignore[attr-defined]
        return command

    return decorate


def help_text(
    about: Sequence[str], name: str, schema: type, given: Sequence[str] = (), conf_dir: Path = CONF
) -> str:
    """Return what `--help` says of a command. about: paragraphs before the keys. given: the
    command line, whose choices of groups hold; "all" in it shows all keys. Raises UserError for a
    choice that is none."""
    options = groups(conf_dir, name)
    chosen = [word for word in given if word.partition("=")[0] in options]
    taken, problems = overrides_of(name, chosen, conf_dir)
    raise_all(problems)
    cfg = composed(conf_dir, name, taken)
    here: Any = OmegaConf.to_container(cfg, resolve=True)
    with contextlib.suppress(UserError):  # a choice is missing, and so are the keys behind it
        schema = exact(cfg, schema)
    return layout(about, schema, here, options, "all" in given)


def refused(name: str, schema: type, given: Sequence[str], conf_dir: Path = CONF) -> int:
    """Return 2, with the command's own line on stderr, where it would refuse the words;
    else 0. Nothing is run and no framework is loaded, so that a mistake costs no more than
    reading it."""
    return guarded(lambda: _run(None, name, schema, conf_dir, given), schema)


def _run(
    main: Callable[[Any], Any] | None,
    name: str,
    schema: type,
    conf_dir: Path,
    args: Sequence[str],
) -> int:
    """Return the largest exit code of the runs that a command line asks for. main: None looks for
    mistakes alone."""
    raise_all(dashed(args, schema))
    given = [word for word in args if word not in SEVERAL]
    codes = [0]
    for words in _each(given) if len(given) < len(args) else [given]:
        found: tuple[Any, list[str]] = check(name, schema, words, conf_dir)
        raise_all(found[1])
        raise_all(getattr(found[0], "absent", list)())  # before torch is loaded for nothing
        codes.append((main(settled(found[0])) or 0) if main else 0)
    return max(codes)


def _each(given: Sequence[str]) -> Iterator[list[str]]:
    """Yield the command lines that one with several values for a key, A,B, means."""
    parser, several = OverridesParser.create(), list[list[str]]()
    for word in given:
        values: Iterable[str] = ()
        with contextlib.suppress(HydraException):  # `check` says what is wrong with it
            one = parser.parse_override(word)
            values = one.sweep_string_iterator() if one.is_sweep_override() else ()
        several.append([f"{word.partition('=')[0]}={value}" for value in values] or [word])
    return map(list, itertools.product(*several))


def guarded(action: Callable[[], int | None], schema: type | None = None) -> int:
    """Return the exit code of an action; what the user should read goes to stderr. schema: of
    the command, which may take one of what others take several, such as drafters."""
    try:
        return action() or 0
    except UserError as error:
        key, known = str(error).partition(":")[0], [*keys(schema)] if schema else []
        one = key if key in known or key[:-1] not in known else key[:-1]
        _say(f"error: {str(error).replace(key, one, 1)}")
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
        where, why = error.filename or "disk", os.strerror(error.errno)
        _say(f"error: {where}: {why}; make room and mend permissions there, or write elsewhere")
        return 2


def _say(text: str, stream: typing.TextIO | None = None, everywhere: bool = False) -> None:
    if everywhere or os.environ.get("RANK", "0") == "0":
        # A full disk behind stderr leaves the exit code alone.
        with contextlib.suppress(OSError) if stream is None else contextlib.nullcontext():
            print(text, file=stream or sys.stderr, flush=True)


# The words of a command line
# -------------------------------------------------------------------------------------------


def groups(conf_dir: Path, name: str) -> dict[str, dict[str, Path]]:
    """Return the groups that the defaults of a command's file choose from, and those of the
    files that it begins from, with their options by name."""
    found: dict[str, dict[str, Path]] = {}
    whole = typing.cast(DictConfig, OmegaConf.load(conf_dir / f"{name}.yaml"))
    for item in whole.get("defaults") or []:
        if isinstance(item, DictConfig):
            found |= {str(group): packages.options(conf_dir, str(group)) for group in item}
        elif item != "_self_":
            found |= groups(conf_dir, item)
    return dict(sorted(found.items()))


def overrides_of(name: str, given: Sequence[str], conf_dir: Path) -> tuple[list[str], list[str]]:
    """Return the words of a command line as Hydra takes them, and what is wrong with others."""
    known, parser = groups(conf_dir, name), OverridesParser.create()
    taken, problems = list[str](), list[str]()
    for word in (one for text in _joined(given) for one in _named_model(text, known)):
        key, _, value = word.lstrip("+").partition("=")
        try:
            parsed = parser.parse_override(word)
        except HydraException:
            problems.append(_unreadable(word, known))
            continue
        several = parsed.is_sweep_override()
        chosen = None if several else parsed.value()
        if key in known and not several and not isinstance(chosen, dict):
            each = chosen if isinstance(chosen, list) else [chosen]
            wrong = [_choice(key, known[key], one) for one in each]
            problems += filter(None, wrong)
            taken += [] if any(wrong) else [word]
        elif parsed.is_delete() or key in known or key.startswith("hydra"):
            taken.append(word)
        elif (conf_dir / key).is_dir():
            problems.append(left("choices", word) or f"{key}: this command has no such group")
        else:  # the schema is the authority: a key that the YAML leaves alone may be set
            taken.append(f"++{key}=[{value}]" if several else f"++{key}={value}")
    return taken, problems


def _joined(given: Sequence[str]) -> list[str]:
    """Return the words, where those of a list that a space parted are one: [none, ngram]."""
    found: list[str] = []
    for word in given:
        inside = found and found[-1].count("[") > found[-1].count("]")
        found[-1:] = [f"{found[-1]} {word}"] if inside else [*found[-1:], word]
    return found


def _named_model(text: str, known: dict[str, dict[str, Path]]) -> list[str]:
    """Return the words for target=OWNER/NAME and target=FOLDER; of any other word the word
    itself."""
    group, _, value = text.lstrip("+").partition("=")
    bare = value.strip("'\"")
    named = paths.model(bare) if group == "target" else None
    if named is None or value in known.get(group, {}):
        return [text]
    if value == bare and ("," not in bare or Path(bare).is_dir()):
        value = "'{}'".format(bare.replace("'", r"\'"))  # it holds what words of ours do not
    return [f"{group}={named[0]}", f"{group}.{named[1]}={value}"]


def _choice(group: str, options: dict[str, Path], name: Any) -> str:
    """Return what is wrong with an option of a group, "" if nothing."""
    word, head = f"{group}={'null' if name is None else name}", group == packages.GROUP
    if name in options:
        return ""
    if not name:
        return f"{word}: names no option; leave it out, or choose one"
    if gone := left("choices", word) or (head and left("kinds", name)):
        return gone if gone.startswith(word) else f"{group}={gone}"
    if missing := packages.missing(name) if head else "":
        return missing
    said = nearest(name, options)
    model = "write target=OWNER/NAME; " if group == "target" and said.startswith("known") else ""
    return f"{word}: no such option; {model}{said}"


def _unreadable(text: str, known: dict[str, dict[str, Path]]) -> str:
    """Return what is said of a word that is no KEY=VALUE."""
    if "=" in text:
        return f"{text}: cannot be read as KEY=VALUE; quote it: \"key='a value'\""
    group = next((group for group, options in known.items() if text in options), "")
    said = f"did you mean {group}={text}?" if group else f"write {text}=VALUE"
    return left("words", text) or f"{text}: is no KEY=VALUE; {said}"


def dashed(args: Sequence[str], schema: type) -> list[str]:
    """Return a line for each key that is written --key value."""
    found, known = [], [*keys(schema)]
    for flag in (word for word in args if word.startswith("-") and word not in SEVERAL):
        key = flag.lstrip("-").partition("=")[0].replace("-", "_")
        other = f" ({unknown_key(key, known).partition('; ')[2]})" if key not in known else ""
        found.append(f"{flag}: keys have no dashes; write {key}=VALUE{other}")
    return found
