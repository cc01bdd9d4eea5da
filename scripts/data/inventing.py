"""How a target writes its own conversations (the Magpie idea, Xu et al. 2024): prompted with
the bare header of a user's turn, a chat model invents the question; then it answers it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import records
from outrider.decode.engine import Request
from outrider.decode.sampling import Sampling
from outrider.scripts.common.prompts import user_header
from outrider.scripts.data.in_process import InProcess
from outrider.scripts.data.ledger import say
from outrider.scripts.data.questions import Question, fingerprint

MIN_CHARS = 8
MIN_LETTERS = 0.2  # share of letters among the characters that are no white space
ROUNDS = 12  # attempts to fill a block before giving up on a model that invents no questions


def clean_question(text: str, complete: bool) -> str:
    """Return the question without white space around it; one that was cut loses its
    unfinished last sentence, if it has a finished one before."""
    text = text.strip().rstrip("\ufffd").rstrip()
    ends = [m.end() for m in re.finditer(r"[.?!](?=\s|$)|\n", text)]
    whole = complete or not ends or ends[-1] < MIN_CHARS
    return text if whole else text[: ends[-1]].rstrip()


def junk(text: str, specials: tuple[str, ...] = ()) -> str:
    """Return why `text` is no usable question, in a word or two; "" when it is one.
    specials: token texts that would change the chat's structure."""
    if len(text) < MIN_CHARS:
        return "too short"
    dense = re.sub(r"\s", "", text)
    if sum(c.isalpha() for c in dense) < MIN_LETTERS * len(dense):
        return "no letters"
    if any(s in text for s in specials):
        return "control tokens"
    return ""


@dataclass(kw_only=True)
class Inventing(InProcess):
    """The target asks as well as it answers. Block b is a pure function of (target, settings, seed,
    b, the questions before it), whatever ran before in this process.

    invented: number -> question of the block. seen: fingerprints of the questions on file.
    unanswered: those of the block that have no answer. dropped: junk by reason."""

    invented: dict[int, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    unanswered: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.header, after = user_header(self.tokenizer)
        special_ids = set(self.tokenizer.all_special_ids)
        self.stop = sorted({*self.target.eos_ids, *(i for i in after[:1] if i in special_ids)})
        if not self.stop:
            raise UserError(
                "target: it names no end-of-turn token; set eos_token_id in its "
                "generation_config.json"
            )
        known = records(self.ledger.path) if self.ledger.numbers else ()
        self.seen |= {fingerprint(row["messages"][0]["content"]) for row in known}

    def blocks(self) -> Iterator[Sequence[int]]:
        """New questions. Raises UserError when the target invents too few usable ones."""
        while (missing := self.total - len(self.ledger.numbers)) > 0:
            first = ((max(self.ledger.numbers, default=-1) >> 24) + 1) << 24
            new = self._questions(first, min(self.cfg.batch, missing))
            self.invented = dict(enumerate(new, first))
            yield [*self.invented]

    def question(self, n: int) -> Question:
        """Return an invented question of the block."""
        return [{"role": "user", "content": self.invented[n]}], None

    def fail(self, n: int, error: Exception) -> None:
        """Count an invented question that has no answer; another one replaces it, also where the
        block is drawn again because none of it has one."""
        self.dropped["no answer"] += 1
        self.unanswered.add(fingerprint(self.invented[n]))

    def check_cut(self, least: int = 1) -> None:
        """Short answers are meant to be cut."""

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Put a block on file. Its questions are seen: a resumed run knows no others."""
        if rows:
            self.unanswered.clear()
        self.seen |= {fingerprint(row["messages"][0]["content"]) for row in rows}
        super().append(rows)

    def closing(self) -> None:
        """Say what was dropped."""
        say(f"dropped: {', '.join(f'{n} {why}' for why, n in self.dropped.items()) or 'none'}")

    def _questions(self, first: int, want: int) -> list[str]:
        """`want` usable questions; `first` numbers the requests."""
        sampling = Sampling(1.0, top_p=0.95)
        good: dict[str, str] = {}
        drawn, reasons = 0, Counter[str]()
        for _ in range(ROUNDS):
            missing = want - len(good)
            numbers = range(first + drawn, first + drawn + missing + missing // 8 + 1)
            drawn += len(numbers)  # some will be junk
            requests = [Request(self.header, self.cfg.max_question_tokens, id=i) for i in numbers]
            for out in self.decode(requests, sampling, 2 * self.cfg.seed, self.stop):
                text = clean_question(self.text(out), out.finish == "eos")
                key = fingerprint(text)
                reason = junk(text, self.specials)
                known = (good, self.seen, self.unanswered)
                if not reason and any(key in some for some in known):
                    reason = "duplicate"
                if reason:
                    reasons[reason] += 1
                elif len(good) < want:
                    good[key] = text
            if len(good) == want:
                self.dropped += reasons
                return [*good.values()]
        why = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common()) or "none dropped"
        raise UserError(
            f"target: only {len(good)} of {drawn} invented questions are usable ({why}); take an "
            "instruction-tuned chat model"
        )
