"""One run of the tuner: record, fit, search, confirm, and the report of it. scripts/tune.py is
its command line.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.typed import from_json
from outrider.decode.target import Target
from outrider.heads import hub
from outrider.heads.tuned import DraftSettings, Tuned, card_sha256
from outrider.scripts.common import files
from outrider.scripts.common.progress import Steps, by_name, named
from outrider.scripts.common.prompts import Prompt, load_prompts, question_ids, spread
from outrider.scripts.scoring import contest
from outrider.scripts.scoring.score import Scores, plain
from outrider.scripts.scoring.systems import drafting, systems_of
from outrider.scripts.tuning import search
from outrider.scripts.tuning.config import TuneConfig
from outrider.scripts.tuning.cost import CostModel, CycleShape
from outrider.scripts.tuning.family import Bounds, DrafterFamily
from outrider.scripts.tuning.latency import Bench, curves_of
from outrider.scripts.tuning.replay import Text
from outrider.scripts.tuning.search import Candidate, Pricing

CURVE_NODES = (1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CURVE_CYCLES = 8
FIT_TOKENS = 16
Texts = dict[str, list[Text]]  # of every drafter that was recorded


class Tuning:
    """One run: what was measured so far, stage by stage."""

    def __init__(self, cfg: TuneConfig, target: Target, progress: Steps) -> None:
        self.cfg, self.target, self.on_progress = cfg, target, by_name(progress)
        self.sampling = cfg.sampling()
        self.bounds = Bounds(cfg.max_depth, cfg.max_nodes, cfg.max_width)
        self.family = DrafterFamily.of(cfg.drafter, target, self.sampling, self.bounds)
        self.prompts = spread(load_prompts(cfg.prompts), cfg.num_prompts)
        if len(self.prompts) < 2:
            raise UserError("prompts: the file holds a single prompt; give at least two")
        self.ids = [question_ids(target.tokenizer, p.turns[0]) for p in self.prompts]
        self.batches = [cfg.batch_size]

    def model(self) -> tuple[CostModel, list[dict[str, Any]]]:
        """The fitted cost model, and the raw samples of the loop's curves."""
        cfg, bench = self.cfg, Bench(self.target, self.ids, self.sampling)
        default = CycleShape.of(self.family.default()).nodes
        biggest = max(
            self.bounds.nodes if "tree" in self.family.kinds else 1, self.family.deepest, default
        )
        nodes = [n for n in CURVE_NODES if n < biggest] + [biggest]
        rounds = cfg.curve_rounds
        curve = named(self.on_progress, "latency curve")
        samples = bench.loop(nodes, [cfg.batch_size], rounds, CURVE_CYCLES, curve)
        probes = self.family.probes()
        drafting = named(self.on_progress, "drafter's latency")
        fits = bench.drafters(probes, self.batches, FIT_TOKENS, drafting)
        parts: dict[str, Any] = {**curves_of(samples), **fits}
        first = CostModel(**parts)
        levels = named(self.on_progress, "per level")
        extra = bench.extra_per_level(first, probes, FIT_TOKENS, cfg.batch_size, levels)
        return dataclasses.replace(first, extra=extra), samples

    def measure(self, settings: dict[str, DraftSettings], batch: int) -> Measured:
        """What interleaved decoding of `batch` rows together gave."""
        cfg = self.cfg
        systems, _ = systems_of(["none"], self.target)
        systems += [
            drafting(name, self.family.drafter(one), self.target) for name, one in settings.items()
        ]
        plan = contest.ContestSettings(
            self.sampling, cfg.max_new_tokens, batch, cfg.seed, cfg.verify
        )
        total, done = -(-len(self.prompts) // batch) * len(systems), itertools.count(1)
        counted = lambda: self.on_progress(next(done), total, "confirming")
        for system in systems:
            system.run = _then(system.run, counted)
        first = [Prompt(p.id, p.category, p.turns[:1]) for p in self.prompts]
        found = contest.run_contest(self.target, first, systems, plan, quiet=True)
        scores = Scores(found, systems, cfg.seed)
        return Measured(batch, scores, {system.name: scores.row(system) for system in systems})


@dataclass(frozen=True)
class Measured:
    """What was measured with `batch` rows together. rows: of every name, plain decoding under
    "none" among them."""

    batch: int
    scores: Scores
    rows: dict[str, Any]

    def rows_together(self) -> float:
        """Rows that ran together on average: the last chunk may be smaller, and rows finish at
        different times."""
        timed_runs = [
            timed_run
            for timed_runs in self.scores.timed_runs["none"].values()
            for timed_run in timed_runs
        ]
        passes = sum(timed_run.timing.cycles for timed_run in timed_runs)
        tokens = sum(timed_run.tokens - len(timed_run.prompts) for timed_run in timed_runs)
        return tokens / passes if passes else float(self.batch)


def _then(run: Any, after: Callable[[], None]) -> Any:
    def ran(requests: Any, settings: Any) -> Any:
        result = run(requests, settings)
        after()
        return result

    return ran


def compared(row: dict[str, Any], expected: dict[str, Any], pace: float) -> dict[str, Any]:
    """Predicted beside measured. pace: how fast plain decoding ran while measuring, over what
    the curves say of it; a shared machine drifts between the two, and `error` is what is left
    when that one number is taken out."""
    measured, length = row["tokens_per_second"], row["accepted_length"]["mean"]
    at_pace = expected["tokens_per_second"] * pace
    return {
        "measured": {
            k: row[k] for k in ("tokens_per_second", "speedup", "accepted_length", "ms_per_token")
        },
        "predicted": expected,
        "predicted_at_pace": at_pace,
        "error": at_pace / measured - 1 if measured else None,
        "error_raw": expected["tokens_per_second"] / measured - 1 if measured else None,
        "error_accepted_length": expected["accepted_length"] / length - 1 if length else None,
    }


@dataclass
class Choice:
    """The settings of a drafter that are weighed.

    found: every fixed one that was searched, priced: those with a price, each with what is
    expected of it. systems: those that are measured, by name. proposed: the names of those
    among which is chosen; `default` is among them as well."""

    model: CostModel
    default: DraftSettings
    found: list[Candidate]
    priced: list[Candidate]
    systems: dict[str, DraftSettings]
    proposed: set[str]

    @classmethod
    def of(cls, cfg: TuneConfig, family: DrafterFamily, model: CostModel, texts: Texts) -> Choice:
        """Search, and pick the few that are worth measuring. Raises UserError where nothing
        can be searched."""
        pricing = Pricing(model, cfg.batch_size)
        found, priced = family.candidates(pricing, texts), family.confident(pricing, texts)
        # Proposed unseen: nothing predicts what they accept.
        drawn = [*family.drawn(), *family.drawn_at_a_price()]
        if not found and not drawn:
            raise UserError(
                f"drafter: {cfg.drafter} accepted nothing that could be searched; give more prompts"
            )
        few = search.best_few(found, cfg.confirm) if found else []
        few += search.best_prices(priced)
        systems = {str(one): one for one in [*(c.settings for c in few), *drawn]}
        proposed = set(systems)
        default = family.default()
        if default not in systems.values():
            systems[f"default ({default})"] = default
        return cls(model, default, found, priced, systems, proposed)

    def candidate(self, one: DraftSettings) -> Candidate | None:
        """What the search said of a setting; None where it did not meet it."""
        return next((c for c in [*self.found, *self.priced] if c.settings == one), None)

    def row(self, name: str, measured: dict[str, Any], batch: int, pace: float) -> dict[str, Any]:
        """One entry of the report's `rows`."""
        one = self.systems[name]
        if known := self.candidate(one):
            expected = known.expected
        else:
            # Outside the search (a tree that was trained in, one that is drawn): its measured
            # accepted length, at the model's price.
            length = measured["accepted_length"]["mean"] or 1.0
            expected = self.model.predict(batch, CycleShape.of(one), one.shape, length)
        return {
            "name": name,
            "settings": listed(one),
            "kind": one.shape,
            "proposed": name in self.proposed,
            "default": one == self.default,
            **compared(measured, expected, pace),
        }


def run(cfg: TuneConfig, target: Target, progress: Steps) -> dict[str, Any]:
    """Everything but the files."""
    tuning = Tuning(cfg, target, progress)
    family, along = tuning.family, named(tuning.on_progress, "drafting along")
    texts = family.record(tuning.ids, cfg.max_new_tokens, cfg.seed, along)
    model, samples = tuning.model()
    choice = Choice.of(cfg, family, model, texts)
    measured = tuning.measure(choice.systems, cfg.batch_size)
    rows = measured.rows
    plain_rate = 1000 * measured.rows_together() / model.plain(cfg.batch_size)
    pace = rows["none"]["tokens_per_second"] / plain_rate
    table = [choice.row(name, rows[name], cfg.batch_size, pace) for name in choice.systems]
    chosen = max((r for r in table if r["proposed"] or r["default"]), key=_pace)
    speedup = chosen["measured"]["speedup"]
    best = choice.candidate(choice.systems[chosen["name"]])
    shapes = per_shape(table, choice.found)
    report = {
        **_made_with(tuning),
        "latency": {
            "samples": samples,
            "fit": model.to_json(),
            "plain_ms": {str(b): model.plain(b) for b in tuning.batches},
        },
        "acceptance": family.acceptance(texts),
        "searched": len(choice.found) + len(choice.priced),
        "curves": curves(model, choice.found, best, tuning.batches),
        "rows": table,
        "none": {k: rows["none"][k] for k in ("tokens_per_second", "ms_per_token", "target_ms")},
        "pace": pace,
        "plain_pass_ms": measured.scores.steadiness(),
        "chosen": {
            "name": chosen["name"],
            "settings": chosen["settings"],
            "break_even": _break_even(rows, chosen["name"]),
            "speedup": speedup,
            "pays": (speedup["mean"] or 0) > 1,
        },
        "per_shape": shapes,
    }
    parts = {name: rows[name]["ms_per_token"] for name in ("none", chosen["name"])}
    return {**plain(report), "breakdown": parts}


def _made_with(tuning: Tuning) -> dict[str, Any]:
    """What the report rests on: command, drafter, target, settings, machine."""
    cfg, target, head = tuning.cfg, tuning.target, tuning.family.head
    return {
        "format": 1,
        **files.origin(str(target.device)),
        "drafter": cfg.drafter,
        **({"hub": known} if (known := hub.commits(cfg.drafter)) else {}),
        "kind": head.kind if head else "ngram",
        "target": asdict(target.identity) if target.identity else {"name": "unknown"},
        "settings": {
            **{
                k: v for k, v in asdict(cfg).items() if k not in ("quiet", "wandb", "wandb_project")
            },
            "num_prompts": len(tuning.prompts),
            "prompts_sha256": files.sha256(Path(cfg.prompts)),
        },
        "notes": tuning.family.notes,
    }


def _pace(row: dict[str, Any]) -> float:
    """Measured tokens per second of a row of the report."""
    return float(row["measured"]["tokens_per_second"])


def listed(one: DraftSettings) -> dict[str, Any]:
    """Settings as JSON has them: lists in place of tuples."""
    return json.loads(json.dumps(one.to_json()))  # type: ignore[no-any-return]


def _break_even(rows: dict[str, Any], name: str) -> float:
    """Measured: how many tokens a cycle must commit to cost no more per token than plain
    decoding.
    """
    per_cycle = {n: rows[n]["draft_ms"] + rows[n]["verify_ms"] for n in ("none", name)}
    return max(per_cycle[name] / per_cycle["none"], 1.0) if per_cycle["none"] else 1.0


def curves(
    model: CostModel,
    found: Sequence[Candidate],
    chosen: Candidate | None,
    batches: Sequence[int],
) -> dict[str, Any]:
    """Predicted speedup against K, against nodes (the best of each), and against batch size."""

    def points(kind: str, key: str) -> list[dict[str, Any]]:
        best: dict[int, Candidate] = {}
        for c in found:
            if c.kind == kind:
                at = getattr(c.shape, key)
                best[at] = max(best.get(at, c), c, key=lambda one: one.expected["speedup"])
        message = ("speedup", "accepted_length", "break_even", "tokens_per_second")
        return [{key: at, **{k: c.expected[k] for k in message}} for at, c in sorted(best.items())]

    out: dict[str, Any] = {"chain": points("chain", "depth"), "tree": points("tree", "nodes")}
    if chosen is not None:
        tau = chosen.expected["accepted_length"]
        out["batch"] = [
            {"batch_size": b, **model.predict(b, chosen.shape, chosen.kind, tau)} for b in batches
        ]
    return out


def per_shape(table: Sequence[dict[str, Any]], found: Sequence[Candidate]) -> dict[str, Any]:
    """The best settings of each shape, and under "adaptive" of those with a price: by
    measurement where there is one, else by prediction."""
    out: dict[str, Any] = {}
    judged = [r for r in table if r["proposed"] or r["default"]]
    for kind in ("chain", "tree", "adaptive"):
        rows = [
            r for r in judged if kind == ("adaptive" if "price" in r["settings"] else r["kind"])
        ]
        guesses = [c for c in found if c.kind == kind]
        if rows:
            out[kind] = max(rows, key=_pace)["settings"]
        elif guesses:
            best = max(guesses, key=lambda c: c.expected["tokens_per_second"])
            out[kind] = listed(best.settings)
    return out


def tuned_from(report: dict[str, Any], folder: Path) -> Tuned:
    """What is written beside the head."""
    chosen, shapes = report["chosen"], report["per_shape"]
    get = lambda kind: from_json(shapes[kind], DraftSettings)[0] if shapes.get(kind) else None
    s = report["settings"]
    evidence = {
        "created": report["created"],
        "command": report["command"],
        "speedup": chosen["speedup"],
        "measured_for": {
            k: s[k] for k in ("temperature", "dtype", "batch_size", "max_new_tokens", "num_prompts")
        },
        "target": report["target"]["name"],
        "environment": report["environment"],
        "curves": report["curves"],
        "latency": report["latency"]["fit"],
        "rows": [
            {
                k: r[k]
                for k in ("name", "kind", "settings", "proposed", "predicted_at_pace", "error")
            }
            | {"measured": {k: r["measured"][k] for k in ("tokens_per_second", "speedup")}}
            for r in report["rows"]
        ],
    }
    return Tuned(
        card_sha256(folder),
        from_json(chosen["settings"], DraftSettings)[0],
        get("chain"),
        get("tree"),
        chosen["pays"],
        evidence,
        get("adaptive"),
    )
