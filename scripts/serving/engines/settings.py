"""`engines.py settings`: are the settings right that scripts/tune.py engine derives?

A llama.cpp server for every number of draft tokens, and a plain one, are loaded in turns; the
cost curve comes from `curve` depths on the prompts of the export's contract. Then other
prompts are asked, and depths that the curve has not seen: their speed against plain, the
median of rounds in turns, stands beside the prediction.

With `pilot=FOLDER synthetic=[..]` the curve needs no trained head: a cycle costs the same whatever
it accepts, so a short run of the same shape serves, told to accept at made-up rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len

from conf.errors import UserError
from conf.rules import AtATime, OneOrMore, Share, one_of
from conf.schema import entry
from heads import find_head
from heads.checkpoint import read_card
from heads.interop import gguf_write
from scripts.common.spelling import spelled
from scripts.reports.block import Columns, md_of
from scripts.serving import contract, costs, gguf_export, llamacpp_cases, load, settings
from scripts.serving import llamacpp as server
from scripts.serving.asking import Address
from scripts.serving.engines import shared
from scripts.serving.engines.llamacpp import MAKE, target_file

NEAR = 0.15  # of the measured ratio, by which a prediction may miss


@dataclass
class SettingsConfig(shared.Keys):
    """Keys of scripts/engines.py settings."""

    # one run folder or head folder to export and serve
    drafters: Annotated[list[str], Len(1, 1)]
    out: str = "docs/results/engine-settings.json"
    work: str = "runs/engines-llamacpp"
    # numbers of target and draft in their files: float32, float16 or q8_0
    dtype: Annotated[str, one_of(gguf_write.DTYPES)] = "float32"
    # draft tokens that the curve is measured with
    curve: AtATime = field(default_factory=lambda: [1, 5])
    # draft tokens whose speed is predicted and measured
    checked: AtATime = field(default_factory=lambda: [1, 3])
    # run folder or head folder that the curve is measured with; empty = the drafter itself
    pilot: str = ""
    # share of cycles in which llama.cpp shall accept the pilot's 1st, 2nd, .. token
    synthetic: list[Share] = field(default_factory=list)
    # requests at a time
    batches: AtATime = field(default_factory=lambda: [1, 2, 4, 8])
    # rounds of either load
    rounds: OneOrMore = 5
    # how many of them acceptance and curve come from
    expected: OneOrMore = 24
    # how many are looked at for the check, which takes those that are left
    num_prompts: OneOrMore = 60
    max_new_tokens: OneOrMore = 32
    batch_size: OneOrMore = 8
    context: OneOrMore = 512
    # each server's threads
    threads: OneOrMore = 1
    engine: str = ".venv-llamacpp/bin/python"

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        if max(self.checked) > max(self.curve):
            found.append(
                f"checked: {self.checked} goes beyond curve: {self.curve}, where nothing is "
                "claimed; measure the curve as deep"
            )
        if bool(self.pilot) != bool(self.synthetic):
            found.append(
                "synthetic: made-up rates of a pilot; give pilot and synthetic, or neither"
            )
        if self.synthetic and len(self.synthetic) < max(self.curve):
            found.append(
                f"synthetic: {self.synthetic} has {len(self.synthetic)} rates; curve: "
                f"{self.curve} needs {max(self.curve)}"
            )
        if sorted(self.synthetic, reverse=True) != self.synthetic:
            found.append(
                f"synthetic: {self.synthetic} rises; each is the share of cycles that accept so "
                "many tokens or more"
            )
        return found


@entry("engines_settings", SettingsConfig)
def main(cfg: SettingsConfig) -> int:
    """Export, serve, load, derive, load again, compare, write."""
    python = shared.environment(cfg.engine, MAKE)
    stage = shared.Stage(cfg)
    found = next(stage.drafters(), None)
    if found is None:
        return stage.end()
    keys = (f"dtype={cfg.dtype}", f"prompts={spelled(cfg.prompts)}")
    name = f"settings-{found.name}-{cfg.dtype}"
    count = f"num_prompts={cfg.expected}"
    folder = stage.exported(name, found, "gguf", *keys, count, "max_new_tokens=32")
    wanted = contract.load(folder)
    rates = settings.rates_of(wanted)
    if max(cfg.curve) > len(rates):
        raise UserError(
            f"curve: {cfg.curve}; the drafter drafts {len(rates)} tokens at most: stay below"
        )
    others = beside(cfg, stage.ids, wanted)
    base, timed, checked = servers_of(cfg, stage, found, folder)
    with served(python, [base, *timed, *checked], stage.work) as (address, which):
        known = [load.Served(one.draft_tokens, address[one]) for one in (base, *timed)]
        asked = load.Load(ids(wanted), cfg.batches, cfg.rounds, cfg.max_new_tokens)
        laps = load.laps(known, asked, lambda *at: tell("curve", *at))
        curve = costs.Costs(f"llama.cpp (xllamacpp {which})", tuple(load.points(laps)))
        tested = [load.Served(one.draft_tokens, address[one]) for one in (base, *checked)]
        asked = load.Load(others, cfg.batches, cfg.rounds, cfg.max_new_tokens)
        laps = load.laps(tested, asked, lambda *at: tell("check", *at))
    plan = settings.plan(rates, curve)
    cases = compared(curve, rates, laps)
    about = {
        "drafter": found.spec,
        "card_sha256": found.card_sha256,
        "kind": found.kind,
        "dtype": cfg.dtype,
        "curve_depths": list(cfg.curve),
        "pilot": cfg.pilot,
        "synthetic": list(cfg.synthetic),
        "rounds": cfg.rounds,
        "slots": max(cfg.batches),
        "threads": cfg.threads,
        "expected": cfg.expected,
        "other_prompts": len(others),
        "plan": plan.to_json(),
        "costs": curve.to_json(),
    }
    print(markdown(stage.report({"xllamacpp": which}, about, cases)))
    for line in settings.told(plan, found.kind):
        print(line)
    return stage.end()


def servers_of(
    cfg: SettingsConfig, stage: shared.Stage, found: shared.Found, folder: Path
) -> tuple[server.Settings, list[server.Settings], list[server.Settings]]:
    """(a plain server, those that the curve is measured with, those whose speed is checked).
    folder: the drafter's export."""
    base = server.Settings(
        str(target_file(stage, cfg.dtype)),
        method=llamacpp_cases.METHODS[found.kind],
        slots=max(cfg.batches),
        context=cfg.context,
        threads=cfg.threads,
        talk=1,
    )
    drafting = replace(base, draft=str(folder / gguf_export.DRAFT))
    timed = [replace(drafting, draft_tokens=k) for k in cfg.curve]
    if cfg.pilot:
        draft = pilot(stage, cfg, found.kind)
        timed = [made_up(cfg, one, draft) for one in timed]
    checked = [replace(drafting, draft_tokens=k) for k in cfg.checked]
    return base, timed, checked


