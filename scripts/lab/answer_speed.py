"""Who answers a data set's questions sooner: our engine with the weights in bfloat16, or a
llama.cpp server of the very GGUF that they were made from?

    make .venv-llamacpp/.installed && python scripts/lab/answer_speed.py target=qwen25_coder

By turns, `tokens` tokens in all for each number of concurrent requests. The server is as it
comes (flash attention, K/V in float16, one slot for every request). Writes JSON: tokens per
second, the prompts' own time within.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from outrider.conf.errors import UserError
from outrider.conf.rules import Filled, NotEmpty, OneOrMore
from outrider.conf.schema import entry
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.config import TargetConfig
from outrider.decode.models.load import load_target
from outrider.decode.models.packages import TARGETS
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common import files
from outrider.scripts.common.prompts import load_prompts, question_ids, spread
from outrider.scripts.extra.llamacpp import server as llamacpp
from outrider.scripts.lab.serving.shared import environment
from outrider.scripts.serving.asking import Address, Endpoint, ServerRequest

MAKE = "make .venv-llamacpp/.installed"
PATIENCE = 600.0  # seconds for one answer on a busy machine


@dataclass(frozen=True)
class AnswerSpeedConfig:
    """Keys of scripts/lab/answer_speed.py."""

    # JSON to write
    out: NotEmpty
    # folder for the server's log
    work: NotEmpty
    # a target that packages carry
    target: TargetConfig = field(default_factory=lambda: TargetConfig(kind="qwen25_coder"))
    # JSONL of prompts
    prompts: NotEmpty = "scripts/prompts/demo.jsonl"
    # of all answers of a turn
    tokens: OneOrMore = 200
    # of one answer, at least: else reading the prompts is all of it
    least: OneOrMore = 48
    # requests at a time
    concurrent: Filled[OneOrMore] = field(default_factory=lambda: [1, 4, 8, 16])
    # how often each is measured
    turns: OneOrMore = 2
    # of the server and of ours
    threads: OneOrMore = 2
    # Python of llama.cpp's environment
    engine: NotEmpty = ".venv-llamacpp/bin/python"


def ours(target: Target, prompts: list[list[int]], limit: int) -> int:
    """Tokens of answers that are decoded together."""
    requests = [Request(prompt, limit, id=i) for i, prompt in enumerate(prompts)]
    run = generate(target, NoDraft(), requests, Sampling(0.0), batch_size=len(prompts), eos_ids=())
    return sum(len(answer.token_ids) for answer in run.generations)


def theirs(url: str, prompts: list[list[int]], limit: int) -> int:
    """Tokens of answers that are asked together."""

    async def ask() -> int:
        address = Address(url, timeout=PATIENCE, connections=len(prompts))
        async with Endpoint(address) as server:
            asked = (server.answer(prompt, ServerRequest(limit)) for prompt in prompts)
            return sum(len(reply.tokens or ()) for reply in await asyncio.gather(*asked))

    return asyncio.run(ask())


def measured(
    cfg: AnswerSpeedConfig, target: Target, url: str, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """A row for every number of requests: tokens per second of both in every turn."""
    found = []
    for count in cfg.concurrent:
        limit = max(cfg.least, cfg.tokens // count)
        row: dict[str, Any] = {"concurrent": count, "tokens": limit, "ours": [], "llama.cpp": []}
        for turn in range(cfg.turns):
            for name in ("ours", "llama.cpp")[:: -1 if turn % 2 else 1]:
                at = (turn * count) % len(prompts)
                rows = (prompts[at:] + prompts[:at])[:count]
                began = time.perf_counter()
                tokens = ours(target, rows, limit) if name == "ours" else theirs(url, rows, limit)
                row[name].append(tokens / (time.perf_counter() - began))
        row["ratio"] = statistics.median(row["ours"]) / statistics.median(row["llama.cpp"])
        found.append(row)
        print(row, flush=True)
    return found


@entry("answer_speed", AnswerSpeedConfig)
def main(cfg: AnswerSpeedConfig) -> None:
    """Start the server, measure by turns, write."""
    os.chdir(files.ROOT)
    if cfg.target.kind not in TARGETS:
        raise UserError(f"target: {cfg.target.kind}; choose one of {', '.join(TARGETS)}")
    torch.set_num_threads(cfg.threads)
    known, most = TARGETS[cfg.target.kind], max(cfg.concurrent)
    target = load_target(cfg.target, "bfloat16", "cpu")
    asked = spread(load_prompts(cfg.prompts), 2 * most)
    prompts = [question_ids(target.tokenizer, prompt.turns[0]) for prompt in asked]
    python, work = environment(cfg.engine, MAKE), Path(cfg.work).resolve()
    settings = llamacpp.LlamaServerSettings(
        str(known.file), slots=most, threads=cfg.threads, talk=0, exact=False
    )
    ours(target, prompts[:1], 4)  # packs the weights
    with files.sole_folder(work), llamacpp.running(python, settings, work, "server") as server:
        theirs(server.url, prompts[:1], 4)
        rows = measured(cfg, target, server.url, prompts)
        about = {**files.origin(), "target": known.name, "xllamacpp": server.version}
    files.write_json(Path(cfg.out), {**about, "rows": rows})


if __name__ == "__main__":
    main()
