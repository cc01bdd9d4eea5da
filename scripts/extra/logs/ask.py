"""Asking the target again what another model answered, by the backends of
`scripts/synthesize.py`: in this process, or at a server. Both go on where they stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.jsonl import records
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.files import write_text
from outrider.scripts.common.prompts import chat_ids
from outrider.scripts.extra.logs.prepare import Ask
from outrider.scripts.synthesis.config import SynthesizeConfig
from outrider.scripts.synthesis.from_server import from_server
from outrider.scripts.synthesis.ledger import Ledger, json_line
from outrider.scripts.synthesis.questions import Questions, turns_of
from outrider.scripts.synthesis.write import text_of

REQUESTED, ANSWERS = "asked.jsonl", "answers.jsonl"
Rows = list[dict[str, Any] | None]


def asker(cfg: SynthesizeConfig) -> Ask:
    """The backend of a configuration, as `prepare` asks it. It leaves its questions and
    answers in the folder, masked as the rows are, and goes on from them."""

    def ask(questions: list[dict[str, Any]], out: Path) -> Rows:
        path = out / REQUESTED
        text = "".join(json_line(q) for q in questions)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
        print(
            f"synthesize: {len(questions)} chats have no answer of the target's own and are asked "
            f"again ({cfg.backend}); a served model that is the target is named by served=NAME",
            file=sys.stderr,
        )
        return (_here if cfg.backend == "local" else _served)(cfg, path, out / ANSWERS)

    return ask


def _served(cfg: SynthesizeConfig, path: Path, answers: Path) -> Rows:
    """By a server: its rows stand in the order of the questions, those that failed are named
    in the ledger's record."""
    from_server(dataclasses.replace(cfg, prompts=str(path), logs="", num_conversations=0), answers)
    questions = Questions(path)
    record = json.loads(answers.with_name(answers.name + ".meta.json").read_text())
    gone = {line for line, _ in record["failed"]}
    kept = [line for line in questions.lines if line not in gone]
    rows = records(answers)
    if len(rows) != len(kept):
        raise UserError(
            f"out: {answers} holds {len(rows)} answers where its record says {len(kept)}; delete "
            "it and its .meta.json to ask again"
        )
    by_line = dict(zip(kept, rows, strict=True))
    count = path.read_text(encoding="utf-8").count("\n")
    return [by_line.get(line) for line in range(1, count + 1)]


def _here(cfg: SynthesizeConfig, path: Path, answers: Path) -> Rows:
    """In this process, cfg.batch chats at a time. A chat that cannot be asked gives {}."""
    lines = path.read_bytes().splitlines()
    settings = {**cfg.settings(), "asked": [len(lines), Questions(path).sha256]}
    ledger = Ledger(answers, settings)
    ledger.open()
    at = ledger.settled
    if at < len(lines):
        target = load_target(cfg.target, cfg.dtype)
        try:
            while at < len(lines):
                part = lines[at : at + cfg.batch]
                ledger.append(block(cfg, target, part, at), len(part))
                at += len(part)
                print(f"synthesize: {at} of {len(lines)} asked again", file=sys.stderr)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: {answers} holds {at} of {len(lines)} answers; the same command "
                "continues"
            ) from None
    return [row or None for row in records(answers)]


def block(
    cfg: SynthesizeConfig, target: Target, lines: Sequence[bytes], first: int
) -> list[dict[str, Any]]:
    """Rows {"messages", "complete"} of some chats, {} for those that cannot be asked: every
    user turn is put again, with the target's own answers before it. Chat n draws the same
    whatever else is in its block."""
    chats: list[list[dict[str, str]]] = [[] for _ in lines]
    for chat, line in zip(chats, lines, strict=True):
        with contextlib.suppress(ValueError):
            chat += turns_of(line)
    made: list[list[dict[str, str]]] = [[] for _ in chats]
    whole = [True] * len(chats)
    for turn in range(max(map(len, chats), default=0)):
        requested: list[tuple[int, Request]] = []
        for n, chat in enumerate(chats):
            if turn >= len(chat) or not whole[n]:
                continue
            made[n].append(chat[turn])
            if chat[turn]["role"] == "system":
                continue
            ids = chat_ids(target.tokenizer, made[n])
            if len(ids) + 1 < target.context_length:
                tokens = min(cfg.longest, target.context_length - len(ids))
                requested.append((n, Request(ids, tokens, id=((first + n) << 8) + turn)))
            else:
                whole[n], made[n] = False, []
        run = generate(
            target,
            NoDraft(),
            [request for _, request in requested],
            Sampling(cfg.answer_temperature, top_p=cfg.answer_top_p),
            batch_size=cfg.batch,
            seed=2 * cfg.seed + 1,
        )
        for (n, _), out in zip(requested, run.generations, strict=True):
            text = text_of(target, out).strip()
            if not text or any(s and s in text for s in target.tokenizer.all_special_tokens):
                whole[n], made[n] = False, []  # what would follow was said to another answer
                continue
            made[n].append({"role": "assistant", "content": text})
            whole[n] = out.finish == "eos"
    return [
        {"messages": messages, "complete": ended} if messages else {}
        for messages, ended in zip(made, whole, strict=True)
    ]
