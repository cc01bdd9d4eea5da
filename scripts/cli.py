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
from typing import NoReturn

from outrider.conf import packages
from outrider.conf.errors import UserError
from outrider.conf.words import left
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
    "formats": ("", "format=NAME of export"),
}
OWN = {  # the verbs that are no file
    "train": "Train a head: `outrider train NAME KEY=VALUE ... [--launch PROCESSES]`.",
    "ls": "What there is to name: heads, targets, recipes, suites, prompts, formats.",
}
MARKS = ("@", "dry run:")  # comments for Hydra, and on which GPUs a recipe was planned
# The keys of a verb, "module:class". They are those of conf/VERB.yaml, VERB being the name of its
# file.
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
HELP = frozenset({"-h", "--help"})
# "accelerate launch train/head.py head=eagle3" and "python scripts/check.py" in a file's words
TRAINED = re.compile(r"accelerate launch train/head\.py head=\w+")
NAMED = re.compile(r"(?:python |accelerate launch )?scripts/(\w+)\.py")


@dataclass(frozen=True)
class Verb:
    """A file that is run. about: what it says of itself, in a line."""

    file: Path
    about: str


def verbs() -> dict[str, Verb]:
    """Return every command of the product that is a file, by its verb."""
    return {NAMES.get(stem, stem): verb for stem, verb in _runnable(ROOT / "scripts").items()}


def trainers() -> dict[str, Verb]:
    """Return every training entry point, by the name of its file."""
    found = _runnable(ROOT / "train")
    return {
        name: verb
        for name, verb in found.items()
        if "launch.trainer(" in verb.file.read_text(encoding="utf-8")
    }


def _runnable(folder: Path) -> dict[str, Verb]:
    found = {}
    for path in sorted(folder.glob("*.py")):
        if "\nif __name__ == " in path.read_text(encoding="utf-8"):
            found[path.stem] = Verb(path, " ".join(own_words(path).split("\n\n")[0].split()))
    return found


def own_words(file: Path) -> str:
    """Return the docstring of a file."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False) or ""


def options(group: str) -> dict[str, str]:
    """Return the files of a folder of conf/, also of packages', with their first sentence for
    people."""
    found = {}
    for name, path in sorted(packages.options(CONF, group).items()):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found[name] = _sentence(lines)
        if any(line.startswith("licence: ") for line in lines) and "tried: true" not in lines:
            found[name] += " (not tried on the real set)"
    return found


def _sentence(lines: Sequence[str]) -> str:
    """Return the first comment for people, to the end of its first sentence."""
    said: list[str] = []
    for line in lines:
        if line.startswith("#") and not line[1:].strip().startswith(MARKS):
            said.append(line[1:].strip())
        elif said:
            break
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(said))[0]


def trainer(name: str) -> tuple[Verb, list[str]] | None:
    """Return (what trains `name`, a head or an entry point; the key that chooses the head); None
    where there is neither."""
    known = trainers()
    if name in known:
        return known[name], []
    return (known["head"], [f"head={name}"]) if name in options("head") else None


# Run a verb
# -------------------------------------------------------------------------------------------


def run(verb: str, words: list[str]) -> NoReturn:
    """Become the file of `verb`; raises SystemExit where its words have a mistake or ask for
    help."""
    from outrider.conf.schema import help_text, refused

    file = verbs()[verb].file
    place, _, name = KEYS[file.stem].partition(":")
    module, keyed = importlib.import_module(place), [*words]
    schema = getattr(module, name)
    if hasattr(module, "keyed"):  # words that need no key there
        keyed = module.keyed(keyed)
    if HELP & {*words}:
        said = own_words(ROOT / ("train" if file.stem in HANDED_ON else "scripts") / file.name)
        print(as_typed(help_text([said], file.stem, schema, keyed)))
        raise SystemExit(0)
    if code := refused(file.stem, schema, keyed):
        raise SystemExit(code)
    become([sys.executable, str(file), *words])


def train(words: list[str]) -> None:
    """Become the training script of a head; raises SystemExit where its words have a mistake or
    ask for help."""
    from outrider.conf.schema import help_text, refused
    from outrider.train.launch import SAME
    from outrider.train.runs import SCHEMAS

    if not words or words[0] in HELP:
        about = {name: verb.about for name, verb in trainers().items()} | options("head")
        print("\n".join([OWN["train"], "", *_two_columns(dict(sorted(about.items())), "  ")]))
        return
    name, processes, words = words[0], *_launch(words[1:])
    found = trainer(name)
    if found is None:
        raise no_such("head", name, {**trainers(), **options("head")}, "kinds")
    verb, head = found
    script, keys = verb.file.stem, [*head, *words]
    if HELP & {*words}:
        said = [own_words(verb.file), SAME]
        print(as_typed(help_text(said, script, SCHEMAS[script], keys), head=name))
        return
    known = not head or (CONF / "head" / f"{name}.yaml").exists()  # a package's is heavy
    if known and (code := refused(script, SCHEMAS[script], keys)):
        raise SystemExit(code)
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS)
    become(launched(verb, processes, keys))


def _launch(words: list[str]) -> tuple[int, list[str]]:
    """(processes that --launch asks for, the other words). Raises UserError for no number."""
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--launch"), None)
    if at is None:
        return 1, words
    _, given, count = words[at].partition("=")
    rest = at + 1 if given else at + 2
    count = count if given else "".join(words[at + 1 : rest])
    if not count.isdigit() or int(count) < 1:
        raise UserError(f"--launch: {count!r} is no number of processes; give 1 or more")
    return int(count), [*words[:at], *words[rest:]]


def launched(verb: Verb, processes: int, words: Iterable[str]) -> list[str]:
    """Return the command line of a training run: one process needs no launcher.

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


