"""`tune.py engine`: what a serving engine is best told, from the acceptance that an export was
measured to have and from what a step costs on that very engine.

    python scripts/tune.py engine expected=exports/eagle3 costs=costs.json out=reports/engine

costs is a JSON file of rows that the engine's own bench has measured (docs/serving.md says how).
OUT gets serving.json (the plan, and what vLLM, SGLang and llama.cpp want), and
sglang-adaptive.json where there is a schedule. `scripts/export.py costs=FILE` writes the same
into an export.
"""

from __future__ import annotations

from pathlib import Path

from outrider.conf.errors import UserError
from outrider.conf.schema import entry
from outrider.heads.interop import exported
from outrider.scripts.extra.config import TuneEngineConfig
from outrider.scripts.serving import contract, costs, settings


@entry("tune_engine", TuneEngineConfig)
def main(cfg: TuneEngineConfig) -> None:
    """Read, derive, write, say."""
    out = Path(cfg.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is a file; give a folder")
    place = Path(cfg.expected).expanduser()
    rates = settings.rates_of(contract.load(place))
    found = settings.plan(rates, costs.load(Path(cfg.costs).expanduser()))
    kind = str(((exported(place) if place.is_dir() else None) or {}).get("kind", ""))
    out.mkdir(parents=True, exist_ok=True)
    settings.write(out, found, kind)
    for line in settings.summary(found, kind):
        print(line)
    print(f"written: {out / settings.FILE}")
