"""The run of `scripts/synthesize.py`: who asks, who answers, the ledger, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TextColumn

from outrider.conf.disk import check_space
from outrider.conf.errors import Interrupted, UserError
from outrider.decode.models.identity import sha256_template, sha256_tokenizer
from outrider.decode.models.load import load_target, load_tokenizer
from outrider.scripts.common.progress import Steps, columns
from outrider.scripts.data.answering import Answering
from outrider.scripts.data.config import SynthesizeConfig
from outrider.scripts.data.from_server import Regenerator
from outrider.scripts.data.in_process import InProcess
from outrider.scripts.data.inventing import Inventing
from outrider.scripts.data.ledger import Ledger, say
from outrider.scripts.data.prompt_sets import is_file, prompt_set, prompts_of
from outrider.scripts.data.questions import Invented, Questions
from outrider.scripts.data.server import OpenAIServer

FORMAT = 3  # raise when the same settings would give other requests or rows
USUAL = 600  # conversations, where the target invents the questions


def synthesize(cfg: SynthesizeConfig) -> None:
    """Write or continue cfg.out. Raises UserError, or Interrupted (130 after Ctrl-C, 75 after
    SIGTERM); the file is sound wherever that comes."""
    path = Path(cfg.out).expanduser()
    questions, total = _questions(cfg, path)
    letters = 5 * (cfg.max_question_tokens + cfg.longest)  # of a row, about
    check_space("out", path.parent, total * letters + (1 << 20))
    if cfg.backend == "openai":
        asyncio.run(_by_server(cfg, questions, total, path))
    else:
        with stopping(path):
            _here(cfg, questions, total, path)


def _questions(cfg: SynthesizeConfig, path: Path) -> tuple[Questions | Invented, int]:
    """Return what is asked, and how many of it."""
    if not cfg.prompts:
        return Invented(path), cfg.num_conversations or USUAL
    file, usual = Path(cfg.prompts).expanduser(), 0
    if not is_file(cfg.prompts):
        chosen = replace(prompt_set(cfg.prompts), path=cfg.prompts_path)
        file, usual = prompts_of(chosen, path, cfg.unseen), chosen.take
    questions = Questions(file)
    bad, of = questions.bad, len(questions) + len(questions.bad)
    if len(bad) > cfg.max_failed * of:
        raise UserError(
            f"{questions.path}:{bad[0][0]}: {bad[0][1]}; {len(bad)} of {of} questions are "
            f"malformed, above max_failed={cfg.max_failed:g}; mend them or raise it"
        )
    for line, reason in bad[:5]:
        say(f"left out {questions.path}:{line}: {reason}")
    return questions, min(cfg.num_conversations or usual or len(questions), len(questions))


async def _by_server(cfg: SynthesizeConfig, questions: Any, total: int, path: Path) -> None:
    """A server answers, many questions at a time. A signal ends what waits for it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    key = os.environ.get(cfg.api_key_env, "") if cfg.api_key_env else ""
    server = OpenAIServer(cfg.base_url.rstrip("/"), key, cfg.timeout, cfg.retries)
    with stopping(path, lambda: loop.call_soon_threadsafe(task.cancel)):
        async with server:
            model = await server.model(cfg.model)
            tokenizer = load_tokenizer(cfg.target)
            ledger = Ledger(path, _settings(cfg, questions, tokenizer, {"model": model}))
            ledger.open()
            work = Regenerator(cfg, questions, ledger, total, tokenizer, server=server, model=model)
            with _under_way(work):
                await work.run()
            if server.troubles:
                often = server.troubles.most_common(4)
                say("tried again after " + ", ".join(f"{n} x {why}" for why, n in often))


def _here(cfg: SynthesizeConfig, questions: Any, total: int, path: Path) -> None:
    """The target answers in this process."""
    target = load_target(cfg.target, cfg.dtype)
    identity = {k: v for k, v in target.identity.to_json().items() if k != "path"}
    made = {"batch": cfg.batch, "dtype": cfg.dtype, "target": identity}
    kind: Any = InProcess
    if isinstance(questions, Invented):
        kind = Inventing
        asked = ("max_question_tokens", "question_temperature", "question_top_p")
        made |= {key: getattr(cfg, key) for key in asked}
    ledger = Ledger(path, _settings(cfg, questions, target.tokenizer, made))
    ledger.open()
    shared = {"ledger": ledger, "total": total, "tokenizer": target.tokenizer}
    work = kind(cfg, questions=questions, target=target, **shared)
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
    with Steps(*columns(10), note, console=Console(stderr=True), every=10.0) as bar:
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
    cfg: SynthesizeConfig, questions: Questions | Invented, tokenizer: Any, more: dict[str, Any]
) -> dict[str, Any]:
    """Return what decides the rows. A server's address is no part of it: another one of the
    same model may continue."""
    keys = ("backend", "seed", "answer_temperature", "answer_top_p", "extra_body")
    found = {"format": FORMAT, **{key: getattr(cfg, key) for key in keys}}
    found["max_new_tokens"] = cfg.longest
    if isinstance(questions, Questions):
        found["prompts"] = questions.sha256
        if not is_file(cfg.prompts):
            found["prompt_set"] = prompt_set(cfg.prompts).described
    hashes = {"tokenizer": sha256_tokenizer(tokenizer), "template": sha256_template(tokenizer)}
    return {**found, "target": hashes, **more}


@contextlib.contextmanager
def stopping(path: Path, cancel: Callable[[], Any] | None = None) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block with Interrupted, at once; the file is sound at any time.
    cancel: called in the handler instead, for a run that waits in an event loop."""
    came: list[int] = []

    def stopped() -> Interrupted:
        return Interrupted(
            f"interrupted: {path} keeps its rows; the same command continues",
            code=130 if came[0] == signal.SIGINT else 75,
        )

    def handle(number: int, _: Any) -> None:
        came.append(number)
        if cancel is None:
            raise stopped()
        cancel()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except asyncio.CancelledError:
        raise stopped() from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