def become(words: list[str]) -> NoReturn:
    """Run a command line in place of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)


# What the command says itself
# -------------------------------------------------------------------------------------------


def as_typed(text: str, head: str = "") -> str:
    """Return a text about commands, each as `outrider` spells it. head: the word behind `train` in
    place of head.py and its key."""
    found = TRAINED.sub(rf"outrider train {head or 'HEAD'}", text)
    found = re.sub(r"accelerate launch train/(\w+)\.py", r"outrider train \1", found)
    return NAMED.sub(lambda file: f"outrider {NAMES.get(file[1], file[1])}", found)


def no_such(kind: str, word: str, known: Iterable[str], section: str = "") -> UserError:
    """Return the error about a word that names nothing, or what left (a section of left.yaml)."""
    from outrider.conf.typed import nearest

    gone = section and left(section, word)
    return UserError(gone or f"{word}: no such {kind}; {nearest(word, known)}")


def ls(words: list[str]) -> None:
    """Print what the list that `words` names holds, or all lists."""
    if words and words[0] not in FOLDERS:
        raise no_such("list", words[0], FOLDERS)
    for name in words[:1] or FOLDERS:
        folder, requested = FOLDERS[name]
        rows = options(folder) if folder else dict.fromkeys(FORMATS, "")
        if not words:
            print(f"{name} ({requested}):")
        print("\n".join(_two_columns(rows, "" if words else "  ")))


def _two_columns(rows: dict[str, str], indent: str) -> Iterator[str]:
    """Yield names and words, wrapped where a person reads; for a program a name is a line."""
    wide = max(map(len, rows), default=0)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name, about in rows.items():
        first, later = f"{indent}{name:{wide}}  ", " " * (len(indent) + wide + 2)
        room = max(columns - len(later), 30)
        said = textwrap.wrap(about, room, break_long_words=False, break_on_hyphens=False) or [""]
        yield f"{first}{said[0]}".rstrip()
        yield from (later + line for line in said[1:])


def overview() -> str:
    """Return what `outrider --help` says: all verbs, by what they are for."""
    lines = [
        "usage: outrider VERB KEY=VALUE ... (outrider VERB --help lists the keys)",
        "",
        "Draft heads for speculative decoding: train, decode losslessly, score, serve.",
    ]
    about = {name: verb.about for name, verb in verbs().items()} | OWN
    for heading, group in GROUPS.items():
        rows = {name: textwrap.shorten(about[name], 84, placeholder="...") for name in group}
        lines += ["", f"{heading}:", *_two_columns(rows, "  ")]
    return "\n".join(lines)


def version() -> str:
    """Return the version of this clone with its commit, and of what a bug report needs."""
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


def speak(words: list[str]) -> None:
    """Do what a command line asks for. Raises UserError."""
    verb, rest = (words or ["--help"])[0], words[1:]
    if verb in HELP:
        print(overview())
    elif verb == "--version":
        print(version())
    elif verb in OWN:
        if verb == "train":
            train(rest)
        elif HELP & {*rest}:
            print(OWN["ls"])
        else:
            ls(rest)
    elif verb in verbs():
        run(verb, rest)
    else:
        raise no_such("verb", verb, [*verbs(), *OWN], "verbs")


def main() -> None:
    """Run the installed command."""
    try:
        speak(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # `| head` went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None
