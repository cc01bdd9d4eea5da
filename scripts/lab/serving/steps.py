"""`engines.py steps`: what a step without a draft and a cycle with one cost in llama.cpp, for every
number of draft tokens K, build and type of weights, and from them the accepted length from which
on drafting pays: cycle / step, its break-even.

A cycle is a draft of K tokens and a pass of the target over K + 1. What it costs does not hang on
what is accepted, so that an untrained head of the servable recipe will do (drafters=[]). Servers
run one after another, all of them in each of `rounds`; a ratio is taken within a round. Cycles are
told apart by the server's own timings of a streamed answer, its draft's share by its log. WORK
gets a file of rows for `export costs=` (docs/serving.md) for every build and type.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from outrider.conf.errors import UserError
from outrider.conf.rules import Filled, OneOrMore, one_of
from outrider.conf.schema import entry
from outrider.heads import head_in, save_head
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.interop import exported, gguf_write
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.extra.llamacpp import server
from outrider.scripts.lab.serving import llamacpp, llamacpp_cases, shared
from outrider.scripts.lab.serving.benches import ENGINES, LLAMACPP, NATIVE
from outrider.scripts.reports.table import Table
from outrider.scripts.serving import gguf_export

PATIENCE = 300.0  # seconds for a streamed answer
WARM = 2  # cycles at the beginning of an answer that are left out
TALK = 4  # the log level that says what drafting took
DRAFTING = re.compile(r"#gen tokens = +(\d+).*dur\(b,g,a\) = [\d.]+, ([\d.]+),")
UNTRAINED = "untrained"


@dataclass(frozen=True, kw_only=True)
class StepsConfig(shared.EngineKeys):
    """Keys of scripts/lab/engines.py steps."""

    # one run folder or head folder to draft with; [] = an untrained EAGLE-3 head
    drafters: list[str]
    # JSON to write
    out: str = "docs/results/llamacpp-steps.json"
    # folder for exports and for what is measured so far
    work: str = "runs/engines-steps"
    # builds of llama.cpp; one whose environment is not there is named and left out
    builds: Filled[Annotated[str, one_of((LLAMACPP, NATIVE))]] = field(
        default_factory=lambda: [LLAMACPP, NATIVE]
    )
    # numbers of the files, target and draft
    weights: Filled[Annotated[str, one_of(gguf_write.DTYPES)]] = field(
        default_factory=lambda: ["float16", "bfloat16"]
    )
    # draft tokens of a cycle; no draft is measured always
    draft_tokens: Filled[OneOrMore] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    # how often everything is measured
    rounds: OneOrMore = 3
    num_prompts: OneOrMore = 1
    # tokens of an answer that are timed
    max_new_tokens: OneOrMore = 32
    # the servers' threads
    threads: OneOrMore = 1
    # Python of the builds' environments; empty = those that make builds
    engine: str = ""


class Event(NamedTuple):
    """What a server said behind one token of an answer. tokens, drafted: so far. ms: since the
    prompt was read."""

    tokens: int
    drafted: int
    ms: float


@dataclass(frozen=True)
class Files:
    """A target and its draft as GGUF files of one type, with their hashes."""

    target: Path
    draft: Path
    sha256: tuple[str, str]


@entry("engines_steps", StepsConfig)
def main(cfg: StepsConfig) -> int:
    """Export, time, write."""
    if len(cfg.drafters) > 1:
        raise UserError(f"drafters: {len(cfg.drafters)} are named; give one, its cost is measured")
    untrained = str(Path(cfg.work).resolve() / UNTRAINED)
    stage = shared.Stage(replace(cfg, drafters=cfg.drafters or [untrained]))
    pythons = environments(cfg, stage)
    if not cfg.drafters and not head_in(untrained):
        save_head(fresh(stage), untrained, stage.target.identity)
    found = next(iter(stage.drafters()), None)
    if found is None or found.kind not in llamacpp_cases.METHODS:
        return stage.end() or _refused(found)
    weighed = {name: exports(stage, found, name) for name in cfg.weights}
    key = {name: one.sha256 for name, one in weighed.items()}
    depends = {"files": key, "prompts": stage.ids, "tokens": cfg.max_new_tokens}
    with files.sole_folder(stage.work / "measured"):
        memo = Memo(stage.work / "measured", depends | {"threads": cfg.threads})
        rows: list[dict[str, Any]] = []
        turns = itertools.product(
            range(cfg.rounds), (0, *cfg.draft_tokens), weighed.items(), pythons.items()
        )
        for turn, depth, (name, one), (build, python) in turns:
            place = f"{build}-{name}-{depth}-{turn}"
            settings = server.LlamaServerSettings(
                str(one.target), context=cfg.context, threads=cfg.threads, talk=TALK, exact=False
            )
            if depth:
                method = llamacpp_cases.METHODS[found.kind]
                settings = replace(
                    settings, draft=str(one.draft), method=method, draft_tokens=depth
                )
            about = {"build": build, "weights": name, "draft_tokens": depth, "round": turn}
            rows.append(about | memo.once(place, partial(timed, stage, python, settings)))
            print(f"{place}: {rows[-1]['cycle_ms']:.1f} ms", flush=True)
    return written(cfg, stage, found.kind, rows)


def environments(cfg: StepsConfig, stage: shared.Stage) -> dict[str, Path]:
    """Python of every build that is there; the others are noted as missing.

    Raises UserError where none is."""
    out = {}
    for name in cfg.builds:
        _, _, default, make = ENGINES[name]
        try:
            out[name] = shared.environment(cfg.engine or default, make)
        except UserError as error:
            stage.missing.append({"drafter": name, "reason": str(error)})
    if not out:
        raise UserError("; ".join(one["reason"] for one in stage.missing))
    return out


def fresh(stage: shared.Stage) -> Eagle3Head:
    """A head of recipe eagle3_portable that has learned nothing: the shapes cost what they cost."""
    torch.manual_seed(0)
    size = stage.target.vocab_size
    cfg = EagleConfig(draft_vocab=min(8192, size))
    return Eagle3Head.for_target(stage.target, cfg, torch.arange(size, 0, -1))


def exports(stage: shared.Stage, found: shared.Found, dtype: str) -> Files:
    """Both files, made where they are missing."""
    target = llamacpp.target_file(stage, dtype)
    folder = stage.exported(f"{found.name}-{dtype}", found, "gguf", f"dtype={dtype}")
    sha256 = str((exported(folder) or {})["files"][gguf_export.DRAFT]["sha256"])
    return Files(target, folder / gguf_export.DRAFT, (files.sha256(target), sha256))


def timed(stage: shared.Stage, python: Path, how: server.LlamaServerSettings) -> dict[str, Any]:
    """One server's median cycle over the prompts, in milliseconds: of it drafting, by the log."""
    depth, ms = how.draft_tokens, list[float]()
    with server.running(python, how, stage.work, "timed") as one:
        for prompt in stage.ids:
            limit = stage.cfg.max_new_tokens + depth + 1
            ms += cycles(streamed(one.url, prompt, limit), depth)[WARM:]
    if not ms:
        raise UserError("max_new_tokens: no whole cycle was timed; give more tokens")
    drafting = depth * drafted(one.log.read_text(errors="replace")) if depth else 0.0
    return {
        "cycle_ms": statistics.median(ms),
        "cycles": len(ms),
        "draft_ms": drafting,
        "version": one.version,
        "instructions": one.system,
    }


