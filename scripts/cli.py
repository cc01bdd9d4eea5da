"""The command `outrider`: every script of this clone and every training entry point by its
name, from any folder.

    outrider train eagle3 target=smollm2 data.path=runs/data.jsonl out_dir=runs/eagle3 steps=1000
    outrider evaluate target=smollm2 'drafters=[none,runs/eagle3@tree]' out=reports/eagle3
    outrider ls heads

A verb is a file: the process becomes `python FILE KEY=VALUE ...`, so keys, errors and exit
codes are the file's own. `VERB --help` is made of the file's first words and of its keys
(KEYS below), whose modules import neither torch nor transformers; by the same keys a command
line with a mistake is refused here already, in the file's words, before anything heavy is
loaded.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from outrider.conf import left, packages
from outrider.conf.errors import UserError
from outrider.heads.registry import FORMATS

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
# The verbs as they are listed.
GROUPS = {
    "Data": ("synthesize", "cache_features"),
    "Train": ("train", "validate"),
    "Score": ("evaluate", "tune", "certify"),
    "Serve": ("export", "check", "serve", "chat"),
    "Publish": ("push", "import"),
    "Begin": ("demo", "doctor", "ls"),
}
NAMES = {"import_head": "import"}  # file -> verb, where they differ
FOLDERS = {  # what `ls` lists: (a folder of conf/, how one of its files is asked for)
    "heads": ("head", "outrider train NAME"),
    "targets": ("target", "target=NAME"),
    "recipes": ("experiment", "experiment=NAME of train and validate"),
    "suites": ("suite", "suite=NAME of evaluate"),
    "prompts": ("prompt_set", "prompts=NAME of synthesize"),
}
MARKS = ("@", "dry run:")  # comments for Hydra, and on which GPUs a recipe was planned
# Where the keys of a verb stand, "module:class". They are those of conf/VERB.yaml, VERB being the
# name of its file.
KEYS = {
    "synthesize": "outrider.scripts.data.config:SynthesizeConfig",
    "cache_features": "outrider.train.features.config:CacheConfig",
    "validate": "outrider.train.config:ValidateConfig",
    "evaluate": "outrider.scripts.scoring.config:EvaluateConfig",
    "tune": "outrider.scripts.tuning.config:TuneConfig",
    "certify": "outrider.scripts.certificate.config:CertifyConfig",
    "export": "outrider.scripts.exporting.config:ExportConfig",
    "check": "outrider.scripts.exporting.config:CheckConfig",
    "serve": "outrider.scripts.serve_http.config:ServeConfig",
    "chat": "outrider.scripts.common.config:ChatConfig",
    "import_head": "outrider.scripts.exporting.config:ImportConfig",
    "push": "outrider.scripts.exporting.config:PushConfig",
    "demo": "outrider.scripts.common.config:DemoConfig",
    "doctor": "outrider.scripts.machine.config:DoctorConfig",
}
# Verbs whose file hands everything on to one of the same name under train/, which speaks.
HANDED_ON = ("validate",)
# What torchrun hands on to its processes; the last two not by itself.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
COMPLETION = 'Completion: eval "$(_OUTRIDER_COMPLETE=bash_source outrider)", also zsh_ and fish_'
HELP = frozenset({"-h", "--help"})
# "accelerate launch train/head.py head=eagle3" and "python scripts/check.py" in a file's words
TRAINED = re.compile(r"accelerate launch train/head\.py head=\w+")
NAMED = re.compile(r"(?:python |accelerate launch )?scripts/(\w+)\.py")
RAW = {"ignore_unknown_options": True, "allow_extra_args": True}


@dataclass(frozen=True)
class Verb:
    """A file that is run. about: what it says of itself, in a line."""

    file: Path
    about: str


def verbs() -> dict[str, Verb]:
    """Every command of the product, by its verb."""
    return {NAMES.get(stem, stem): verb for stem, verb in _runnable(ROOT / "scripts").items()}


def trainers() -> dict[str, Verb]:
    """Every training entry point, by the name of its file."""
    found = _runnable(ROOT / "train")
    return {
        name: verb
        for name, verb in found.items()
        if "launch.trainer(" in verb.file.read_text(encoding="utf-8")
    }


def options(group: str) -> dict[str, str]:
    """The files of a folder of conf/, also of packages', with their first sentence for
    people."""
    found = {}
    for name, path in sorted(packages.options(CONF, group).items()):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found[name] = _sentences(lines)
        if any(line.startswith("licence: ") for line in lines) and "tried: true" not in lines:
            found[name] += " (not tried on the real set)"
    return found


def _sentences(lines: Sequence[str]) -> str:
    """The first comment for people, as long as its first line and to the end of a sentence."""
    said: list[str] = []
    for line in lines:
        if line.startswith("#") and not line[1:].strip().startswith(MARKS):
            said.append(line[1:].strip())
        elif said:
            break
    text = " ".join(said)
    ends = [stop.end() for stop in re.finditer(r"\.(?= [A-Z]|$)", text)]
    first = len(said[0]) if said else 0
    within = [end for end in ends if end <= first]
    return text[: max(within) if within else min(ends, default=len(text))]


def trainer(name: str) -> tuple[Verb, list[str]] | None:
    """(what trains `name`, a head or an entry point; the key that chooses the head); None
    where there is neither."""
    known = trainers()
    if name in known:
        return known[name], []
    return (known["head"], [f"head={name}"]) if name in options("head") else None


def own_words(file: Path) -> str:
    """The docstring of a file."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False) or ""


