"""What docs/path.md takes as given, in small: a set of prompts, and the log of a server.

    python -m outrider.scripts.lab.rehearsing.given prompts OUT COUNT
    python -m outrider.scripts.lab.rehearsing.given log DATA OUT

Prompts are questions of the made-up domains (scripts/synthesis/domains.yaml), in the form of
UltraChat's rows. The log holds the answers that a server gave (DATA, as synthesize leaves them)
as a proxy writes requests and responses, and a few lines that are none.
"""

from __future__ import annotations

import itertools
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from outrider.conf.jsonl import records
from outrider.scripts.common import files
from outrider.scripts.synthesis.domains import domains, questions

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
MODEL = "smollm2"
BROKEN = '{"request": {"model": "smol'


def prompts(out: Path, count: int) -> None:
    """`count` questions, by turns from the domains."""
    turns = itertools.chain.from_iterable(zip(*(questions(d, 0) for d in domains()), strict=False))
    rows = ({"messages": [{"role": "user", "content": text}]} for text in turns)
    files.write_jsonl(out, itertools.islice(rows, count))


def log(data: Path, out: Path) -> None:
    """The rows of `data` as requests and responses, a minute apart, with a line that was cut and
    a request that failed."""
    lines = [_exchange(number, row) for number, row in enumerate(records(data))]
    failed = {"request": {"model": MODEL, "messages": []}, "status": 500, "error": "overloaded"}
    files.write_jsonl(out, [*lines, failed])
    files.write_text(out, out.read_text() + BROKEN + "\n")


def _exchange(number: int, row: dict[str, Any]) -> dict[str, Any]:
    *question, answer = row["messages"]
    reason = "stop" if row["complete"] else "length"
    choice = {"index": 0, "message": answer, "finish_reason": reason}
    return {
        "timestamp": (BEGAN + timedelta(minutes=number)).isoformat(),
        "request": {"model": MODEL, "messages": question},
        "response": {"model": MODEL, "choices": [choice]},
    }


if __name__ == "__main__":
    what, first, second = sys.argv[1:]
    if what == "prompts":
        prompts(Path(first), int(second))
    else:
        log(Path(first), Path(second))