def streamed(url: str, prompt: Sequence[int], limit: int) -> list[Event]:
    """What a llama.cpp server says behind every token of a greedy answer that does not stop."""
    body = {
        "prompt": list(prompt),
        "n_predict": limit,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "timings_per_token": True,
    }
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    out = []
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        for line in answer:
            said = json.loads(line[5:]) if line.startswith(b"data:") else {}
            if found := said.get("timings"):
                drafts = int(found.get("draft_n", 0))
                out.append(Event(int(found["predicted_n"]), drafts, float(found["predicted_ms"])))
    return out


def cycles(events: Iterable[Event], depth: int) -> list[float]:
    """Milliseconds of every cycle that drafted `depth` tokens, of every step where that is 0. A
    cycle's tokens come together, and the last ones of an answer are drafted for shorter."""
    groups: list[Event] = []
    for event in events:
        if groups and depth and event.drafted == groups[-1].drafted:
            groups[-1] = event
        else:
            groups.append(event)
    return [
        after.ms - before.ms
        for before, after in itertools.pairwise(groups)
        if after.drafted - before.drafted == depth and (depth or after.tokens - before.tokens == 1)
    ]


def drafted(log: str) -> float:
    """Milliseconds of drafting for each draft token, by the last line of a server's log that tells
    it; 0 where none does."""
    found = DRAFTING.findall(log)
    return float(found[-1][1]) / int(found[-1][0]) if found and int(found[-1][0]) else 0.0


