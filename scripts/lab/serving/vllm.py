"""`engines.py`: exports served by vLLM on the CPU at T = 0, and the speculators package on
what is exported for it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from outrider.conf.schema import entry
from outrider.heads import load_head
from outrider.heads.base import Head
from outrider.heads.interop import exported
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.lab.serving import case as engine_case
from outrider.scripts.lab.serving import shared
from outrider.scripts.serving import card

FORMATS = {
    "medusa": ("vllm", "medusa"),
    "eagle1": ("vllm",),
    "eagle3": ("vllm", "speculators"),
    "dflash": ("vllm", "speculators"),
    "small_lm": ("transformers",),
}


@dataclass(frozen=True)
class EnginesConfig(shared.EngineKeys):
    """Keys of scripts/lab/engines.py."""

    usual: ClassVar[tuple[str, ...]] = (
        "runs/medusa",
        "runs/eagle1",
        "runs/eagle3",
        "runs/draft",
    )
    out: str = "docs/results/engines.json"
    work: str = "runs/engines"
    # prompts that the engine answers alone, for its speed
    timed: int = 6
    engine: str = ".venv-engines/bin/python"
    # Python of the environment with the speculators package
    speculators: str = ".venv-speculators/bin/python"
    # K of a case by its name, in place of the one that the export's serve command names
    draft_tokens: dict[str, int] = field(default_factory=dict)
    # only these cases, such as eagle3-vllm; [] = all
    only: list[str] = field(default_factory=list)


@entry("engines", EnginesConfig)
def main(cfg: EnginesConfig) -> int:
    """Export, serve, compare, write."""
    shared.environment(cfg.engine, "make engines")
    package = shared.environment(cfg.speculators, "make engines")
    stage = shared.Stage(cfg)
    job = {
        "model": stage.target.identity.path if stage.target.identity else "",
        "speculative": None,
        "prompts": stage.ids,
        "max_tokens": cfg.max_new_tokens,
        "stop": list(stage.target.eos_ids),
        "batch": cfg.batch_size,
        "timed": cfg.timed,
        "context": cfg.context,
    }
    print("plain decoding: the engine's", flush=True)
    plain = answered(cfg, stage.work, "plain", job)
    cases = [{"case": "plain", **stage.runs.plain_case(plain)}]
    for found in stage.drafters():
        for format in FORMATS.get(found.kind, ()):
            name = f"{found.name.replace('small_lm', 'draft')}-{format}"
            if cfg.only and name not in cfg.only:
                continue
            print(f"{name}: {found.spec}", flush=True)
            folder = stage.exported(name, found, format)
            depth = cfg.draft_tokens.get(name) or (exported(folder) or {})["draft_tokens"]
            head = load_head(found.folder, stage.target)
            answer = answered(cfg, stage.work, name, requested(job, folder, head, depth, format))
            case = stage.runs.case(head, found.card_sha256, depth, answer, plain)
            if format == "speculators":
                case["package"] = engine_case.package(
                    package, folder, head, stage.target, stage.ids[0], stage.work
                )
            cases.append(
                {
                    "case": name,
                    "drafter": found.spec,
                    "kind": found.name,
                    "format": format,
                    "draft_tokens": depth,
                    **case,
                }
            )
    settings = {"dtype": "float32", "batch_size": cfg.batch_size, "timed": cfg.timed}
    print(engine_case.table(stage.report(plain["versions"], settings, cases)).markdown())
    return stage.end()


def requested(
    job: dict[str, Any], folder: Path, head: Head, depth: int, format: str
) -> dict[str, Any]:
    """The plain job with a drafter. A folder of speculators is served as it is."""
    if format == "speculators":
        return {**job, "model": str(folder)}
    return {**job, "speculative": card.vllm(head, folder, depth)}


def answered(cfg: EnginesConfig, work: Path, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """The engine's answer to a job, from WORK when the same job was answered before."""
    weights = job["speculative"]["model"] if job["speculative"] else job["model"]
    stamp = (exported(Path(weights)) or {}).get("files")

    def made() -> Any:
        question, answer = work / f"{name}.job.json", work / f"{name}.answer.json"
        files.write_json(question, job)
        script = files.ROOT / "scripts/lab/serving/run_vllm.py"
        command = [files.ROOT / cfg.engine, script, question, answer]
        shared.call([*map(str, command)], work / f"{name}.engine.log")
        return json.loads(answer.read_text())

    found: dict[str, Any] = Memo(work / "answers" / name, {**job, "files": stamp}).once("job", made)
    return found
