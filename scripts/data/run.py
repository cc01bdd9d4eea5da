"""The run of `scripts/synthesize.py`: who asks, who answers, the ledger, closing words."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.conf.disk import check_space
from outrider.conf.errors import UserError
from outrider.decode.models.identity import sha256_template, sha256_tokenizer
from outrider.decode.models.load import load_target, load_tokenizer
from outrider.scripts.common.meter import Meter
from outrider.scripts.data.config import SynthesizeConfig
from outrider.scripts.data.conversation import Answering
from outrider.scripts.data.from_server import Regenerator
from outrider.scripts.data.in_process import InProcess
from outrider.scripts.data.ledger import Ledger, say
from outrider.scripts.data.prompt_sets import is_file, prompt_set
from outrider.scripts.data.questions import Invented, Questions
from outrider.scripts.data.server import OpenAIServer
from outrider.scripts.data.set_prompts import prompts_of
from outrider.scripts.data.signals import Signals
from outrider.scripts.data.write import Inventing

FORMAT = 2  # raise when the same settings would give other requests or rows
USUAL = 600  # conversations, where the target invents the questions
UNLIKE = 0.5  # below this share of answers with the same tokens here, something is wrong


def answer(cfg: SynthesizeConfig, signals: Signals) -> None:
    """Write or continue `signals.path`. Raises UserError, or Interrupted as `signals` does."""
    path = signals.path
    if not cfg.prompts:
        total = cfg.num_conversations or USUAL
        letters = 5 * (cfg.max_question_tokens + cfg.longest)  # of a row, about
        check_space("out", path.parent, total * letters + (1 << 20))
        return asyncio.run(_answer(cfg, Invented(path), total, signals))
    questions, usual = _questions(cfg, path)
    bad, of = questions.bad, len(questions) + len(questions.bad)
    if len(bad) > cfg.max_failed * of:
        raise UserError(
            f"{questions.path}:{bad[0][0]}: {bad[0][1]}; {len(bad)} of {of} questions are "
            f"malformed, above max_failed={cfg.max_failed:g}; mend them or raise it"
        )
    for line, reason in bad[:5]:
        say(f"left out {questions.path}:{line}: {reason}")
    total = min(cfg.num_conversations or usual or len(questions), len(questions))
    # About 5 bytes a token, and the questions again.
    need = 5 * total * cfg.longest + questions.path.stat().st_size + (1 << 20)
    check_space("out", path.parent, need)
    asyncio.run(_answer(cfg, questions, total, signals))


def _questions(cfg: SynthesizeConfig, path: Path) -> tuple[Questions, int]:
    """What is asked, and how many of it unless num_conversations says so; 0: all."""
    if is_file(cfg.prompts):
        return Questions(Path(cfg.prompts).expanduser()), 0
    chosen = replace(prompt_set(cfg.prompts), path=cfg.prompts_path)
    return Questions(prompts_of(chosen, path, cfg.unseen)), chosen.take


async def _answer(
    cfg: SynthesizeConfig, questions: Questions | Invented, total: int, signals: Signals
) -> None:
    path, who = signals.path, _server if cfg.backend == "openai" else _here
    try:
        async with who(cfg, questions, total, signals) as work:
            if work.done > total:
                raise UserError(
                    f"num_conversations: {path} already holds {work.done}, {total} asked; give "
                    "another name"
                )
            if work.done == total:
                say(f"{path} already holds {total} conversations; nothing to do")
                return work.check_cut()
            signals.held = work.ledger.rows
            with Meter(total, work.done, cfg.longest // 2 + 1) as meter:

                def settled(count: int) -> None:
                    signals.held = work.ledger.rows
                    meter.block(count)

                def told(tokens: int) -> None:
                    meter.add(tokens)
                    if signals.drawing:
                        signals.check_stop()

                work.on_tokens, work.on_commit = told, settled
                signals.drawing = signals.cancel is None
                await work.run()
                _closing(work, meter)
            work.check_cut()
    except asyncio.CancelledError:
        signals.check_stop()
        raise


@contextlib.asynccontextmanager
async def _server(
    cfg: SynthesizeConfig, questions: Questions | Invented, total: int, signals: Signals
) -> AsyncIterator[Regenerator | InProcess]:
    """A server answers, many questions at a time. A signal ends what waits for it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None and isinstance(questions, Questions)
    signals.cancel = functools.partial(loop.call_soon_threadsafe, task.cancel)
    key = os.environ.get(cfg.api_key_env, "") if cfg.api_key_env else ""
    server = OpenAIServer(
        cfg.base_url.rstrip("/"), key, cfg.timeout, cfg.retries, cfg.backoff, cfg.concurrency
    )
    server.on_trouble = _Messages(server.base_url)
    async with server:
        model = await server.model(cfg.model)
        tokenizer = load_tokenizer(cfg.target)
        ledger = Ledger(signals.path, _settings(cfg, questions, tokenizer, model))
        ledger.open()
        yield Regenerator(cfg, questions, ledger, total, tokenizer, server=server, model=model)
        if server.troubles:
            often = server.troubles.most_common(4)
            say("tried again after " + ", ".join(f"{n} x {why}" for why, n in often))


