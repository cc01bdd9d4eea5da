"""One run of the forecast: the target's text, the pilots, the machine, and what follows."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.stats import accepted_length, split
from outrider.decode.target import Target
from outrider.heads import drafter_folder
from outrider.heads.checkpoint import read_card
from outrider.heads.names import parse
from outrider.scripts.common import files
from outrider.scripts.common.progress import Steps
from outrider.scripts.common.prompts import load_prompts, question_ids, spread
from outrider.scripts.extra.forecasting import curves, text
from outrider.scripts.extra.forecasting.config import ForecastConfig
from outrider.scripts.extra.forecasting.curves import Length, PilotRun
from outrider.scripts.serving import costs as engine_costs
from outrider.scripts.serving.costs import Costs
from outrider.scripts.tuning import run as tune_run
from outrider.scripts.tuning.config import TuneConfig
from outrider.scripts.tuning.cost import CostModel, CycleShape, acceptance_needed, expected_tokens
from outrider.scripts.tuning.family import Bounds, DrafterFamily

FORMAT = 1
HERE = "this machine"
COST_ERROR = 0.055  # of the cost model's tokens/s against measured ones (docs/results/tune.json)
LIKE = 0.02  # a head whose tokens lie within this of a budget is held against its forecast


class Forecast:
    """One forecast, stage by stage. engine: whether it is about another engine; those draft
    chains."""

    def __init__(self, cfg: ForecastConfig, target: Target, progress: Steps, engine: bool) -> None:
        self.cfg, self.target, self.progress = cfg, target, progress
        self.shape = "@chain" if engine else ""
        self.prompts = spread(load_prompts(cfg.prompts), cfg.num_prompts)
        room = target.context_length - cfg.max_new_tokens
        every = (question_ids(target.tokenizer, p.turns[0]) for p in self.prompts)
        self.ids = [ids for ids in every if len(ids) < room]
        if len(self.ids) < 2:
            raise UserError(
                f"prompts: fewer than two of {cfg.prompts} leave room for {cfg.max_new_tokens} "
                "tokens; give shorter ones, or a lower max_new_tokens"
            )

    def decoded(self, folder: str) -> tuple[DrafterFamily, list[Generation], Length]:
        """What a head accepts on the prompts: its family, the answers, and the accepted length
        with its 95 % interval."""
        shaped = folder if parse(folder).shape else folder + self.shape
        family = DrafterFamily.of(shaped, self.target, Sampling(), Bounds())
        requested = [Request(ids, self.cfg.max_new_tokens, id=i) for i, ids in enumerate(self.ids)]
        task = self.progress.add_task(Path(folder).name, total=len(requested))
        drafter = family.drafter(family.default())
        answers = []
        for one in requested:
            run = generate(self.target, drafter, [one], Sampling(), seed=self.cfg.seed)
            answers += run.generations
            self.progress.advance(task)
        found = accepted_length([split(g).clean for g in answers])
        if found.low is None or found.high is None:
            raise UserError(
                f"prompts: {self.cfg.prompts} gave fewer than two answers to measure with; give "
                "other prompts, or a higher max_new_tokens"
            )
        return family, answers, Length(found.mean, found.low, found.high)

    def model(self, folder: str) -> CostModel:
        """What a cycle costs here, with the drafter in `folder`."""
        cfg = self.cfg
        with tempfile.TemporaryDirectory() as unused:
            tuning = tune_run.Tuning(
                TuneConfig(
                    drafter=folder,
                    out=unused,
                    prompts=cfg.prompts,
                    num_prompts=min(cfg.num_prompts, 8),
                    curve_rounds=cfg.curve_rounds,
                    batch_size=cfg.batch_sizes[0],
                    curve_batches=cfg.batch_sizes,
                    max_nodes=32,
                    quiet=True,
                ),
                self.target,
                self.progress,
            )
            return tuning.model()[0]

    def engine(self) -> Costs | None:
        """What a cycle costs on another engine, None where none was named."""
        path = self.cfg.costs
        return engine_costs.load(Path(path).expanduser()) if path else None


def run(cfg: ForecastConfig, target: Target, progress: Steps, pilots: Sequence[str]) -> Any:
    """Everything but the files. pilots: their folders."""
    made = Forecast(cfg, target, progress, bool(cfg.costs))
    known = [(folder, made.decoded(folder)) for folder in pilots]
    found = [_pilot(folder, family, length) for folder, (family, _, length) in known]
    lines = curves.families(Path(cfg.curves), {p.kind: p.depth for p in found} | DEPTHS)
    engine = made.engine()
    rows = []
    for pilot, (folder, (family, _, _)) in zip(found, known, strict=True):
        model = made.model(folder) if engine is None else None
        for tokens in sorted(set(cfg.tokens)):
            length = curves.forecast(pilot, lines.get(pilot.kind), [*lines.values()], tokens)
            rows.append(
                {
                    "head": pilot.kind,
                    "pilot": pilot.name,
                    "tokens": tokens,
                    "hours": tokens / pilot.tokens_per_second / 3600,
                    "accepted_length": asdict(length),
                    "half_width": (length.high - length.low) / 2 / length.mean,
                    "by_batch": [
                        _speed(b, length, pilot, family, model, engine) for b in cfg.batch_sizes
                    ],
                }
            )
    answers = known[0][1][1]
    value = {
        "format": FORMAT,
        **files.origin(str(target.device)),
        "target": _name(target),
        "prompts": {
            "file": Path(cfg.prompts).name,
            "sha256": files.sha256(Path(cfg.prompts).expanduser()),
            "asked": cfg.num_prompts,
            "count": len(made.ids),
            "max_new_tokens": cfg.max_new_tokens,
        },
        "text": text.statistics(target, made.ids, answers),
        "engine": engine.engine if engine else HERE,
        "pilots": [asdict(p) for p in found],
        "families": [asdict(f) for f in lines.values()],
        "forecasts": rows,
    }
    return {**value, "sha256": digest(value)}


# Levels of the drafts behind the measured curves.
DEPTHS = {"eagle3": 5, "medusa": 4, "hydra_heads": 4}


def _pilot(folder: str, family: DrafterFamily, length: Length) -> PilotRun:
    """A pilot by what its card says of the training."""
    card, seen = _card(folder)
    tokens, seconds = (_amount(seen.get(key)) for key in ("tokens_seen", "train_seconds"))
    if tokens < 1 or not seconds:
        raise UserError(
            f"pilots: {folder} does not say how many tokens it was trained on; give a run folder "
            "of this project"
        )
    depth = family.deepest if family.parallel else family.default().depth or family.deepest
    return PilotRun(Path(folder).name, str(card["kind"]), depth, tokens, tokens / seconds, length)


def _card(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    place = drafter_folder(parse(folder))
    if place is None:
        raise UserError(f"pilots: {folder} is no trained head; give a run folder")
    card = read_card(place)
    seen = card.get("extra", {}).get("training")
    return card, seen if isinstance(seen, dict) else {}


def _amount(value: Any) -> float:
    """A number of a card, which may be a stranger's; 0 for what is no finite positive one."""
    try:
        found = float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return 0.0
    return found if 0 < found < math.inf else 0.0


