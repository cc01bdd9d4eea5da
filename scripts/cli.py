"""The command `outrider`: every script of this clone and every training entry point by its
name, from any folder.

    outrider train eagle3 target=smollm2 data.path=runs/data.jsonl out_dir=runs/eagle3 steps=1000
    outrider evaluate target=smollm2 'drafters=[none,runs/eagle3@tree]' out=reports/eagle3
    outrider ls heads

A verb is a file: the process becomes `python -m MODULE KEY=VALUE ...`, so keys, errors and exit
codes are the file's own. `VERB --help` is made of the file's first words and of its keys,
whose modules import neither torch nor transformers; by the same keys a command line with a
mistake is refused here already, in the file's words, before anything heavy is loaded.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from outrider.conf import packages
from outrider.conf.errors import UserError
from outrider.conf.words import left
from outrider.heads.registry import FORMATS
from outrider.scripts.common.files import ROOT, installed

CONF = ROOT / "conf"
# The verbs as they are listed: the file of each, and where its keys are, "module:class". They are
# those of conf/NAME.yaml, NAME being the file's.
VERBS: dict[str, dict[str, tuple[str, str] | None]] = {
    "Data": {
        "synthesize": ("scripts/synthesize.py", "scripts.data.config:SynthesizeConfig"),
        "cache_features": ("scripts/cache_features.py", "train.data.config:CacheConfig"),
    },
    "Train": {
        "train": None,
        "validate": ("train/validate.py", "train.config:ValidateConfig"),
    },
    "Score": {
        "evaluate": ("scripts/evaluate.py", "scripts.scoring.config:EvaluateConfig"),
        "tune": ("scripts/tune.py", "scripts.tuning.config:TuneConfig"),
        "certify": ("scripts/certify.py", "scripts.certificate.config:CertifyConfig"),
    },
    "Serve": {
        "export": ("scripts/export.py", "scripts.exporting.config:ExportConfig"),
        "check": ("scripts/check.py", "scripts.exporting.config:CheckConfig"),
        "serve": ("scripts/serve.py", "scripts.serve_http.config:ServeConfig"),
        "chat": ("scripts/chat.py", "scripts.common.config:ChatConfig"),
    },
    "Publish": {
        "push": ("scripts/push.py", "scripts.exporting.config:PushConfig"),
        "import": ("scripts/import_head.py", "scripts.exporting.config:ImportConfig"),
    },
    "Begin": {
        "demo": ("scripts/demo.py", "scripts.common.config:DemoConfig"),
        "doctor": ("scripts/doctor.py", "scripts.machine.config:DoctorConfig"),
        "ls": None,
    },
}
FILES = {verb: row for group in VERBS.values() for verb, row in group.items() if row}
OWN = {  # the verbs that are no file
    "train": "Train a head: `outrider train NAME KEY=VALUE ... [--launch PROCESSES]`.",
    "ls": "What there is to name: heads, targets, recipes, suites, prompts, formats.",
}
FOLDERS = {  # what `ls` lists: (a folder of conf/, how one of its files is asked for)
    "heads": ("head", "outrider train NAME"),
    "targets": ("target", "target=NAME"),
    "recipes": ("experiment", "experiment=NAME of train and validate"),
    "suites": ("suite", "suite=NAME of evaluate"),
    "prompts": ("prompt_set", "prompts=NAME of synthesize"),
    "formats": ("", "format=NAME of export"),
}
MARKS = ("@", "dry run:")  # comments for Hydra, and on which GPUs a recipe was planned
# What torchrun hands on to its processes; the last two not by itself.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
HELP = frozenset({"-h", "--help"})


def own_words(file: str) -> str:
    """Return the docstring of a file."""
    return (
        ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8")), clean=False) or ""
    )


def about(file: str) -> str:
    """Return the first paragraph of it, in a line."""
    return " ".join(own_words(file).split("\n\n")[0].split())


def schema_of(verb: str) -> type:
    """Return the class of the keys of a verb that is a file."""
    module, _, name = FILES[verb][1].partition(":")
    found: type = getattr(importlib.import_module(f"outrider.{module}"), name)
    return found


def trainers() -> dict[str, str]:
    """Return the file of every training entry point, by its name."""
    from outrider.train.config import HEAD_KEYS

    return {name: f"train/{name}.py" for name in HEAD_KEYS}


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


def trainer(name: str) -> tuple[str, list[str]] | None:
    """Return (the file that trains `name`, a head or an entry point; the key that chooses the
    head); None where there is neither."""
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

    file, stem, schema = FILES[verb][0], Path(FILES[verb][0]).stem, schema_of(verb)
    processes, words = _launch(words) if verb == "cache_features" else (1, words)
    keyed = getattr(sys.modules[schema.__module__], "keyed", list)(words)  # words without a key
    if HELP & {*words}:
        print(help_text([own_words(file)], stem, schema, keyed + ["all"] * ("all" in words)))
        raise SystemExit(0)
    if code := refused(stem, schema, keyed):
        raise SystemExit(code)
    become(launched(file, processes, words))


def train(words: list[str]) -> None:
    """Become the training script of a head; raises SystemExit where its words have a mistake or
    ask for help."""
    from outrider.conf.schema import help_text, refused
    from outrider.train.config import keys_of
    from outrider.train.launch import SAME

    if not words or words[0] in HELP:
        rows = {name: about(file) for name, file in trainers().items()} | options("head")
        print("\n".join([OWN["train"], "", *_two_columns(dict(sorted(rows.items())), "  ")]))
        return
    name, processes, words = words[0], *_launch(words[1:])
    found = trainer(name)
    if found is None:
        raise no_such("head", name, options("head"), "kinds")
    file, head = found
    script, keys = Path(file).stem, [*head, *words]
    if HELP & {*words}:
        heading = f"{name}: {options('head')[name]}" if head else ""
        print(help_text([heading, own_words(file), SAME], script, keys_of(script), keys))
        return
    known = not head or (CONF / "head" / f"{name}.yaml").exists()  # a package's is heavy
    if known and (code := refused(script, keys_of(script), keys)):
        raise SystemExit(code)
    become(launched(file, processes, keys))


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


def launched(file: str, processes: int, words: Iterable[str]) -> list[str]:
    """Return the command line of a run in processes: one needs no launcher.

    Raises UserError for more processes than accelerators, which would share one of them; on a
    machine without any they run on its processors.
    """
    command = [sys.executable, str(ROOT / file), *words]
    if processes == 1 and file.startswith("scripts/"):  # -P: no folder may shadow a library
        module = f"outrider.{file.removesuffix('.py').replace('/', '.')}"
        return [sys.executable, "-P", "-m", module, *words]
    if processes == 1:
        return command
    from outrider.train.launch import devices

    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS)
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch"]
    launcher += ["--num_processes", str(processes)]
    if not devices(
        processes, key="--launch"
    ):  # else accelerate starts one, which starts the others
        launcher += ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"]
        launcher += ["--dynamo_backend", "no"]
    return [sys.executable, *launcher, *command[1:]]


def become(words: list[str]) -> NoReturn:
    """Run a command line in place of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)


