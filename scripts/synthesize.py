"""Let the target write its own training conversations: JSONL rows {"messages": [...],
"complete": bool}.

    python scripts/synthesize.py target=smollm2 out=runs/demo/data.jsonl \\
        num_conversations=600 seed=0
    python scripts/synthesize.py target=smollm2 prompts=FILE.jsonl out=runs/data.jsonl
    python scripts/synthesize.py backend=openai base_url=http://localhost:8000/v1 \\
        prompts=FILE.jsonl target=hub target.name=NAME out=runs/data.jsonl

The first command invents the questions as well. The others take them from a file, or from a
public set by name (prompts=ultrachat; outrider ls prompts), and write the rows in the order of
the file: the second answers in this process, the third lets a server answer (vLLM, SGLang: any
that speaks the OpenAI API), many at a time; it must serve the target, whose tokenizer alone is
loaded here.

Stop it at any time (Ctrl-C): the file holds whole lines, and the same command goes on where it
stopped and ends with the file that an uninterrupted run would have written on the same
machine. `complete` says whether the answer reached its end-of-turn token. FILE.meta.json
beside the file keeps the settings; other settings are refused."""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a file: scripts/ comes first on the path and would shadow libraries.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.conf.errors import UserError
from outrider.conf.jsonl import records
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.files import sole_writer
from outrider.scripts.common.meter import Meter
from outrider.scripts.synthesis.config import SynthesizeConfig
from outrider.scripts.synthesis.given import answer
from outrider.scripts.synthesis.ledger import Ledger, check_space, say
from outrider.scripts.synthesis.signals import Signals
from outrider.scripts.synthesis.write import BlockWriter, fingerprint


def synthesize(cfg: SynthesizeConfig) -> None:
    """Write or continue cfg.out. Raises UserError, or Interrupted (130 after Ctrl-C, 75 after
    SIGTERM).
    """
    path = Path(cfg.out).expanduser()
    with Signals(path) as signals, sole_writer(path):
        if cfg.prompts:
            return answer(cfg, signals)
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
            return say(f"{path} already holds {signals.held} conversations; nothing to do")
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
        writer.on_tokens = signals.after(meter.add)
        while signals.held < cfg.conversations:
            signals.check_stop()
            requested = min(cfg.batch, cfg.conversations - signals.held)
            ledger.append(writer.block(len(ledger.blocks), requested), requested)
            signals.held = ledger.rows
            meter.block(signals.held)
    dropped = ", ".join(f"{n} {why}" for why, n in writer.dropped.most_common()) or "none"
    say(
        f"{signals.held} conversations in {ledger.path}; {meter.tokens} tokens at "
        f"{meter.rate():.0f} tokens/s; dropped: {dropped}"
    )


@entry("synthesize", SynthesizeConfig)
def main(cfg: SynthesizeConfig) -> None:
    """Command-line entry."""
    synthesize(cfg)


if __name__ == "__main__":
    main()
