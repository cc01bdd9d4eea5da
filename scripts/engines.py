"""Serve exported heads with a real engine and compare: `make engines` builds the environments
and runs this.

    python scripts/engines.py drafters=[runs/medusa,runs/eagle1,runs/eagle3,runs/draft]

Every drafter is exported (scripts/export.py) and served by vLLM on the CPU at T = 0 in
float32. Its answers are compared with plain decoding of this repository token by token, its
own acceptance counters with ours under the same K, cycle for cycle. The speculators package
loads what was exported, and must give the same draft logits and the same tensors back. Writes
OUT (JSON), prints the table. Finished parts lie in WORK and are not done again; a drafter that
is not there is named, exit code 3.

    python scripts/engines.py llamacpp drafters=[runs/eagle3_portable,runs/draft]

The same with llama.cpp (`make engines ONLY=llamacpp`): its server on loopback, prompts as
token ids; text, drafted and accepted tokens must be ours prompt by prompt.

    python scripts/engines.py check url=http://127.0.0.1:8080 expected=exports/eagle3

Does a running server do what the export beside expected.json was measured to do? Exit code 1:
it does not, with the place where it parts.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conf.errors import UserError
from conf.schema import entry
from decode.models.load import TargetConfig, load_target
from heads import find_head, load_head
from heads.checkpoint import read_card
from heads.interop import exported, gguf_write, read_folder
from heads.names import Draft
from scripts.common import files
from scripts.common.prompts import chat_ids, load_prompts
from scripts.serving import case as engine_case
from scripts.serving import contract, contract_check, gguf_export, llamacpp_cases
from scripts.serving import llamacpp as server
from scripts.serving import probe as acceptance_probe
from scripts.serving import trial as probe_trial
from scripts.serving.asking import Address

FORMATS = {
    "medusa": ("vllm", "medusa"),
    "eagle1": ("vllm",),
    "eagle3": ("vllm", "speculators"),
    "small_lm": ("transformers",),
}
METHODS = {"medusa": "medusa", "eagle1": "eagle", "eagle3": "eagle3", "small_lm": "draft_model"}
SKIPPED, PROBED = 3, 16


@dataclass
class EnginesConfig:
    """Keys of scripts/engines.py."""

    # run folders or head folders to export and serve
    drafters: list[str]
    # JSON to write
    out: str = "docs/results/engines.json"
    # folder for exports and for the parts that are finished
    work: str = "runs/engines"
    # the target of all of them
    target: TargetConfig = field(default_factory=TargetConfig)
    # JSONL of prompts
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them
    num_prompts: int = 50
    # most tokens per answer
    max_new_tokens: int = 64
    # prompts that are decoded together, on both sides
    batch_size: int = 25
    # prompts that the engine answers alone, for its speed
    timed: int = 6
    # the engine's max_model_len
    context: int = 1024
    # Python of the environment with vLLM
    engine: str = ".venv-engines/bin/python"
    # Python of the environment with the speculators package
    speculators: str = ".venv-speculators/bin/python"
    # K of a case by its name, in place of the one that the export's serve command names
    draft_tokens: dict[str, int] = field(default_factory=dict)
    # only these cases, such as eagle3-vllm; [] = all
    only: list[str] = field(default_factory=list)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        return [
            f"{key}: {getattr(self, key)} is below 1; give 1 or more"
            for key in ("num_prompts", "max_new_tokens", "batch_size", "context")
            if getattr(self, key) < 1
        ]


@entry("engines", EnginesConfig)
def main(cfg: EnginesConfig) -> int:
    """Export, serve, compare, write."""
    for python in (cfg.engine, cfg.speculators):
        if not (files.ROOT / python).exists():
            raise UserError(f"engine: {python} is not there; `make engines` builds it")
    work = Path(cfg.work)
    work.mkdir(parents=True, exist_ok=True)
    target = load_target(cfg.target, "float32", "cpu")
    known = load_prompts(cfg.prompts)
    count = min(cfg.num_prompts, len(known))
    some = [known[i * len(known) // count] for i in range(count)]
    ids = [chat_ids(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in some]
    print("plain decoding: ours, then the engine's", flush=True)
    runs = engine_case.Runs(target, ids, cfg.max_new_tokens, cfg.batch_size, work)
    job = {
        "model": target.identity.path,
        "speculative": None,
        "prompts": ids,
        "max_tokens": cfg.max_new_tokens,
        "stop": list(target.eos_ids),
        "batch": cfg.batch_size,
        "timed": cfg.timed,
        "context": cfg.context,
    }
    plain = engine(cfg, work, "plain", job)
    cases, missing = [{"case": "plain", **runs.plain_case(plain)}], []
    batch = acceptance_probe.answers(target, ids[:PROBED], cfg.max_new_tokens)
    for spec in cfg.drafters:
        try:
            source = find_head(spec)
            card = read_card(source)
            kind = card["kind"]
        except UserError as error:
            missing.append({"drafter": spec, "reason": str(error)})
            continue
        for format in FORMATS.get(kind, ()):
            name = f"{kind.replace('small_lm', 'draft')}-{format}"
            if cfg.only and name not in cfg.only:
                continue
            print(f"{name}: {spec}", flush=True)
            folder = export(cfg, work / name, source, format)
            depth = cfg.draft_tokens.get(name) or (exported(folder) or {})["draft_tokens"]
            head = load_head(source, target)
            settings = {
                "model": str(folder),
                "method": METHODS[kind],
                "num_speculative_tokens": depth,
            }
            asked = (
                {**job, "model": str(folder)}
                if format == "speculators"
                else {**job, "speculative": settings}
            )
            answer = engine(cfg, work, name, asked)
            case = runs.case(head, card["sha256"], depth, answer, plain)
            if format == "vllm":
                foreign = replace(read_folder(folder), manifest=None)
                case["probe"] = probe_trial.trial(foreign, target, batch)
            if format == "speculators":
                case["package"] = engine_case.package(
                    files.ROOT / cfg.speculators, folder, head, target, ids[0], work
                )
            cases.append(
                {
                    "case": name,
                    "drafter": spec,
                    "kind": kind,
                    "format": format,
                    "draft_tokens": depth,
                    **case,
                }
            )
    report = {
        "format": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": files.command(),
        "environment": files.environment(),
        "engine": plain["versions"],
        "settings": {
            "prompts": cfg.prompts,
            "num_prompts": len(ids),
            "max_new_tokens": cfg.max_new_tokens,
            "dtype": "float32",
            "temperature": 0,
            "batch_size": cfg.batch_size,
            "timed": cfg.timed,
        },
        "target": target.identity.to_json() | {"path": ""},
        "cases": cases,
        "missing": missing,
    }
    files.write_json(Path(cfg.out), report)
    engine_case.show(report)
    for row in missing:
        print(f"not there: {row['drafter']} ({row['reason']})", file=sys.stderr)
    return SKIPPED if missing else 0


@dataclass
class LlamaCppConfig:
    """Keys of scripts/engines.py llamacpp."""

    # run folders or head folders to export and serve
    drafters: list[str]
    # JSON to write
    out: str = "docs/results/engines-llamacpp.json"
    # folder for exports and for the parts that are finished
    work: str = "runs/engines-llamacpp"
    # the target of all of them
    target: TargetConfig = field(default_factory=TargetConfig)
    # numbers of the target's GGUF: float32, float16, q8_0, or a GGUF file of it
    targets: list[str] = field(default_factory=lambda: ["float32"])
    # numbers of the drafts' GGUF
    dtype: str = "float32"
    # JSONL of prompts
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them
    num_prompts: int = 50
    # most tokens per answer
    max_new_tokens: int = 64
    # prompts that are decoded together on our side
    batch_size: int = 25
    # prompts whose draft tokens are compared one by one
    traced: int = 5
    # the server's context
    context: int = 1024
    # its threads
    threads: int = 1
    # Python of the environment with xllamacpp
    engine: str = ".venv-llamacpp/bin/python"
    # K of a kind of drafter (eagle3, small_lm), in place of the export's
    draft_tokens: dict[str, int] = field(default_factory=dict)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = [
            f"{key}: {getattr(self, key)} is below 1; give 1 or more"
            for key in ("num_prompts", "max_new_tokens", "batch_size", "context", "threads")
            if getattr(self, key) < 1
        ]
        if self.dtype not in gguf_write.DTYPES:
            found.append(f"dtype: {self.dtype} is none of {', '.join(gguf_write.DTYPES)}")
        for name in self.targets:
            if name not in gguf_write.DTYPES and not Path(name).expanduser().is_file():
                found.append(
                    f"targets: {name} is none of {', '.join(gguf_write.DTYPES)}, nor a file"
                )
        if not self.targets:
            found.append("targets: names none; set targets=[float32]")
        return found


@entry("engines_llamacpp", LlamaCppConfig)
def llamacpp(cfg: LlamaCppConfig) -> int:
    """Export, serve, compare, write."""
    python = files.ROOT / cfg.engine
    if not python.exists():
        raise UserError(
            f"engine: {cfg.engine} is not there; `make engines ONLY=llamacpp` builds it"
        )
    work = Path(cfg.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    target = load_target(cfg.target, "float32", "cpu")
    known = load_prompts(cfg.prompts)
    count = min(cfg.num_prompts, len(known))
    some = [known[i * len(known) // count] for i in range(count)]
    ids = [chat_ids(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in some]
    print("plain decoding: ours", flush=True)
    runs = engine_case.Runs(target, ids, cfg.max_new_tokens, cfg.batch_size, work)
    bench = llamacpp_cases.Bench(python, work, runs, cfg.max_new_tokens, cfg.traced)
    heads, missing = [], []
    for spec in cfg.drafters:
        try:
            source = find_head(spec)
            kind = read_card(source)["kind"]
        except UserError as error:
            missing.append({"drafter": spec, "reason": str(error)})
            continue
        folder = export(cfg, work / f"{kind}-{cfg.dtype}", source, "gguf")
        heads.append((spec, kind, folder, load_head(source, target)))
    cases = []
    version = ""
    for name in cfg.targets:
        file = target_file(cfg, work, name)
        label = name if name in gguf_write.DTYPES else Path(name).name
        settings = server.Settings(str(file), context=cfg.context, threads=cfg.threads)
        print(f"llama.cpp on the {label} target", flush=True)
        about = {"target": label, "target_sha256": files.sha256(file)}
        plain = llamacpp_cases.served(bench, f"plain-{label}", settings, about["target_sha256"])
        version = plain["version"]
        cases.append({"case": "plain", **about, **llamacpp_cases.plain_case(bench, plain)})
        for spec, kind, folder, head in heads:
            manifest = exported(folder) or {}
            depth = cfg.draft_tokens.get(kind) or manifest["draft_tokens"]
            said = replace(
                settings,
                draft=str(folder / gguf_export.DRAFT),
                method=llamacpp_cases.METHODS[kind],
                draft_tokens=depth,
            )
            print(f"llama.cpp on the {label} target: {spec}", flush=True)
            key = about["target_sha256"] + manifest["files"][gguf_export.DRAFT]["sha256"]
            answer = llamacpp_cases.served(bench, f"{kind}-{label}", said, key)
            twin = gguf_export.rounded_head(head, cfg.dtype)
            drafter = twin.drafter(target, Draft(shape="chain"))
            found = llamacpp_cases.case(bench, drafter, depth, answer, plain)
            cases.append(
                {
                    "case": kind,
                    **about,
                    "drafter": spec,
                    "card_sha256": manifest["source"]["card_sha256"],
                    "dtype": cfg.dtype,
                    "draft_tokens": depth,
                    **found,
                }
            )
    report = {
        "format": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": files.command(),
        "environment": files.environment(),
        "engine": {"xllamacpp": version},
        "settings": {
            "prompts": cfg.prompts,
            "num_prompts": len(ids),
            "max_new_tokens": cfg.max_new_tokens,
            "temperature": 0,
            "cache": "float32",
            "flash_attention": False,
            "threads": cfg.threads,
        },
        "target": target.identity.to_json() | {"path": ""} if target.identity else None,
        "cases": cases,
        "missing": missing,
    }
    files.write_json(Path(cfg.out), report)
    print(llamacpp_cases.markdown(report))
    for row in missing:
        print(f"not there: {row['drafter']} ({row['reason']})", file=sys.stderr)
    return SKIPPED if missing else 0


def target_file(cfg: LlamaCppConfig, work: Path, name: str) -> Path:
    """The target's GGUF in the numbers that `name` says, or the file that it names."""
    if name not in gguf_write.DTYPES:
        return Path(name).expanduser().resolve()
    folder = work / f"target-{name}"
    if exported(folder) is None:
        command = [
            *export_command(cfg),
            "drafter=none",
            "format=gguf",
            f"dtype={name}",
            "num_prompts=2",
            f"out={folder}",
        ]
        call(command, work / f"target-{name}.export.log")
    return folder / gguf_export.TARGET


