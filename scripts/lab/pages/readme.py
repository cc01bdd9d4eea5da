"""The figures of README.md and the tables of docs/results.md, tuning.md, engines.md,
serving.md and path.md, from JSON: `make readme`, that is
`python -m outrider.scripts.lab.pages.readme`.

Copies what the tables need from reports/NAME/report.json (`COPIED`) to docs/results and puts
the tables between the markers of the pages. Without reports it renders the committed JSON
again. Of the demo only a full one is taken: the figures of FAST=1 mean little.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from outrider.heads.names import ADAPTIVE, NGRAM, NONE
from outrider.heads.warm import BEFORE
from outrider.scripts.common import files
from outrider.scripts.extra.forecasting import table as forecast_table
from outrider.scripts.lab import vllm_protocol
from outrider.scripts.lab.pages import (
    cycle_parts,
    gpu,
    matched,
    rehearsed,
    reused,
    serves,
    trainers,
    two_targets,
)
from outrider.scripts.lab.serving import case as engine_case
from outrider.scripts.lab.serving import llamacpp_cases, steps
from outrider.scripts.lab.serving import sampled as engine_sampled
from outrider.scripts.reports import fit_table, score_table, tune_table
from outrider.scripts.reports.block import Block
from outrider.scripts.reports.table import Table, interval
from outrider.scripts.scoring.names import SERVER

RESULTS = files.ROOT / "docs" / "results"
BY = "`make readme`"
README = Block.of("README.md", "results", BY)
TABLES = Block.of("docs/results.md", "tables", BY)
TUNING = Block.of("docs/tuning.md", "tuned", BY)
ENGINES = Block.of("docs/engines.md", "engines", BY)
STEPS = Block.of("docs/engines.md", "steps", BY)
SERVING = Block.of("docs/serving.md", "serves", BY)
VERSIONS = Block.of("docs/serving.md", "versions", BY)
SPEEDS = Block.of("docs/serving.md", "speeds", BY)
FIT = Block.of("docs/fit.md", "fits", BY)
FORGOTTEN = Block.of("docs/fit.md", "matrix", BY)
FORETOLD = Block.of("docs/fit.md", "forecasts", BY)
PATH = Block.of("docs/path.md", "path", BY)
PROTOCOL = Block.of("docs/others.md", "protocol", BY)
RACE = Block.of("docs/race.md", "race", BY)
GPU = Block.of("docs/scaling.md", "gpu", BY)
REUSED = Block.of("docs/data.md", "passes", BY)
DROPPED = ("per_prompt", "acceptance_by_rank")
# file in docs/results without its ending -> folder under reports/
COPIED = {
    "demo-t0": "demo/t0",
    "demo-t1": "demo/t1",
    "demo-unlike": "demo/unlike",
    "unseen-t0": "unseen/t0",
    "unseen-t1": "unseen/t1",
    "unseen-fp32": "unseen/fp32",
    "unseen-b4": "unseen/b4",
    "unseen-b8": "unseen/b8",
    "union-t0": "union/t0",
    "union-t1": "union/t1",
    "gpu-t0": "gpu/t0",
    "gpu-t1": "gpu/t1",
    "avx2-t0": "avx2/smollm2-halves",
    "avx2-t1": "avx2/smollm2-t1",
    "avx2-b4": "avx2/smollm2-b4",
    "avx2-b8": "avx2/smollm2-b8",
    "avx2-rows-b4": "avx2/smollm2-rows",
    "avx2-rows-b8": "avx2/smollm2-rows/t0-b8",
    "avx2-fit": "avx2/fit",
    "qwen25-t0": "avx2/qwen",
    "qwen25-k2-t0": "avx2/qwen-spin",
    "qwen25-more-t0": "avx2/qwen-more",
    "qwen25-adaptive-t0": "avx2/qwen-capped",
    "qwen25-uncapped-t0": "avx2/qwen-adaptive",
    "qwen25-sizes-t0": "qwen-pick",
    "qwen25-fit-t0": "avx2/qwen-fit",
    "qwen25-generate-t0": "avx2/qwen-generate",
    "qwen25-fp32": "qwen25/fp32",
    "qwen25-gpu-t0": "gpu/qwen25/t0",
}
# the same for reports that count as vLLM does
COUNTED = {
    "vllm-protocol": "vllm_protocol",
    "vllm-protocol-qwen25": "vllm_protocol_qwen25",
}
# tables of accepted lengths by category: file -> heading
BY_CATEGORY = {
    "union-t0": "Accepted length of a union of drafters, by category",
    "union-t1": "The same union at T = 1",
}
# score tables of docs/results.md: file -> heading
SHOWN = {
    "unseen-t0": "72 prompts that nothing was trained or tuned on",
    "unseen-t1": "The same at T = 1, with the head of the first 25 minutes",
    "unseen-fp32": "The same in float32 (beside other work: no times)",
    "unseen-b4": "The same, four at a time",
    "unseen-b8": "The same, eight at a time",
    "avx2-t0": "On a CPU without bfloat16: the 72 prompts with the head that every engine serves",
    "avx2-drafts32-t0": "The same before, drafters in float32",
    "avx2-t1": "On a CPU without bfloat16, T = 1",
    "avx2-rows-b4": "On a CPU without bfloat16, four at a time",
    "avx2-rows-b8": "On a CPU without bfloat16, eight at a time",
    "avx2-b4": "The same before `@adaptive` counted rows, four at a time",
    "avx2-b8": "The same before `@adaptive` counted rows, eight at a time",
    "avx2-fit": "On a CPU without bfloat16: a head fitted to its traffic, on later questions",
    "demo-t0": "What `make demo` shows: questions like its data (its JSON says at which commit)",
    "demo-t1": "What `make demo` shows at T = 1",
    "demo-unlike": "What `make demo` shows on questions unlike its data",
    "recipes-t0": "Recipes, trained longer",
    "qwen25-adaptive-t0": "Qwen2.5-Coder-1.5B, on a CPU without bfloat16, drafts at a price",
    "qwen25-more-t0": "The same before, drafts of fixed sizes",
    "qwen25-k2-t0": "The same before that, with a head that had read 7.2 million tokens",
    "qwen25-asleep-t0": "The same once more before, waiting threads asleep",
    "qwen25-t0": "The same with chains of five and Qwen's own Q4_K_M file, waiting threads asleep",
    "qwen25-fit-t0": "Qwen2.5-Coder-1.5B after a fit to SQL, on later questions",
    "qwen25-generate-t0": "Qwen2.5-Coder-1.5B, plain decoding beside `generate` of transformers",
    "gpu-t0": "On a GPU, where a small target waits for its launches",
    "gpu-t1": "The same at T = 1",
    "qwen25-gpu-t0": "Qwen2.5-Coder-1.5B on a GPU",
    "qwen25-fp32": "The same in float32, eight at a time (beside other work: no times)",
}


def slim(report: dict[str, Any]) -> dict[str, Any]:
    """A report without folders of this machine and without per-prompt detail."""
    kept = {k: v for k, v in report.items() if k != "skipped_turns"}
    kept["target"] = {k: v for k, v in report["target"].items() if k != "path"}
    kept["settings"] = {k: v for k, v in report["settings"].items() if k != "target"}
    kept["drafters"] = [
        {k: v for k, v in row.items() if k not in DROPPED} for row in report["drafters"]
    ]
    for row in kept["drafters"]:
        if row["lossless"]:
            row["lossless"] = {k: v for k, v in row["lossless"].items() if k != "differences"}
    # Other settings of the same run have files of their own.
    return {**kept, "skipped_turns": [], "others": []}


def read(name: str) -> dict[str, Any]:
    """A file of docs/results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def front() -> str:
    """What the README says first: a sentence about the fastest drafter with a trained head, and
    a small table. Which answers are equal is told in float32, where no rounding blurs it."""
    report, exact = read("unseen-t0"), read("unseen-fp32")
    same = {row["label"]: row for row in exact["drafters"]}
    rows = {row["label"]: row for row in report["drafters"]}
    heads = {label: same[label.partition("+")[0]] for label in rows if label in same}
    best = max(
        (row for label, row in rows.items() if heads.get(label, {}).get("training")),
        key=lambda row: row["speedup"]["mean"],
    )
    training = heads[best["label"]]["training"]
    seconds = training.get("cpu_seconds") or training["train_seconds"]
    seconds += training.get(f"{BEFORE}cpu_seconds", 0)
    found = same[best["label"]]["lossless"]
    kill = read("reliability")["kill9"]["result"].split(",")[0]
    generate = rows["hf_generate"]["tokens_per_second"]
    paces = {name: cell["speedup"]["mean"] for name, cell in best["by_category"].items()}
    slowest = min(paces, key=lambda name: paces[name])
    beside = ", n-grams beside it," if best["label"].endswith(f"+{NGRAM}") else ""
    told = (
        f"**A head trained for {seconds / 60:.0f} minutes of one CPU core{beside} makes "
        f"{report['target']['name']} write {best['speedup']['mean']:.2f} times as fast: "
        f"{best['accepted_length']['mean']:.2f} tokens a pass instead of 1** "
        f"(`{best['label']}` against our own plain decoding, 95 % interval "
        f"{best['speedup']['low']:.2f} to {best['speedup']['high']:.2f}, "
        f"{report['environment']['threads']} cores; {report['settings']['num_prompts']} prompts "
        f"of {len(paces)} categories that nothing was trained or tuned on, T = 0, "
        f"{report['settings']['dtype']}; the slowest is {slowest}, {paces[slowest]:.2f}×). "
        f"In float32 {found['equal']} of {found['checked']} answers are equal token by token. "
        f"`kill -9` at random moments of training: {kill}."
    )
    head = "drafter", "tokens a pass", "× plain decoding", "× `generate`", "same tokens, float32"
    cells = [
        [
            label,
            interval(row["accepted_length"]),
            interval(row["speedup"]),
            f"{row['tokens_per_second'] / generate:.2f}",
            score_table.equality(same[label]) if label in same else "–",
        ]
        for label, row in rows.items()
        if not label.endswith("(defaults)") and not _drafting_server(row)
    ]
    more = " ".join(filter(None, [fastest(report), fitted()]))
    return "\n".join([told, "", Table(head, cells).markdown(), "", more, larger()])


