"""Benchmarks by name: conf/suite/NAME.yaml says where a public set of prompts is and which
columns hold what; here it becomes prompts, with the sha256 of what was loaded.

From the Hugging Face hub, or with suite.path from this disk (scripts/common/published.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.rules import ZeroOrMore
from outrider.conf.schema import CONF
from outrider.scripts.common.prompts import Prompt, requested, spoken
from outrider.scripts.common.published import Published, described, rows_of

SHOWN = ("name", "dataset", "config", "split", "revision", "licence", "path", "tried")


@dataclass(frozen=True)
class SuiteConfig(Published):
    """A public set of prompts to score with: conf/suite/NAME.yaml."""

    word, place = "suite", "suite.path"

    # which part of it
    split: str = "test"
    # prompts of the whole set
    prompts: ZeroOrMore = 0
    # column of the text, or of the list of a conversation's turns
    turns: str = "turns"
    # column of an id; empty = the row's number
    id: str = ""
    # column of a category; empty = all rows are of one
    category: str = ""


def every_suite() -> list[SuiteConfig]:
    """Return all of conf/suite, by name."""
    return [described(path, SuiteConfig) for path in sorted((CONF / "suite").glob("*.yaml"))]


def load_suite(suite: SuiteConfig) -> tuple[list[Prompt], dict[str, Any]]:
    """Return every prompt of a suite, and what the report says of it: the sha256 of all ids,
    categories and turns among it. Raises UserError for a set that cannot be had, for a missing
    column, and for a row without text."""
    prompts, seen = [], set()
    columns = (suite.turns, suite.more, suite.id, suite.category)
    for number, row in enumerate(rows_of(suite, columns), 1):
        prompt = _prompt(suite, row, number)
        if prompt.id in seen:
            raise UserError(f"suite: {suite.name}: row {number}: id {prompt.id!r} came before")
        seen.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"suite: {suite.name}: the set holds no row; give another suite.path")
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.category, prompt.turns]).encode())
    about = {key: getattr(suite, key) for key in SHOWN}
    about |= {"sha256": digest.hexdigest(), "loaded": len(prompts)}
    return prompts, about | {"expected": suite.prompts or len(prompts)}


def _prompt(suite: SuiteConfig, row: dict[str, Any], number: int) -> Prompt:
    text = row[suite.turns]
    turns = [suite.below(text, row)] if isinstance(text, str) else text
    try:
        asked = requested(*spoken({"turns": turns}))
    except ValueError as error:
        raise UserError(f"suite: {suite.name}: row {number}: {suite.turns}: {error}") from None
    name = str(row[suite.id]) if suite.id else str(number)
    category = str(row[suite.category]) if suite.category else suite.name
    return Prompt(name, category, [turn["content"] for turn in asked])
