"""`tune.py engine`: what a serving engine is best told, from the acceptance that an export was
measured to have and from what a cycle costs on that very engine.

    python scripts/tune.py engine expected=exports/eagle3 url=http://127.0.0.1:8080 \\
        plain=http://127.0.0.1:8081 out=reports/engine

url is a server with the drafter, plain one of the same model without; a small load of both is
timed with 1, 2, 4 and 8 requests at a time. A server drafts a fixed number of tokens: to know
more than one, serve again with another and give the first run's costs.json as costs=FILE. With
costs= alone nothing is asked. OUT gets serving.json (the plan, and what vLLM, SGLang and
llama.cpp want), costs.json, and sglang-adaptive.json where there is a schedule.
`scripts/export.py costs=FILE` writes the same into an export.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from conf.errors import UserError
from conf.rules import AboveZero, AtATime, OneOrMore, ZeroOrMore
from conf.schema import entry
from heads.interop import exported
from scripts.common.progress import Steps, columns
from scripts.extra import load
from scripts.serving import contract, costs, settings
from scripts.serving.asking import Address


@dataclass
class TuneEngineConfig:
    """Keys of scripts/tune.py engine."""

    # the exported folder, or its expected.json: whose acceptance is served
    expected: str
    # folder for serving.json, costs.json and sglang-adaptive.json
    out: str
    # address of a running server with the drafter; empty = nothing is asked
    url: str = ""
    # address of a running server of the same model without a drafter
    plain: str = ""
    # draft tokens of the server at url; 0 = as in expected
    draft_tokens: ZeroOrMore = 0
    # points that are known already; empty = none
    costs: str = ""
    # requests at a time
    batches: AtATime = field(default_factory=lambda: [1, 2, 4, 8])
    # loads of every server and batch, in turns
    rounds: OneOrMore = 5
    # tokens of an answer
    max_new_tokens: Annotated[int, Ge(2)] = 32
    # seconds for one answer
    timeout: AboveZero = 120.0
    # tries after the first
    retries: ZeroOrMore = 4
    # environment variable that holds the servers' key; empty = none
    key_env: str = ""
    # no progress bar
    quiet: bool = False

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        if bool(self.url) != bool(self.plain):
            found.append(
                f"url: {self.url or 'none'}, plain: {self.plain or 'none'}; a load needs both, the "
                "server with the drafter and one without"
            )
        if not self.url and not self.costs:
            found.append("costs: none; give url= and plain= to measure, or costs=FILE")
        if len(set(self.batches)) != len(self.batches):
            found.append(f"batches: {self.batches} names one twice; name each once")
        return found


@entry("tune_engine", TuneEngineConfig)
def main(cfg: TuneEngineConfig) -> None:
    """Load, derive, write, say."""
    out = Path(cfg.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is a file; give a folder")
    place = Path(cfg.expected).expanduser()
    wanted = contract.load(place)
    rates = settings.rates_of(wanted)
    known = costs.load(Path(cfg.costs).expanduser()) if cfg.costs else costs.Costs("", ())
    if cfg.url:
        depth = cfg.draft_tokens or len(rates)
        known = measured(cfg, wanted, depth, known)
    found = settings.plan(rates, known)
    kind = str(((exported(place) if place.is_dir() else None) or {}).get("kind", ""))
    out.mkdir(parents=True, exist_ok=True)
    costs.save(out / "costs.json", known)
    settings.write(out, found, kind)
    for line in settings.told(found, kind):
        print(line)
    print(f"written: {out / settings.FILE}")


def measured(
    cfg: TuneEngineConfig, wanted: dict[str, Any], depth: int, known: costs.Costs
) -> costs.Costs:
    """The known points with those of a load of both servers."""
    address = Address(cfg.url, cfg.timeout, cfg.retries, 1, cfg.key_env)
    plain = Address(cfg.plain, cfg.timeout, cfg.retries, 1, cfg.key_env, "plain")
    asked = asked_of(wanted, cfg.batches, cfg.rounds, cfg.max_new_tokens)
    with Steps(*columns(20), quiet=cfg.quiet, transient=True) as bar:
        found = loaded(plain, address, depth, asked, bar)
    return costs.Costs(known.engine or cfg.url, known.points).joined(found)


def loaded(
    plain: Address, drafting: Address, depth: int, asked: load.Load, bar: Steps
) -> list[costs.Point]:
    """What a cycle costs on two servers of the same model, one of which drafts `depth` tokens."""
    task = bar.add_task("load", total=None)
    servers = [load.Served(0, plain), load.Served(depth, drafting)]
    watch = lambda done, total: bar.update(task, completed=done, total=total)
    return load.points(load.laps(servers, asked, watch))


def asked_of(wanted: dict[str, Any], batches: Sequence[int], rounds: int, most: int) -> load.Load:
    """The contract's prompts with whole answers of at most `most` tokens: one that stops early
    leaves its place empty."""
    longest = max(len(row["tokens"]) for row in wanted["prompts"])
    rows = zip(wanted["prompts"], contract.cycles_of(wanted), strict=True)
    whole = [(row["ids"], cycles) for row, cycles in rows if len(row["tokens"]) == longest]
    cycles = [one for _, one in whole] if most <= longest else []  # else not all are known
    depth = int(wanted.get("draft_tokens") or 0)
    return load.Load([ids for ids, _ in whole], batches, rounds, most, cycles, depth)