def written(
    cfg: StepsConfig, stage: shared.Stage, kind: str, rows: Sequence[dict[str, Any]]
) -> int:
    """The report, the files of costs, the table."""
    cases = summed(rows)
    seen = {row["build"]: row for row in rows}
    builds = {name: row["instructions"] for name, row in seen.items()}
    how = {"threads": cfg.threads, "rounds": cfg.rounds, "kind": kind, "builds": builds}
    versions = {ENGINES[name][1]: row["version"] for name, row in seen.items()}
    report = stage.report(versions, how | {"trained": bool(cfg.drafters)}, cases)
    for build, name in dict.fromkeys((row["build"], row["weights"]) for row in rows):
        points = [
            {
                "concurrent_requests": 1,
                "draft_tokens": row["draft_tokens"],
                "step_seconds": row["cycle_ms"] / 1000,
            }
            for row in rows
            if (row["build"], row["weights"]) == (build, name)
        ]
        engine = f"llama.cpp, {build}, {name}, {cfg.threads} threads"
        place = stage.work / f"costs-{build}-{name}.json"
        files.write_json(place, {"engine": engine, "points": points})
    print(table(report).markdown(), checks(report).markdown(), sep="\n\n")
    return stage.end()


def summed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A case for every build, type and K: medians over the rounds with the range, ratios to the
    same round's step without a draft."""
    steps = {
        (row["build"], row["weights"], row["round"]): row["cycle_ms"]
        for row in rows
        if not row["draft_tokens"]
    }
    points: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        points.setdefault((row["build"], row["weights"], row["draft_tokens"]), []).append(row)
    out = []
    for (build, name, depth), some in points.items():
        plain = [steps[build, name, row["round"]] for row in some]
        both = list(zip(some, plain, strict=True))
        out.append(
            {
                "build": build,
                "weights": name,
                "draft_tokens": depth,
                "cycle_ms": spread(row["cycle_ms"] for row in some),
                "draft_ms": spread(row["draft_ms"] for row in some),
                "break_even": spread(row["cycle_ms"] / step for row, step in both),
                "verify_in_steps": spread(
                    (row["cycle_ms"] - row["draft_ms"]) / step for row, step in both
                ),
                "cycles": sum(row["cycles"] for row in some),
            }
        )
    return out


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and range of a few rounds."""
    some = sorted(values)
    ends = {"median": statistics.median(some), "low": some[0], "high": some[-1]}
    return {name: round(value, 4) for name, value in ends.items()}


def table(report: dict[str, Any]) -> Table:
    """By build and type of weights: milliseconds of a step without a draft, and for every K the
    break-even accepted length with the milliseconds of a cycle."""
    said = report["settings"]
    threads = said["threads"]
    title = (
        f"Break-even accepted length in llama.cpp (xllamacpp {report['engine']['xllamacpp']}), "
        f"{'a trained' if said['trained'] else 'an untrained'} {said['kind']} head, {threads} "
        f"thread{'s' if threads != 1 else ''}, one request, medians of {said['rounds']} rounds"
    )

    def cell(case: dict[str, Any]) -> str:
        even, ms = case["break_even"]["median"], case["cycle_ms"]["median"]
        reached = even <= case["draft_tokens"] + 1
        return f"{'' if reached else 'never: '}{even:.2f} ({ms:.1f} ms)"

    return _by_depth(report, title, "K = {}", cell)


def checks(report: dict[str, Any]) -> Table:
    """By build and type of weights: what the pass over K + 1 tokens costs, in steps."""
    title = "What the pass over K + 1 tokens that checks a draft costs, in steps without a draft"

    def cell(case: dict[str, Any]) -> str:
        return f"{case['verify_in_steps']['median']:.2f}"

    return _by_depth(report, title, "{} tokens", cell, 1)


def _by_depth(
    report: dict[str, Any],
    title: str,
    name: str,
    cell: Callable[[dict[str, Any]], str],
    more: int = 0,
) -> Table:
    """A row for every build and type; a column for every K, named by K + more."""
    points: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for case in report["cases"]:
        points.setdefault((case["build"], case["weights"]), {})[case["draft_tokens"]] = case
    depths = sorted({case["draft_tokens"] for case in report["cases"]} - {0})
    rows = [
        [
            ENGINES[build][0],
            weights,
            f"{some[0]['cycle_ms']['median']:.1f}",
            *(cell(some[depth]) for depth in depths),
        ]
        for (build, weights), some in points.items()
    ]
    head = ("build", "weights", "step, ms", *(name.format(depth + more) for depth in depths))
    return Table(head, rows, title=title, words=(0, 1))


def _refused(found: shared.Found | None) -> int:
    if found is not None:
        raise UserError(f"drafters: {found.spec} is {found.kind}, which llama.cpp does not serve")
    return shared.SKIPPED