def beside(cfg: SettingsConfig, known: list[list[int]], wanted: dict[str, Any]) -> list[list[int]]:
    """The prompts that acceptance does not come from. Raises UserError for none."""
    others = [prompt for prompt in known if prompt not in ids(wanted)]
    if not others:
        raise UserError(
            f"num_prompts: {cfg.num_prompts}; none is left beside the {cfg.expected} that "
            "acceptance comes from: give more, or more prompts"
        )
    return others


def ids(wanted: dict[str, Any]) -> list[list[int]]:
    """The contract's prompts."""
    return [row["ids"] for row in wanted["prompts"]]


def tell(what: str, done: int, total: int) -> None:
    """A line now and then."""
    if done == total or done % 10 == 0:
        print(f"{what}: {done} of {total}", flush=True)


def pilot(stage: shared.Stage, cfg: SettingsConfig, kind: str) -> Path:
    """The file of the head whose cost stands for the drafter's. Raises UserError for one of
    another kind than that, which llama.cpp would load as what it is not."""
    folder = find_head(cfg.pilot)
    said = read_card(folder)
    if said["kind"] != kind:
        raise UserError(
            f"pilot: {cfg.pilot} is {said['kind']}, the drafter is {kind}: it costs something "
            "else; give a short run of the same recipe"
        )
    found = shared.Found(cfg.pilot, "pilot", folder, said["kind"], said["sha256"])
    name = f"settings-pilot-{cfg.dtype}"
    return stage.exported(name, found, "gguf", f"dtype={cfg.dtype}") / gguf_export.DRAFT


