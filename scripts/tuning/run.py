"""One run of the tuner: record, replay, time, confirm, and the report of it.
scripts/tune.py is its command line.
"""

from __future__ import annotations

import itertools
import json
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
from outrider.scripts.common.progress import OnProgress, Steps, by_name, columns, named
from outrider.scripts.common.prompts import Prompt, load_prompts, question_ids, thinned
from outrider.scripts.scoring import contest
from outrider.scripts.scoring.score import Scores, plain
from outrider.scripts.scoring.systems import drafting, systems_of
from outrider.scripts.tuning import search
from outrider.scripts.tuning.config import TuneConfig
from outrider.scripts.tuning.family import Bounds, DrafterFamily
from outrider.scripts.tuning.search import Candidate

TIMED_TOKENS = 32  # of each row, while a candidate is timed
MEASURED = (
    *("tokens_per_second", "speedup", "doubts", "accepted_length", "break_even", "ms_per_token"),
)


class Tuning:
    """What one run works with."""

    def __init__(self, cfg: TuneConfig, target: Target) -> None:
        self.cfg, self.target = cfg, target
        self.sampling = cfg.sampling()
        bounds = Bounds(cfg.max_depth, cfg.max_nodes, cfg.max_width)
        self.family = DrafterFamily.of(cfg.drafter, target, self.sampling, bounds)
        self.prompts = thinned(load_prompts(cfg.prompts), cfg.num_prompts)
        if len(self.prompts) < 2:
            raise UserError("prompts: the file holds a single prompt; give at least two")
        self.ids = [question_ids(target.tokenizer, p.turns[0]) for p in self.prompts]

    def cycle_ms(self, settings: DraftSettings) -> float:
        """Milliseconds of a cycle with these settings, in the decode loop itself."""
        drafter, cfg = self.family.drafter(settings), self.cfg
        ids = list(itertools.islice(itertools.cycle(self.ids), max(cfg.batch_size, 2)))
        for tokens in (3, min(TIMED_TOKENS, cfg.max_new_tokens)):  # the first run warms up
            requests = [Request(one, tokens, id=i) for i, one in enumerate(ids)]
            timing = generate(
                self.target,
                drafter,
                requests,
                self.sampling,
                batch_size=cfg.batch_size,
                eos_ids=(),
            ).timing
        return 1000 * statistics.median(timing.cycle_s or [0.0])  # no stall moves it

    def timed(
        self, candidates: Sequence[Candidate], on_progress: OnProgress
    ) -> list[dict[str, Any]]:
        """The report's `timed`: what the candidates cost and bring, the fastest first."""
        rows = []
        for number, one in enumerate(candidates, 1):
            spent = self.cycle_ms(one.settings)
            rows.append(
                {
                    "name": str(one.settings),
                    "settings": listed(one.settings),
                    "accepted_length": one.accepted_length,
                    "cycle_ms": spent,
                    "tokens_per_second": 1000 * self.cfg.batch_size * one.accepted_length / spent,
                }
            )
            on_progress(number, len(candidates))
        return sorted(rows, key=lambda row: -row["tokens_per_second"])

    def measure(self, settings: dict[str, DraftSettings]) -> tuple[Scores, dict[str, Any]]:
        """What interleaved decoding gave: the scores, and the row of every name, plain
        decoding under "none" among them."""
        cfg = self.cfg
        systems = systems_of([NONE], self.target)
        systems += [
            drafting(name, self.family.drafter(one), self.target) for name, one in settings.items()
        ]
        plan = contest.ContestSettings(self.sampling, cfg.max_new_tokens, cfg.batch_size, cfg.seed)
        first = [Prompt(p.id, p.category, p.turns[:1]) for p in self.prompts]
        found = contest.run_contest(self.target, first, systems, plan, quiet=cfg.quiet)
        scores = Scores(found, systems, cfg.seed)
        return scores, {system.name: scores.row(system) for system in systems}