@dataclass(frozen=True)
class Entry:
    """What a command line is for. file: the one that speaks; config: its file in conf/;
    schema: of its keys; words: those that it reads."""

    file: Path
    config: str
    schema: type
    words: list[str]


def entry_of(verb: str, words: Sequence[str]) -> Entry:
    """What `VERB WORDS` is for. verb: the name of its file."""
    folder = "train" if verb in HANDED_ON else "scripts"
    place, _, name = KEYS[verb].partition(":")
    module, left = importlib.import_module(place), [*words]
    if hasattr(module, "keyed"):  # words that need no key there
        left = module.keyed(left)
    return Entry(ROOT / folder / f"{verb}.py", verb, getattr(module, name), left)


def help_of(verb: str, words: Sequence[str]) -> str:
    """What `VERB WORDS --help` says. verb: the name of its file."""
    from outrider.conf.schema import help_text

    at = entry_of(verb, words)
    said = own_words(at.file)
    return help_text(said, at.config, at.schema, words=words, spoken=as_typed)


def training(name: str, words: Sequence[str]) -> Entry:
    """What `train/NAME.py WORDS` is for."""
    from outrider.train.runs import SCHEMAS

    return Entry(ROOT / "train" / f"{name}.py", name, SCHEMAS[name], [*words])


def help_of_training(name: str, words: Sequence[str], typed: str = "") -> str:
    """What `train/NAME.py WORDS --help` says. typed: the head that was asked for by name."""
    from outrider.conf.schema import help_text
    from outrider.train.launch import SAME

    at = training(name, words)

    def spoken(text: str) -> str:
        return as_typed(text, typed)

    said = own_words(at.file)
    return help_text(said, at.config, at.schema, SAME, words=words, spoken=spoken)


def as_typed(text: str, head: str = "") -> str:
    """A text about commands, each as `outrider` spells it. head: the word behind `train` in
    place of head.py and its key."""
    found = TRAINED.sub(rf"outrider train {head or 'HEAD'}", text)
    found = re.sub(r"accelerate launch train/(\w+)\.py", r"outrider train \1", found)
    return NAMED.sub(lambda file: f"outrider {NAMES.get(file[1], file[1])}", found)


def refuse(at: Entry) -> None:
    """End the process with code 2 and the line of the file itself where it would refuse the
    words."""
    from outrider.conf.schema import refused

    if code := refused(at.config, at.schema, at.words):
        raise SystemExit(code)


def _runnable(folder: Path) -> dict[str, Verb]:
    found = {}
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nif __name__ == " in text:
            found[path.stem] = Verb(path, " ".join(own_words(path).split("\n\n")[0].split()))
    return found


