"""The run of `scripts/synthesize.py`: who asks, who answers, what is on file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import TextColumn

from outrider.conf.disk import check_space
from outrider.conf.errors import UserError, resumable
from outrider.decode.models.identity import sha256_template, sha256_tokenizer
from outrider.decode.models.load import load_target, load_tokenizer
from outrider.scripts.common.progress import Steps
from outrider.scripts.data.answering import Answering
from outrider.scripts.data.config import SynthesizeConfig
from outrider.scripts.data.from_server import Regenerator
from outrider.scripts.data.in_process import InProcess
from outrider.scripts.data.inventing import Inventing
from outrider.scripts.data.ledger import Ledger, say
from outrider.scripts.data.prompt_sets import is_file, prompt_set, prompts_of
from outrider.scripts.data.questions import Questions
from outrider.scripts.data.server import OpenAIServer

FORMAT = 4  # raise when the same settings would give other requests or rows
USUAL = 600  # conversations, where the target invents the questions


@resumable()
def synthesize(cfg: SynthesizeConfig) -> None:
    """Write or continue cfg.out. Raises UserError, or Interrupted (130 after Ctrl-C, 75 after
    SIGTERM); the file is sound wherever that comes."""
    path = Path(cfg.out).expanduser()
    questions, total = _questions(cfg, path) if cfg.prompts else (None, 0)
    total = total or cfg.num_conversations or USUAL
    letters = 5 * (cfg.max_question_tokens + cfg.longest)  # of a row, about
    check_space("out", path.parent, total * letters + (1 << 20))
    if cfg.backend == "openai":
        asyncio.run(_by_server(cfg, questions, total, path))
    else:
        _here(cfg, questions, total, path)


def _questions(cfg: SynthesizeConfig, path: Path) -> tuple[Questions, int]:
    """Return what is asked, and how many of it."""
    file, usual = Path(cfg.prompts).expanduser(), 0
    if not is_file(cfg.prompts):
        chosen = replace(prompt_set(cfg.prompts), path=cfg.prompts_path)
        file, usual = prompts_of(chosen, path, cfg.unseen), chosen.take
    questions = Questions(file)
    bad, count = questions.bad, len(questions.asked)
    if len(bad) > cfg.max_failed * (count + len(bad)):
        raise UserError(
            f"{questions.path}:{bad[0][0]}: {bad[0][1]}; {len(bad)} of {count + len(bad)} questions"
            f" are malformed, above max_failed={cfg.max_failed:g}; mend them or raise it"
        )
    for line, reason in bad[:5]:
        say(f"left out {questions.path}:{line}: {reason}")
    return questions, min(cfg.num_conversations or usual or count, count)


async def _by_server(
    cfg: SynthesizeConfig, questions: Questions | None, total: int, path: Path
) -> None:
    """A server answers, many questions at a time."""
    key = os.environ.get(cfg.api_key_env, "") if cfg.api_key_env else ""
    async with OpenAIServer(cfg.base_url.rstrip("/"), key, cfg.timeout, cfg.retries) as server:
        model = await server.model(cfg.model)
        tokenizer = load_tokenizer(cfg.target)
        ledger = Ledger(path, _settings(cfg, questions, tokenizer, {"model": model}))
        work = Regenerator(cfg, ledger, total, tokenizer, questions, server=server, model=model)
        with _under_way(work):
            await work.run()
        if server.troubles:
            often = server.troubles.most_common(4)
            say("tried again after " + ", ".join(f"{n} x {why}" for why, n in often))


def _here(cfg: SynthesizeConfig, questions: Questions | None, total: int, path: Path) -> None:
    """The target answers in this process."""
    target = load_target(cfg.target, cfg.dtype, cfg.device)
    made = {f"target.{k}": v for k, v in target.identity.to_json().items() if k != "path"}
    made |= {"batch": cfg.batch, "dtype": cfg.dtype}
    if questions is None:
        made["max_question_tokens"] = cfg.max_question_tokens
    ledger = Ledger(path, _settings(cfg, questions, target.tokenizer, made))
    kind = InProcess if questions else Inventing
    work = kind(cfg, ledger, total, target.tokenizer, questions, target=target)
    with _under_way(work):
        work.run()


@contextlib.contextmanager
def _under_way(work: Answering) -> Iterator[None]:
    """Show progress while the block answers what is missing, then bring the file in order."""
    ledger, total = work.ledger, work.total
    have = len(ledger.numbers)
    if have > total:
        raise UserError(
            f"num_conversations: {ledger.path} already holds {have}, {total} asked; give another "
            "name"
        )
    if have == total:
        say(f"{ledger.path} already holds {total} conversations; nothing to do")
    begun, note = time.monotonic(), TextColumn("{task.fields[note]}")
    with Steps(note) as bar:
        task = bar.add_task("synthesize", total=total, completed=have, note="")

        def tell(rows: int) -> None:
            pace = work.tokens / (time.monotonic() - begun)
            bar.update(task, completed=rows, note=f"{pace:.0f} tokens/s")

        work.on_rows = tell
        yield
    if not ledger.numbers:
        raise UserError(f"prompts: no question has an answer; {next(iter(work.failed.values()))}")
    ledger.finish()
    say(f"{len(ledger.numbers)} conversations in {ledger.path}; {work.tokens} tokens")
    work.closing()
    work.check_cut()


def _settings(
    cfg: SynthesizeConfig, questions: Questions | None, tokenizer: Any, more: dict[str, Any]
) -> dict[str, Any]:
    """Return what decides the rows. A server's address is no part of it: another one of the
    same model may continue."""
    keys = ("backend", "seed", "answer_temperature", "answer_top_p", "extra_body")
    found = {"format": FORMAT, **{key: getattr(cfg, key) for key in keys}}
    found["max_new_tokens"] = cfg.longest
    found |= {"tokens": True} if cfg.tokens else {}
    if questions:
        found["prompts"] = questions.sha256
        if not is_file(cfg.prompts):
            found["prompt_set"] = prompt_set(cfg.prompts).described
    found["target.tokenizer_sha256"] = sha256_tokenizer(tokenizer)
    return {**found, "target.template_sha256": sha256_template(tokenizer), **more}