def made_up(cfg: SettingsConfig, one: server.Settings, draft: Path) -> server.Settings:
    """A server with another draft, told what to accept."""
    return replace(one, draft=str(draft), synth_rates=tuple(cfg.synthetic[: one.draft_tokens]))


@contextmanager
def served(
    python: Path, wanted: Sequence[server.Settings], work: Path
) -> Iterator[tuple[dict[server.Settings, Address], str]]:
    """One server for all settings that are equal, while the block runs: their addresses, and
    the version."""
    with ExitStack() as stack:
        found: dict[server.Settings, Address] = {}
        version = ""
        for number, settings in enumerate(dict.fromkeys(wanted)):
            one = stack.enter_context(server.running(python, settings, work, f"settings-{number}"))
            found[settings] = Address(one.url, timeout=llamacpp_cases.PATIENCE)
            version = one.version
        yield found, version


def compared(
    curve: costs.Costs, rates: Sequence[float], laps: Sequence[load.Lap]
) -> list[dict[str, Any]]:
    """Predicted and measured speed against plain decoding of every batch and depth."""
    line = curve.curve()
    accepted: dict[tuple[int, int], list[float]] = {}
    for one in laps:
        accepted.setdefault((one.batch, one.draft_tokens), []).append(one.tokens / one.cycles)
    out = []
    for (batch, depth), rounds in load.ratios(laps).items():
        predicted = settings.speedup(line, batch, rates, depth)
        measured = statistics.median(rounds)
        out.append(
            {
                "batch": batch,
                "draft_tokens": depth,
                "predicted": predicted,
                "measured": measured,
                "rounds": rounds,
                "error": predicted / measured - 1,
                "within": abs(predicted / measured - 1) <= NEAR,
                "accepted_length": {
                    "expected": 1 + sum(rates[:depth]),
                    "measured": statistics.fmean(accepted[batch, depth]),
                },
            }
        )
    return out


def cost_error(row: dict[str, Any]) -> str:
    """What is left of the error where the acceptance of these very prompts had been expected."""
    length = row["accepted_length"]
    known = row["predicted"] * length["measured"] / length["expected"]
    return f"{known / row['measured'] - 1:+.0%}"


COLUMNS: Columns = (
    ("requests at a time", lambda row: str(row["batch"])),
    ("draft tokens", lambda row: str(row["draft_tokens"])),
    ("accepted length expected", lambda row: f"{row['accepted_length']['expected']:.2f}"),
    ("measured", lambda row: f"{row['accepted_length']['measured']:.2f}"),
    ("speed against plain predicted", lambda row: f"{row['predicted']:.2f}×"),
    ("measured", lambda row: f"{row['measured']:.2f}×"),
    ("rounds", lambda row: f"{min(row['rounds']):.2f} to {max(row['rounds']):.2f}"),
    ("error", lambda row: f"{row['error']:+.0%}"),
    ("of the cost alone", cost_error),
)


def title(report: dict[str, Any]) -> str:
    """Where and how it was measured."""
    said = report["settings"]
    return (
        f"{said['costs']['engine']} on the CPU · {said['kind']}, {said['dtype']} · curve from "
        f"K = {', '.join(map(str, said['curve_depths']))}"
        f"{' of a short run, acceptance made up' if said.get('pilot') else ''} · median of "
        f"{said['rounds']} rounds in turns"
    )


def markdown(report: dict[str, Any]) -> str:
    """The table for documents."""
    return md_of(COLUMNS, report["cases"], ())