def become(words: list[str]) -> NoReturn:
    """Run a command line in place of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)


def launched(verb: Verb, processes: int, words: Iterable[str]) -> list[str]:
    """The command line of a training run: one process needs no launcher.

    Raises UserError for more processes than accelerators, which would share one of them; on a
    machine without any they run on its processors.
    """
    if processes == 1:
        return [sys.executable, str(verb.file), *words]
    from outrider.train.launch import devices

    found = devices(processes, key="--launch")
    beside = Path(sys.executable).with_name("accelerate")
    module = ["-m", "accelerate.commands.accelerate_cli"]
    launcher = [str(beside)] if beside.exists() else module
    launcher += ["launch", "--num_processes", str(processes)]
    if not found:  # else accelerate starts one process, which starts the others
        launcher += ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"]
        launcher += ["--dynamo_backend", "no"]
    return [sys.executable, *launcher, str(verb.file), *words]


def _no_such(kind: str, word: str, known: Iterable[str]) -> NoReturn:
    from outrider.conf.typed import nearest

    known = list(options("head") if kind == "head" else known)
    gone = {"verb": left.VERBS, "head": left.KINDS}.get(kind, {})
    if word in gone and word not in known:
        click.echo(f"error: {left.line(word, gone[word])}", err=True)
        raise SystemExit(2)
    click.echo(f"error: {word}: no such {kind}; {nearest(word, known)}", err=True)
    raise SystemExit(2)


class Keys(click.Argument):
    """The words that go to the file as they are; groups and keys of its YAML complete."""

    def __init__(self, config: str):
        super().__init__(["words"], nargs=-1, type=click.UNPROCESSED)
        self.config = config

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Keys of conf/NAME.yaml, options where a key is a group."""
        group, given, _ = incomplete.partition("=")
        known = list(options(group)) if given else _keys(CONF / f"{self.config}.yaml")
        shown = [f"{group}={name}" for name in known] if given else [f"{key}=" for key in known]
        return [CompletionItem(word) for word in shown if word.startswith(incomplete)]


def _keys(path: Path) -> list[str]:
    """Top-level keys and groups of a YAML file, and of the files that it begins from."""
    if not path.exists():
        return []
    from omegaconf import DictConfig, OmegaConf

    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        return []
    found = set[str]()
    for item in loaded.pop("defaults", []):
        if isinstance(item, DictConfig):
            found.update(map(str, item))
        elif item != "_self_":
            found.update(_keys(path.with_name(f"{item}.yaml")))
    return sorted({*found, *map(str, loaded)})


def _command(name: str, verb: Verb) -> click.Command:
    def run(words: tuple[str, ...]) -> NoReturn:
        known = verb.file.stem in KEYS
        if HELP & {*words} and known:
            click.echo(help_of(verb.file.stem, words))
            raise SystemExit(0)
        if known:
            refuse(entry_of(verb.file.stem, words))
        become([sys.executable, str(verb.file), *words])

    return click.Command(
        name,
        params=[Keys(verb.file.stem)],
        callback=run,
        help=verb.about,
        short_help=verb.about,
        context_settings=RAW,
        add_help_option=False,  # the file's own lists its keys
    )


class Verbs(click.Group):
    """The table of commands; an unknown one is told in a line."""

    def __init__(self, kind: str, **keys: Any):
        super().__init__(**keys)
        self.kind = kind

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's; what is not there ends the process with code 2."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            _no_such(self.kind, args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


class Outrider(Verbs):
    """All verbs, by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A heading and its verbs, group by group."""
        wide = formatter.width - 6 - max(map(len, self.commands))
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                shown = ((name, self.commands[name]) for name in group if name in self.commands)
                formatter.write_dl([(n, c.get_short_help_str(wide)) for n, c in shown])


