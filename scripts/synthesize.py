"""Let the target write its own training conversations: JSONL rows {"messages": [...], "complete": bool}.

    python scripts/synthesize.py target=smollm2 out=runs/demo/data.jsonl num_conversations=600 seed=0

Stop it at any time (Ctrl-C): the file holds whole lines, and the same command goes on where it stopped and
ends with the file that an uninterrupted run would have written on the same machine. `complete` says whether
the answer reached its end-of-turn token. FILE.meta.json beside the file keeps the settings; other settings
are refused."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: scripts/ comes first on the path and would shadow libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conf.errors import Interrupted, UserError
from conf.schema import entry
from decode.load import DTYPES, TargetConfig, load_target
from decode.sampling import Sampling
from scripts.lib.synthesis import Store, Writer, fingerprint, sole_writer

FORMAT = 1  # raise when the same settings would give other rows


@dataclass
class SynthesizeConfig:
    """Keys of scripts/synthesize.py."""

    # JSONL file to write or to continue
    out: str
    # the model that writes the conversations
    target: TargetConfig = field(default_factory=TargetConfig)
    # conversations that the file shall hold; a larger number extends a finished file
    num_conversations: int = 600
    # seed of all draws
    seed: int = 0
    # conversations decoded at a time, and the block in which the file grows
    batch: int = 96
    # number format of the target: bfloat16, float32 or float16
    dtype: str = "bfloat16"
    # longest invented question, tokens
    max_question_tokens: int = 64
    # longest answer, tokens
    max_new_tokens: int = 200
    # temperature of the questions
    question_temperature: float = 1.0
    # nucleus of the questions (1 = off)
    question_top_p: float = 0.95
    # temperature of the answers
    answer_temperature: float = 0.7
    # nucleus of the answers (1 = off)
    answer_top_p: float = 1.0

    def validate(self) -> list[str]:
        """Problems with the values, one line each."""
        problems = self.target.validate()
        if not self.out:
            problems.append("out: empty; give the JSONL file to write")
        for key in ("num_conversations", "batch", "max_question_tokens", "max_new_tokens"):
            if getattr(self, key) < 1:
                problems.append(f"{key}: {getattr(self, key)} must be at least 1")
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

    def settings(self) -> dict[str, Any]:
        """What decides the rows, apart from the target's identity and how many there are."""
        keys = ("seed", "batch", "dtype", "max_question_tokens", "max_new_tokens", "question_temperature",
                "question_top_p", "answer_temperature", "answer_top_p")  # fmt: skip
        return {"format": FORMAT, **{key: getattr(self, key) for key in keys}}


class Meter:
    """Progress on stderr: a bar on a terminal, else a line per block. Counts conversations, tokens/s, time
    left."""

    def __init__(self, total: int, done: int, guess: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.total, self.first, self.done, self.tokens = total, done, done, 0
        self.console = Console(stderr=True)
        self.started = time.monotonic()
        self.per_row = 1.0 * guess  # tokens spent for a finished conversation, junk included
        self.bar = Progress(
            TextColumn("synthesize"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=total, completed=done, rate="")

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def rate(self) -> str:
        """Tokens per second and time left, in words."""
        elapsed = max(time.monotonic() - self.started, 1e-9)
        text = f"{self.tokens / elapsed:.0f} tokens/s"
        left = max(0.0, (self.total - self.first) * self.per_row - self.tokens) * elapsed / max(1, self.tokens)
        text += f", {int(left) // 60}:{int(left) % 60:02d} left"
        return text

    def add(self, tokens: int) -> None:
        """Tokens just generated."""
        before, self.tokens = self.tokens, self.tokens + tokens
        if before // 100 != self.tokens // 100:
            now = min(self.total, self.first + int(self.tokens / self.per_row))
            self.bar.update(self.task, completed=max(now, self.done), rate=self.rate())

    def block(self, done: int) -> None:
        """A block is on disk; the file holds `done` conversations."""
        self.done = done
        self.per_row = self.tokens / max(1, done - self.first)
        self.bar.update(self.task, completed=done, rate=self.rate())
        if not self.console.is_terminal:
            print(f"synthesize: {done}/{self.total} conversations, {self.rate()}", file=sys.stderr, flush=True)


def _check_space(path: Path, cfg: SynthesizeConfig) -> None:
    # About 5 bytes a token, the file twice while it is being replaced.
    need = 2 * 5 * cfg.num_conversations * (cfg.max_question_tokens + cfg.max_new_tokens) + (1 << 20)
    free = shutil.disk_usage(path.parent).free
    if free < need:
        raise UserError(f"out: {path.parent} has {free >> 20} MB free, up to {need >> 20} MB are needed; free space "
                        "there or give another folder")  # fmt: skip


def synthesize(cfg: SynthesizeConfig) -> None:
    """Write or continue cfg.out. Raises UserError, or Interrupted (130 after Ctrl-C, 75 after SIGTERM)."""
    path = Path(cfg.out).expanduser()
    held = 0

    def stop(number: int, _: Any) -> None:
        raise Interrupted(
            f"interrupted: {path} holds {held} of {cfg.num_conversations} conversations; the same command continues",
            code=130 if number == signal.SIGINT else 75,
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
                print(f"synthesize: {path} already holds {held} conversations; nothing to do", file=sys.stderr)
                return
            writer = Writer(
                target, Sampling(cfg.question_temperature, top_p=cfg.question_top_p),
                Sampling(cfg.answer_temperature, top_p=cfg.answer_top_p), cfg.max_question_tokens,
                cfg.max_new_tokens, cfg.batch, cfg.seed,
            )  # fmt: skip
            writer.seen.update(map(fingerprint, store.questions()))
            with Meter(cfg.num_conversations, held, (cfg.max_question_tokens + cfg.max_new_tokens) * 3 // 4) as meter:
                writer.on_tokens = meter.add
                while held < cfg.num_conversations:
                    asked = min(cfg.batch, cfg.num_conversations - held)
                    store.append(writer.block(len(store.blocks), asked), asked)
                    held = len(store.lines)
                    meter.block(held)
                rate = meter.tokens / (time.monotonic() - meter.started)
            dropped = ", ".join(f"{n} {why}" for why, n in writer.dropped.most_common()) or "none"
            print(f"synthesize: {held} conversations in {path}; {meter.tokens} tokens at {rate:.0f} tokens/s; dropped: "
                  f"{dropped}", file=sys.stderr)  # fmt: skip
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@entry("synthesize", SynthesizeConfig)
def main(cfg: SynthesizeConfig) -> None:
    """Command-line entry."""
    synthesize(cfg)


if __name__ == "__main__":
    main()
