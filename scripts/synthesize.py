"""Let the target write its own training conversations: JSONL rows {"messages": [...],
"complete": bool}.

    python scripts/synthesize.py target=smollm2 out=runs/demo/data.jsonl \\
        num_conversations=600 seed=0
    python scripts/synthesize.py backend=openai base_url=http://localhost:8000/v1 \\
        prompts=FILE.jsonl target=hub target.name=NAME out=runs/data.jsonl

The first command invents the questions as well. The second takes them from a file and lets a
server answer them (vLLM, SGLang: any that speaks the OpenAI API), many at a time; it must
serve the target, whose tokenizer alone is loaded here. Its rows stand in the order of the
file.

Stop it at any time (Ctrl-C): the file holds whole lines, and the same command goes on where it
stopped and ends with the file that an uninterrupted run would have written on the same
machine. `complete` says whether the answer reached its end-of-turn token. FILE.meta.json
beside the file keeps the settings; other settings are refused."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Run as a file: scripts/ comes first on the path and would shadow libraries.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conf.errors import Interrupted, UserError
from conf.schema import entry
from decode.models.load import DTYPES, TargetConfig, load_target
from decode.sampling import Sampling
from scripts.common.files import sole_writer
from scripts.common.meter import Meter
from scripts.synthesis.from_server import from_server
from scripts.synthesis.write import Store, Writer, fingerprint

FORMAT = 1  # raise when the same settings would give other rows


@dataclass
class SynthesizeConfig:
    """Keys of scripts/synthesize.py."""

    # JSONL file to write or to continue
    out: str
    # the model that writes the conversations
    target: TargetConfig = field(default_factory=TargetConfig)
    # local: this process runs the target and invents the questions; openai: a server answers
    #     the questions of a file
    backend: str = "local"
    # conversations that the file shall hold, a larger number extends a finished file; 0 = 600,
    # or all questions
    num_conversations: int = 0
    # seed of all draws
    seed: int = 0
    # local: conversations decoded at a time, and the block in which the file grows
    batch: int = 96
    # local: number format of the target: bfloat16, float32 or float16
    dtype: str = "bfloat16"
    # local: longest invented question, tokens
    max_question_tokens: int = 64
    # longest answer, tokens
    max_new_tokens: int = 200
    # local: temperature of the questions
    question_temperature: float = 1.0
    # local: nucleus of the questions (1 = off)
    question_top_p: float = 0.95
    # temperature of the answers
    answer_temperature: float = 0.7
    # nucleus of the answers (1 = off)
    answer_top_p: float = 1.0
    # openai: address of the server's API, such as http://localhost:8000/v1
    base_url: str = ""
    # openai: the model's name at the server; empty = the only one it serves
    model: str = ""
    # openai: JSONL file of messages, conversations, turns or prompt rows; their user turns are
    #     asked
    prompts: str = ""
    # openai: questions asked at a time
    concurrency: int = 32
    # openai: seconds that a whole answer may take
    timeout: float = 600.0
    # openai: tries after the first one, for each question; a rate limit uses up none
    retries: int = 6
    # openai: seconds before the first retry; every further one waits twice as long, up to 60
    backoff: float = 1.0
    # openai: share of the questions that may stay without an answer (malformed, refused, all
    #     tries used up)
    max_failed: float = 0.01
    # openai: name of the environment variable that holds the key, sent to base_url alone and
    #     never written
    api_key_env: str = "OPENAI_API_KEY"
    # openai: further keys of every request, such as {chat_template_kwargs: {enable_thinking:
    #     false}}
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend == "local" and not self.num_conversations:
            self.num_conversations = 600

    def validate(self) -> list[str]:
        """Problems with the values, one line each."""
        problems = self.target.validate()
        if not self.out:
            problems.append("out: empty; give the JSONL file to write")
        lows = {
            "num_conversations": 0,
            "batch": 1,
            "max_question_tokens": 1,
            "max_new_tokens": 1,
            "concurrency": 1,
            "retries": 0,
            "backoff": 0,
        }
        for key, low in lows.items():
            if getattr(self, key) < low:
                problems.append(f"{key}: {getattr(self, key)} must be at least {low}")
        problems += self._server_problems()
        if self.dtype not in DTYPES:
            problems.append(f"dtype: {self.dtype!r} is none of {', '.join(DTYPES)}")
        for key in ("question_temperature", "answer_temperature"):
            if getattr(self, key) < 0:
                problems.append(f"{key}: {getattr(self, key)} must be >= 0")
        for key in ("question_top_p", "answer_top_p"):
            if not 0 < getattr(self, key) <= 1:
                problems.append(f"{key}: {getattr(self, key)} must lie in (0, 1]")
        if self.question_temperature == 0:
            problems.append("question_temperature: 0 would invent one question only; use 1.0")
        return problems

    def _server_problems(self) -> list[str]:
        if self.backend == "local":
            return [
                f"{key}: only with backend=openai; set that or leave it out"
                for key in ("base_url", "model", "prompts", "extra_body")
                if getattr(self, key)
            ]
        if self.backend != "openai":
            return [f"backend: {self.backend!r} is none of local, openai"]
        problems = []
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            problems.append(f"base_url: {self.base_url!r} is no address; give http://HOST:PORT/v1")
        elif address.username or address.password or address.query:
            problems.append(
                "base_url: holds a name, key or query; give the bare address, and the key in the "
                "environment variable that api_key_env names"
            )
        if not self.prompts:
            problems.append("prompts: empty; give the JSONL file whose questions shall be answered")
        if not self.timeout > 0:
            problems.append(f"timeout: {self.timeout} must be above 0")
        if not 0 <= self.max_failed <= 1:
            problems.append(f"max_failed: {self.max_failed} must lie in [0, 1]")
        problems += [
            f"extra_body: {key} is set by this command; leave it out"
            for key in ("messages", "model", "stream", "n")
            if key in self.extra_body
        ]
        return problems

    def settings(self) -> dict[str, Any]:
        """What decides the rows, apart from the target's identity and how many there are."""
        keys = (
            "seed",
            "batch",
            "dtype",
            "max_question_tokens",
            "max_new_tokens",
            "question_temperature",
            "question_top_p",
            "answer_temperature",
            "answer_top_p",
        )
        return {"format": FORMAT, **{key: getattr(self, key) for key in keys}}


