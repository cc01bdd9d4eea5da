"""How a target writes its own conversations (the Magpie idea, Xu et al. 2024): prompted with
the bare header of a user's turn, a chat model invents the question; then it answers it. Here:
drawing a block of conversations, what counts as a junk question, and the file that holds them.
`scripts/synthesize.py` is the command."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import UserError
from decode.drafters import NoDraft
from decode.engine import Generation, Request, generate
from decode.sampling import Sampling
from decode.target import Target
from scripts.common.files import write_bytes, write_json
from scripts.common.prompts import chat_ids, user_header

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
class Writer:
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
        for text, out in zip(
            questions, self._run(requests, self.answer, 2 * self.seed + 1, None), strict=True
        ):
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
            count = (
                (want - len(good)) + (want - len(good)) // 8 + 1
            )  # a few more than missing: some will be junk
            first = (number << 24) + drawn
            drawn += count
            requests = [
                Request(self.header, self.max_question_tokens, id=first + i) for i in range(count)
            ]
            for out in self._run(requests, self.question, 2 * self.seed, self.stop):
                text = clean_question(self._text(out), out.finish == "eos")
                key = fingerprint(text)
                reason = junk(text, self.specials) or (
                    "duplicate" if key in (self.seen | here) else ""
                )
                if reason:
                    reasons[reason] += 1
                elif len(good) < want:
                    here.add(key)
                    good.append(text)
            if len(good) == want:
                self.dropped += reasons
                return good
        raise UserError(
            f"target: only {len(good)} of {drawn} invented questions are usable "
            f"({_counts(reasons)}); "
            "take an instruction-tuned chat model, or a higher question_temperature"
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
        ids = out.token_ids[:-1] if out.finish == "eos" else out.token_ids
        return self.target.tokenizer.decode(ids, skip_special_tokens=False)


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in reasons.most_common()) or "none dropped"


class Store:
    """The JSONL file, whole at every moment, and FILE.meta.json beside it: the settings that
    made it and its blocks.

    Every block replaces the file by rename, then the record; after a kill between the two the
    file is one block ahead and that block is drawn again, with the same result."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.settings = path, settings
        self.meta = path.with_name(path.name + ".meta.json")
        self.lines: list[str] = []
        self.blocks: list[list[int]] = []  # [asked, got] per block

    def open(self, total: int, batch: int) -> None:
        """Read what is there. Raises UserError when the file belongs to other settings (the
        message names each difference), has no record, was damaged, or already holds more than
        `total` conversations."""
        if (record := read_record(self.path, self.meta, self.settings)) is None:
            return
        try:
            blocks = [[int(a), int(g)] for a, g in record["blocks"]]
        except (ValueError, KeyError, TypeError) as e:
            raise damaged(self.path, self.meta) from e
        held = sum(got for _, got in blocks)
        if held > total:
            raise UserError(
                f"num_conversations: {self.path} already holds {held}, {total} asked; "
                "give another name"
            )
        if held < total and blocks and blocks[-1][0] < batch:
            blocks.pop()  # the short last block of a smaller run: a larger run has a full one there
        self.blocks = blocks
        try:
            lines = (
                self.path.read_bytes().decode(errors="replace").split("\n")
            )  # not splitlines: text may hold U+2028
            lines = [line + "\n" for line in lines[:-1]]
        except FileNotFoundError:
            lines = []
        keep = sum(got for _, got in blocks)
        if len(lines) < keep:
            raise UserError(
                f"out: {self.path} lost lines since it was written ({len(lines)} of {keep} left); "
                f"delete it and {self.meta.name} to start again"
            )
        self.lines = lines[:keep]

    def questions(self) -> Iterator[str]:
        """The questions on file. Raises UserError with file:line for a line that is no
        conversation.
        """
        for number, line in enumerate(self.lines, 1):
            try:
                yield json.loads(line)["messages"][0]["content"]
            except (ValueError, KeyError, IndexError, TypeError) as e:
                raise UserError(
                    f"{self.path}:{number}: no conversation any more; delete the file and "
                    f"{self.meta.name} to start again"
                ) from e

    def append(self, rows: list[dict[str, Any]], asked: int) -> None:
        """Add one block. Raises OSError (disk full, no permission); the old file then stays as
        it was.
        """
        if not self.meta.exists():  # first, so that no kill leaves a file without a record
            write_json(self.meta, {"settings": self.settings, "blocks": []})
        self.lines += [json_line(row) for row in rows]
        self.blocks.append([asked, len(rows)])
        write_bytes(self.path, "".join(self.lines).encode())
        write_json(self.meta, {"settings": self.settings, "blocks": self.blocks})


def json_line(row: dict[str, Any]) -> str:
    """One JSON line; letters stay readable, what some readers take for a line end does not."""
    text = json.dumps(row, ensure_ascii=False)
    return re.sub("[\x85\u2028\u2029]", lambda m: f"\\u{ord(m[0]):04x}", text) + "\n"


def read_record(path: Path, meta: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What `meta` tells of `path`; None where there is neither. Raises UserError: a folder, a
    file without a record, a damaged record, or one of other settings (each is named)."""
    if path.is_dir():
        raise UserError(f"out: {path} is a folder; give a file name such as {path / 'data.jsonl'}")
    if not meta.exists():
        if path.exists():
            raise UserError(
                f"out: {path} exists and was not written by this command; give another name"
            )
        return None
    try:
        record: dict[str, Any] = json.loads(meta.read_text(encoding="utf-8"))
        wrong = differences(record["settings"], settings)
    except (ValueError, KeyError, TypeError) as e:
        raise damaged(path, meta) from e
    if wrong:
        raise UserError(
            f"out: {path} was made with other settings ({'; '.join(wrong)}); give another name"
        )
    return record


def damaged(path: Path, meta: Path) -> UserError:
    """The error of a record that cannot be read."""
    return UserError(f"out: {meta} is damaged; delete it and {path} to start again")


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Every leaf in which two settings differ, as "key old, now new"."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in [*old, *(k for k in new if k not in old)]:
            found += differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return found
    short = [
        v[:12] if isinstance(v, str) and re.fullmatch("[0-9a-f]{64}", v) else v for v in (old, new)
    ]
    return [] if old == new else [f"{key} {short[0]}, now {short[1]}"]
