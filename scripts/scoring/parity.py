"""The parity gate of every trained head of a report: heads/parity.py on the report's own
prompts, at T = 0.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.decode.target import Target
from outrider.heads.checkpoint import load_head, save_head
from outrider.heads.folders import head_folder
from outrider.heads.parity import Parity, check
from outrider.scripts.common.progress import Steps
from outrider.scripts.common.prompts import Prompt, question_ids
from outrider.scripts.scoring.interleaved import System


def gates(
    systems: Sequence[System],
    target: Target,
    prompts: Sequence[Prompt],
    count: int,
    tokens: int,
    quiet: bool = False,
) -> dict[str, Parity]:
    """Folder -> what the gate found, for every head that some system drafts with, on that
    system's own target; `count` prompts (0: no gate), answers of `tokens`. Each head is saved
    once more and read back.

    Raises UserError for a head that has vanished or changed since its system was made.
    """
    heads: dict[str, tuple[Path, Target]] = {}
    for system in systems if count else ():
        for part in system.draft.each if system.draft else ():
            if folder := head_folder(part):
                heads.setdefault(part.source, (folder, system.target or target))
    requested = [question_ids(target.tokenizer, p.turns[0]) for p in prompts[:count]]
    found = {}
    with Steps(quiet=quiet, transient=True) as bar:
        task = bar.add_task("parity gate", total=len(heads))
        for name, (folder, own) in sorted(heads.items()):
            head = load_head(folder, own)
            with tempfile.TemporaryDirectory() as place:
                copy = Path(place) / "head"
                save_head(head, copy, own.identity)
                reload = functools.partial(load_head, copy, own)
                found[name] = check(head, own, requested, tokens, reload=reload)
            bar.advance(task)
    return found
