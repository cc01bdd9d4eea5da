"""The run of `scripts/synthesize.py backend=openai`: set-up, progress, signals, closing words."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import Interrupted, UserError
from outrider.decode.models.identity import sha256_template, sha256_tokenizer
from outrider.decode.models.load import load_tokenizer
from outrider.scripts.common.meter import Meter
from outrider.scripts.synthesis.config import SynthesizeConfig
from outrider.scripts.synthesis.ledger import Ledger, check_space
from outrider.scripts.synthesis.prompt_sets import is_file, prompt_set
from outrider.scripts.synthesis.questions import Questions
from outrider.scripts.synthesis.regenerate import Regenerator
from outrider.scripts.synthesis.server import OpenAIServer
from outrider.scripts.synthesis.set_prompts import prompts_of
from outrider.train.texts.rows import BadRow, RowReading, encode, interpret

FORMAT = 2  # raise when the same settings would give other requests or rows
UNLIKE = 0.5  # below this share of answers with the same tokens here, something is wrong


def from_server(cfg: SynthesizeConfig, path: Path) -> None:
    """Write or continue `path`. Raises UserError, or Interrupted (130 after Ctrl-C, 75 after
    SIGTERM).
    """
    questions, usual = _questions(cfg, path)
    bad, of = questions.bad, len(questions) + len(questions.bad)
    if len(bad) > cfg.max_failed * of:
        raise UserError(
            f"{questions.path}:{bad[0][0]}: {bad[0][1]}; {len(bad)} of {of} questions are "
            f"malformed, above max_failed={cfg.max_failed:g}; mend them or raise it"
        )
    for line, reason in bad[:5]:
        _say(f"left out {questions.path}:{line}: {reason}")
    total = min(cfg.num_conversations or usual or len(questions), len(questions))
    # About 5 bytes a token, and the questions again.
    need = 5 * total * cfg.longest + questions.path.stat().st_size + (1 << 20)
    check_space(path.parent, need)
    asyncio.run(_ask(cfg, path, questions, total))


def _questions(cfg: SynthesizeConfig, path: Path) -> tuple[Questions, int]:
    """What is asked, and how many of it unless num_conversations says so; 0: all."""
    if is_file(cfg.prompts):
        return Questions(Path(cfg.prompts).expanduser()), 0
    chosen = replace(prompt_set(cfg.prompts), path=cfg.prompts_path)
    return Questions(prompts_of(chosen, path, cfg.unseen)), chosen.take


async def _ask(cfg: SynthesizeConfig, path: Path, questions: Questions, total: int) -> None:
    key = os.environ.get(cfg.api_key_env, "") if cfg.api_key_env else ""
    server = OpenAIServer(
        cfg.base_url.rstrip("/"), key, cfg.timeout, cfg.retries, cfg.backoff, cfg.at_a_time
    )
    server.on_trouble = _Messages(server.base_url)
    caught: list[int] = []
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def stop(number: int) -> None:
        if not caught and task is not None:
            task.cancel()
        caught.append(number)

    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, stop, number)
    ledger = None
    try:
        async with server:
            model = await server.model(cfg.model)
            tokenizer = load_tokenizer(cfg.target)
            ledger = Ledger(path, _settings(cfg, questions, tokenizer, model))
            ledger.open()
            if ledger.settled > total:
                raise UserError(
                    f"num_conversations: {path} already holds the answers to {ledger.settled} "
                    f"questions, {total} asked; give another name"
                )
            work = _regenerator(cfg, server, questions, ledger, total, tokenizer, model)
            if ledger.settled == total:
                _say(f"{path} already holds the answers to {total} questions; nothing to do")
                return work.check_cut()
            with Meter(total, ledger.settled, cfg.longest // 2 + 1) as meter:
                work.on_row, work.on_commit = meter.add, meter.block
                await work.run()
                _closing(path, server, work, meter)
            work.check_cut()
    except asyncio.CancelledError:
        if not caught:
            raise
        held = f"holds {ledger.rows} rows" if ledger else "was not begun"
        raise Interrupted(
            f"interrupted: {path} {held}; the same command continues",
            code=130 if caught[0] == signal.SIGINT else 75,
        ) from None
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _regenerator(
    cfg: SynthesizeConfig,
    server: OpenAIServer,
    questions: Questions,
    ledger: Ledger,
    total: int,
    tokenizer: Any,
    model: str,
) -> Regenerator:
    return Regenerator(
        server,
        questions,
        ledger,
        total,
        cfg.at_a_time,
        _body(cfg, model),
        cfg.seed,
        cfg.max_failed,
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        tuple(t for t in tokenizer.all_special_tokens if t),
        _reader(cfg, tokenizer),
        cfg.max_cut,
    )


def _body(cfg: SynthesizeConfig, model: str) -> dict[str, Any]:
    """What every request holds besides messages and seed."""
    return {
        "model": model,
        "max_tokens": cfg.longest,
        "temperature": cfg.answer_temperature,
        "top_p": cfg.answer_top_p,
        "stream": False,
        **cfg.extra_body,
    }


def _reader(cfg: SynthesizeConfig, tokenizer: Any) -> Callable[[dict[str, Any]], list[int]] | None:
    """Reads the last answer of a row as training does, without its end-of-turn token; None
    without a chat template."""
    if not tokenizer.chat_template:
        return None
    ends = frozenset({tokenizer.eos_token_id} - {None})
    given = cfg.extra_body.get("chat_template_kwargs")
    kwargs = given if isinstance(given, dict) else {}
    how = RowReading(sys.maxsize, ends, last_turn_only=True, kwargs=kwargs)

    def read(row: dict[str, Any]) -> list[int]:
        try:
            made = interpret(row, "row")
        except ValueError as error:
            raise BadRow("row", str(error)) from None
        (found,) = encode(made, tokenizer, how)
        ids = [i for i, on in zip(found.ids, found.loss, strict=True) if on]
        return ids[:-1] if ids[-1] in ends else ids

    return read


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
            _say(f"{self.address}: {reason}; the next try in {wait:.0f} s")


def _closing(path: Path, server: OpenAIServer, work: Regenerator, meter: Meter) -> None:
    text = (
        f"{work.ledger.rows} conversations in {path}; {meter.tokens} tokens at "
        f"{meter.rate():.0f} tokens/s"
    )
    if work.ledger.failed:
        (line, reason), count = work.ledger.failed[0], len(work.ledger.failed)
        where = f"{work.questions.path}:{line}"
        text += f"; {count} questions without an answer, the first {where}: {reason}"
    if server.troubles:
        often = server.troubles.most_common(4)
        text += "; tried again after " + ", ".join(f"{n} x {why}" for why, n in often)
    _say(text)
    _say(work.cut())
    if kwargs := work.body.get("chat_template_kwargs"):
        _say(f"asked with {kwargs}: train with the same data.chat_template_kwargs")
    if unusable := work.unusable.total():
        _say(
            f"warning: training would leave out {unusable} of the rows that were looked at, one "
            f"because {next(iter(work.unusable))}"
        )
    counted = sum(work.tokens_alike.values())
    if not counted:
        return _say(
            "the server counts no tokens: whether the target's tokenizer makes the same "
            "ones is unknown"
        )
    alike = work.tokens_alike[True] / counted
    read = "have the server's tokens when the target's tokenizer reads them"
    _say(f"{alike:.1%} of the answers {read}")
    if alike < UNLIKE:
        _say(
            "warning: so few mean that the server's model has another tokenizer than target, or "
            "that the server cuts something out of its answers (reasoning, for one)"
        )


def _say(text: str) -> None:
    print(f"synthesize: {text}", file=sys.stderr, flush=True)