def larger() -> str:
    """The same of the larger target, in a few sentences; nothing where it was not raced."""
    report = dict(known("qwen25-adaptive-t0")).get("qwen25-adaptive-t0")
    if report is None:
        return ""
    ours = {one["name"] for one in report["ranking"]}
    rows = [row for row in report["drafters"] if row["name"] in ours and row["label"] != NONE]
    best = max(rows, key=lambda row: row["speedup"]["mean"])
    training = next(row["training"] for row in rows if row["training"])
    gpu = read("first_gpu")["environment"]["gpu"]
    servers = [row for row in report["drafters"] if SERVER.fullmatch(row["name"])]
    plain = next(row for row in servers if not _drafting_server(row))
    drafted = max(filter(_drafting_server, servers), key=_pace)
    beside = ", n-grams beside it," if NGRAM in best["label"] else ""
    if ADAPTIVE in best["label"]:
        beside = f"{beside or ','} with [as many drafts as pay](docs/tuning.md),"
    return (
        f"**On {report['target']['name']} a head{beside} makes our decoding "
        f"{interval(best['speedup'], 2, '×')} as fast and llama.cpp "
        f"{interval(against(report, drafted, plain), 2, '×')} as fast as itself (the head alone)** "
        f"(`{best['label']}`, {best['accepted_length']['mean']:.2f} tokens a pass, "
        f"{report['settings']['num_prompts']} unseen prompts of {len(best['by_category'])} "
        f"categories, T = 0, 16-bit weights, {report['environment']['threads']} cores without "
        f"bfloat16; the head read {training['tokens_seen'] / 1e6:.1f} million tokens in "
        f"{training['train_seconds']:.0f} seconds of one {gpu}). Ours is "
        f"{interval(against(report, best, plain), 2, '×')} as fast as llama.cpp without a draft, "
        f"{interval(against(report, best, drafted), 2, '×')} as fast as it with the same head; "
        f"the fastest 16-bit row is `{max(report['drafters'], key=_pace)['label']}`{four_bits()} "
        f"([both targets](docs/results.md#targets-beside-each-other)).{fitted_larger()}{on_gpu()}"
    )


