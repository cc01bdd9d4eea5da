"""Drafters as the user wrote them, made short enough for a table, a legend and a headline."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import PurePath
from urllib.parse import urlsplit

from outrider.conf.errors import UserError
from outrider.heads.folders import head_folder
from outrider.heads.names import JOIN, members, parse, split

SERVER = re.compile(r"([\w.+-]+)@(https?://\S+)")  # a running one, by a name for it
INSIDE = ("head", "best", "checkpoints")  # folders of a run, which say nothing about it
LONGEST = 30
# outside references: transformers' own loops
GENERATE, LOOKUP = "hf_generate", "hf_prompt_lookup"
ASSISTED = "hf_assisted"  # stands before the name of a draft: transformers decodes with it


def labels(names: Sequence[str]) -> list[str]:
    """/data/runs/medusa/head@tree -> medusa@tree, hf_assisted@runs/draft -> hf_assisted@draft;
    of names that would be told by the same label each takes as much of its path as it needs,
    and the whole of it at last."""
    levels = [_levels(name) for name in names]
    place = [0] * len(names)
    while True:
        found = [steps[at] for steps, at in zip(levels, place, strict=True)]
        longer = [
            i
            for i, label in enumerate(found)
            if found.count(label) > 1 and place[i] + 1 < len(levels[i])
        ]
        if not longer:
            return found
        for i in longer:
            place[i] += 1


def wrong_drafter(name: str) -> str:
    """What is wrong with the name of a drafter, as far as it shows without loading anything;
    "" for one that may be loaded."""
    if name in (GENERATE, LOOKUP) or SERVER.fullmatch(name):
        return wrong_address(name)
    if name == ASSISTED:
        return f"{name}: transformers needs an assistant; write {name}@DIR"
    try:
        for part in parse(name.removeprefix(f"{ASSISTED}@")).each:
            head_folder(part)
    except UserError as error:
        close = difflib.get_close_matches(name.partition("@")[0], (GENERATE, LOOKUP, ASSISTED), 1)
        if close and "/" not in name:
            return f"{name}: no such drafter; did you mean {close[0]}?"
        return str(error).removeprefix("drafters: ")
    return ""


def wrong_address(name: str) -> str:
    """What is wrong with the address of a running server, "" for a sound one and for any other
    name. What may be a password is not told, for it would be printed."""
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
    """The short label of a name that stands alone."""
    return labels([name])[0]


def clipped(text: str, longest: int = LONGEST) -> str:
    """At most `longest` letters, the middle left out: both ends tell drafters apart."""
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[head + 1 - longest :]}"


def _levels(name: str) -> list[str]:
    """Ever longer labels of a name, the name itself last."""
    if (server := SERVER.fullmatch(name)) is not None:
        return [server[1], name]
    whole, extra = re.fullmatch(
        r"(.*?)((?: \(\w+\)| "
        r"#\d+)*)",
        name,
        re.S,
    ).groups()  # type: ignore[union-attr]
    lead = [ASSISTED] if whole.startswith(f"{ASSISTED}@") else []
    drafters = members(whole)
    if len(drafters) > 1:  # every one of them longer at the same time
        each = [_levels(one) for one in drafters]
        most = max(map(len, each))
        levels = [JOIN.join(one[min(i, len(one) - 1)] for one in each) for i in range(most)]
        return list(dict.fromkeys([*(level + extra for level in levels), name]))
    path, options = split(whole.removeprefix(f"{ASSISTED}@"))
    parts = [[*PurePath(part).parts] or [part] for part in (*lead, path, *options)]
    shown = [[p for p in folders if p not in INSIDE] or folders for folders in parts]
    deepest = max(map(len, parts))
    found = []
    for source in (shown, parts):
        for count in range(1, deepest + 1):
            short = [folders[-count - (folders[-1] in INSIDE) :] for folders in source]
            found.append(
                "@".join("/".join(folders) for folders in short).replace("//", "/") + extra
            )
    return list(dict.fromkeys([*found, name]))