def _check_space(path: Path, cfg: SynthesizeConfig) -> None:
    # About 5 bytes a token, the file twice while it is being replaced.
    need = 2 * 5 * cfg.num_conversations * (cfg.max_question_tokens + cfg.max_new_tokens) + (
        1 << 20
    )
    free = shutil.disk_usage(path.parent).free
    if free < need:
        raise UserError(
            f"out: {path.parent} has {free >> 20} MB free, up to {need >> 20} MB are "
            "needed; free space "
            "there or give another folder"
        )


def synthesize(cfg: SynthesizeConfig) -> None:
    """Write or continue cfg.out. Raises UserError, or Interrupted (130 after Ctrl-C, 75 after
    SIGTERM).
    """
    path = Path(cfg.out).expanduser()
    if cfg.backend == "openai":
        with sole_writer(path):
            return from_server(cfg, path)
    held = asked_by = 0
    drawing = False

    def stop(number: int, _: Any) -> None:
        """Stop at once while nothing is drawn, or on the second signal; otherwise at the next
        token: an exception out of a handler may come between file and count, and is lost where
        a destructor runs."""
        nonlocal asked_by
        again, asked_by = asked_by, number
        if again or not drawing:
            heed()

    def heed() -> None:
        if asked_by:
            raise Interrupted(
                f"interrupted: {path} holds {held} of {cfg.num_conversations} "
                "conversations; the same "
                "command continues",
                code=130 if asked_by == signal.SIGINT else 75,
            )

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        with sole_writer(path):
            _check_space(path, cfg)
            target = load_target(cfg.target, cfg.dtype)
            identity = {k: v for k, v in target.identity.to_json().items() if k != "path"}
            store = Store(path, {**cfg.settings(), "target": identity})
            store.open(cfg.num_conversations, cfg.batch)
            held = len(store.lines)
            if held == cfg.num_conversations:
                print(
                    f"synthesize: {path} already holds {held} conversations; nothing to do",
                    file=sys.stderr,
                )
                return
            writer = Writer(
                target,
                Sampling(cfg.question_temperature, top_p=cfg.question_top_p),
                Sampling(cfg.answer_temperature, top_p=cfg.answer_top_p),
                cfg.max_question_tokens,
                cfg.max_new_tokens,
                cfg.batch,
                cfg.seed,
            )
            writer.seen.update(map(fingerprint, store.questions()))
            with Meter(
                cfg.num_conversations, held, (cfg.max_question_tokens + cfg.max_new_tokens) * 3 // 4
            ) as meter:

                def drawn(tokens: int) -> None:
                    meter.add(tokens)
                    heed()

                writer.on_tokens, drawing = drawn, True
                while held < cfg.num_conversations:
                    heed()
                    asked = min(cfg.batch, cfg.num_conversations - held)
                    store.append(writer.block(len(store.blocks), asked), asked)
                    held = len(store.lines)
                    meter.block(held)
                rate = meter.tokens / (time.monotonic() - meter.started)
            dropped = ", ".join(f"{n} {why}" for why, n in writer.dropped.most_common()) or "none"
            print(
                f"synthesize: {held} conversations in {path}; {meter.tokens} tokens at "
                f"{rate:.0f} tokens/s; dropped: "
                f"{dropped}",
                file=sys.stderr,
            )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@entry("synthesize", SynthesizeConfig)
def main(cfg: SynthesizeConfig) -> None:
    """Command-line entry."""
    synthesize(cfg)


if __name__ == "__main__":
    main()
