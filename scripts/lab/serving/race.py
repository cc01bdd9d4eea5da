"""`engines.py race`: our engine, transformers and real servers in one table, on the same prompts
and in turns. llama.cpp (float16) and vLLM (bfloat16) run as they are fast by default, without a
draft and with each of `drafters`; `systems` are what scripts/evaluate.py scores beside them.

A llama.cpp head must be one that llama.cpp knows (recipe eagle3_portable); what an engine cannot
serve is named and left out there.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import torch

from outrider.conf.errors import UserError
from outrider.conf.rules import Filled, OneOrMore, Seed, one_of
from outrider.conf.schema import entry
from outrider.conf.typed import raise_all
from outrider.heads.names import NONE
from outrider.scripts import evaluate
from outrider.scripts.common import files
from outrider.scripts.lab.serving import shared
from outrider.scripts.lab.serving.benches import BENCHES, ENGINES, GREEDY, Serving, drafters
from outrider.scripts.scoring.names import wrong_drafter


@dataclass(frozen=True)
class RaceConfig(shared.EngineKeys):
    """Keys of scripts/lab/engines.py race."""

    usual: ClassVar[tuple[str, ...]] = (NONE, "runs/eagle3_portable")
    # run folders or head folders to export and serve; none: a server without a draft; [] = none
    # and the usual one, or the demo's
    drafters: list[str]
    # what scripts/evaluate.py scores beside the servers
    systems: list[str] = field(default_factory=lambda: ["none", "ngram", "hf_generate"])
    # engines to start
    servers: Filled[Annotated[str, one_of(ENGINES)]] = field(default_factory=lambda: [*ENGINES])
    # folder of the report
    out: str = "reports/race"
    # folder for exports
    work: str = "runs/engines-race"
    # draft tokens of a server's cycle
    draft_tokens: OneOrMore = 2
    # prompts decoded together, requests asked together
    batch_size: OneOrMore = 1
    # of our engine
    dtype: str = "bfloat16"
    # the servers' threads, and ours
    threads: OneOrMore = 2
    # addresses all random numbers
    seed: Seed = 0
    # Python of the engines' environments; empty = those that `make engines` builds
    engine: str = ""


@entry("engines_race", RaceConfig)
def main(cfg: RaceConfig) -> int:
    """Export, start every server, score all of them, stop them."""
    raise_all([f"systems: {line}" for name in cfg.systems if (line := wrong_drafter(name))])
    pythons = {
        name: shared.environment(cfg.engine or ENGINES[name][2], ENGINES[name][3])
        for name in cfg.servers
    }
    stage = shared.Stage(cfg)
    how = Serving(cfg.draft_tokens, cfg.batch_size, cfg.context, cfg.threads, exact=False)
    with ExitStack() as stack:
        systems = list(cfg.systems)
        for server in cfg.servers:
            label, *_ = ENGINES[server]
            bench = BENCHES[server](stage, pythons[server], how)
            for found in drafters(stage, bench.headless):
                if (problem := bench.refusal(found, GREEDY)) is not None:
                    stage.missing.append({"drafter": found.spec, "reason": problem})
                    continue
                name = server if found.kind == NONE else f"{server}-{found.name}"
                print(f"{label}: {found.spec}", flush=True)
                mode = GREEDY if found.kind != NONE else ""
                try:
                    url = stack.enter_context(bench.running(found, mode, f"race-{name}"))
                except UserError as error:  # no export, or a server that does not come up
                    stage.missing.append({"drafter": found.spec, "reason": str(error)})
                    continue
                systems.append(f"{name}@{url}")
        # every engine looks for all drafters
        stage.missing = [one for i, one in enumerate(stage.missing) if one not in stage.missing[:i]]
        if len(systems) == len(cfg.systems):
            stage.end()
            raise UserError("drafters: no server was started; none of them can be served")
        torch.set_num_threads(cfg.threads)
        requested = evaluate.EvaluateConfig(
            out=cfg.out,
            target=cfg.target,
            drafters=systems,
            prompts=cfg.prompts,
            num_prompts=cfg.num_prompts,
            max_new_tokens=cfg.max_new_tokens,
            dtype=cfg.dtype,
            device="cpu",  # where the servers run
            batch_size=cfg.batch_size,
            seed=cfg.seed,
            parity=0,
        )
        out = Path(cfg.out)
        with files.sole_folder(out):
            code = evaluate.evaluated(requested, out)
    ended = stage.end()  # names what is missing in any case
    return code or ended
