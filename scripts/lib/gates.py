"""The parity gate of every trained head of a report: heads/parity.py on the report's own prompts, at T = 0."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from conf.errors import UserError
from decode.target import Target
from heads import find_head, load_head, save_head
from heads.parity import Parity, check
from scripts.lib.progress import Steps, columns
from scripts.lib.prompts import Prompt, chat_ids


def gates(specs: Sequence[str], target: Target, prompts: Sequence[Prompt], count: int,
          tokens: int, quiet: bool = False) -> dict[str, Parity]:  # fmt: skip
    """Folder -> what the gate found, for every drafter of `specs` that is a head on disk; `count` prompts (0: no gate),
    answers of `tokens`. Each head is saved once more and read back."""
    folders = {re.sub(r"(@\w+)+$", "", spec) for spec in specs} if count else set()
    asked = [chat_ids(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in prompts[:count]]
    found = {}
    with Steps(*columns(28), quiet=quiet, transient=True) as bar:
        task = bar.add_task("parity gate", total=len(folders))
        for name in sorted(folders):
            try:
                head = load_head(find_head(name), target)
            except UserError:  # no head, or one that was named and left out already
                bar.advance(task)
                continue
            with tempfile.TemporaryDirectory() as place:
                copy = Path(place) / "head"
                save_head(head, copy, target.identity)
                found[name] = check(head, target, asked, tokens, reload=lambda copy=copy: load_head(copy, target))  # type: ignore[misc]
            bar.advance(task)
    return found
