"""Walk docs/path.md here, with real parts: `make rehearsal`.

    python scripts/lab/rehearsal.py

Its commands are those of the page, in order, with a small model for the large one, two CPU
processes for eight GPUs, llama.cpp for vLLM, a hub on this machine, and budgets of minutes:
scripts/lab/rehearsing/stand_ins.yaml says what stands for what. A server of the page runs while
commands that ask it do. Finished commands are not run again, so it goes on after a kill at any
place by the same command. Writes OUT (JSON): every command with its seconds and what it left.

    python scripts/lab/rehearsal.py kills=true work=runs/killed \\
        out=docs/results/rehearsal-killed.json

kills it once in every command, begins it again each time, and holds what it left against OUT of
a rehearsal that was left alone (against=FILE). Exit code 1 where they differ.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from outrider.conf import threads
from outrider.conf.errors import CheckFailed
from outrider.conf.rules import OneOrMore
from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.lab.hub_stand_in import hub
from outrider.scripts.lab.rehearsing import kills, stand_ins
from outrider.scripts.lab.rehearsing.page import PAGE, steps
from outrider.scripts.lab.rehearsing.stand_ins import Line
from outrider.scripts.lab.rehearsing.walk import Walk
from outrider.scripts.lab.serving import llamacpp, shared


@dataclass(frozen=True)
class RehearsalConfig:
    """Keys of scripts/lab/rehearsal.py."""

    # JSON to write
    out: str = "docs/results/rehearsal.json"
    # folder that takes the place of runs/, exports/ and reports/ of the page
    work: str = "runs/rehearsal"
    # Python of llama.cpp's environment
    engine: str = ".venv-llamacpp/bin/python"
    # threads of llama.cpp's server
    threads: OneOrMore = 2
    # kill it once in every command and compare
    kills: bool = False
    # kills: JSON of a rehearsal that was left alone
    against: str = "docs/results/rehearsal.json"


@entry("rehearsal", RehearsalConfig)
def main(cfg: RehearsalConfig) -> int:
    """Run what is not done yet, write what was found."""
    os.chdir(files.ROOT)
    work = stand_ins.places(Path(cfg.work))
    given = stand_ins.load()
    lines = stand_ins.plan(steps(), given, work)
    if cfg.kills:
        return kills.compare(Path(cfg.out), Path(cfg.against), _again(cfg), work, lines)
    python = shared.environment(cfg.engine, llamacpp.MAKE)
    with files.sole_folder(work):
        with hub(work / "hub") as server:
            walk = Walk(work, given.exit_codes, python, cfg.threads, environment(work, server.url))
            origin = files.origin()
            rows = walk.through(
                lines, lambda rows: files.write_json(Path(cfg.out), origin | report(lines, rows))
            )
        check_read_back(rows)
    seconds = sum(row["seconds"] for row in rows)
    print(f"rehearsal: {len(rows)} commands in {seconds / 60:.1f} minutes; {cfg.out}")
    return 0


def _again(cfg: RehearsalConfig) -> list[str]:
    """The command line of this rehearsal without kills."""
    keys = [f"out={cfg.work}/rehearsal.json", f"work={cfg.work}", f"threads={cfg.threads}"]
    return [sys.executable, str(Path(__file__).resolve()), *keys]


def check_read_back(rows: list[dict[str, Any]]) -> None:
    """Raises CheckFailed where the head that comes back from the hub (step D8) is not accepted as
    the one that was pushed (D1)."""
    pushed, back = (
        [
            length
            for row in rows
            for label, length in row.get("same", {}).get("accepted_length", {}).items()
            if row["step"] == step and label.endswith("@chain")
        ]
        for step in ("D1", "D8")
    )
    if pushed != back:
        raise CheckFailed(f"D8: accepted length {back} of the head that came back, not {pushed}")


def environment(work: Path, hub_url: str) -> dict[str, str]:
    """Of every command: this clone's code, processors in place of GPUs, the hub at `hub_url`, and
    no spinning threads, which starve each other on shared cores."""
    root = str(files.ROOT)
    mine = {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", "")))),
        "ACCELERATE_USE_CPU": "true",
        **threads.SLEEPY,
        "HF_ENDPOINT": hub_url,
        "HF_TOKEN": "write-rehearsal",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(work.resolve() / "hf"),
    }
    return {**os.environ, **mine}


def report(lines: list[Line], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """OUT but for its origin. complete: whether every command is through."""
    left_out = [{"written": x.written, "why": x.why} for x in lines if x.kind == "left out"]
    engines = {row["engine"] for row in rows}
    return {
        "format": 1,
        "complete": len(rows) == sum(line.kind == "run" for line in lines),
        "page": {"path": str(PAGE.relative_to(files.ROOT)), "sha256": files.sha256(PAGE)},
        "engine": {"xllamacpp": next((v for v in sorted(engines) if v), "")},
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "steps": rows,
        "servers": [x.written for x in lines if x.kind == "serve"],
        "left_out": left_out,
    }


if __name__ == "__main__":
    main()
