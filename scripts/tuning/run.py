"""One run of the tuner: record, replay, time, confirm, and the report of it.
scripts/tune.py is its command line.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.conf.errors import UserError
from outrider.conf.typed import from_json
from outrider.decode.engine import Request, generate
from outrider.decode.target import Target
from outrider.heads import hub
from outrider.heads.names import NONE
from outrider.heads.tuned import DraftSettings, Tuned, card_sha256
from outrider.scripts.common import files
from outrider.scripts.common.progress import Steps, by_name, columns, named
from outrider.scripts.common.prompts import Prompt, load_prompts, question_ids, thinned
from outrider.scripts.scoring.interleaved import ContestSettings, run_contest
from outrider.scripts.scoring.score import Scores, plain
from outrider.scripts.scoring.systems import drafting, systems_of
from outrider.scripts.tuning.config import TuneConfig
from outrider.scripts.tuning.search import Candidate, DrafterFamily, worth_timing

TIMED_TOKENS = 32  # of each row, while a candidate is timed
MEASURED = ("tokens_per_second", "speedup", "doubts", "accepted_length", "break_even")


def run(cfg: TuneConfig, target: Target, console: Console) -> dict[str, Any]:
    """Return the report of a search. Raises UserError where nothing can be searched."""
    sampling = cfg.sampling()
    family = DrafterFamily.of(cfg.drafter, target, sampling, cfg.max_depth, cfg.max_nodes)
    prompts = thinned(load_prompts(cfg.prompts), cfg.num_prompts)
    if len(prompts) < 2:
        raise UserError("prompts: the file holds a single prompt; give at least two")
    ids = [question_ids(target.tokenizer, p.turns[0]) for p in prompts]
    with Steps(*columns(20), console=console, quiet=cfg.quiet, transient=True) as progress:
        shown = by_name(progress)
        along = named(shown, "drafting along")
        found = family.candidates(family.record(ids, cfg.max_new_tokens, cfg.seed, along))
        timed, candidates = [], worth_timing(found)
        for number, one in enumerate(candidates, 1):
            timed.append(_timed(one, family, ids, cfg))
            shown(number, len(candidates), "timing")
    timed.sort(key=lambda row: -row["tokens_per_second"])
    settings = {str(one): one for one in confirmed(timed, cfg.confirm)}
    settings["default"] = family.default()
    scores = measured(settings, family, prompts, cfg)
    replayed = {row["name"]: row["accepted_length"] for row in timed}
    rows: list[dict[str, Any]] = []
    for system in scores.systems:
        name, row = system.name, scores.row(system)
        if name in settings:
            shape = {"settings": settings[name].to_json(), "kind": settings[name].shape}
            figures = {key: row[key] for key in MEASURED}
            rows.append(
                {"name": name, **shape, "replayed": replayed.get(name), "measured": figures}
            )
    # a speed in doubt is chosen only where all are
    believed = [row for row in rows if not row["measured"]["doubts"]]
    ordered = sorted(believed or rows, key=lambda row: row["measured"]["tokens_per_second"] or 0)
    chosen, speedup = ordered[-1], ordered[-1]["measured"]["speedup"]
    report = {
        **_made_with(cfg, family, len(prompts)),
        "replayed": len(found),
        "timed": timed,
        "rows": rows,
        "stalls": scores.stalls(),
        "chosen": {
            "name": chosen["name"],
            "settings": chosen["settings"],
            "speedup": speedup,
            "pays": bool(believed) and (speedup["mean"] or 0) > 1,
        },
        "per_shape": {row["kind"]: row["settings"] for row in ordered},
    }
    return plain(report)  # type: ignore[no-any-return]


def _timed(
    one: Candidate, family: DrafterFamily, ids: Sequence[list[int]], cfg: TuneConfig
) -> dict[str, Any]:
    """Return what a candidate costs, in the decode loop itself, and brings."""
    drafter, size = family.drafter(one.settings), cfg.batch_size
    prompts = list(itertools.islice(itertools.cycle(ids), max(size, 2)))
    for tokens in (3, min(TIMED_TOKENS, cfg.max_new_tokens)):  # the first run warms up
        requests = [Request(prompt, tokens, id=i) for i, prompt in enumerate(prompts)]
        how: dict[str, Any] = {"batch_size": size, "eos_ids": ()}
        timing = generate(family.target, drafter, requests, family.sampling, **how).timing
    spent = 1000 * statistics.median(timing.cycle_s or [0.0])  # no stall moves it
    return {
        "name": str(one.settings),
        "settings": one.settings.to_json(),
        "accepted_length": one.accepted_length,
        "cycle_ms": spent,
        "tokens_per_second": 1000 * size * one.accepted_length / spent,
    }


def measured(
    settings: dict[str, DraftSettings],
    family: DrafterFamily,
    prompts: Sequence[Prompt],
    cfg: TuneConfig,
) -> Scores:
    """Return what interleaved decoding of first turns gives, plain decoding among the rows."""
    target = family.target
    systems = systems_of([NONE], target)
    systems += [drafting(name, family.drafter(one), target) for name, one in settings.items()]
    plan = ContestSettings(family.sampling, cfg.max_new_tokens, cfg.batch_size, cfg.seed)
    first = [Prompt(p.id, p.category, p.turns[:1]) for p in prompts]
    found = run_contest(target, first, systems, plan, quiet=cfg.quiet)
    return Scores(found, systems)


def confirmed(timed: Sequence[dict[str, Any]], count: int) -> list[DraftSettings]:
    """Return the settings of the `count` fastest rows of `timed`, the fastest of every
    shape among them."""
    shapes = {row["settings"]["shape"]: row for row in reversed(timed)}
    first = sorted(shapes.values(), key=timed.index)
    rows = [*first, *(row for row in timed if row not in first)][: max(count, len(first))]
    return [from_json(row["settings"], DraftSettings)[0] for row in rows]


def _made_with(cfg: TuneConfig, family: DrafterFamily, prompts: int) -> dict[str, Any]:
    """Return what the report rests on: command, drafter, target, settings, machine."""
    target, head = family.target, family.head
    left_out = ("quiet", "overwrite")
    return {
        "format": 2,
        **files.origin(str(target.device)),
        "drafter": cfg.drafter,
        **({"hub": known} if (known := hub.commits(cfg.drafter)) else {}),
        "kind": head.kind if head else "ngram",
        "target": asdict(target.identity) if target.identity else {"name": "unknown"},
        "settings": {
            **{k: v for k, v in asdict(cfg).items() if k not in left_out},
            "num_prompts": prompts,
            "prompts_sha256": files.sha256(Path(cfg.prompts)),
        },
    }


def tuned_from(report: dict[str, Any], folder: Path) -> Tuned:
    """Return what is written beside the head."""
    chosen, shapes, s = report["chosen"], report["per_shape"], report["settings"]
    keys = ("temperature", "dtype", "batch_size", "max_new_tokens", "num_prompts")
    evidence = {
        "created": report["created"],
        "command": report["command"],
        "speedup": chosen["speedup"],
        "measured_for": {key: s[key] for key in keys},
        "target": report["target"]["name"],
        "environment": report["environment"],
    }
    of = {kind: from_json(shape, DraftSettings)[0] for kind, shape in shapes.items()}
    best = from_json(chosen["settings"], DraftSettings)[0]
    return Tuned(card_sha256(folder), best, of.get("chain"), of.get("tree"), evidence=evidence)
