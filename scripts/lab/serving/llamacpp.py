"""`engines.py llamacpp`: exports served by llama.cpp, beside our own engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from outrider.conf.rules import Filled, OneOrMore, one_of
from outrider.conf.schema import entry
from outrider.heads import load_head
from outrider.heads.interop import exported, gguf_write
from outrider.heads.names import DraftSpec
from outrider.scripts.common import files
from outrider.scripts.extra.llamacpp import server as server
from outrider.scripts.lab.serving import llamacpp_cases, shared
from outrider.scripts.serving import gguf_export

MAKE = "make engines ONLY=llamacpp"


@dataclass(frozen=True)
class LlamaCppConfig(shared.EngineKeys):
    """Keys of scripts/lab/engines.py llamacpp."""

    out: str = "docs/results/engines-llamacpp.json"
    work: str = "runs/engines-llamacpp"
    # numbers of the target's GGUF: float32, float16, q8_0, or a GGUF file of it
    targets: Filled[str] = field(default_factory=lambda: ["float32"])
    # numbers of the drafts' GGUF
    dtype: Annotated[str, one_of(gguf_write.DTYPES)] = "float32"
    # prompts whose draft tokens are compared one by one
    traced: int = 5
    # the server's threads
    threads: OneOrMore = 1
    engine: str = ".venv-llamacpp/bin/python"
    # K of a drafter by its name in the table (eagle3, small_lm), in place of the export's
    draft_tokens: dict[str, int] = field(default_factory=dict)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        return [
            f"targets: {name} is none of {', '.join(gguf_write.DTYPES)}, nor a file"
            for name in self.targets
            if name not in gguf_write.DTYPES and not Path(name).expanduser().is_file()
        ]


@entry("engines_llamacpp", LlamaCppConfig)
def main(cfg: LlamaCppConfig) -> int:
    """Export, serve, compare, write."""
    python = shared.environment(cfg.engine, MAKE)
    stage = shared.Stage(cfg)
    bench = llamacpp_cases.CaseBench(python, stage.work, stage.runs, cfg.max_new_tokens, cfg.traced)
    heads = []
    for found in stage.drafters():
        name = f"{found.name}-{cfg.dtype}"
        folder = stage.exported(name, found, "gguf", f"dtype={cfg.dtype}")
        heads.append((found, folder, load_head(found.folder, stage.target)))
    cases = []
    version = ""
    for name in cfg.targets:
        file = target_file(stage, name)
        label = name if name in gguf_write.DTYPES else Path(name).name
        settings = server.LlamaServerSettings(str(file), context=cfg.context, threads=cfg.threads)
        print(f"llama.cpp on the {label} target", flush=True)
        about = {"target": label, "target_sha256": files.sha256(file)}
        plain = llamacpp_cases.served(bench, f"plain-{label}", settings, about["target_sha256"])
        version = plain["version"]
        cases.append({"case": "plain", **about, **llamacpp_cases.plain_case(bench, plain)})
        for found, folder, head in heads:
            manifest = exported(folder) or {}
            depth = cfg.draft_tokens.get(found.name) or manifest["draft_tokens"]
            said = replace(
                settings,
                draft=str(folder / gguf_export.DRAFT),
                method=llamacpp_cases.METHODS[found.kind],
                draft_tokens=depth,
            )
            print(f"llama.cpp on the {label} target: {found.spec}", flush=True)
            key = about["target_sha256"] + manifest["files"][gguf_export.DRAFT]["sha256"]
            answer = llamacpp_cases.served(bench, f"{found.name}-{label}", said, key)
            twin = gguf_export.rounded_head(head, cfg.dtype)
            drafter = twin.drafter(stage.target, DraftSpec(shape="chain"))
            case = llamacpp_cases.case(bench, drafter, depth, answer, plain)
            cases.append(
                {
                    "case": found.name,
                    **about,
                    "drafter": found.spec,
                    "card_sha256": found.card_sha256,
                    "dtype": cfg.dtype,
                    "draft_tokens": depth,
                    **case,
                }
            )
    how = {"cache": "float32", "flash_attention": False, "threads": cfg.threads}
    print(llamacpp_cases.table(stage.report({"xllamacpp": version}, how, cases)).markdown())
    return stage.end()


def target_file(stage: shared.Stage, name: str) -> Path:
    """The target's GGUF in the numbers that `name` says, or the file that it names."""
    if name not in gguf_write.DTYPES:
        return Path(name).expanduser().resolve()
    folder = f"target-{name}"
    said = exported(stage.work / folder)
    if said is None or (said.get("target") or {}).get("weights_sha256") != stage.weights_sha256:
        stage.export(folder, "drafter=none", "format=gguf", f"dtype={name}", "num_prompts=2")
    return stage.work / folder / gguf_export.TARGET
