"""One run of the tuner: every setting by itself, the fastest few interleaved with plain decoding,
and the report of it. scripts/tune.py is its command line.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.conf.errors import UserError
from outrider.conf.typed import from_json
from outrider.decode import stats
from outrider.decode.engine import Request, generate
from outrider.decode.target import Target
from outrider.heads import hub
from outrider.heads.names import NONE
from outrider.heads.tuned import DraftSettings, Tuned, card_sha256
from outrider.scripts.common import files
from outrider.scripts.common.progress import Steps
from outrider.scripts.common.prompts import Prompt, load_prompts, question_ids, thinned
from outrider.scripts.scoring.interleaved import ContestSettings, run_contest
from outrider.scripts.scoring.score import Scores, plain
from outrider.scripts.scoring.systems import drafting, systems_of
from outrider.scripts.tuning.config import TuneConfig
from outrider.scripts.tuning.search import Tunable

TRIED_TOKENS, TRIED_PROMPTS = 32, 8  # of a setting by itself
MEASURED = ("tokens_per_second", "speedup", "doubts", "accepted_length", "break_even")
EVIDENCE = ("temperature", "dtype", "batch_size", "max_new_tokens", "num_prompts")


def run(cfg: TuneConfig, target: Target, console: Console) -> dict[str, Any]:
    """Return the report of a search. Raises UserError where nothing can be searched."""
    tunable = Tunable.of(cfg.drafter, target)
    prompts = thinned(load_prompts(cfg.prompts), cfg.num_prompts)
    if len(prompts) < 2:
        raise UserError("prompts: the file holds a single prompt; give at least two")
    ids = [question_ids(target.tokenizer, p.turns[0]) for p in prompts[:TRIED_PROMPTS]]
    table, tried = tunable.settings(cfg.max_depth, cfg.max_nodes), []
    with Steps(console=console, quiet=cfg.quiet, transient=True) as progress:
        task = progress.add_task("trying settings", total=len(table))
        for one in table:
            tried.append(_alone(one, tunable, ids, cfg))
            progress.advance(task)
    tried.sort(key=lambda row: -row["tokens_per_second"])
    default = tunable.default()
    settings = {str(one): one for one in (*confirmed(tried, cfg.confirm), default)}
    scores = measured(settings, tunable, prompts, cfg)
    rows: list[dict[str, Any]] = []
    for system in scores.systems:
        name, row = system.name, scores.row(system)
        if name in settings:
            shape = {"settings": settings[name].to_json(), "kind": settings[name].shape}
            about = {"name": name, "default": name == str(default), **shape}
            rows.append({**about, "measured": {key: row[key] for key in MEASURED}})
    # a speed in doubt is chosen only where all are
    believed = [row for row in rows if not row["measured"]["doubts"]]
    ordered = sorted(believed or rows, key=lambda row: row["measured"]["tokens_per_second"] or 0)
    chosen, speedup = ordered[-1], ordered[-1]["measured"]["speedup"]
    report = {
        **_made_with(cfg, tunable, len(prompts)),
        "tried": tried,
        "rows": rows,
        "stalls": scores.stalls(),
        "chosen": {
            "name": chosen["name"],
            "settings": chosen["settings"],
            "speedup": speedup,
            "pays": bool(believed) and (speedup["low"] or 0) > 1,
        },
        "per_shape": {row["kind"]: row["settings"] for row in ordered},
    }
    return plain(report)  # type: ignore[no-any-return]


def _alone(
    one: DraftSettings, tunable: Tunable, ids: Sequence[list[int]], cfg: TuneConfig
) -> dict[str, Any]:
    """Return how fast a setting decodes a few prompts: the accepted length over the median time
    of a cycle, which no stall moves."""
    drafter, how = tunable.drafter(one), cfg.sampling()
    for tokens in (3, min(TRIED_TOKENS, cfg.max_new_tokens)):  # the first run warms up
        requests = [Request(prompt, tokens, id=i) for i, prompt in enumerate(ids)]
        more: dict[str, Any] = {"batch_size": cfg.batch_size, "eos_ids": (), "seed": cfg.seed}
        found = generate(tunable.target, drafter, requests, how, **more)
    cycles = [stats.split(g).clean for g in found.generations]
    length = stats.accepted_length(cycles).mean if any(cycles) else 1.0
    spent = statistics.median(found.timing.cycle_s)
    return {
        "name": str(one),
        "settings": one.to_json(),
        "accepted_length": length,
        "cycle_ms": 1000 * spent,
        "tokens_per_second": min(cfg.batch_size, len(ids)) * length / spent,
    }


def measured(
    settings: dict[str, DraftSettings], tunable: Tunable, prompts: Sequence[Prompt], cfg: TuneConfig
) -> Scores:
    """Return what interleaved decoding of first turns gives, plain decoding among the rows."""
    target = tunable.target
    systems = systems_of([NONE], target)
    systems += [drafting(name, tunable.drafter(one), target) for name, one in settings.items()]
    how = ContestSettings(cfg.sampling(), cfg.max_new_tokens, cfg.batch_size, cfg.seed)
    first = [Prompt(p.id, p.category, p.turns[:1]) for p in prompts]
    return Scores(run_contest(target, first, systems, how, quiet=cfg.quiet), systems)


def confirmed(tried: Sequence[dict[str, Any]], count: int) -> list[DraftSettings]:
    """Return the settings of the `count` fastest rows of `tried`, the fastest of every
    shape among them."""
    shapes = {row["settings"]["shape"]: row for row in reversed(tried)}
    first = sorted(shapes.values(), key=tried.index)
    rows = [*first, *(row for row in tried if row not in first)][: max(count, len(first))]
    return [from_json(row["settings"], DraftSettings)[0] for row in rows]


def _made_with(cfg: TuneConfig, tunable: Tunable, prompts: int) -> dict[str, Any]:
    """Return what the report rests on: command, drafter, target, settings, machine."""
    target, head = tunable.target, tunable.head
    sha256 = files.sha256(Path(cfg.prompts))
    return {
        "format": 3,
        **files.origin(str(target.device)),
        "drafter": cfg.drafter,
        **({"hub": known} if (known := hub.commits(cfg.drafter)) else {}),
        "kind": head.kind if head else "ngram",
        "target": asdict(target.identity) if target.identity else {"name": "unknown"},
        "settings": {**files.asked(cfg), "num_prompts": prompts, "prompts_sha256": sha256},
    }


def tuned_from(report: dict[str, Any], folder: Path) -> Tuned:
    """Return what is written beside the head."""
    chosen, settings = report["chosen"], report["settings"]
    evidence = {key: report[key] for key in ("created", "command", "environment")}
    evidence |= {"speedup": chosen["speedup"], "target": report["target"]["name"]}
    evidence["measured_for"] = {key: settings[key] for key in EVIDENCE}
    of = {kind: from_json(shape, DraftSettings)[0] for kind, shape in report["per_shape"].items()}
    best = from_json(chosen["settings"], DraftSettings)[0]
    return Tuned(card_sha256(folder), best, of.get("chain"), of.get("tree"), evidence=evidence)