def run(cfg: TuneConfig, target: Target, console: Console) -> dict[str, Any]:
    """Everything but the files. Raises UserError where nothing can be searched."""
    tuning = Tuning(cfg, target)
    family = tuning.family
    with Steps(*columns(20), console=console, quiet=cfg.quiet, transient=True) as progress:
        shown = by_name(progress)
        along = named(shown, "drafting along")
        found = family.candidates(family.record(tuning.ids, cfg.max_new_tokens, cfg.seed, along))
        timed = tuning.timed(search.worth_timing(found), named(shown, "timing"))
    settings = confirmed(timed, cfg.confirm) + family.drawn()
    if not settings:
        raise UserError(
            f"drafter: {cfg.drafter} accepted nothing that could be searched; give more prompts"
        )
    default = family.default()
    systems = {str(one): one for one in settings}
    if default not in settings:
        systems[f"default ({default})"] = default
    scores, rows = tuning.measure(systems)
    replayed = {row["name"]: row["accepted_length"] for row in timed}
    table: list[dict[str, Any]] = [
        {
            "name": name,
            "settings": listed(one),
            "kind": one.shape,
            "default": one == default,
            "replayed": replayed.get(str(one)),
            "measured": {key: rows[name][key] for key in MEASURED},
        }
        for name, one in systems.items()
    ]
    # a speed in doubt is chosen only where all are
    believed = [row for row in table if not row["measured"]["doubts"]]
    chosen = max(believed or table, key=_pace)
    speedup = chosen["measured"]["speedup"]
    report = {
        **_made_with(tuning),
        "replayed": len(found),
        "timed": timed,
        "rows": table,
        "none": {k: rows["none"][k] for k in ("tokens_per_second", "ms_per_token", "target_ms")},
        "stalls": scores.stalls(),
        "chosen": {
            "name": chosen["name"],
            "settings": chosen["settings"],
            "speedup": speedup,
            "pays": bool(believed) and (speedup["mean"] or 0) > 1,
        },
        "per_shape": {row["kind"]: row["settings"] for row in sorted(believed or table, key=_pace)},
    }
    return plain(report)  # type: ignore[no-any-return]


def confirmed(timed: Sequence[dict[str, Any]], count: int) -> list[DraftSettings]:
    """The settings of the `count` fastest rows of `timed`, the fastest of every shape among
    them."""
    shapes = {row["settings"]["shape"]: row for row in reversed(timed)}
    first = sorted(shapes.values(), key=timed.index)
    rows = [*first, *(row for row in timed if row not in first)][: max(count, len(first))]
    return [from_json(row["settings"], DraftSettings)[0] for row in rows]


def _made_with(tuning: Tuning) -> dict[str, Any]:
    """What the report rests on: command, drafter, target, settings, machine."""
    cfg, target, head = tuning.cfg, tuning.target, tuning.family.head
    unsaid = ("quiet", "overwrite", "wandb", "wandb_project")
    return {
        "format": 2,
        **files.origin(str(target.device)),
        "drafter": cfg.drafter,
        **({"hub": known} if (known := hub.commits(cfg.drafter)) else {}),
        "kind": head.kind if head else "ngram",
        "target": asdict(target.identity) if target.identity else {"name": "unknown"},
        "settings": {
            **{k: v for k, v in asdict(cfg).items() if k not in unsaid},
            "num_prompts": len(tuning.prompts),
            "prompts_sha256": files.sha256(Path(cfg.prompts)),
        },
        "notes": tuning.family.notes,
    }


def _pace(row: dict[str, Any]) -> float:
    """Measured tokens per second of a row of the report; 0 where nothing was decoded."""
    return float(row["measured"]["tokens_per_second"] or 0)


def listed(one: DraftSettings) -> dict[str, Any]:
    """Settings as JSON has them: lists in place of tuples."""
    return json.loads(json.dumps(one.to_json()))  # type: ignore[no-any-return]


def tuned_from(report: dict[str, Any], folder: Path) -> Tuned:
    """What is written beside the head."""
    chosen, shapes, s = report["chosen"], report["per_shape"], report["settings"]
    get = lambda kind: from_json(shapes[kind], DraftSettings)[0] if kind in shapes else None
    evidence = {
        "created": report["created"],
        "command": report["command"],
        "speedup": chosen["speedup"],
        "measured_for": {
            k: s[k] for k in ("temperature", "dtype", "batch_size", "max_new_tokens", "num_prompts")
        },
        "target": report["target"]["name"],
        "environment": report["environment"],
    }
    best = from_json(chosen["settings"], DraftSettings)[0]
    return Tuned(card_sha256(folder), best, get("chain"), get("tree"), chosen["pays"], evidence)