class Train(Verbs):
    """Entry points and heads, looked up when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Entry points and heads."""
        return sorted({*trainers(), *options("head")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command that trains `cmd_name`."""
        found = trainer(cmd_name)
        if found is None:
            return None
        verb, head = found

        def run(launch: int, words: tuple[str, ...]) -> NoReturn:
            if HELP & {*words}:
                click.echo(help_of_training(verb.file.stem, [*head, *words], cmd_name))
                raise SystemExit(0)
            if not head or (CONF / "head" / f"{cmd_name}.yaml").exists():  # a package's is heavy
                refuse(training(verb.file.stem, [*head, *words]))
            os.environ.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS)
            become(launched(verb, launch, [*head, *words]))

        about = options("head").get(cmd_name) or verb.about
        processes = click.Option(
            ["--launch"],
            type=click.IntRange(1),
            default=1,
            help="processes, by `accelerate launch`",
        )
        return click.Command(
            cmd_name,
            params=[processes, Keys("head")],  # the keys of all runs are alike
            callback=run,
            help=about,
            short_help=about,
            context_settings=RAW,
            add_help_option=False,
        )


LISTED = "What there is to name: heads, targets, recipes, suites, prompts, formats."


@click.command("ls", help=LISTED, short_help=LISTED)
@click.argument("kind", required=False)
def ls(kind: str | None) -> None:
    """Print what `kind` may name, or all kinds."""
    known = [k for k, (folder, _) in FOLDERS.items() if (CONF / folder).is_dir()] + ["formats"]
    if kind is not None and kind not in known:
        _no_such("list", kind, known)
    for name in known if kind is None else [kind]:
        folder, requested = FOLDERS.get(name, ("", "format=NAME of export"))
        rows = options(folder) if folder else dict.fromkeys(FORMATS, "")
        if kind is None:
            click.echo(f"{name} ({requested}):")
        indent = "  " if kind is None else ""
        for line in _two_columns(rows, indent):
            click.echo(line)


def _two_columns(rows: dict[str, str], indent: str) -> Iterator[str]:
    """Names and words, wrapped where a person reads; for a program a name is a line."""
    wide = max(map(len, rows), default=0)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name, about in rows.items():
        first, later = f"{indent}{name:{wide}}  ", " " * (len(indent) + wide + 2)
        room = max(columns - len(later), 30)
        said = textwrap.wrap(about, room, break_long_words=False, break_on_hyphens=False)
        yield f"{first}{said[0] if said else ''}".rstrip()
        yield from (later + line for line in said[1:])


def version() -> str:
    """The version of this clone with its commit, and of what a bug report needs."""
    from outrider.conf.commit import commit

    metadata = importlib.import_module("importlib.metadata")
    written = ROOT / "pyproject.toml"
    found = re.search(r'^version = "(.+)"', written.read_text(), re.M) if written.exists() else None
    made = commit()
    others = {"torch", "transformers"} & {*metadata.packages_distributions()}
    parts = [f"outrider {found[1] if found else metadata.version('outrider')}"]
    parts[0] += f" ({made})" if made else ""
    parts += [f"Python {sys.version.split()[0]}"]
    parts += [f"{name} {metadata.version(name)}" for name in sorted(others)]
    return ", ".join(parts)


def _show_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(version())
        raise SystemExit(0)


def application() -> click.Group:
    """The whole command."""
    group = Outrider(
        "verb",
        name="outrider",
        help="Draft heads for speculative decoding: train, decode losslessly, score, serve.",
        epilog=COMPLETION,
        commands={name: _command(name, verb) for name, verb in verbs().items()},
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    group.params.append(
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the version and exit.",
        )
    )
    about = "Train a head: `outrider train NAME KEY=VALUE ... [--launch PROCESSES]`."
    group.add_command(
        Train(
            "head",
            name="train",
            help=about,
            short_help=about,
            context_settings=group.context_settings,
        )
    )
    group.add_command(ls)
    return group


def main() -> None:
    """Entry of the installed command."""
    try:
        application().main(prog_name="outrider", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as shown:
        click.echo(shown.ctx.get_help() if shown.ctx else str(shown))
    except click.ClickException as error:
        click.echo(f"error: {error.format_message().rstrip('.')}; see outrider --help", err=True)
        raise SystemExit(2) from None
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
    except BrokenPipeError:  # `| head` went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None
