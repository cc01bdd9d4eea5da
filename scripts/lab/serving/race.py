"""`engines.py race`: our engine, transformers and real servers in one table, on the same prompts
and in turns. llama.cpp and vLLM (bfloat16) run as they are fast by default, without a draft and
with each of `drafters` at each of `draft_tokens`; `systems` are what scripts/evaluate.py scores
beside them. servers=[llamacpp,llamacpp_native] races the wheel and a build for this CPU,
weights=[float16,FILE.gguf] the target as we export it and as somebody else did. Which number of
draft tokens pays where, `engines.py steps` measures.

A llama.cpp head must be one that llama.cpp knows (recipe eagle3_portable); what an engine cannot
serve is named and left out there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch

from outrider.conf.errors import UserError
from outrider.conf.rules import Filled, NotEmpty, NotNegative, OneOrMore, Seed, one_of
from outrider.conf.schema import entry
from outrider.conf.typed import raise_all
from outrider.decode.models.config import AutoDtype
from outrider.heads.interop import gguf_write
from outrider.heads.names import NONE
from outrider.scripts import evaluate
from outrider.scripts.common import files
from outrider.scripts.lab.serving import shared
from outrider.scripts.lab.serving.benches import (
    BENCHES,
    ENGINES,
    GREEDY,
    LLAMACPP,
    VLLM,
    Serving,
    drafters,
)
from outrider.scripts.scoring.names import wrong_drafter
from outrider.scripts.serving import gguf_export


@dataclass(frozen=True)
class RaceConfig(shared.EngineKeys, AutoDtype):
    """Keys of scripts/lab/engines.py race."""

    usual: ClassVar[tuple[str, ...]] = (NONE, "runs/eagle3_portable")
    device: ClassVar[str] = "cpu"  # where the servers run
    # run folders or head folders to export and serve; none: a server without a draft; [] = none
    # and the usual one, or the demo's
    drafters: list[str]
    # what scripts/evaluate.py scores beside the servers
    systems: list[str] = field(default_factory=lambda: ["none", "ngram", "hf_generate"])
    # engines to start: llamacpp, llamacpp_native, vllm
    servers: Filled[Annotated[str, one_of(ENGINES)]] = field(
        default_factory=lambda: [LLAMACPP, VLLM]
    )
    # numbers of llama.cpp's files: float32, bfloat16, float16, q8_0; or a GGUF file of the target
    weights: Filled[NotEmpty] = field(default_factory=lambda: ["float16"])
    # folder of the report
    out: str = "reports/race"
    # folder for exports
    work: str = "runs/engines-race"
    # draft tokens of a server's cycle, an entry for each
    draft_tokens: Filled[OneOrMore] = field(default_factory=lambda: [2, 4])
    # prompts decoded together, requests asked together
    batch_size: OneOrMore = 1
    # sampling temperature of every system; above 0 the servers' drafts take their best tokens
    temperature: NotNegative = 0.0
    # of our engine; auto: bfloat16, but float32 on a CPU without instructions for it
    dtype: str = "bfloat16"
    # the servers' threads, and ours
    threads: OneOrMore = 2
    # addresses all random numbers
    seed: Seed = 0
    # Python of the engines' environments; empty = those that `make engines` builds
    engine: str = ""


def wrong_weights(name: str) -> str:
    """Why llama.cpp cannot take the target so; "" when it can."""
    if name in gguf_write.DTYPES:
        return ""
    if Path(name).suffix != Path(gguf_export.TARGET).suffix:
        return f"is {name}; give {', '.join(gguf_write.DTYPES)} or a GGUF file of the target"
    return "" if Path(name).is_file() else f"no such file {name}; export the target to it first"


def alike(weights: Sequence[str]) -> list[str]:
    """Which of `weights` would stand in the table under one name."""
    names = [Path(one).stem for one in weights]
    twice = dict.fromkeys(name for name in names if names.count(name) > 1)
    return [f"two of them would be called {name}; rename a file" for name in twice]


def entries(cfg: RaceConfig) -> Iterator[tuple[str, str, Serving]]:
    """(engine, its name in the table before the drafter's, how it runs) for every type of weights
    and number of draft tokens."""
    for server in cfg.servers:
        for weights in cfg.weights[:1] if server == VLLM else cfg.weights:
            usual = len(cfg.weights) == 1 and weights in gguf_write.DTYPES
            label = server if server == VLLM or usual else f"{server}-{Path(weights).stem}"
            how = Serving(0, cfg.batch_size, cfg.context, cfg.threads, False, weights)
            yield from ((server, label, replace(how, draft_tokens=k)) for k in cfg.draft_tokens)


def started(
    cfg: RaceConfig, stage: shared.Stage, pythons: dict[str, Path], stack: ExitStack
) -> list[str]:
    """NAME@URL of every server that came up; the others are noted as missing."""
    out = []
    for server, label, how in entries(cfg):
        bench = BENCHES[server](stage, pythons[server], how)
        for found in drafters(stage, bench.headless):
            if found.kind == NONE and how.draft_tokens != cfg.draft_tokens[0]:
                continue  # it drafts nothing, whatever K
            if (problem := bench.refusal(found, GREEDY)) is not None:
                stage.missing.append({"drafter": found.spec, "reason": problem})
                continue
            several = f"-k{how.draft_tokens}" if len(cfg.draft_tokens) > 1 else ""
            name = label if found.kind == NONE else f"{label}-{found.name}{several}"
            print(f"{ENGINES[server][0]}: {found.spec}{several}", flush=True)
            mode = GREEDY if found.kind != NONE else ""
            try:
                url = stack.enter_context(bench.running(found, mode, f"race-{name}"))
            except UserError as error:  # no export, or a server that does not come up
                stage.missing.append({"drafter": found.spec, "reason": str(error)})
                continue
            out.append(f"{name}@{url}")
    return out


@entry("engines_race", RaceConfig)
def main(cfg: RaceConfig) -> int:
    """Export, start every server, score all of them, stop them."""
    raise_all(
        [
            *(f"systems: {line}" for name in cfg.systems if (line := wrong_drafter(name))),
            *(f"weights: {line}" for name in cfg.weights if (line := wrong_weights(name))),
            *(f"weights: {line}" for line in alike(cfg.weights)),
        ]
    )
    pythons = {
        name: shared.environment(cfg.engine or ENGINES[name][2], ENGINES[name][3])
        for name in cfg.servers
    }
    stage = shared.Stage(cfg)
    with ExitStack() as stack:
        systems = [*cfg.systems, *started(cfg, stage, pythons, stack)]
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
            temperature=cfg.temperature,
            dtype=cfg.dtype,
            device=cfg.device,
            batch_size=cfg.batch_size,
            seed=cfg.seed,
            parity=0,
        )
        out = Path(cfg.out)
        with files.sole_folder(out):
            code = evaluate.evaluated(requested, out)
    ended = stage.end()  # names what is missing in any case
    return code or ended
