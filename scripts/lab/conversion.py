"""Is a converted target the file that it was made from? llama.cpp answers prompts greedily
from the GGUF itself; our model reads every answer along, and the token that it puts first is
compared with llama.cpp's at every place. `gap`: how far apart the two lie in our logits
where they differ.

    make .venv-llamacpp/.installed && python scripts/lab/conversion.py target=qwen25_coder

The same again with one thing broken shows that the comparison sees it: the biases of
queries, keys and values at zero, or another base of the rotary frequencies. Works for
`minutes` at a time and exits with 75 where something is left: the same command goes on.
Writes JSON.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from outrider.conf.errors import UserError
from outrider.conf.rules import AboveZero, NotEmpty, OneOrMore, one_of
from outrider.conf.schema import entry
from outrider.decode.models.config import DTYPES, TargetConfig
from outrider.decode.models.load import load_target
from outrider.decode.models.packages import TARGETS
from outrider.decode.target import Target
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.pipeline import Deadline
from outrider.scripts.common.prompts import load_prompts, question_ids, spread
from outrider.scripts.extra.llamacpp import server as llamacpp
from outrider.scripts.lab.serving.shared import environment
from outrider.scripts.serving.asking import Address, Endpoint, ServerRequest

MAKE = "make .venv-llamacpp/.installed"
PATIENCE = 600.0  # seconds for one answer on a busy machine
# Bases of the rotary frequencies that are not the target's: what readers take where a file says
# none, which near neighbours hardly notice, and one that turns neighbours differently too.
OTHERS = (1e4, 1e2)


@dataclass(frozen=True)
class ConversionConfig:
    """Keys of scripts/lab/conversion.py."""

    # JSON to write
    out: NotEmpty
    # folder for what is finished, until all is
    work: NotEmpty
    # a target that packages carry
    target: TargetConfig = field(default_factory=lambda: TargetConfig(kind="qwen25_coder"))
    # JSONL of prompts
    prompts: NotEmpty = "scripts/prompts/demo.jsonl"
    # places that are compared
    places: OneOrMore = 500
    # most tokens of an answer
    tokens: OneOrMore = 20
    # number format of our model
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"
    # of work before it stops
    minutes: AboveZero = 5.0
    # of the server and of ours
    threads: OneOrMore = 1
    # Python of llama.cpp's environment
    engine: NotEmpty = ".venv-llamacpp/bin/python"


def without_biases(model: Any) -> None:
    """Queries, keys and values with no bias."""
    for name, value in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
            value.data.zero_()


def of_base(model: Any, base: float) -> None:
    """Rotary frequencies of another base."""
    config = copy.deepcopy(model.config)
    config.rope_parameters["rope_theta"] = base
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)


CHANGES: dict[str, Callable[[Any], None]] = {
    "as converted": lambda model: None,
    "without the biases of queries, keys and values": without_biases,
    **{f"with a rope base of {x:.0f}": functools.partial(of_base, base=x) for x in OTHERS},
}


async def _answers(
    url: str, memo: Memo, prompts: list[list[int]], cfg: Any, clock: Deadline
) -> None:
    rows = memo.lines("answers")
    async with Endpoint(Address(url, timeout=PATIENCE)) as server:
        for prompt in prompts[len(rows) :]:
            if sum(len(row["tokens"]) for row in rows) >= cfg.places:
                return
            clock.left()
            reply = await server.answer(prompt, ServerRequest(cfg.tokens))
            rows.append({"prompt": prompt, "tokens": reply.tokens})
            memo.add("answers", rows[-1])


def answers(
    cfg: ConversionConfig, memo: Memo, prompts: list[list[int]], gguf: Path, clock: Deadline
) -> tuple[list[Any], str]:
    """[{prompt, tokens}] by llama.cpp at T = 0, and its version."""
    found = memo.lines("version")
    if not found:
        python, work = environment(cfg.engine, MAKE), Path(cfg.work).resolve()
        settings = llamacpp.LlamaServerSettings(str(gguf), threads=cfg.threads, talk=0)
        with llamacpp.running(python, settings, work, "server") as server:
            asyncio.run(_answers(server.url, memo, prompts, cfg, clock))
            memo.add("version", server.version)
    return memo.lines("answers"), memo.lines("version")[0]


@torch.inference_mode()
def read_along(model: Any, row: dict[str, Any]) -> list[tuple[int, float]]:
    """(the token that our logits put first, how far behind it llama.cpp's lies) at every
    place of an answer."""
    ids = [*row["prompt"], *row["tokens"]]
    keep = len(row["tokens"]) + 1
    logits = model(torch.tensor([ids]), logits_to_keep=keep).logits[0, :-1].float()
    best, first = logits.max(-1)
    behind = best - logits.gather(1, torch.tensor(row["tokens"])[:, None])[:, 0]
    return list(zip(first.tolist(), behind.tolist(), strict=True))


def compared(target: Target, memo: Memo, rows: list[Any], clock: Deadline) -> list[dict[str, Any]]:
    """A row for every entry of CHANGES."""
    found = []
    for number, (name, change) in enumerate(CHANGES.items()):
        model = target.model
        if len(memo.lines(f"read-{number}")) < len(rows):
            kept = {k: v.clone() for k, v in model.state_dict().items() if k.endswith(".bias")}
            rotary = model.model.rotary_emb
            change(model)
            for row in rows[len(memo.lines(f"read-{number}")) :]:
                clock.left()
                memo.add(f"read-{number}", read_along(model, row))
            model.load_state_dict(kept, strict=False)
            model.model.rotary_emb = rotary
        places = [
            (first == token, gap)
            for row, read in zip(rows, memo.lines(f"read-{number}"), strict=True)
            for token, (first, gap) in zip(row["tokens"], read, strict=True)
        ]
        gaps = sorted((round(gap, 4) for same, gap in places if not same), reverse=True)
        equal = len(places) - len(gaps)
        row = {"model": name, "places": len(places), "equal": equal, "share": equal / len(places)}
        found.append({**row, "largest_gap": gaps[0] if gaps else 0.0, "gaps": gaps[:40]})
        print(f"{name}: {equal} of {len(places)}, largest gap {found[-1]['largest_gap']}")
    return found


@entry("conversion", ConversionConfig)
def main(cfg: ConversionConfig) -> None:
    """Answer, read along, write."""
    os.chdir(files.ROOT)
    if cfg.target.kind not in TARGETS:
        raise UserError(f"target: {cfg.target.kind}; choose one of {', '.join(TARGETS)}")
    torch.set_num_threads(cfg.threads)
    clock, known = Deadline(cfg.minutes, "conversion"), TARGETS[cfg.target.kind]
    target = load_target(cfg.target, cfg.dtype, "cpu")
    asked = spread(load_prompts(cfg.prompts), -(-cfg.places // cfg.tokens) * 2)
    prompts = [question_ids(target.tokenizer, prompt.turns[0]) for prompt in asked]
    work = Path(cfg.work)
    with files.sole_folder(work):
        depends = {"gguf": known.gguf["sha256"], "tokens": cfg.tokens, "dtype": cfg.dtype}
        memo = Memo(work / "found", {**depends, "prompts": prompts, "places": cfg.places})
        rows, version = answers(cfg, memo, prompts, known.file, clock)
        result = compared(target, memo, rows, clock)
        about = {**files.origin(), "target": known.name, "weights": known.weights}
        about |= {"gguf_sha256": known.gguf["sha256"], "xllamacpp": version, "dtype": cfg.dtype}
        files.write_json(Path(cfg.out), {**about, "rows": result})
        memo.clear()


if __name__ == "__main__":
    main()