def fitted_larger() -> str:
    """What a fit brought the larger target on CPU cores, a sentence behind others."""
    found = dict(known("qwen25-fit-t0", "fit-qwen25-sql"))
    if len(found) < 2:
        return ""
    report, fit = found["qwen25-fit-t0"], found["fit-qwen25-sql"]
    best = max((row for row in report["drafters"] if row["label"].startswith("fit")), key=_pace)
    before = max((r for r in report["drafters"] if r["label"].startswith("eagle3")), key=_pace)
    servers = [row for row in report["drafters"] if SERVER.fullmatch(row["name"])]
    plain = next(row for row in servers if not _drafting_server(row))
    drafted = max(filter(_drafting_server, servers), key=_pace)
    threads, minutes = fit["environment"]["threads"], fit["seconds"]["training"] / 60
    return (
        f" `outrider fit` on SQL, {minutes:.0f} minutes of {threads} "
        f"core{'s' if threads > 1 else ''}, brings ours from {interval(before['speedup'], 2, '×')} "
        f"to {interval(best['speedup'], 2, '×')} on {report['settings']['num_prompts']} later "
        "questions of that kind "
        f"({best['accepted_length']['mean']:.2f} tokens a pass, `{best['label']}`), "
        f"{interval(against(report, best, plain), 2, '×')} llama.cpp without a draft and "
        f"{interval(against(report, best, drafted), 2, '×')} it with the same head."
    )