@contextlib.asynccontextmanager
async def _here(
    cfg: SynthesizeConfig, questions: Questions | Invented, total: int, signals: Signals
) -> AsyncIterator[Regenerator | InProcess]:
    """The target answers in this process."""
    target = load_target(cfg.target, cfg.dtype)
    identity = {k: v for k, v in target.identity.to_json().items() if k != "path"}
    if isinstance(questions, Invented):
        ledger = Ledger(signals.path, {**cfg.settings(), "target": identity})
        ledger.open()
        if ledger.rows < total:
            ledger.shorten(cfg.batch)
        yield Inventing(cfg, ledger, total, target.tokenizer, questions=questions, target=target)
        return
    settings = _settings(cfg, questions, target.tokenizer, "")
    here = {"batch": cfg.batch, "dtype": cfg.dtype, "target": identity}
    ledger = Ledger(signals.path, {**settings, **here})
    ledger.open()
    yield InProcess(cfg, questions, ledger, total, target.tokenizer, target=target)


def _settings(
    cfg: SynthesizeConfig, questions: Questions, tokenizer: Any, model: str
) -> dict[str, Any]:
    """What decides the rows. The address is no part of it: another server of the same model
    may continue.
    """
    keys = ("backend", "seed", "max_new_tokens", "answer_temperature", "answer_top_p", "extra_body")
    made = replace(cfg, max_new_tokens=cfg.longest)
    public = {} if is_file(cfg.prompts) else {"prompt_set": prompt_set(cfg.prompts).described}
    return {
        "format": FORMAT,
        **public,
        **{k: getattr(made, k) for k in keys},
        "model": model,
        "prompts": questions.sha256,
        "target": {
            "tokenizer": sha256_tokenizer(tokenizer),
            "template": sha256_template(tokenizer),
        },
    }


class _Messages:
    """Says a trouble when it is new, and once every ten seconds. address: of the server."""

    def __init__(self, address: str) -> None:
        self.address, self.last, self.at = address, "", 0.0

    def __call__(self, reason: str, wait: float) -> None:
        now = time.monotonic()
        if reason != self.last or now - self.at > 10:
            self.last, self.at = reason, now
            say(f"{self.address}: {reason}; the next try in {wait:.0f} s")


def _closing(work: Answering, meter: Meter) -> None:
    text = (
        f"{work.ledger.rows} conversations in {work.ledger.path}; {meter.tokens} tokens at "
        f"{meter.rate():.0f} tokens/s"
    )
    if work.ledger.failed:
        (line, reason), count = work.ledger.failed[0], len(work.ledger.failed)
        where = f"{work.questions.path}:{line}"
        text += f"; {count} questions without an answer, the first {where}: {reason}"
    if isinstance(work, Inventing):
        dropped = ", ".join(f"{n} {why}" for why, n in work.dropped.most_common()) or "none"
        return say(f"{text}; dropped: {dropped}")
    say(text)
    say(work.cut())
    if work.template:
        say(f"asked with {work.template}: train with the same data.chat_template_kwargs")
    if unusable := work.unusable.total():
        say(
            f"warning: training would leave out {unusable} of the rows that were looked at, one "
            f"because {next(iter(work.unusable))}"
        )
    counted = sum(work.tokens_alike.values())
    if not counted:
        return say(
            "the server counts no tokens: whether the target's tokenizer makes the same "
            "ones is unknown"
        )
    alike = work.tokens_alike[True] / counted
    whose = "server's" if isinstance(work, Regenerator) else "model's"
    say(
        f"{alike:.1%} of the answers have the {whose} tokens when the target's tokenizer reads them"
    )
    if alike < UNLIKE and isinstance(work, Regenerator):
        say(
            "warning: so few mean that the server's model has another tokenizer than target, or "
            "that the server cuts something out of its answers (reasoning, for one)"
        )
