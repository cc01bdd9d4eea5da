"""`engines.py settings`: are the settings right that scripts/tune.py engine derives?

A llama.cpp server for every number of draft tokens, and a plain one, are loaded in turns; the
cost curve comes from `curve` depths on the prompts of the export's contract. Then other
prompts are asked, and depths that the curve has not seen: their speed against plain, the
median of rounds in turns, stands beside the prediction.

With `pilot=FOLDER synthetic=[..]` the curve needs no trained head: a cycle costs the same whatever
it accepts, so a short run of the same shape serves, told to accept at made-up rates. What an engine
loses of its acceptance when requests come together, the same short run shows as it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Len

from conf.errors import UserError
from conf.rules import AtATime, OneOrMore, Share, one_of
from conf.schema import entry
from heads import find_head
from heads.checkpoint import read_card
from heads.interop import gguf_write
from scripts.common.spelling import spelled
from scripts.extra import load
from scripts.extra.engine_settings import asked_of
from scripts.extra.llamacpp import server as server
from scripts.lab.serving import llamacpp_cases, shared
from scripts.lab.serving.llamacpp import MAKE, target_file
from scripts.reports.block import Columns, md_of
from scripts.serving import contract, costs, gguf_export, settings
from scripts.serving.asking import Address

NEAR = 0.15  # of the measured ratio, by which a prediction may miss


@dataclass
class SettingsConfig(shared.Keys):
    """Keys of scripts/lab/engines.py settings."""

    usual: ClassVar[tuple[str, ...]] = ("runs/eagle3_portable",)
    # one run folder or head folder to export and serve; [] = the usual one, or the demo's
    drafters: Annotated[list[str], Len(0, 1)]
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
    name = f"settings-{found.name}-{cfg.dtype}"
    folder = stage.exported(name, found, "gguf", *export_keys(cfg))
    wanted = contract.load(folder)
    rates = settings.rates_of(wanted)
    if max(cfg.curve) > len(rates):
        raise UserError(
            f"curve: {cfg.curve}; the drafter drafts {len(rates)} tokens at most: stay below"
        )
    others = beside(cfg, stage.ids, wanted)
    servers = servers_of(cfg, stage, found, folder)
    every = [servers.base, *servers.timed, *servers.honest, *servers.checked]
    with served(python, every, stage.work) as (address, which):

        def laps(what: str, some: Sequence[server.Settings], asked: load.Load) -> list[load.Lap]:
            known = [load.Served(one.draft_tokens, address[one]) for one in some]
            return load.laps(known, asked, lambda *at: tell(what, *at))

        points = curve_points(cfg, servers, wanted, laps)
        curve = costs.Costs(f"llama.cpp (xllamacpp {which})", tuple(points))
        asked = load.Load(others, cfg.batches, cfg.rounds, cfg.max_new_tokens)
        tested = laps("check", [servers.base, *servers.checked], asked)
    plan = settings.plan(rates, curve)
    cases = compared(curve, rates, tested)
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


@dataclass(frozen=True)
class Servers:
    """base: a plain one. timed: those that the curve is measured with. honest: a pilot that
    accepts what the target says, none without a pilot. checked: those whose speed is checked."""

    base: server.Settings
    timed: list[server.Settings]
    honest: list[server.Settings]
    checked: list[server.Settings]

    @property
    def curve(self) -> list[server.Settings]:
        """Those whose costs make the curve."""
        return [self.base, *self.timed]


def servers_of(
    cfg: SettingsConfig, stage: shared.Stage, found: shared.Found, folder: Path
) -> Servers:
    """What is served. folder: the drafter's export."""
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
    honest = []
    if cfg.pilot:
        draft = pilot(stage, cfg, found.kind)
        honest = [replace(drafting, draft=str(draft), draft_tokens=max(cfg.curve))]
        timed = [made_up(cfg, one, draft) for one in timed]
    checked = [replace(drafting, draft_tokens=k) for k in cfg.checked]
    return Servers(base, timed, honest, checked)


def curve_points(
    cfg: SettingsConfig,
    servers: Servers,
    wanted: dict[str, Any],
    laps: Callable[[str, Sequence[server.Settings], load.Load], list[load.Lap]],
) -> list[costs.Point]:
    """The points of the curve. wanted: the drafter's contract. laps: loads these servers.

    Made-up acceptance tells nothing of what real drafts keep of theirs in company, which the
    pilot tells by its own contract."""

    def asked(told: dict[str, Any]) -> load.Load:
        return asked_of(told, cfg.batches, cfg.rounds, cfg.max_new_tokens)

    if not servers.honest:
        return load.points(laps("curve", servers.curve, asked(wanted)))
    points = load.points(laps("curve", servers.curve, replace(asked(wanted), cycles=())))
    own = asked(contract.load(Path(servers.honest[0].draft).parent))
    counted = load.points(laps("acceptance", servers.honest, own))
    known = {point.batch: point.kept for point in counted}
    return [replace(p, kept=known.get(p.batch)) if p.draft_tokens else p for p in points]


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
    """The file of the head whose cost stands for the drafter's, its contract beside it. Raises
    UserError for one of another kind than that, which llama.cpp would load as what it is not."""
    folder = find_head(cfg.pilot)
    said = read_card(folder)
    if said["kind"] != kind:
        raise UserError(
            f"pilot: {cfg.pilot} is {said['kind']}, the drafter is {kind}: it costs something "
            "else; give a short run of the same recipe"
        )
    found = shared.Found(cfg.pilot, "pilot", folder, said["kind"], said["sha256"])
    name = f"settings-pilot-{cfg.dtype}"
    return stage.exported(name, found, "gguf", *export_keys(cfg)) / gguf_export.DRAFT


def export_keys(cfg: SettingsConfig) -> list[str]:
    """What drafter and pilot are exported with."""
    return [
        f"dtype={cfg.dtype}",
        f"prompts={spelled(cfg.prompts)}",
        f"num_prompts={cfg.expected}",
        f"max_new_tokens={cfg.max_new_tokens}",
    ]


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
        kept = curve.kept(batch)
        left = settings.kept_rates(rates, kept)
        predicted = settings.speedup(line, batch, left, depth)
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
                "kept": kept,
                "accepted_length": {
                    "expected": 1 + sum(left[:depth]),
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
    ("acceptance kept", lambda row: f"{row['kept']:.0%}" if "kept" in row else "–"),
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
