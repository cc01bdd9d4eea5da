"""What a drafter would bring on your prompts, before it is trained: accepted length and
speedup by budget and batch size, hours, and whether it pays.

    outrider forecast target=smollm2 prompts=FILE heads=[eagle3] chats=CHATS.jsonl \\
        tokens=[1e6,5e6] out=reports/forecast
    outrider forecast target=smollm2 prompts=FILE pilots=[runs/short] out=reports/forecast
    outrider forecast target=smollm2 prompts=FILE check=reports/forecast/forecast.json \\
        truth=[runs/eagle3] out=reports/forecast

A pilot of a few minutes (heads= trains one of each recipe, pilots= takes short runs that are
there) decodes the prompts; learning curves that were measured on SmolLM2-135M
(docs/results/recipes.json) say how it goes on from there, also for a larger target, where nobody
has checked them, and the latency curves of this machine, timed with the pilot's head, what that
is worth. Your engine instead: costs=FILE takes the rows that its own bench measured
(docs/serving.md); any drafter will do there, since what a step costs does not hang on what it
accepts. OUT gets forecast.json, frozen by its sha256 and date. check= holds such a file against
heads that were trained since and writes truth.json, to which later checks add; misses stay in the
table.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console

from outrider.conf.errors import UserError
from outrider.conf.recipes import RECIPES
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.decode.models.memory import MemoryPlan
from outrider.scripts.common import files
from outrider.scripts.common.pipeline import Command, Pipeline
from outrider.scripts.common.progress import Steps, columns
from outrider.scripts.common.prompts import load_prompts
from outrider.scripts.common.spelling import spelled, target_keys
from outrider.scripts.extra.forecasting import run as forecasting
from outrider.scripts.extra.forecasting import table
from outrider.scripts.extra.forecasting.config import ForecastConfig
from outrider.train.config import ENTRIES

RECORD, TRUTH = "forecast.json", "truth.json"


@entry("forecast", ForecastConfig)
def main(cfg: ForecastConfig) -> None:
    """Measure, foretell, freeze; or hold a frozen forecast against truth."""
    out = Path(cfg.out).expanduser()
    record = out / (TRUTH if cfg.check else RECORD)
    with files.sole_folder(out):
        if record.exists() and not cfg.check:
            raise UserError(
                f"out: {record} exists, and a forecast stays as it was; give another folder"
            )
        foretold(cfg, out, record)


def foretold(cfg: ForecastConfig, out: Path, record: Path) -> None:
    """The run behind `main`."""
    console = Console()
    if cfg.check:
        forecasting.frozen(Path(cfg.check).expanduser())
    longest = max(len(p.turns[0]) for p in load_prompts(cfg.prompts)) // 2
    pilots = [*cfg.pilots, *(str(pilot(cfg, name, out)) for name in cfg.heads)]
    plan = MemoryPlan(max(cfg.batch_sizes), longest + cfg.max_new_tokens, 32)
    target = load_target(cfg.target, cfg.dtype, cfg.device, plan)
    with Steps(*columns(20), console=console, quiet=cfg.quiet, transient=True) as progress:
        if cfg.check:
            value = forecasting.check(cfg, target, progress, record)
        else:
            value = forecasting.run(cfg, target, progress, pilots)
    files.write_json(record, value)
    (table.check if cfg.check else table.table)(value).show(console)
    console.print(f"written: {record}", highlight=False)


def pilot(cfg: ForecastConfig, name: str, out: Path) -> Path:
    """A short run of a recipe in OUT/pilots, taken up where it stopped. Raises UserError where
    it fails."""
    data = Path(cfg.chats).expanduser().resolve()
    if not data.is_file():
        raise UserError(f"chats: {data} is no file; give the JSONL of conversations")
    kind, recipe = RECIPES[name]
    folder = (out / "pilots").resolve() / name
    argv = [
        f"train/{ENTRIES[kind][0]}.py",
        *target_keys(cfg.target),
        "data=jsonl",
        f"data.path={spelled(str(data))}",
        "data.max_length=320",
        *recipe,
        "head.draft_vocab=4096",
        "batch_size=16",
        f"out_dir={spelled(str(folder))}",
        f"steps={cfg.pilot_steps}",
        f"seed={cfg.seed}",
        "save_every=0",
        "eval.every=0",
        "eval.parity=0",
        *cfg.more,
    ]
    command = Command(f"a pilot of {name}", argv, [data], folder / "head" / "head.json")
    Pipeline("forecast", folder.parent).run([command])
    return folder


if __name__ == "__main__":
    main()
