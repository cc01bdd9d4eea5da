"""Let the target write its own training conversations: JSONL rows {"messages": [...],
"complete": bool}.

    outrider synthesize target=smollm2 out=runs/demo/data.jsonl \\
        num_conversations=600 seed=0
    outrider synthesize target=smollm2 prompts=FILE.jsonl out=runs/data.jsonl
    outrider synthesize backend=openai base_url=http://localhost:8000/v1 \\
        prompts=FILE.jsonl target=hub target.name=NAME out=runs/data.jsonl

The first command invents the questions as well. The others take them from a file, or from a
public set by name (prompts=ultrachat; outrider ls prompts): the second answers in this process,
the third lets a server answer (vLLM, SGLang: any that speaks the OpenAI API), many at a time; it
must serve the target, whose tokenizer alone is loaded here.

Stop it at any time (Ctrl-C): the same command asks only what has no answer yet, and a finished
file has its rows in the order of the questions. `line` numbers the question, `complete` says
whether the answer reached its end-of-turn token. FILE.meta.json beside the file keeps the
settings; other settings are refused."""

from __future__ import annotations

from pathlib import Path

from outrider.conf.schema import entry
from outrider.scripts.common.files import sole_writer
from outrider.scripts.data.config import SynthesizeConfig
from outrider.scripts.data.run import synthesize


@entry("synthesize", SynthesizeConfig)
def main(cfg: SynthesizeConfig) -> None:
    """Command-line entry."""
    with sole_writer(Path(cfg.out)):
        synthesize(cfg)


if __name__ == "__main__":
    main()
