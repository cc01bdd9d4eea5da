"""How a target writes its own conversations (the Magpie idea, Xu et al. 2024): prompted with
the bare header of a user's turn, a chat model invents the question; then it answers it. Here:
drawing a block of conversations, and what counts as a junk question. `scripts/synthesize.py`
is the command."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import records
from outrider.decode.engine import Request
from outrider.decode.sampling import Sampling
from outrider.scripts.common.prompts import user_header
from outrider.scripts.data.in_process import InProcess
from outrider.scripts.data.questions import Invented

MIN_CHARS = 8
MIN_LETTERS = 0.2  # share of letters among the characters that are no white space
ROUNDS = 12  # attempts to fill a block before giving up on a model that invents no questions


def clean_question(text: str, complete: bool) -> str:
    """The question without white space around it; one that was cut loses its unfinished last
    sentence, if it has a finished one before."""
    text = text.strip().rstrip("\ufffd").rstrip()
    if not complete:
        ends = [m.end() for m in re.finditer(r"[.?!](?=\s|$)|\n", text)]
        if ends and ends[-1] >= MIN_CHARS:
            text = text[: ends[-1]].rstrip()
    return text


def junk(text: str, specials: tuple[str, ...] = ()) -> str:
    """Why `text` is no usable question, in a word or two; "" when it is one. specials: token
    texts that would change the chat's structure."""
    if len(text) < MIN_CHARS:
        return "too short"
    dense = re.sub(r"\s", "", text)
    if sum(c.isalpha() for c in dense) < MIN_LETTERS * len(dense):
        return "no letters"
    if any(s in text for s in specials):
        return "control tokens"
    return ""


def fingerprint(text: str) -> str:
    """What two questions share when they are the same question: case, punctuation and spacing
    do not count."""
    return " ".join(re.findall(r"\w+", text.casefold()))


@dataclass(kw_only=True)
class Inventing(InProcess):
    """The target asks as well as it answers. Block b is a pure function of (target, settings, seed,
    b, the questions before it), whatever ran before in this process.

    seen: fingerprints of earlier questions. dropped: junk by reason."""

    questions: Invented
    seen: set[str] = field(default_factory=set)
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
        known = records(self.ledger.path) if self.ledger.rows else ()
        self.seen |= {fingerprint(row["messages"][0]["content"]) for row in known}

    @property
    def done(self) -> int:
        """Rows: a question without an answer is replaced by another one."""
        return self.ledger.rows

    def next_block(self, want: int) -> Sequence[int]:
        """As many new questions. Raises UserError when the target invents too few usable ones."""
        number = len(self.ledger.blocks)
        self.questions.texts = dict(enumerate(self._questions(number, want), number << 24))
        return [*self.questions.texts]

    def fail(self, n: int, error: Exception) -> None:
        """Count an invented question that has no answer."""
        self.dropped["no answer"] += 1

    def check_cut(self, least: int = 1) -> None:
        """Short answers are meant to be cut."""

    def append(self, rows: list[dict[str, Any]], asked: int, failed: list[list[Any]]) -> None:
        """A block of the file. Questions of rows alone are seen: a resumed run knows no others."""
        self.seen |= {fingerprint(row["messages"][0]["content"]) for row in rows}
        self.ledger.append(rows, asked)
        self.on_commit(self.done)

    def _questions(self, number: int, want: int) -> list[str]:
        drawn_from = Sampling(self.cfg.question_temperature, top_p=self.cfg.question_top_p)
        good: list[str] = []
        here: set[str] = set()
        drawn = 0
        reasons: Counter[str] = Counter()
        for _ in range(ROUNDS):
            missing = want - len(good)
            count = missing + missing // 8 + 1  # some will be junk
            first = (number << 24) + drawn
            drawn += count
            requests = [
                Request(self.header, self.cfg.max_question_tokens, id=first + i)
                for i in range(count)
            ]
            for out in self.decode(requests, drawn_from, 2 * self.cfg.seed, self.stop):
                text = clean_question(self.text(out), out.finish == "eos")
                key = fingerprint(text)
                reason = junk(text, self.specials)
                if not reason and (key in self.seen or key in here):
                    reason = "duplicate"
                if reason:
                    reasons[reason] += 1
                elif len(good) < want:
                    here.add(key)
                    good.append(text)
            if len(good) == want:
                self.dropped += reasons
                return good
        why = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common()) or "none dropped"
        raise UserError(
            f"target: only {len(good)} of {drawn} invented questions are usable ({why}); take an "
            "instruction-tuned chat model, or a higher question_temperature"
        )