def on_gpu() -> str:
    """What the larger target's fastest drafter brings on a GPU, a sentence behind others."""
    report = dict(known("qwen25-gpu-t0")).get("qwen25-gpu-t0")
    if report is None:
        return ""
    best = max(report["drafters"], key=lambda row: row["speedup"]["mean"])
    gain, length = interval(best["speedup"], 2, "×"), best["accepted_length"]["mean"]
    pace = report["plain_pass_ms"]
    doubt = f" (a plain pass took {pace['low']:.0f} to {pace['high']:.0f} ms)"
    doubt = "" if pace["steady"] else doubt
    return (
        f" On one {report['environment']['gpu']}, in {report['settings']['dtype']}, "
        f"`{best['label']}` is {gain} our plain decoding{doubt}, {length:.2f} tokens a pass."
    )


def four_bits() -> str:
    """What llama.cpp alone does with the larger target's four-bit file, to end a sentence with."""
    report = dict(known("qwen25-t0")).get("qwen25-t0")
    rows = [row for row in (report or {}).get("drafters", ()) if row["label"].endswith("-q4_k_m")]
    if not rows:
        return ""
    gain = interval(rows[0]["speedup"], 2, "×")
    return f", and with the four-bit file llama.cpp alone is {gain} our plain decoding"


def _pace(row: dict[str, Any]) -> float:
    return float(row["tokens_per_second"] or 0.0)


def _drafting_server(row: dict[str, Any]) -> bool:
    """A row that the page behind the README is enough for."""
    return bool(SERVER.fullmatch(row["name"])) and row["accepted_length"]["mean"] != 1