# What the command says itself
# -------------------------------------------------------------------------------------------


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


def _two_columns(rows: dict[str, str], indent: str) -> list[str]:
    wide = max(map(len, rows), default=0)
    return [f"{indent}{name:{wide}}  {said}".rstrip() for name, said in rows.items()]


def overview() -> str:
    """Return what `outrider --help` says: all verbs, by what they are for."""
    lines = [
        "usage: outrider VERB KEY=VALUE ... (outrider VERB --help: its keys; --help all)",
        "",
        "Draft heads for speculative decoding: train, decode losslessly, score, serve.",
    ]
    for heading, group in VERBS.items():
        said = {verb: about(row[0]) if row else OWN[verb] for verb, row in group.items()}
        rows = {verb: textwrap.shorten(text, 84, placeholder="...") for verb, text in said.items()}
        lines += ["", f"{heading}:", *_two_columns(rows, "  ")]
    return "\n".join(lines)


def version() -> str:
    """Return the version of this clone with its commit, and of what a bug report needs."""
    from outrider.conf.commit import commit

    made = commit()
    parts = [f"outrider {installed('outrider')}" + (f" ({made})" if made else "")]
    parts += [f"Python {sys.version.split()[0]}"]
    others = ((name, installed(name)) for name in ("torch", "transformers"))
    return ", ".join([*parts, *(f"{name} {found}" for name, found in others if found)])


def speak(words: list[str]) -> None:
    """Do what a command line asks for. Raises UserError."""
    verb, rest = (words or ["--help"])[0], words[1:]
    if verb in HELP:
        print(overview())
    elif verb == "--version":
        print(version())
    elif verb == "train":
        train(rest)
    elif verb == "ls":
        print(OWN["ls"]) if HELP & {*rest} else ls(rest)
    elif verb in FILES:
        run(verb, rest)
    else:
        raise no_such("verb", verb, [*FILES, *OWN], "verbs")


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
