"""Score drafters side by side on prompts: one table, one report.

    python scripts/evaluate.py target=smollm2 \\
        'drafters=[none,ngram,runs/eagle3@chain,runs/eagle3@tree]' prompts=FILE \\
        temperature=0 max_new_tokens=128 batch_size=1 seed=0 \\
        out=reports/eagle3

Writes OUT/report.json, OUT/report.html (one file with its plots), OUT/outputs.jsonl and
OUT/figures/*.png, and prints the table and the ranking. Among the drafters may stand outside
references, which take turns with ours: hf_generate, hf_assisted@DIR (`assistant_model=` with
the same draft and K, and a second row with transformers' defaults), hf_prompt_lookup (two
rows alike) and NAME@http://HOST:PORT, a running server that takes token ids (vLLM,
llama.cpp, scripts/serve.py). `temperatures=[0,1]` and `batch_sizes=[1,4]` measure several
settings at once. suite=NAME asks a published set in place of prompts (mtbench, gsm8k,
humaneval, math500, specbench, speedbench, livecodebench, alpaca), suite=all each of them
into OUT/NAME, with one table in OUT/suites.json; suite.path=FILE or FOLDER takes a copy on
disk.

An evaluation that is stopped (Ctrl-C, SIGTERM, kill -9) goes on by the same command: prompts
that all drafters have answered are kept in OUT/unfinished until the report is written. A report of
another evaluation in OUT is replaced with overwrite=true alone.

Exit codes: 0; 3 when a prompt could not be asked or a server failed on the way: it is named
and left out, the others are scored; 1 when a trained head failed the parity gate (decoding
against the training pass, and after save and reload); 2 a mistake to mend, of which a name
in `drafters` that cannot be loaded is one; 130 stopped by Ctrl-C, 75 by SIGTERM.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])


from outrider.conf.errors import UserError, resumable
from outrider.conf.schema import entry
from outrider.conf.typed import raise_all
from outrider.decode.fits import unfit
from outrider.decode.models import facts, packed
from outrider.decode.models.load import load_target
from outrider.decode.models.memory import MemoryPlan
from outrider.decode.target import Target
from outrider.heads.small_lm.net import parameters
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.names import wrong_drafter
from outrider.scripts.common.prompts import Prompt, load_prompts, question_ids
from outrider.scripts.data.suites import SuiteConfig, in_one, load_suite, notes, suites
from outrider.scripts.reports import score_table
from outrider.scripts.reports.wandb_log import to_wandb
from outrider.scripts.scoring import contest
from outrider.scripts.scoring.batches import batches, stops_paying
from outrider.scripts.scoring.breakdown import again
from outrider.scripts.scoring.config import EvaluateConfig
from outrider.scripts.scoring.parity import gates
from outrider.scripts.scoring.ranking import ranking
from outrider.scripts.scoring.same_tokens import lossless
from outrider.scripts.scoring.score import Scores, output_lines
from outrider.scripts.scoring.served import dead
from outrider.scripts.scoring.systems import systems_of

SKIPPED, DISAGREES = 3, 1
GATE_TOKENS = 64
PLANNED_NODES = 64  # of a draft tree, when memory is estimated
# keys that change nothing in what is measured at a temperature and batch size, and those whose
# meaning is looked up: prompts, target and drafters are compared by what they are
ELSEWHERE = (
    "out",
    "target",
    "drafters",
    "prompts",
    "suite",
    "num_prompts",
    "categories",
    "temperature",
    "temperatures",
    "device",
    "batch_size",
    "batch_sizes",
    "parity",
    "breakdown",
    "wandb",
    "wandb_project",
    "quiet",
    "overwrite",
)
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
    with files.sole_folder(out):
        if cfg.suite is None:
            return evaluated(cfg, out)
        return by_suite(cfg, suites(cfg.suite), out)


def by_suite(cfg: EvaluateConfig, named: list[SuiteConfig], out: Path) -> int:
    """One suite into `out`, or several into a folder each, with a table of them. A suite that
    cannot be had is named and left out, unless it is the only one."""
    if len(named) == 1:
        return evaluated(replace(cfg, suite=named[0]), out)
    codes, kept, missing = [], [], []
    for suite in named:
        unclaimed(replace(cfg, suite=suite), out / suite.name)
    for suite in named:
        try:
            code, memo = scored(replace(cfg, suite=suite), out / suite.name)
        except UserError as error:
            missing.append(str(error))
            continue
        codes.append(code)
        kept.append(memo)
    reports = [out / suite.name / "report.json" for suite in named]
    found = in_one([path for path in reports if path.is_file()], missing)
    if not found["suites"]:
        raise UserError(f"{missing[0]} (and no other suite could be had)")
    files.write_json(out / "suites.json", found)
    for memo in kept:
        memo.clear()
    score_table.by_suite(found).show()
    print(f"table: {out / 'suites.json'}")
    return DISAGREES if DISAGREES in codes else max([SKIPPED if missing else 0, *codes])


def requested_of(
    cfg: EvaluateConfig, bad: list[dict[str, str]]
) -> tuple[list[Prompt], dict[str, Any]]:
    """(prompts to ask, what the report says of their source)."""
    if cfg.suite is None:
        prompts = chosen(load_prompts(Path(cfg.prompts), bad), cfg)
        return prompts, {"path": cfg.prompts, "sha256": files.sha256(Path(cfg.prompts))}
    loaded = load_suite(cfg.suite)
    for line in notes(loaded):
        print(f"warning: {line}", file=sys.stderr)
    take = cfg.num_prompts or cfg.suite.take or None
    path = f"suite={cfg.suite.name}"
    prompts = chosen(loaded.prompts, replace(cfg, num_prompts=take, prompts=path))
    return prompts, {"path": path, "sha256": loaded.sha256, "suite": loaded.described}


def evaluated(cfg: EvaluateConfig, out: Path) -> int:
    """The run behind `main`: its exit code. The same call goes on where one was stopped."""
    unclaimed(cfg, out)
    code, memo = scored(cfg, out)
    memo.clear()
    return code


def unclaimed(cfg: EvaluateConfig, out: Path) -> None:
    """Raises UserError where the report of another evaluation lies in `out`."""
    files.unclaimed(out / "report.json", files.asked(cfg), cfg.overwrite)


def scored(cfg: EvaluateConfig, out: Path) -> tuple[int, Memo]:
    """(exit code, what was measured): all is written to `out`, and the parts may go."""
    bad: list[dict[str, str]] = []
    prompts, source = requested_of(cfg, bad)
    out.mkdir(parents=True, exist_ok=True)
    # A token is two letters or more; later turns hold the earlier ones and their answers.
    longest = max(sum(len(t) // 2 + cfg.max_new_tokens for t in p.turns) for p in prompts)
    plan = MemoryPlan(max(cfg.batch_sizes or [cfg.batch_size]), longest, PLANNED_NODES)
    target = load_target(cfg.target, cfg.dtype, cfg.device, plan)
    prompts = fitting(prompts, target, cfg.max_new_tokens, bad)
    for line in facts.notes(target, cfg.sampling()):
        print(line, file=sys.stderr)
    systems = entered(cfg, target)
    memo = kept_in(out / "unfinished", cfg, target, prompts, systems)
    parity = gates(
        systems, target, prompts, cfg.parity, min(cfg.max_new_tokens, GATE_TOKENS), cfg.quiet
    )
    shared = {
        "asked": files.asked(cfg),
        "parity": {name: found.json() for name, found in parity.items()},
    }
    settings = points(cfg)
    reports = []
    for at in settings:
        report, lines = measure(at, target, prompts, systems, bad, memo)
        report["settings"]["prompts"] = source
        reports.append(report | shared)
        if len(reports) == 1:
            first = lines
        else:
            write(reports[-1], lines, out / folder(at.temperature, at.batch_size))
        if len(reports) in (1, len(settings)):  # the settings between may take hours
            write(joined(reports), first, out)
        score_table.table(reports[-1]).show()
    for report in reports:
        if len(report["ranking"]) > 1:
            score_table.ranking(report).show()
        print("\n".join(shares(report)), end="\n" if shares(report) else "")
    for name, found in parity.items():
        # What passed is said in a line; what failed, or could not be compared, at length.
        compared = found.passed and "teacher_forced" in found.lengths
        said = [found.line()] if compared else found.lines()
        print("\n".join([f"{name}: {said[0]}", *said[1:]]))
    print(f"report: {out / 'report.html'}")
    if cfg.wandb != "off":
        to_wandb(joined(reports), out, "evaluate", cfg.wandb, cfg.wandb_project)
    failed = [name for name, found in parity.items() if not found.passed]
    return DISAGREES if failed else SKIPPED if any(r["skipped"] for r in reports) else 0, memo


def points(cfg: EvaluateConfig) -> list[EvaluateConfig]:
    """Every temperature with every batch size."""
    both = (cfg.temperatures or [cfg.temperature], cfg.batch_sizes or [cfg.batch_size])
    return [replace(cfg, temperature=t, batch_size=b) for t, b in itertools.product(*both)]


def joined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The first report with what it says of the other settings."""
    by_batch = batches(reports)
    return {
        **reports[0],
        "others": [other(report) for report in reports[1:]],
        "batches": by_batch,
        "batch_limits": {label: stops_paying(found) for label, found in by_batch.items()},
    }


