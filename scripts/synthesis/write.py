"""How a target writes its own conversations (the Magpie idea, Xu et al. 2024): prompted with
the bare header of a user's turn, a chat model invents the question; then it answers it. Here:
drawing a block of conversations, and what counts as a junk question. `scripts/synthesize.py`
is the command."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.prompts import chat_ids, user_header

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


@dataclass
class BlockWriter:
    """Draws blocks of conversations. Block b is a pure function of (target, settings, seed, b,
    the questions before it), whatever ran before in this process.

    seen: fingerprints of earlier questions. dropped: junk by reason. tokens: generated so far,
    all of them."""

    target: Target
    question: Sampling
    answer: Sampling
    max_question_tokens: int
    max_new_tokens: int
    batch: int
    seed: int
    on_tokens: Callable[[int], None] = lambda n: None
    seen: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    def __post_init__(self) -> None:
        tokenizer = self.target.tokenizer
        self.header, after = user_header(tokenizer)
        special_ids = set(tokenizer.all_special_ids)
        self.stop = set(self.target.eos_ids) | {i for i in after[:1] if i in special_ids}
        self.specials = tuple(t for t in tokenizer.all_special_tokens if t)
        if not self.stop:
            raise UserError(
                "target: it names no end-of-turn token; set eos_token_id in its "
                "generation_config.json"
            )

    def block(self, number: int, want: int) -> list[dict[str, Any]]:
        """At most `want` conversations {"messages", "complete"}: fewer where an answer came
        out empty.

        Raises UserError when the target invents too few usable questions."""
        questions = self._questions(number, want)
        prompts = [
            chat_ids(self.target.tokenizer, [{"role": "user", "content": q}]) for q in questions
        ]
        first = number << 24
        requests = [Request(p, self.max_new_tokens, id=first + i) for i, p in enumerate(prompts)]
        rows = []
        answers = self._run(requests, self.answer, 2 * self.seed + 1, None)
        for text, out in zip(questions, answers, strict=True):
            reply = self._text(out).strip()
            if not reply or any(s in reply for s in self.specials):
                self.dropped["no answer"] += 1
                continue
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
            rows.append({"messages": messages, "complete": out.finish == "eos"})
            self.seen.add(fingerprint(text))  # of rows on file alone: a resumed run knows no others
        return rows

    def _questions(self, number: int, want: int) -> list[str]:
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
                Request(self.header, self.max_question_tokens, id=first + i) for i in range(count)
            ]
            for out in self._run(requests, self.question, 2 * self.seed, self.stop):
                text = clean_question(self._text(out), out.finish == "eos")
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

    def _run(
        self, requests: list[Request], sampling: Sampling, seed: int, stop: set[int] | None
    ) -> list[Generation]:
        def count(_: int, new: list[int], __: list[bool]) -> None:
            self.tokens += len(new)
            self.on_tokens(len(new))

        run = generate(
            self.target,
            NoDraft(),
            requests,
            sampling,
            batch_size=self.batch,
            seed=seed,
            on_tokens=count,
            eos_ids=sorted(stop) if stop else None,
        )
        return run.generations

    def _text(self, out: Generation) -> str:
        return text_of(self.target, out)


def text_of(target: Target, out: Generation) -> str:
    """An answer without its end-of-turn token; other special tokens are shown."""
    ids = out.token_ids[:-1] if out.finish == "eos" else out.token_ids
    return str(target.tokenizer.decode(ids, skip_special_tokens=False))
