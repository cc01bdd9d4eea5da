"""The training of a fit: one of train/'s own runs, whose steps a pilot has counted."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import records
from outrider.conf.rules import AboveZero, NotNegative, OneOrMore
from outrider.conf.schema import compose
from outrider.conf.typed import from_json
from outrider.heads import head_class
from outrider.heads.checkpoint import read_card
from outrider.heads.config import HeadConfig
from outrider.heads.earlier import implied, without_gone
from outrider.heads.folders import head_in
from outrider.heads.lora import LoraKeys
from outrider.scripts.common import files
from outrider.scripts.fitting.config import FitConfig
from outrider.scripts.fitting.ranks import train
from outrider.train.config import TrainConfig, entry_of

BUDGET = "budget.json"
PILOT_STEPS = 4
MOST_SHARE = 0.5  # of the budget that evaluations may take


@dataclass(frozen=True)
class Chats:
    """What is learned from and what is asked: two JSONL files of chats."""

    train: str
    later: str


@dataclass(frozen=True)
class PilotBudget:
    """What a pilot has found. seconds: of a step and of an evaluation. every: steps between
    two evaluations."""

    minutes: AboveZero
    steps: OneOrMore
    every: OneOrMore
    step_seconds: AboveZero
    eval_seconds: NotNegative

    @classmethod
    def read(cls, value: Any) -> PilotBudget:
        """What a file holds. Raises ValueError for what is no budget."""
        found, problems = from_json(value, cls)
        if problems:
            raise ValueError(problems[0])
        return found


def start_of(cfg: FitConfig) -> tuple[str, str, Any]:
    """(kind, sha256 of the weights, keys) of the head at cfg.start. Raises UserError where there
    is none that can be fitted."""
    try:
        folder = head_in(cfg.start)
    except UserError as error:
        raise UserError(f"start: {error}") from None
    if folder is None:
        raise UserError(
            f"start: {cfg.start}: no head there (no head.json, head/, best/ or checkpoints/); give "
            "a run folder or a head folder, or no start= for a fresh head"
        )
    card = read_card(folder)
    kind = str(card["kind"])
    if head_class(kind, f"start: {folder}").trains_target:
        raise UserError(
            f"start: {cfg.start}: a {kind[:80]} head is not fitted: its target moved with it; give "
            "a head of a frozen target"
        )
    saved = card["head"].get("config")
    saved = without_gone(saved) | implied(card["head"]) if isinstance(saved, dict) else saved
    keys, problems = from_json(saved, head_class(kind).Config)
    if problems:
        raise UserError(f"start: {folder}: {problems[0].partition('; set ')[0]}; give a sound head")
    return kind, str(card["weights"]["sha256"]), keys


def fresh_kind(cfg: FitConfig) -> str:
    """The kind of head that is trained without a start. Raises UserError for none, and for one
    that moves its target."""
    if head_class(cfg.kind, "kind").trains_target:
        raise UserError(
            f"kind: a {cfg.kind} head moves its target; give a head of a frozen one, such as eagle3"
        )
    return cfg.kind


def config(cfg: FitConfig, chats: Chats, out: Path, fresh: bool = False) -> TrainConfig:
    """The training run of a fit, its steps still open. fresh: from scratch."""
    kind, keys = cfg.kind, cfg.head if isinstance(cfg.head, HeadConfig) else None
    if cfg.start:
        kind, _, keys = start_of(cfg)
    script, schema = entry_of(kind)
    chosen = [] if keys is not None else [f"head={kind}"]
    given = ["data=jsonl", "data.path=x", "out_dir=x", "steps=1", *chosen]
    usual: Any = compose(script, schema, given)
    head = keys or usual.head
    fresh = fresh or not cfg.start
    made: TrainConfig = replace(
        usual,
        target=cfg.target,
        data=replace(usual.data, path=chats.train, **_fields(cfg.data)),
        out_dir=str(out),
        head=replace(head, lora=LoraKeys() if fresh else cfg.head.lora, **_words(cfg, head, fresh)),
        start="" if fresh else cfg.start,
        optim=cfg.optim,
        eval=replace(usual.eval, temperature=cfg.temperature, shape=cfg.shape, **_fields(cfg.eval)),
        **{
            key: getattr(cfg, key)
            for key in ("batch_size", "micro_batch", "micro_tokens", "seed", "dtype")
        },
        device=cfg.device or "",
    )
    return made


def _fields(keys: Any) -> dict[str, Any]:
    return {item.name: getattr(keys, item.name) for item in fields(keys)}


def _words(cfg: FitConfig, head: HeadConfig, fresh: bool) -> dict[str, Any]:
    """Keys of the draft vocabulary, and the chunk. A head that starts from another keeps its
    vocabulary; a fresh one beside it takes one of the same size."""
    given = cfg.head
    kept = head.draft_vocab if fresh or not head.draft_vocab else None
    size = kept if given.draft_vocab is None else given.draft_vocab
    return {
        "draft_vocab": size,
        "draft_vocab_from": given.draft_vocab_from or head.draft_vocab_from,
        "chunk": given.chunk or head.chunk,
    }


def pilot(cfg: FitConfig, chats: Chats, out: Path) -> PilotBudget:
    """How many steps fit into cfg.minutes here, by a few steps and one evaluation; written to
    OUT/budget.json once, and read from there ever after.

    Raises UserError for a budget that is too short for one evaluation, and where nothing can be
    evaluated."""
    path = out / BUDGET
    if path.exists():
        try:
            return PilotBudget.read(json.loads(path.read_text()))
        except ValueError:
            raise UserError(
                f"out: {path} is damaged; delete it, and the same command runs the pilot again"
            ) from None
    run, folder = config(cfg, chats, out / "pilot"), out / "pilot"
    shutil.rmtree(folder, ignore_errors=True)  # seconds of a pilot that was cut short mean little
    evals = replace(run.eval, every=PILOT_STEPS, parity=0, patience=0)
    run = replace(run, steps=PILOT_STEPS, log_every=1, save_every=0, eval=evals)
    train(run, cfg)
    lines = records(folder / "metrics.jsonl")
    evaluated = [line for line in lines if line.get("event") == "eval"]
    if not evaluated:
        raise UserError(
            f"data.held_out: {cfg.data.held_out} of the training chats is none that could be "
            "asked; give more, or more chats"
        )
    passed = [line["train_seconds"] for line in lines if "loss" in line]
    steps = [b - a for a, b in itertools.pairwise(passed)]  # the first one warms up
    budget = budgeted(cfg, statistics.median(steps), evaluated[-1]["seconds"])
    files.write_json(path, asdict(budget))
    shutil.rmtree(folder, ignore_errors=True)
    return budget


def budgeted(cfg: FitConfig, step: float, evaluation: float) -> PilotBudget:
    """The steps that cfg.minutes have room for. step, evaluation: seconds of one.

    Raises UserError where not even one evaluation fits in."""
    room, step = 60 * cfg.minutes, max(step, 1e-3)
    # Each takes a share of the room at most, and has a step before it.
    most = min(MOST_SHARE * room / max(evaluation, 1e-3), room / (evaluation + step))
    evaluations = min(cfg.evaluations, int(most))
    every = int((room - evaluations * evaluation) / step) // max(evaluations, 1)
    if evaluations < 1 or every < 1:
        least = max(evaluation / MOST_SHARE, evaluation + step) / 60
        enough = math.ceil(1000 * least) / 1000  # rounded down it would be refused again
        raise UserError(
            f"minutes: {cfg.minutes:g} is too short for one evaluation here ({evaluation:.1f} s, a "
            f"step {step:.2f} s); give {enough:g} or more, or fewer eval.prompts"
        )
    return PilotBudget(cfg.minutes, every * evaluations, every, step, evaluation)


def trained(
    cfg: FitConfig, chats: Chats, out: Path, budget: PilotBudget, fresh: bool = False
) -> Path:
    """Train within the budget, or go on; the folder of the best head."""
    run = config(cfg, chats, out, fresh)
    evals = replace(run.eval, every=budget.every)
    run = replace(run, steps=budget.steps, save_every=budget.every, eval=evals)
    train(run, cfg)
    return out / "best"


def record(out: Path) -> dict[str, Any]:
    """What a training run says of itself: steps, which were the best, accepted length at every
    evaluation."""
    lines = records(out / "metrics.jsonl")
    requested = {line["step"]: line for line in lines if line.get("event") == "eval"}
    last, best = (read_card(out / part)["extra"] for part in ("head", "best"))
    return {
        "steps": last["step"],
        "best_step": best["step"],
        "seen": last.get("training", {}),
        "evaluations": [
            {"step": step, "accepted_length": line["accepted_length"], "seconds": line["seconds"]}
            for step, line in sorted(requested.items())
        ],
    }
