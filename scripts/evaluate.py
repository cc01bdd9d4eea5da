"""Score drafters side by side on prompts: one table, one report.

    outrider evaluate target=smollm2 \\
        'drafters=[none,ngram,runs/eagle3@chain,runs/eagle3@tree]' prompts=FILE \\
        temperature=0 max_new_tokens=128 batch_size=1 seed=0 \\
        out=reports/eagle3

Writes OUT/report.json, OUT/report.html (one file with its plots), OUT/outputs.jsonl and
OUT/figures/*.png, and prints the table. Among the drafters may stand outside references, which
take turns with ours: hf_generate, hf_assisted@DIR (`assistant_model=` with the same draft and K)
and NAME@http://HOST:PORT, a running server that takes token ids (vLLM, SGLang, llama.cpp,
scripts/serve.py). `temperatures=[0,1]` measures both in one report; other settings
are runs of their own (`--multirun batch_size=1,4 'out=reports/b${batch_size}'`). suite=NAME
asks a published set in place of prompts (mtbench, gsm8k, humaneval, math500, specbench,
speedbench, livecodebench, alpaca); suite.path=FILE or FOLDER takes a copy on disk.

An evaluation that is stopped (Ctrl-C, SIGTERM, kill -9) goes on by the same command: prompts
that all drafters have answered are kept in OUT/unfinished.jsonl until the report is written. A
report of another evaluation in OUT is replaced with overwrite=true alone.

Exit codes: 0; 3 when a prompt could not be asked or a server failed on the way: it is named
and left out, the others are scored; 1 when a trained head failed the parity gate (decoding
against the training pass, and after save and reload); 2 a mistake to mend, of which a name
in `drafters` that cannot be loaded is one; 130 stopped by Ctrl-C, 75 by SIGTERM.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import resumable
from outrider.conf.schema import entry
from outrider.conf.typed import raise_all
from outrider.decode.models import facts
from outrider.decode.models.load import load_target
from outrider.decode.models.memory import MemoryPlan
from outrider.decode.target import Target
from outrider.heads.drafters import refuse_other
from outrider.heads.parity import Parity
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.names import wrong_drafter
from outrider.scripts.common.prompts import Prompt, load_prompts, thinned
from outrider.scripts.data.suites import load_suite
from outrider.scripts.reports import score_table
from outrider.scripts.reports.wandb_log import to_wandb
from outrider.scripts.scoring.config import EvaluateConfig
from outrider.scripts.scoring.interleaved import ContestSettings, System, fitting, run_contest
from outrider.scripts.scoring.parity import gates
from outrider.scripts.scoring.same_tokens import lossless
from outrider.scripts.scoring.score import Scores, output_lines
from outrider.scripts.scoring.served import dead
from outrider.scripts.scoring.systems import systems_of

SKIPPED, DISAGREES = 3, 1
GATE_TOKENS = 64
PLANNED_NODES = 64  # of a draft tree, when memory is estimated
MEASURED = ("decode", "heads", "scripts/scoring")  # code that answers and times depend on


@entry("evaluate", EvaluateConfig)
@resumable()
def main(cfg: EvaluateConfig) -> int:
    """Load, measure, score, write. Exit code 3 when something was skipped, 1 when a head
    failed the parity gate.
    """
    raise_all([f"drafters: {line}" for name in cfg.drafters if (line := wrong_drafter(name))])
    raise_all(dead(cfg.drafters))  # before a target is loaded for nothing
    out = Path(cfg.out)
    with files.sole_writer(out):
        files.unclaimed(out / "report.json", files.asked(cfg), cfg.overwrite)
        return scored(cfg, out)


def scored(cfg: EvaluateConfig, out: Path) -> int:
    """Measure every temperature, write all to `out`, show it. Returns the exit code. The same call
    goes on where one was stopped."""
    skipped: list[dict[str, str]] = []
    prompts, source = requested(cfg, skipped)
    out.mkdir(parents=True, exist_ok=True)
    refuse_other(cfg.drafters, cfg.target)
    target = load_target(cfg.target, cfg.dtype, cfg.device, planned(cfg, prompts))
    prompts = fitting(prompts, target, cfg.max_new_tokens, skipped)
    for line in facts.notes(target, cfg.sampling()):
        print(line, file=sys.stderr)
    systems = systems_of(list(dict.fromkeys(cfg.drafters)), target)
    memo = kept_in(out / "unfinished.jsonl", cfg, target, prompts, systems)
    tokens = min(cfg.max_new_tokens, GATE_TOKENS)
    parity = gates(systems, target, prompts, cfg.parity, tokens, cfg.quiet)
    origin = {"format": 1, **files.origin(str(target.device)), "asked": files.asked(cfg)}
    identity = asdict(target.identity) if target.identity else {"name": "unknown"}
    reports, lines = [], list[dict[str, Any]]()
    for temperature in cfg.temperatures or [cfg.temperature]:
        at = replace(cfg, temperature=temperature)
        sampling = at.sampling()
        how = ContestSettings(sampling, cfg.max_new_tokens, cfg.batch_size, cfg.seed)
        name = f"t{temperature:g}"
        measured = run_contest(target, prompts, systems, how, cfg.quiet, memo, name)
        same = lossless(measured, systems, target) if temperature == 0 else {}
        settings = files.asked(at, ("prompts", "suite"))
        report = {
            **origin,
            "target": identity | {"generation_config": facts.ignored(target.model, sampling)},
            "settings": settings | {"num_prompts": len(prompts), "prompts": source},
            **Scores(measured, systems).report(same),
            "parity": {name: gate.json() for name, gate in parity.items()},
        }
        report["skipped"] = [*skipped, *report["skipped"]]
        reports.append(report)
        lines += [{"temperature": temperature, **line} for line in output_lines(measured)]
    report = {**reports[0], "others": reports[1:]}
    write(report, lines, out)
    memo.clear()
    show(reports, parity)
    print(f"report: {out / 'report.html'}")
    if cfg.wandb != "off":
        to_wandb(report, out, cfg.wandb, cfg.wandb_project)
    if not all(gate.passed for gate in parity.values()):
        return DISAGREES
    return SKIPPED if any(one["skipped"] for one in reports) else 0


def requested(
    cfg: EvaluateConfig, bad: list[dict[str, str]]
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the prompts to ask and what the report says of their source. bad: takes {name, reason}
    of rows that cannot be asked."""
    if cfg.suite is None:
        source = {"path": cfg.prompts, "sha256": files.sha256(Path(cfg.prompts))}
        return thinned(load_prompts(Path(cfg.prompts), bad), cfg.num_prompts), source
    every, suite = load_suite(cfg.suite)
    if suite["loaded"] != suite["expected"]:
        print(f"warning: {len(every)} prompts of {suite['expected']} published", file=sys.stderr)
    kept = thinned(every, cfg.num_prompts or cfg.suite.take or None)
    return kept, {"path": f"suite={cfg.suite.name}", "sha256": suite["sha256"], "suite": suite}