def _name(target: Target) -> str:
    """The target as forecasts name it."""
    return str(target.identity.to_json()["name"]) if target.identity else "unknown"


def _rate(length: float, depth: int) -> float:
    """The acceptance rate of a chain of `depth` behind an accepted length: 0 where nothing was
    accepted, 1 for a length that no rate reaches."""
    found = acceptance_needed(length, depth)
    return 1.0 if found is None else found


def _speed(
    batch: int,
    length: Length,
    pilot: PilotRun,
    family: DrafterFamily,
    model: CostModel | None,
    engine: Costs | None,
) -> dict[str, Any]:
    """Speedup over plain decoding at a batch size, with its 90 % interval, by the chain length
    that pays best, or the head's own tree."""
    own = family.default().shape if engine is None else "chain"
    choices = [CycleShape(k, k) for k in range(1, pilot.depth + 1)]
    if own == "tree":
        choices = [CycleShape.of(family.default())]
    rates = {name: _rate(getattr(length, name), pilot.depth) for name in ("mean", "low", "high")}

    def price(shape: CycleShape) -> float:
        """Cycles of plain decoding that a drafted one takes: the break-even length."""
        if model is not None:
            return model.cycle(batch, shape, own, length.mean).ms / model.plain(batch)
        assert engine is not None
        curve = engine.curve()
        return curve(batch, shape.nodes) / curve(batch, 0)

    def tokens(shape: CycleShape, name: str) -> float:
        """Accepted length of a chain cut to a shape's depth."""
        if own == "tree":
            return float(getattr(length, name))
        return expected_tokens(rates[name], shape.depth)

    if engine is not None:
        choices = [s for s in choices if s.nodes <= engine.deepest] or choices[:1]
    best = max(choices, key=lambda s: tokens(s, "mean") / price(s))
    cost = price(best)
    mean = tokens(best, "mean") / cost
    error = curves.Z90 * COST_ERROR * mean
    low = mean - ((mean - tokens(best, "low") / cost) ** 2 + error**2) ** 0.5
    high = mean + ((tokens(best, "high") / cost - mean) ** 2 + error**2) ** 0.5
    verdict = "yes" if low > 1 else "do not" if high < 1 or mean <= 1 else "perhaps"
    return {
        "batch": batch,
        "shape": own,
        "draft_tokens": best.nodes,
        "speedup": {"mean": mean, "low": max(low, 0.0), "high": high},
        "break_even": max(cost, 1.0),
        "pays": verdict,
    }


