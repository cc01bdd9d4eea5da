"""Let the target write its own training conversations: JSONL rows {"messages": [...],
"complete": bool}.

    python scripts/synthesize.py target=smollm2 out=runs/demo/data.jsonl \\
        num_conversations=600 seed=0
    python scripts/synthesize.py backend=openai base_url=http://localhost:8000/v1 \\
        prompts=FILE.jsonl target=hub target.name=NAME out=runs/data.jsonl

The first command invents the questions as well. The second takes them from a file, or from a
public set by name (prompts=ultrachat; outrider ls prompts), and lets a server answer them (vLLM,
SGLang: any that speaks the OpenAI API), many at a time; it must serve the target, whose tokenizer
alone is loaded here. Its rows stand in the order of the file.

Stop it at any time (Ctrl-C): the file holds whole lines, and the same command goes on where it
stopped and ends with the file that an uninterrupted run would have written on the same
machine. `complete` says whether the answer reached its end-of-turn token. FILE.meta.json
beside the file keeps the settings; other settings are refused."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

# Run as a file: scripts/ comes first on the path and would shadow libraries.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.jsonl import records
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.files import sole_writer
from outrider.scripts.common.meter import Meter
from outrider.scripts.synthesis.config import SynthesizeConfig
from outrider.scripts.synthesis.from_server import from_server
from outrider.scripts.synthesis.ledger import Ledger, check_space
from outrider.scripts.synthesis.write import BlockWriter, fingerprint


class Signals:
    """Ctrl-C and SIGTERM while conversations are drawn: at once while nothing is under way,
    or on the second signal; otherwise at the next token. An exception out of a handler may
    come between file and count, and is lost where a destructor runs.

    held: conversations on file. drawing: whether `check_stop` is called at every token."""

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.total, self.held, self.drawing = path, total, 0, False
        self.requested = 0

    def __enter__(self) -> Signals:
        self.before = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: Any) -> None:
        again, self.requested = self.requested, number
        if again or not self.drawing:
            self.check_stop()

    def check_stop(self) -> None:
        """Raise Interrupted where a signal has come."""
        if self.requested:
            raise Interrupted(
                f"interrupted: {self.path} holds {self.held} of {self.total} "
                "conversations; the same "
                "command continues",
                code=130 if self.requested == signal.SIGINT else 75,
            )


def synthesize(cfg: SynthesizeConfig) -> None:
    """Write or continue cfg.out. Raises UserError, or Interrupted (130 after Ctrl-C, 75 after
    SIGTERM).
    """
    path = Path(cfg.out).expanduser()
    if cfg.backend == "openai":
        with sole_writer(path):
            return from_server(cfg, path)
    with Signals(path, cfg.conversations) as signals, sole_writer(path):
        letters = 5 * (cfg.max_question_tokens + cfg.longest)  # of a row, about
        check_space(path.parent, cfg.conversations * letters + (1 << 20))
        target = load_target(cfg.target, cfg.dtype)
        identity = {k: v for k, v in target.identity.to_json().items() if k != "path"}
        ledger = Ledger(path, {**cfg.settings(), "target": identity})
        ledger.open()
        if ledger.rows > cfg.conversations:
            raise UserError(
                f"num_conversations: {path} already holds {ledger.rows}, "
                f"{cfg.conversations} asked; give another name"
            )
        if ledger.rows < cfg.conversations:
            ledger.shorten(cfg.batch)
        signals.held = ledger.rows
        if signals.held == cfg.conversations:
            print(
                f"synthesize: {path} already holds {signals.held} conversations; nothing to do",
                file=sys.stderr,
            )
            return
        draw(cfg, target, ledger, signals)


def draw(cfg: SynthesizeConfig, target: Target, ledger: Ledger, signals: Signals) -> None:
    """Let the target write the conversations that are still wanted. Raises Interrupted."""
    draws = (
        target,
        Sampling(cfg.question_temperature, top_p=cfg.question_top_p),
        Sampling(cfg.answer_temperature, top_p=cfg.answer_top_p),
        cfg.max_question_tokens,
        cfg.longest,
        cfg.batch,
        cfg.seed,
    )
    writer = BlockWriter(*draws)
    if ledger.rows:
        known = records(ledger.path)
        writer.seen.update(fingerprint(row["messages"][0]["content"]) for row in known)
    guess = (cfg.max_question_tokens + cfg.longest) * 3 // 4
    with Meter(cfg.conversations, signals.held, guess) as meter:

        def drawn(tokens: int) -> None:
            meter.add(tokens)
            signals.check_stop()

        writer.on_tokens, signals.drawing = drawn, True
        while signals.held < cfg.conversations:
            signals.check_stop()
            requested = min(cfg.batch, cfg.conversations - signals.held)
            ledger.append(writer.block(len(ledger.blocks), requested), requested)
            signals.held = ledger.rows
            meter.block(signals.held)
    dropped = ", ".join(f"{n} {why}" for why, n in writer.dropped.most_common()) or "none"
    print(
        f"synthesize: {signals.held} conversations in {ledger.path}; {meter.tokens} tokens at "
        f"{meter.rate():.0f} tokens/s; dropped: {dropped}",
        file=sys.stderr,
    )


@entry("synthesize", SynthesizeConfig)
def main(cfg: SynthesizeConfig) -> None:
    """Command-line entry."""
    synthesize(cfg)


if __name__ == "__main__":
    main()