def planned(cfg: EvaluateConfig, prompts: list[Prompt]) -> MemoryPlan:
    """Return what memory must hold: a token is two letters or more; later turns hold the
    earlier ones and their answers."""
    longest = max(sum(len(t) // 2 + cfg.max_new_tokens for t in p.turns) for p in prompts)
    return MemoryPlan(cfg.batch_size, longest, PLANNED_NODES)


def kept_in(
    place: Path, cfg: EvaluateConfig, target: Target, prompts: list[Prompt], systems: list[System]
) -> Memo:
    """Return what was measured of this very evaluation before it was stopped. Says on
    stderr that it goes on."""
    environment = files.environment(str(target.device))
    del environment["commit"]  # the code itself is compared
    key = {
        **files.asked(cfg, ("device", "parity", "suite", "num_prompts")),
        **environment,
        "code": files.code_sha256(MEASURED),
        "device": str(target.device),
        "target": [asdict(cfg.target), target.identity and asdict(target.identity)],
        "prompts": [asdict(prompt) for prompt in prompts],
        "drafters": [[system.name, system.files] for system in systems],
    }
    memo = Memo(place, key)
    if memo.resumed:
        print(f"going on with what is measured in {place}", file=sys.stderr)
    return memo


def write(report: dict[str, Any], lines: list[dict[str, Any]], out: Path) -> None:
    """All files of a report; report.json comes last, so that its presence means that the
    others are there.
    """
    # slow to import, and a bad command line should fail fast
    from outrider.scripts.reports import page, plots

    files.write_jsonl(out / "outputs.jsonl", lines)
    pictures = plots.drawn(report)
    for name, picture in pictures.items():
        files.write_bytes(out / "figures" / f"{name}.png", picture)
    files.write_text(out / "report.html", page.page(report, pictures))
    files.write_json(out / "report.json", report)


def show(reports: list[dict[str, Any]], parity: dict[str, Parity]) -> None:
    """Print the tables, what their words mean, and what the parity gate found: in a line where it
    is as it should be."""
    for report in reports:
        score_table.table(report).show()
    for word, meaning in score_table.WORDS.items():
        print(f"{word}: {meaning}.")
    for name, gate in parity.items():
        lines = gate.lines()
        if gate.passed and "teacher_forced" in gate.lengths:
            found = gate.lengths["free_running"].mean
            lines = [
                f"training pass, decoding and reloaded head agree (accepted length {found:.2f})"
            ]
        print(f"parity of {name}: " + "\n".join(lines))


if __name__ == "__main__":
    main()