@dataclass
class CheckConfig:
    """Keys of scripts/engines.py check."""

    # address of the running server, such as http://127.0.0.1:8080
    url: str
    # the exported folder, or its expected.json
    expected: str
    # seconds for one answer
    timeout: float = 120.0
    # tries after the first
    retries: int = 4
    # environment variable that holds the server's key; empty = none
    key_env: str = ""
    # JSON to write; empty = none
    out: str = ""

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        if not self.timeout > 0:
            found.append(f"timeout: {self.timeout} is not above 0; give seconds")
        if self.retries < 0:
            found.append(f"retries: {self.retries} is below 0; give 0 or more")
        return found


@entry("engines_check", CheckConfig)
def check(cfg: CheckConfig) -> int:
    """Ask, compare, say."""
    wanted = contract.load(Path(cfg.expected).expanduser())
    address = Address(cfg.url, cfg.timeout, cfg.retries, 1, cfg.key_env)
    found = contract_check.checked(wanted, address)
    if cfg.out:
        files.write_json(Path(cfg.out), found | {"url": cfg.url, "command": files.command()})
    for line in contract_check.told(found):
        print(line)
    return 0 if found["served"] else 1


def export_command(cfg: EnginesConfig | LlamaCppConfig) -> list[str]:
    """The start of an export's command line for this target."""
    target = [f"target={cfg.target.kind}"] + (
        [f"target.path={cfg.target.path}"] if cfg.target.path else []
    )
    return [
        sys.executable,
        str(files.ROOT / "scripts/export.py"),
        *target,
        "overwrite=true",
        "device=cpu",
    ]