def fastest(report: dict[str, Any]) -> str:
    """Which row is the fastest, and how ours stands to the fastest server of another engine, in a
    sentence; nothing where no server ran."""
    rows = sorted(report["drafters"], key=lambda row: -row["speedup"]["mean"])
    server = next((row for row in rows if SERVER.fullmatch(row["name"])), None)
    if server is None:
        return ""
    ours = next(row for row in rows if row["name"] in {one["name"] for one in report["ranking"]})
    ratio = against(report, ours, server)
    first = f"`{(ours if rows[0] is ours else server)['label']}`"
    return (
        f"The fastest row is {first}: `{ours['label']}` writes {interval(ratio, 2, '×')} as fast "
        f"as `{server['label']}`, the fastest server of another engine on the same two cores "
        "([engines](docs/engines.md))."
    )


def against(report: dict[str, Any], row: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """mean, low, high of the speed of a row over another's, paired by prompt."""
    pair = next(p for p in report["pairs"] if {p["a"], p["b"]} == {row["name"], other["name"]})
    ratio: dict[str, float] = pair["speed_ratio"]
    if pair["a"] == row["name"]:
        return ratio
    return {"mean": 1 / ratio["mean"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}


def fitted() -> str:
    """What fitting whole heads to traffic of the README's target brought, in a sentence; of each
    traffic its shortest fit."""
    target = read("unseen-t0")["target"]["name"]
    reports = [
        report
        for report in fit_reports()
        if not fit_table.lora_rank(report) and report["target"]["name"] == target
    ]
    if not reports:
        return ""
    reports.sort(key=lambda report: -report["budget"]["minutes"])
    reports = [*{report["settings"]["train"]: report for report in reports}.values()]
    gains = sorted(reports, key=lambda report: report["gain"]["mean"])
    least, most = (
        f"{gain['mean'] - 1:+.0%} [{gain['low'] - 1:+.0%}, {gain['high'] - 1:+.0%}] ({one['name']})"
        for one in (gains[0], gains[-1])
        for gain in [one["gain"]]
    )
    minutes = {f"{report['budget']['minutes']:g}" for report in reports}
    prompts = {str(report["settings"]["prompts"]) for report in reports}
    return (
        f"`outrider fit`, {' or '.join(sorted(minutes))} minutes for each of {len(reports)} "
        f"made-up traffics, moves accepted length on {' or '.join(sorted(prompts))} later "
        f"questions by {least} to {most} ([fit](docs/fit.md))."
    )


def made(report: dict[str, Any]) -> str:
    """The machine and the commit of a report."""
    env, pace = report["environment"], report.get("plain_pass_ms")
    machine = env.get("gpu") or env["processor"]
    doubt = ""
    if isinstance(pace, dict) and not pace["steady"]:
        doubt = f"; unsteady: a plain pass took {pace['low']:.0f} to {pace['high']:.0f} ms"
    return f"{machine}, {env['threads']} threads, commit `{env['commit']}`{doubt}"


def known(*names: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those files of docs/results that are there."""
    for name in names:
        if (RESULTS / f"{name}.json").exists():
            yield name, read(name)


def results() -> str:
    """The tables of docs/results.md, from the JSON beside it."""
    headings = SHOWN | BY_CATEGORY
    blocks = []
    for name, report in known(*headings):
        where = f"{made(report)}, [JSON](results/{name}.json)"
        by = score_table.by_category if name in BY_CATEGORY else score_table.table
        blocks += [f"## {headings[name]}", "", *_shown(by(report), where), ""]
    blocks = [*together(), *by_part(), *blocks]
    blocks += level()
    for _, report in known("engines"):
        table = engine_case.table(report)
        heading = f"## Exported heads, {table.title}"
        blocks += [heading, "", "`make engines`", "", table.markdown(), ""]
    return "\n".join(blocks)


def together() -> list[str]:
    """The targets beside each other."""
    table = two_targets.table(dict(known(*sum(two_targets.TARGETS.values(), ()))))
    if not table.rows:
        return []
    return [
        "## Targets beside each other",
        "",
        table.markdown(),
        "",
        f"{'; '.join(table.notes)}.",
        "",
    ]


# reports with a chain of a trained head -> what its acceptance is called
CHAINS = {"avx2-t0": "SmolLM2's head", "qwen25-gpu-t0": "Qwen2.5-Coder's head"}


def by_part() -> list[str]:
    """What a cycle costs on every target, and what that says of larger ones."""
    reports = cycle_parts.read(RESULTS)
    if not reports:
        return []
    heads = {}
    for name, report in known(*CHAINS):
        chains = [row for row in report["drafters"] if row["label"] == "eagle3@chain"]
        for row in chains[:1]:
            places = row["acceptance_by_position"]
            heads[f"{CHAINS[name]}, unseen prompts"] = [one["unconditional"] for one in places]
    table, gains = cycle_parts.table(reports), cycle_parts.gains(reports, heads)
    made_by = "; ".join(f"{report['target']}: {made(report)}" for report in reports)
    return [
        "## Does the gain grow with the target?",
        "",
        f"{table.title} (`scripts/lab/cycle_parts.py`; {made_by})",
        "",
        table.markdown(),
        "",
        f"{gains.title.capitalize()}; {'; '.join(gains.notes)}:",
        "",
        gains.markdown(),
        "",
    ]


def _shown(table: Table, where: str) -> list[str]:
    """Title and cells of a table."""
    return [f"{table.title} ({where})", "", table.markdown()]


def level() -> list[str]:
    """The heads that learned from the same data with the same arithmetic, at every budget."""
    blocks = []
    for name, report in known(*(path.stem for path in sorted(RESULTS.glob("matched*.json")))):
        where = f"{made(report)}, [JSON](results/{name}.json)"
        blocks += [f"{matched.title(report)} ({where})", ""]
        blocks += [line for one in matched.tables(report) for line in (one.markdown(), "")]
    return ["## All heads on the same data and arithmetic", "", *blocks] if blocks else []


def tuned() -> str:
    """The table of docs/tuning.md."""
    return tune_table.collected(read("tune")).markdown()


# what shows an engine's file of docs/results, and the command that wrote it
ENGINE_RUNS: dict[str, tuple[Any, str]] = {
    "engines-llamacpp": (llamacpp_cases, "make engines ONLY=llamacpp"),
    "engines-llamacpp-block": (llamacpp_cases, "scripts/lab/engines.py llamacpp"),
    "engines-llamacpp-files": (llamacpp_cases, "scripts/lab/engines.py llamacpp"),
    "engines-llamacpp-sampled": (engine_sampled, "scripts/lab/engines.py sampled"),
    "engines": (engine_case, "make engines ONLY=vllm"),
    "engines-block": (engine_case, "scripts/lab/engines.py"),
    "engines-vllm-sampled": (engine_sampled, "scripts/lab/engines.py sampled server=vllm"),
}


def engines() -> str:
    """The tables of docs/engines.md, one for every engine that was run."""
    blocks = []
    for name, report in known(*ENGINE_RUNS):
        module, command = ENGINE_RUNS[name]
        table = module.table(report)
        blocks += [f"**{table.title}** (`{command}`; {made(report)})", "", table.markdown(), ""]
    return "\n".join(blocks)


def stepped() -> str:
    """What a cycle costs in llama.cpp by draft tokens and build, in docs/engines.md."""
    blocks = []
    for name, report in known("llamacpp-steps", "llamacpp-steps-one"):
        table, checks = steps.table(report), steps.checks(report)
        where = f"`scripts/lab/engines.py steps`; {made(report)}, [JSON](results/{name}.json)"
        blocks += [f"**{table.title}** ({where})", "", table.markdown(), ""]
        blocks += [f"{checks.title}:", "", checks.markdown(), ""]
    return "\n".join(blocks)


def fit_reports() -> list[dict[str, Any]]:
    """The fits of docs/results, each with the name of its traffic."""
    found = known(*(path.stem for path in sorted(RESULTS.glob("fit-*.json"))))
    return [{**report, "name": name.removeprefix("fit-")} for name, report in found]


def fits() -> str:
    """The table of docs/fit.md."""
    reports = fit_reports()
    return fit_table.page(reports) if reports else ""


def forgotten() -> str:
    """The matrix of docs/fit.md: every fitted head on every traffic."""
    found = dict(known("domains")).get("domains")
    if found is None:
        return ""
    return f"{fit_table.matrix(found).markdown()}\n\n`{found['command']}` ({made(found)})"


def counted_as_vllm() -> str:
    """Our drafters as vLLM's own script counts accepted length, in docs/others.md: a table for
    every target that was measured so."""
    tables = []
    for name, report in known(*COUNTED):
        table = vllm_protocol.table(report)
        where = f"{made(report)}, [JSON](results/{name}.json)"
        tables.append(f"{table.title} ({where})\n\n{table.markdown()}")
    return "\n\n".join(tables) or "Not measured yet."


def more_passes() -> str:
    """More conversations or more passes, in docs/data.md."""
    for name, report in known("data-scaling"):
        return reused.text(report, f"{made(report)}, [JSON](results/{name}.json)")
    return "Not measured yet."


def raced() -> str:
    """The trainers beside each other."""
    if not (RESULTS / "trainer-race.json").exists():
        return "Not measured yet."
    parts = [trainers.text(read("trainer-race"))]
    for name, report in known("train-pair"):
        table = trainers.pair_table(report)
        where = f"`{report['command']}`; {made(report)}, [JSON](results/{name}.json)"
        parts += ["", f"### {table.title}", "", where, "", table.markdown()]
    return "\n".join(parts)


def foretold() -> str:
    """A frozen forecast and what came, in docs/fit.md."""
    name = "forecast-nine-truth"
    report = read(name)
    table = forecast_table.check(report)
    return (
        f"{table.markdown()}\n\n{table.notes[0]}, on {made(report)} ([JSON](results/{name}.json))"
    )


PAGES = {
    README: front,
    TABLES: results,
    TUNING: tuned,
    ENGINES: engines,
    STEPS: stepped,
    FIT: fits,
    FORGOTTEN: forgotten,
    FORETOLD: foretold,
    SERVING: lambda: serves.table(RESULTS).markdown(),
    VERSIONS: serves.versions,
    SPEEDS: lambda: serves.speeds(RESULTS),
    PATH: lambda: rehearsed.table(RESULTS),
    PROTOCOL: counted_as_vllm,
    RACE: raced,
    GPU: lambda: gpu.text(RESULTS),
    REUSED: more_passes,
}


def main() -> int:
    """Refresh docs/results from the reports that are there, then the pages."""
    budget = files.ROOT / "runs" / "demo" / "budget"
    full = budget.exists() and budget.read_text().strip() == "full"
    for name, folder in COPIED.items():
        source = files.ROOT / "reports" / folder / "report.json"
        if source.exists() and (full or not name.startswith("demo")):
            files.write_json(RESULTS / f"{name}.json", slim(json.loads(source.read_text())))
    domains = files.ROOT / "reports" / "domains" / "report.json"
    if domains.exists():
        files.write_json(RESULTS / "domains.json", fit_table.forgotten(domains))
    for name, folder in COUNTED.items():
        source = files.ROOT / "reports" / folder / "report.json"
        if source.exists():
            report = json.loads(source.read_text())
            report["target"].pop("path", None)
            files.write_json(RESULTS / f"{name}.json", report)
    spent = files.ROOT / "reports" / "demo" / "spent.json"
    if full and spent.exists():
        files.write_json(RESULTS / "demo-spent.json", json.loads(spent.read_text()))
    for block, body in PAGES.items():
        block.write(body())
    names = dict.fromkeys(block.page.name for block in PAGES)
    print(f"written: {', '.join(names)}, docs/results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
