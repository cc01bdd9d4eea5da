"""A llama.cpp server of our own, and what it writes to its log."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.scripts.extra.llamacpp import process
from outrider.scripts.extra.llamacpp.process import Program, Running

TALK = 5  # the log level that writes every draft token
CANDIDATE = re.compile(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+) \(\s*([\d.]+)\)")
DRAFTED = re.compile(r"generate_draft: id=(\d+), .*#draft=(\d+)")


@dataclass(frozen=True)
class LlamaServerSettings:
    """What a server runs. draft: "" for none. method: EAGLE3 or SIMPLE. context: tokens of
    each slot. exact: K/V caches in float32 and no flash attention, sums in the order of plain
    code; else the engine's own."""

    model: str
    draft: str = ""
    method: str = ""
    draft_tokens: int = 0
    probabilistic: bool = False
    slots: int = 1
    context: int = 1024
    threads: int = 1
    talk: int = TALK
    exact: bool = True


def running(
    python: Path, settings: LlamaServerSettings, work: Path, name: str
) -> AbstractContextManager[Running]:
    """A server while the block runs. Raises UserError when it does not come up."""
    program = Program("llama.cpp", python, Path(__file__).with_name("run.py"))
    return process.running(program, asdict(settings), work, name)


def drafts(log: Path, start: int = 0) -> list[tuple[int, list[tuple[int, float]]]]:
    """Every draft that a server wrote to its log behind byte `start`: (the token it stands
    behind, [(draft token, its share among the ten best)])."""
    with open(log, "rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    out, path = [], []
    for line in text.splitlines():
        found = CANDIDATE.search(line)
        if found:
            path.append((int(found[2]), float(found[3])))
            continue
        done = DRAFTED.search(line)
        if done:
            out.append((int(done[1]), path[: int(done[2])]))
            path = []
    return out