def export(cfg: EnginesConfig | LlamaCppConfig, folder: Path, source: Path, format: str) -> Path:
    """The export of a head; made again when the head has changed."""
    said = exported(folder)
    if said is not None and said["source"]["card_sha256"] == read_card(source)["sha256"]:
        return folder.resolve()
    command = [
        *export_command(cfg),
        f"drafter={source}",
        f"format={format}",
        f"out={folder.resolve()}",
    ]
    if isinstance(cfg, LlamaCppConfig):
        command.append(f"dtype={cfg.dtype}")
    call(command, folder.parent / f"{folder.name}.export.log")
    return folder.resolve()


def engine(cfg: EnginesConfig, work: Path, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """The engine's answer to a job, from WORK when the same job was answered before."""
    weights = job["speculative"]["model"] if job["speculative"] else job["model"]
    stamp = (exported(Path(weights)) or {}).get("files")
    key = hashlib.sha256(json.dumps([job, stamp], sort_keys=True).encode()).hexdigest()[:16]
    answer = work / f"{name}.{key}.json"
    if not answer.is_file():
        files.write_json(work / f"{name}.job.json", job)
        command = [
            str(files.ROOT / cfg.engine),
            str(files.ROOT / "scripts/serving/run_vllm.py"),
            str(work / f"{name}.job.json"),
            str(answer),
        ]
        call(command, work / f"{name}.engine.log")
    return json.loads(answer.read_text())


def call(command: list[str], log: Path) -> None:
    """Run a process; its output goes to `log`. Raises UserError with the last line when it
    fails.
    """
    with open(log, "w") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        lines = [line for line in log.read_text().splitlines() if line.strip()] or ["no output"]
        raise UserError(
            f"{Path(command[1]).name}: failed with code {code} ({lines[-1][:200]}); all "
            f"of it: {log}"
        )


PARTS = {"llamacpp": llamacpp, "check": check}

if __name__ == "__main__":
    part = PARTS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if part is None:
        main()
    else:
        part(sys.argv[2:])
