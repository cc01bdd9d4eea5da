"""What a command line names: drafters, made short enough for a table, a legend and a headline, and
files and folders that are not there, told before torch is loaded in the words in which they would
be told later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from outrider.conf.errors import UserError
from outrider.conf.paths import missing
from outrider.heads.folders import head_folder
from outrider.heads.names import HUB, JOIN, members, parse, split
from outrider.scripts.common.files import ROOT, here

SERVER = re.compile(r"([\w.+-]+)@(https?://\S+)")  # a running one, by a name for it
INSIDE = ("head", "best", "checkpoints")  # folders of a run, which say nothing about it
LONGEST = 30
DEMO = ROOT / "scripts" / "prompts" / "demo.jsonl"
# outside references: transformers' own loops
GENERATE = "hf_generate"
ASSISTED = "hf_assisted"  # comes before the name of a draft: transformers decodes with it


def labels(names: Sequence[str]) -> list[str]:
    """/data/runs/medusa/head@tree -> medusa@tree, hf_assisted@runs/draft -> hf_assisted@draft;
    names that would get the same label stay whole."""
    found = [label(name) for name in names]
    return [
        name if found.count(short) > 1 else short for name, short in zip(names, found, strict=True)
    ]


def no_prompts(path: str, key: str = "prompts") -> list[str]:
    """Return a line where there is no file of prompts."""
    fix = f"give a JSONL file, such as {DEMO}"
    return [] if here(Path(path)).exists() else missing(key, path, fix)


def no_drafters(specs: Iterable[str], key: str = "drafter") -> list[str]:
    """Return a line for each drafter that this disk does not have; the hub is not asked for
    heads."""
    wrong = [wrong_drafter(spec) for spec in specs if HUB not in spec]
    return [f"{key}: {line}" for line in wrong if line]


def wrong_drafter(name: str) -> str:
    """Return what is wrong with the name of a drafter, as far as it shows without loading
    anything; "" for one that may be loaded."""
    if name == GENERATE or SERVER.fullmatch(name):
        return wrong_address(name)
    if name == ASSISTED:
        return f"{name}: transformers needs an assistant; write {name}@DIR"
    try:
        for part in parse(name.removeprefix(f"{ASSISTED}@")).each:
            head_folder(part)
    except UserError as error:
        return str(error).removeprefix("drafters: ")
    return ""


def wrong_address(name: str) -> str:
    """Return what is wrong with the address of a running server, "" for a sound one and for
    any other name. What may be a password is left out, for it would be printed."""
    server = SERVER.fullmatch(name)
    if server is None:
        return ""
    try:
        parts = urlsplit(server[2])
        sound = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        sound = False
    if sound and "@" not in parts.netloc and not parts.query and not parts.fragment:
        return ""
    return (
        f"{server[1]}@: its address is no address of a server; write {server[1]}@http://HOST:PORT"
    )


def label(name: str) -> str:
    """Return the short label of a single name."""
    if (server := SERVER.fullmatch(name)) is not None:
        return server[1]
    if len(drafters := members(name)) > 1:
        return JOIN.join(map(label, drafters))
    lead = f"{ASSISTED}@" if name.startswith(f"{ASSISTED}@") else ""
    path, options = split(name.removeprefix(lead))
    folders = [part for part in PurePath(path).parts if part not in INSIDE]
    return lead + "@".join([folders[-1] if folders else path, *options])


def clipped(text: str, longest: int = LONGEST) -> str:
    """At most `longest` letters, the middle left out: both ends tell drafters apart."""
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[head + 1 - longest :]}"
