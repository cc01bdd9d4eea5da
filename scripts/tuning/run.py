"""One run of the tuner: record, fit, search, confirm, and the report of it. scripts/tune.py is
its command line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.errors import UserError
from decode.engine import generate
from decode.sampling import Sampling
from decode.target import Target
from heads.tuned import Settings, Tuned, card_sha256
from scripts.common import files
from scripts.common.progress import Steps
from scripts.common.prompts import Prompt, chat_ids, load_prompts
from scripts.scoring import contest
from scripts.scoring.lanes import lanes_of
from scripts.scoring.score import Scores, plain
from scripts.tuning import latency, search
from scripts.tuning.config import TuneConfig
from scripts.tuning.cost import CostModel
from scripts.tuning.family import Bounds, Family
from scripts.tuning.search import Candidate

CURVE_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CURVE_CYCLES = 8
FIT_TOKENS = 16


class Tuning:
    """One run: what was measured so far, stage by stage."""

    def __init__(self, cfg: TuneConfig, target: Target, progress: Steps) -> None:
        self.cfg, self.target, self.progress = cfg, target, progress
        self.sampling = Sampling(
            cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, cfg.repetition_penalty
        )
        self.bounds = Bounds(cfg.max_depth, cfg.max_nodes, cfg.max_width)
        self.family = Family.of(cfg.drafter, target, self.sampling, self.bounds)
        self.prompts = some(load_prompts(cfg.prompts), cfg.num_prompts)
        self.ids = [
            chat_ids(target.tokenizer, [{"role": "user", "content": p.turns[0]}])
            for p in self.prompts
        ]
        self.batches = sorted({cfg.batch_size, *cfg.curve_batches})

    def stage(self, name: str, total: int) -> Any:
        if self.progress.plain:
            self.progress.console.print(
                f"{name}: {total} steps", style="dim", highlight=False
            )  # a log shows no bar
        task = self.progress.add_task(name, total=total)
        return lambda: self.progress.advance(task)

    def model(self) -> tuple[CostModel, list[dict[str, Any]]]:
        """The fitted cost model, and the raw samples of the loop's curves."""
        cfg, t = self.cfg, self.target
        default = self.family.shape(self.family.default()).nodes
        biggest = max(
            self.bounds.nodes if "tree" in self.family.kinds else 1, self.family.deepest, default
        )
        nodes = [n for n in CURVE_NODES if n < biggest] + [biggest]
        few = [n for n in (1, 4, 8, 16, 32, 64) if n < biggest] + [biggest]
        rounds = cfg.curve_rounds
        more = [b for b in self.batches if b != cfg.batch_size]
        total = (rounds + 1) * (len(nodes) + 1) + 3 * (len(few) + 1) * len(more)
        tick = self.stage("latency curve", total)
        curves, samples = latency.loop_curves(
            t, self.ids, nodes, [cfg.batch_size], rounds, CURVE_CYCLES, self.sampling, tick
        )
        if more:
            others, extra = latency.loop_curves(
                t, self.ids, few, more, 2, CURVE_CYCLES // 2, self.sampling, tick
            )
            samples += extra
            for part, curve in others.items():
                curves[part].knots.update(curve.knots)
                curves[part] = type(curve)(dict(sorted(curves[part].knots.items())))
        probes = self.family.probes()
        tick = self.stage(
            "drafter's latency", 2 * len(self.batches) + len({p.kind for p in probes})
        )
        fits = latency.drafter_fits(
            t, probes, self.ids, self.batches, FIT_TOKENS, self.sampling, tick
        )
        first = CostModel(
            curves["target"],
            curves["verify"],
            curves["cache"],
            curves["python"],
            fits["propose"],
            fits["observe"],
        )
        extra_ms = latency.extra_per_level(
            t, first, probes, self.ids, FIT_TOKENS, self.sampling, cfg.batch_size, tick
        )
        return dataclasses.replace(first, extra=extra_ms), samples

    def measure(self, settings: dict[str, Settings]) -> dict[str, Any]:
        """name -> what interleaved decoding gave, plain decoding under "none" among them."""
        cfg = self.cfg
        lanes, _ = lanes_of(["none"], self.target)
        for name, one in settings.items():
            lanes.append(self._lane(name, one))
        plan = contest.Settings(
            self.sampling, cfg.max_new_tokens, cfg.batch_size, cfg.seed, cfg.verify
        )
        chunks = -(-len(self.prompts) // cfg.batch_size)
        tick = self.stage(
            "confirming" if not cfg.grid else "measuring the grid", chunks * len(lanes)
        )
        for lane in lanes:
            lane.run = _ticking(lane.run, tick)
        first = [Prompt(p.id, p.category, p.turns[:1]) for p in self.prompts]
        scores = Scores(
            contest.run_contest(self.target, self.target.tokenizer, first, lanes, plan, quiet=True),
            lanes,
            cfg.seed,
        )
        rows = {lane.name: scores.row(lane) for lane in lanes}
        self.scores, self.steadiness = scores, scores.steadiness()
        return rows

    def _lane(self, name: str, one: Settings) -> contest.Lane:
        drafter, target = self.family.drafter(one), self.target
        return contest.Lane(
            name,
            name,
            "tuned",
            drafter.shape,
            drafter.max_depth,
            drafter.max_nodes,
            lambda requests, s: generate(
                target,
                drafter,
                requests,
                s.sampling,
                batch_size=s.batch_size,
                seed=s.seed,
                verify=s.verify,
            ),
        )


def _ticking(run: Any, tick: Any) -> Any:
    def ran(requests: Any, settings: Any) -> Any:
        result = run(requests, settings)
        tick()
        return result

    return ran


def some(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Prompts spread over the file, so over its categories."""
    if len(prompts) < 2:
        raise UserError("prompts: the file holds a single prompt; give at least two")
    step = max(len(prompts) / count, 1.0)
    return [prompts[int(i * step)] for i in range(min(count, len(prompts)))]


def compared(row: dict[str, Any], expected: dict[str, Any], pace: float) -> dict[str, Any]:
    """Predicted beside measured. pace: how fast plain decoding ran while measuring, over what
    the curves say of it; a shared machine drifts between the two, and `error` is what is left
    when that one number is taken out."""
    measured = row["tokens_per_second"]
    at_pace = expected["tokens_per_second"] * pace
    return {
        "measured": {
            k: row[k] for k in ("tokens_per_second", "speedup", "accepted_length", "ms_per_token")
        },
        "predicted": expected,
        "predicted_at_pace": at_pace,
        "error": at_pace / measured - 1 if measured else None,
        "error_raw": expected["tokens_per_second"] / measured - 1 if measured else None,
        "error_accepted_length": expected["accepted_length"] / row["accepted_length"]["mean"] - 1
        if row["accepted_length"]["mean"]
        else None,
    }


def run(cfg: TuneConfig, target: Target, progress: Steps) -> dict[str, Any]:
    """Everything but the files."""
    tuning = Tuning(cfg, target, progress)
    family = tuning.family
    tick = tuning.stage("drafting along", len(tuning.prompts))
    texts = family.record(tuning.ids, cfg.max_new_tokens, cfg.seed, tick)
    model, samples = tuning.model()
    found = family.candidates(model, cfg.batch_size, texts)
    confident = family.confident(model, cfg.batch_size, texts)
    # Proposed unseen: nothing predicts what they accept.
    drawn = {str(one): one for one in [*family.drawn(), *family.drawn_at_a_price()]}
    if not found and not drawn:
        raise UserError(
            f"drafter: {cfg.drafter} accepted nothing that could be searched; give more prompts"
        )
    few = search.best_few(found, cfg.confirm) if found else []
    few += search.best_prices(confident)
    default = family.default()
    wanted = {str(c.settings): c for c in few}
    grid = {str(c.settings): c for c in search.grid(found, cfg.grid_size)} if cfg.grid else {}
    lanes = {name: c.settings for name, c in {**grid, **wanted}.items()} | drawn
    as_it_was = f"default ({default})"
    if not any(search.same(default, one) for one in lanes.values()):
        lanes[as_it_was] = default
    rows = tuning.measure(lanes)
    pace = rows["none"]["tokens_per_second"] / (
        1000 * _rows(cfg, tuning) / model.plain(cfg.batch_size)
    )
    table = []
    for name, one in lanes.items():
        match = wanted.get(name) or grid.get(name) or _like(default, found)
        expected = match.expected if match else _outside(model, family, one, rows[name], cfg)
        proposed = name in wanted or name in drawn
        table.append(
            {
                "name": name,
                "settings": one.to_json(),
                "kind": one.shape,
                "proposed": proposed,
                "default": search.same(one, default),
                **compared(rows[name], expected, pace),
            }
        )
    chosen = max(
        (r for r in table if r["proposed"] or r["default"]),
        key=lambda r: r["measured"]["tokens_per_second"],
    )
    candidate = wanted.get(chosen["name"]) or _like(
        Settings.from_json(_json(chosen["settings"])), found
    )
    best = Settings.from_json(_json(chosen["settings"]))
    limit = _break_even(rows, chosen["name"])
    report: dict[str, Any] = {
        "format": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": files.command(),
        "drafter": cfg.drafter,
        "kind": family.head.kind if family.head else "ngram",
        "target": asdict(target.identity) if target.identity else {"name": "unknown"},
        "settings": {
            **{k: v for k, v in asdict(cfg).items() if k not in ("target", "quiet", "wandb")},
            "num_prompts": len(tuning.prompts),
            "target": asdict(cfg.target),
            "prompts_sha256": files.sha256(Path(cfg.prompts)),
        },
        "environment": files.environment(str(target.device)),
        "notes": family.notes,
        "latency": {
            "samples": samples,
            "fit": model.to_json(),
            "plain_ms": {str(b): model.plain(b) for b in tuning.batches},
        },
        "acceptance": family.acceptance(texts),
        "searched": len(found) + len(confident),
        "curves": curves(model, found, candidate, tuning.batches),
        "rows": table,
        "none": {k: rows["none"][k] for k in ("tokens_per_second", "ms_per_token", "target_ms")},
        "pace": pace,
        "plain_pass_ms": tuning.steadiness,
        "chosen": {
            "name": chosen["name"],
            "settings": best.to_json(),
            "break_even": limit,
            "speedup": chosen["measured"]["speedup"],
            "pays": (chosen["measured"]["speedup"]["mean"] or 0) > 1,
        },
        "per_shape": per_shape(table, found),
    }
    if cfg.grid:
        report["grid"] = judged(table, chosen, tuning)
    report = plain(report)
    report["breakdown"] = {name: rows[name]["ms_per_token"] for name in ("none", chosen["name"])}
    return report


def _rows(cfg: TuneConfig, tuning: Tuning) -> float:
    """Rows that run together on average: the last chunk may be smaller, and rows finish at
    different times.
    """
    laps = [lap for laps in tuning.scores.laps["none"].values() for lap in laps]
    tokens, passes = (
        sum(lap.tokens - len(lap.prompts) for lap in laps),
        sum(lap.timing.cycles for lap in laps),
    )
    return tokens / passes if passes else float(cfg.batch_size)


def _json(value: Any) -> Any:
    return {k: [list(p) for p in v] if k == "paths" else v for k, v in value.items()}


def _like(settings: Settings, found: Sequence[Candidate]) -> Candidate | None:
    return next((c for c in found if search.same(c.settings, settings)), None)


def _outside(
    model: CostModel, family: Family, one: Settings, row: dict[str, Any], cfg: TuneConfig
) -> dict[str, Any]:
    """A setting outside the search (a tree that was trained in): its measured accepted length,
    at the model's price.
    """
    return model.predict(
        cfg.batch_size, family.shape(one), one.shape, row["accepted_length"]["mean"] or 1.0
    )


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
                if at not in best or c.expected["speedup"] > best[at].expected["speedup"]:
                    best[at] = c
        told = ("speedup", "accepted_length", "break_even", "tokens_per_second")
        return [{key: at, **{k: c.expected[k] for k in told}} for at, c in sorted(best.items())]

    out: dict[str, Any] = {"chain": points("chain", "depth"), "tree": points("tree", "nodes")}
    if chosen is not None:
        tau = chosen.expected["accepted_length"]
        out["batch"] = [
            {"batch_size": b, **model.predict(b, chosen.shape, chosen.kind, tau)} for b in batches
        ]
    return out


def per_shape(table: Sequence[dict[str, Any]], found: Sequence[Candidate]) -> dict[str, Any]:
    """The best settings of each shape, and under "adaptive" of those with a price: by measurement
    where there is one, else by prediction."""
    out: dict[str, Any] = {}
    judged = [r for r in table if r["proposed"] or r["default"]]
    for kind in ("chain", "tree", "adaptive"):
        rows = [
            r for r in judged if kind == ("adaptive" if "price" in r["settings"] else r["kind"])
        ]
        guesses = [c for c in found if c.kind == kind]
        if rows:
            out[kind] = _json(
                max(rows, key=lambda r: r["measured"]["tokens_per_second"])["settings"]
            )
        elif guesses:
            out[kind] = _json(
                max(guesses, key=lambda c: c.expected["tokens_per_second"]).settings.to_json()
            )
    return out


def judged(
    table: Sequence[dict[str, Any]], chosen: dict[str, Any], tuning: Tuning
) -> dict[str, Any]:
    """The choice against the best of everything measured, and how good the predictions were."""
    best = max(table, key=lambda r: r["measured"]["tokens_per_second"])
    ratio = tuning.scores.speedup(chosen["name"], best["name"], tuning.scores.units())
    errors = [abs(r["error"]) for r in table if r["error"] is not None]
    proposed = [abs(r["error"]) for r in table if r["proposed"] and r["error"] is not None]
    return {
        "settings": len(table),
        "best": best["name"],
        "chosen_over_best": ratio,
        "within_5_percent": bool((ratio["mean"] or 0) >= 0.95),
        "error_all": {"mean": sum(errors) / len(errors), "worst": max(errors)},
        "error_proposed": {"mean": sum(proposed) / len(proposed), "worst": max(proposed)},
        "within_10_percent": max(proposed) <= 0.10,
    }


def tuned_from(report: dict[str, Any], folder: Path) -> Tuned:
    """What is written beside the head."""
    chosen, shapes = report["chosen"], report["per_shape"]
    get = lambda kind: Settings.from_json(shapes[kind]) if shapes.get(kind) else None
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
        Settings.from_json(_json(chosen["settings"])),
        get("chain"),
        get("tree"),
        chosen["break_even"],
        chosen["pays"],
        evidence,
        get("adaptive"),
    )


def collect(report: dict[str, Any], path: Path) -> None:
    """Merge the figures of a run into a JSON file, an entry per drafter and setting. Raises
    UserError for a file that holds something else."""
    s = report["settings"]
    name = f"{report['drafter']}, T={s['temperature']:g}, batch {s['batch_size']}"
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
        known[name] = {
            **{
                k: report[k]
                for k in (
                    "kind",
                    "created",
                    "command",
                    "environment",
                    "chosen",
                    "searched",
                    "pace",
                    "plain_pass_ms",
                    "breakdown",
                )
            },
            **({"grid": report["grid"]} if "grid" in report else {}),
            "rows": [
                {
                    "name": r["name"],
                    "proposed": r["proposed"],
                    "predicted": r["predicted_at_pace"],
                    "predicted_raw": r["predicted"]["tokens_per_second"],
                    "error": r["error"],
                    "measured": r["measured"]["tokens_per_second"],
                    "speedup": r["measured"]["speedup"],
                }
                for r in report["rows"]
            ],
        }
    except (ValueError, TypeError):
        raise UserError(
            f"results: {path} holds something else than results; give another file"
        ) from None
    files.write_json(path, known)