def entered(cfg: EvaluateConfig, target: Target) -> list[contest.System]:
    """The rows to measure. Raises UserError for a name that cannot be loaded."""
    systems, skipped = systems_of(list(dict.fromkeys(cfg.drafters)), target)
    raise_all([one["reason"] for one in skipped])
    return systems


def kept_in(
    place: Path,
    cfg: EvaluateConfig,
    target: Target,
    prompts: list[Prompt],
    systems: list[contest.System],
) -> Memo:
    """What was measured of this very evaluation before it was stopped. Says on stderr that it
    goes on."""
    described = files.environment(str(target.device))
    del described["commit"]  # the code itself is compared
    key = {
        **{k: v for k, v in asdict(cfg).items() if k not in ELSEWHERE},
        **described,
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


def measure(
    cfg: EvaluateConfig,
    target: Target,
    prompts: list[Any],
    systems: list[contest.System],
    skipped: list[dict[str, str]],
    memo: Memo,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(report, lines of outputs.jsonl) at the temperature and batch size of `cfg`. memo: what
    was measured before the run was stopped, and is not measured again."""
    sampling = cfg.sampling()
    settings = contest.ContestSettings(sampling, cfg.max_new_tokens, cfg.batch_size, cfg.seed)
    name = folder(cfg.temperature, cfg.batch_size)
    measured = contest.run_contest(target, prompts, systems, settings, cfg.quiet, memo, name)
    lost = {one["name"] for one in measured.lost}
    systems = [system for system in systems if system.name not in lost]
    scores = Scores(measured, systems)
    same = lossless(measured, systems, target) if cfg.temperature == 0 else {}
    identity = target.identity
    report: dict[str, Any] = {
        "format": 1,
        **files.origin(str(target.device)),
        "target": {
            **(asdict(identity) if identity else {"name": "unknown"}),
            "generation_config": facts.ignored(target.model, sampling),
            "parameters": parameters(target.model),
            "packed": target.packs_weights and packed.takes(target.dtype, target.device),
        },
        "settings": {
            **{
                k: v
                for k, v in asdict(cfg).items()
                if k not in ("target", "prompts", "suite", "quiet", "out", "overwrite")
            },
            "target": asdict(cfg.target),
            "num_prompts": len(prompts),
        },
        "drafters": [
            {**scores.row(system), "lossless": same.get(system.name)} for system in systems
        ],
        "pairs": scores.pairs(),
        "stalls": scores.stalls(),
        "skipped": [*skipped, *measured.lost],
        "skipped_turns": measured.skipped_turns,
        "sittings": measured.sittings,
    }
    if target.device.type != "cpu":
        again(report["drafters"], target, prompts[: cfg.breakdown], systems, settings)
    report["ranking"] = ranking(report)
    return report, output_lines(measured)


def shares(report: dict[str, Any]) -> list[str]:
    """A line per union: who proposed its accepted draft tokens."""
    return [
        f"{row['label']}: accepted draft tokens "
        + ", ".join(
            f"{part['accepted']} by {part['name']} ({part['alone']} by it alone)"
            for part in row["by_drafter"]
        )
        for row in report["drafters"]
        if "by_drafter" in row
    ]


def fitting(
    prompts: list[Prompt], target: Target, new: int, bad: list[dict[str, str]]
) -> list[Prompt]:
    """The prompts whose first turn fits the target's context. new: tokens of an answer.

    bad: takes {name, reason} of the others. Raises UserError when none fits.
    """
    kept = []
    for prompt in prompts:
        why = unfit(target, len(question_ids(target.tokenizer, prompt.turns[0])), new)
        if not why:
            kept.append(prompt)
            continue
        reason = f"prompts: {prompt.id} {why}; shorten or remove it"
        bad.append({"name": prompt.id, "reason": reason})
    if not kept:
        raise UserError(f"{bad[-1]['reason']} (and no other prompt fits)")
    return kept


def folder(temperature: float, batch_size: int) -> str:
    """Where the report of another setting stands below OUT."""
    return f"t{temperature:g}-b{batch_size}"


# of a drafter, what the first report keeps of another setting
BRIEFLY = (
    *("name", "label", "kind", "shape", "accepted_length", "acceptance_by_position"),
    *("tokens_per_second", "speedup", "doubts", "end_to_end", "draft_ms", "verify_ms"),
    *("break_even", "lossless"),
)


def other(report: dict[str, Any]) -> dict[str, Any]:
    """What the first report keeps of another setting."""
    settings = report["settings"]
    return {
        "folder": folder(settings["temperature"], settings["batch_size"]),
        **{key: report[key] for key in ("settings", "target", "stalls", "ranking")},
        "drafters": [{key: row[key] for key in BRIEFLY} for row in report["drafters"]],
    }


def chosen(prompts: list[Any], cfg: EvaluateConfig) -> list[Any]:
    """The prompts of the wanted categories, thinned to num_prompts by taking turns among the
    categories.
    """
    known = sorted({p.category for p in prompts})
    unknown = [c for c in cfg.categories if c not in known]
    if unknown:
        raise UserError(
            f"categories: {cfg.prompts} has no {', '.join(unknown)}; choose among "
            f"{', '.join(known)}"
        )
    wanted = [p for p in prompts if not cfg.categories or p.category in cfg.categories]
    if cfg.num_prompts is None or cfg.num_prompts >= len(wanted):
        return wanted
    place: dict[str, int] = {}
    ranked = []
    for i, p in enumerate(wanted):
        place[p.category] = place.get(p.category, -1) + 1
        ranked.append((place[p.category], i))
    return [wanted[i] for i in sorted(i for _, i in sorted(ranked)[: cfg.num_prompts])]


def write(report: dict[str, Any], lines: list[dict[str, Any]], out: Path) -> None:
    """All files of a report; report.json comes last, so that its presence means that the
    others are there.
    """
    # slow to import, and a bad command line should fail fast
    from outrider.scripts.reports import page, plots

    files.write_jsonl(out / "outputs.jsonl", lines)
    for name in plots.PANELS:
        files.write_bytes(out / "figures" / f"{name}.png", plots.png(plots.panel(name, report)))
    files.write_text(out / "report.html", page.page(report))
    files.write_json(out / "report.json", report)


if __name__ == "__main__":
    main()