def digest(value: dict[str, Any]) -> str:
    """sha256 of a forecast, without the hash itself."""
    rest = {k: v for k, v in value.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# -- against truth


def frozen(path: Path) -> dict[str, Any]:
    """A forecast that was written before. Raises UserError where it was changed since."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        same = value["sha256"] == digest(value) and value["format"] == FORMAT
    except OSError as error:
        raise UserError(
            f"check: cannot read {path} ({error.strerror}); give a forecast.json"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"check: {path} is no forecast; give a forecast.json") from None
    if not same:
        raise UserError(
            f"check: {path} was changed since it was written (its sha256 differs); a forecast is "
            "held against truth as it was"
        )
    return value


def _earlier(record: Path | None, said: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier check of the same forecast: what missed stays."""
    if record is None or not record.exists():
        return []
    try:
        value = json.loads(record.read_text(encoding="utf-8"))
        same, rows = value["forecast"]["sha256"] == said["sha256"], value["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"out: {record} is damaged; delete it, or give another folder") from None
    if not same:
        raise UserError(f"out: {record} is about another forecast; give another folder")
    return list(rows)


def _same(cfg: ForecastConfig, target: Target, said: dict[str, Any]) -> None:
    """Raises UserError where the target or the prompts are not those of a forecast."""
    if said["target"] != _name(target):
        raise UserError(
            f"target: {_name(target)}; the forecast is about {said['target']}: give that one"
        )
    if files.sha256(Path(cfg.prompts).expanduser()) != said["prompts"]["sha256"]:
        raise UserError(
            f"prompts: {cfg.prompts} is not the file that the forecast was made with "
            f"({said['prompts']['file']}); give that one"
        )


def _foretold(said: dict[str, Any], folder: str, kind: str, tokens: float) -> dict[str, Any]:
    """The row of a forecast whose budget is nearest to what a head was trained on. Raises
    UserError where none is near."""
    rows = [row for row in said["forecasts"] if row["head"] == kind]
    near = [row for row in rows if abs(row["tokens"] / max(tokens, 1) - 1) <= LIKE]
    if not near:
        budgets = ", ".join(f"{b:,.0f}" for b in sorted({row["tokens"] for row in rows}))
        raise UserError(
            f"truth: {folder} ({kind}, {tokens:,.0f} tokens) was not forecast; that kind was for "
            f"{budgets or 'no budget'}"
        )
    return min(near, key=lambda row: abs(row["tokens"] - tokens))


def _head_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells the heads in a table of checks apart: two runs of a budget are two heads.
    Rows of earlier versions have no sha256."""
    return row["head"], row["tokens"], row.get("sha256", row["folder"])


def check(
    cfg: ForecastConfig, target: Target, progress: Steps, record: Path | None = None
) -> dict[str, Any]:
    """Trained heads on the forecast's own prompts, against what was said of their budgets.
    record: an earlier check, whose other heads stay in the table."""
    said = frozen(Path(cfg.check).expanduser())
    _same(cfg, target, said)
    # As many as were asked for, too long ones among them: a spread of fewer takes other ones.
    count = said["prompts"].get("asked", said["prompts"]["count"])
    cfg = replace(cfg, num_prompts=count, max_new_tokens=said["prompts"]["max_new_tokens"])
    earlier, rows = _earlier(record, said), []
    made = Forecast(cfg, target, progress, said["engine"] != HERE)
    for folder in cfg.truth:
        card, seen = _card(folder)
        tokens = _amount(seen.get("tokens_seen"))
        match = _foretold(said, folder, card["kind"], tokens)
        _, _, length = made.decoded(folder)
        expected = match["accepted_length"]
        rows.append(
            {
                "head": card["kind"],
                "folder": Path(folder).name,
                "sha256": card["weights"]["sha256"],
                "tokens": tokens,
                "forecast": expected,
                "half_width": match["half_width"],
                "measured": asdict(length),
                "error": expected["mean"] / length.mean - 1,
                "inside": expected["low"] <= length.mean <= expected["high"],
            }
        )
    new = {_head_of(row) for row in rows}
    new |= {(row["head"], row["tokens"], row["folder"]) for row in rows}  # as it was told before
    rows = [row for row in earlier if _head_of(row) not in new] + rows
    return {
        "format": FORMAT,
        **files.origin(str(target.device)),
        "forecast": {"created": said["created"], "sha256": said["sha256"]},
        "rows": rows,
        "inside": sum(r["inside"] for r in rows),
        "of": len(rows),
    }
