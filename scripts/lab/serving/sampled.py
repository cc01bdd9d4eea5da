"""`engines.py sampled`: is an engine's sampled speculation lossless? Its server with a drafter,
certified over HTTP against the same weights here. A draft takes the drafter's best tokens
(`greedy`), or in llama.cpp draws them from its distribution (`probabilistic`: true rejection
sampling, which this version has for a separate draft alone). `none` among the drafters is
the control: the same server without a draft, asked the same, in the same run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from outrider.conf.errors import UserError
from outrider.conf.rules import AboveZero, AtATime, Filled, Inside, OneOrMore, Seed, one_of
from outrider.conf.schema import entry
from outrider.heads.names import NONE
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.sampling_keys import SamplingKeys
from outrider.scripts.lab.serving import llamacpp_cases, shared
from outrider.scripts.lab.serving.benches import (
    BENCHES,
    ENGINES,
    GREEDY,
    LLAMACPP,
    MODES,
    EngineBench,
    Serving,
    drafters,
)
from outrider.scripts.reports.table import Columns, Table, number
from outrider.scripts.serving import server_certificate
from outrider.scripts.serving.asking import Address
from outrider.scripts.serving.drafter_distributions import drafter_distributions


@dataclass(frozen=True, kw_only=True)
class SampledConfig(shared.EngineKeys, SamplingKeys):
    """Keys of scripts/lab/engines.py sampled."""

    usual: ClassVar[tuple[str, ...]] = (NONE, "runs/eagle3_portable")
    # run folders or head folders to export and serve; none: the control, the server without a
    # draft; ngram: vLLM's own n-grams; [] = none and the usual one, or the demo's
    drafters: list[str]
    # the engine: llamacpp, vllm
    server: Annotated[str, one_of(ENGINES)] = LLAMACPP
    # JSON to write; empty = docs/results/engines-SERVER-sampled.json
    out: str = ""
    # folder for exports and for the answers that are there; empty = runs/engines-SERVER
    work: str = ""
    # how the draft is drawn: probabilistic, greedy
    modes: Filled[Annotated[str, one_of(MODES)]] = field(default_factory=lambda: [GREEDY])
    # draft tokens of a cycle
    draft_tokens: OneOrMore = 3
    # what is asked of the server
    temperature: AboveZero = 1.0
    # sampled tokens, spread evenly over `at_a_time`
    tokens: OneOrMore = 3000
    # numbers of requests that are asked together
    at_a_time: AtATime = field(default_factory=lambda: [1, 2, 8])
    # false-alarm rate of all tests together
    alpha: Inside = 1e-3
    # mean total variation from which on a bias of every known family must be found
    detect: Inside = 0.2
    # random biases of each family that the power is measured on
    members: OneOrMore = 4
    context: OneOrMore = 512
    # the server's threads
    threads: OneOrMore = 1
    # addresses all random numbers
    seed: Seed = 0
    # Python of the engine's environment; empty = the one that `make engines` builds
    engine: str = ""

    def how(self) -> server_certificate.How:
        """What is asked of the server, and how it is judged."""
        return server_certificate.How(
            self.sampling(),
            self.tokens,
            self.max_new_tokens,
            2,
            tuple(self.at_a_time),
            self.alpha,
            self.detect,
            0.0,
            self.seed,
            self.members,
        )


@entry("engines_sampled", SampledConfig)
def main(cfg: SampledConfig) -> int:
    """Export, serve, certify, write."""
    label, package, default, make = ENGINES[cfg.server]
    python = shared.environment(cfg.engine or default, make)
    cfg = replace(
        cfg,
        out=cfg.out or f"docs/results/engines-{cfg.server}-sampled.json",
        work=cfg.work or f"runs/engines-{cfg.server}",
    )
    stage = shared.Stage(cfg)
    how = Serving(cfg.draft_tokens, max(cfg.at_a_time), cfg.context, cfg.threads)
    bench = BENCHES[cfg.server](stage, python, how)
    wanted = []
    for found in drafters(stage, bench.headless):
        for mode in [""] if found.kind == NONE else cfg.modes:
            if mode and (problem := bench.refusal(found, mode)) is not None:
                raise UserError(problem)
            wanted.append((found, mode))
    if not wanted:
        return stage.end()  # a report of nothing would take the place of the last one
    cases = []
    for found, mode in wanted:
        print(f"{label}, {mode or 'no draft'}: {found.spec}", flush=True)
        cases.append(certified(cfg, stage, bench, found, mode))
    about = {
        "temperature": cfg.temperature,
        "top_k": cfg.top_k,
        "top_p": cfg.top_p,
        "min_p": cfg.min_p,
        "tokens": cfg.tokens,
        "at_a_time": list(cfg.at_a_time),
        "alpha": cfg.alpha,
        "detect": cfg.detect,
        "seed": cfg.seed,
        "cache": "float32",
        "threads": cfg.threads,
    }
    print(table(stage.report({package: bench.version}, about, cases)).markdown())
    return stage.end()


def tell(done: int, total: int, name: str = "", /) -> None:
    """A line now and then."""
    if done == total or done % 500 < 8:
        print(f"{name}: {done} of {total}", flush=True)


def certified(
    cfg: SampledConfig,
    stage: shared.Stage,
    bench: EngineBench,
    found: shared.Found,
    mode: str,
) -> dict[str, Any]:
    """The row of one drafter in one mode."""
    how = cfg.how()
    towards = None
    if found.folder != Path():
        towards = drafter_distributions(str(found.folder), stage.target, cfg.sampling())
    name = "-".join(filter(None, ("sampled", found.name, mode)))
    depends = vars(how) | {"members": None, "detect": None}
    identity = stage.target.identity
    key = {
        "served": bench.stamp(found),
        "mode": mode,
        "draft_tokens": cfg.draft_tokens,
        "target": identity.weights_sha256 if identity else "",
        "prompts": stage.ids,
    }
    memo = Memo(stage.work / name, depends | key)
    with bench.running(found, mode, name) as url:
        address = Address(url, llamacpp_cases.PATIENCE, connections=max(cfg.at_a_time))
        paper = server_certificate.certified(
            stage.target, stage.ids, how, address, None, memo, tell, towards
        )
    return {
        "case": found.name,
        "mode": mode,
        "drafter": found.spec,
        "card_sha256": found.card_sha256,
        "draft_tokens": cfg.draft_tokens if mode else 0,
        **brief(paper),
    }


def brief(paper: dict[str, Any]) -> dict[str, Any]:
    """A certificate without its single tests, of which only the smallest p-value stays; and
    without the address, which is another one in every run."""
    layers = []
    for layer in paper["layers"]:
        tests = layer.get("tests", [])
        kept = {k: v for k, v in layer.items() if k != "tests"}
        layers.append(kept | ({"tests": len(tests), "smallest": tests[0]} if tests else {}))
    power = paper["power"]
    return {
        "verdict": paper["verdict"],
        "reasons": paper["reasons"],
        "drafted": paper["server"]["drafted"],
        "spent": paper["spent"],
        "layers": layers,
        "negative_controls": paper["negative_controls"],
        "min_detectable": power.get("min_detectable"),
        "notes": paper["notes"],
        "untested": paper["untested"],
    }


def _layer(row: dict[str, Any], name: str) -> dict[str, Any]:
    """A layer of a row's certificate."""
    return next(layer for layer in row["layers"] if layer["name"] == name)


def _greedy(row: dict[str, Any]) -> str:
    """Greedy tokens beyond ties, of all."""
    layer = _layer(row, "greedy")
    return f"{layer['beyond_ties']} of {layer['tokens']}"


def _rejected(row: dict[str, Any]) -> str:
    """Controls that were rejected, of all."""
    controls = row["negative_controls"]
    return f"{sum(c['rejected'] for c in controls)} of {len(controls)}"


def _verdict(row: dict[str, Any]) -> str:
    """Of the control, which drafts nothing, only whether it passed."""
    if row["mode"]:
        return str(row["verdict"])
    return f"control {'passed' if all(x['passed'] for x in row['layers']) else 'failed'}"


def _spent(row: dict[str, Any]) -> str:
    """Seconds with the server and without it, of one run."""
    spent = row.get("spent")  # older reports have none
    return "–" if spent is None else f"{spent['asking']:.0f}, {spent['judging']:.0f}"


COLUMNS: Columns = (
    ("drafter", lambda row: row["case"]),
    ("draft drawn", lambda row: row["mode"] or "–"),
    ("K", lambda row: str(row["draft_tokens"] or "–")),
    ("sampled tokens", lambda row: f"{_layer(row, 'sampling')['tokens']:,}"),
    ("drafted", lambda row: f"{row['drafted'] or 0:,}"),
    ("greedy tokens off", _greedy),
    ("sampling, p", lambda row: f"{_layer(row, 'sampling')['p']:.2g}"),
    ("controls rejected", _rejected),
    ("bias surely found", lambda row: number(row["min_detectable"])),
    ("asked, judged in s", _spent),
    ("verdict", _verdict),
)


def table(report: dict[str, Any]) -> Table:
    """Every case; its title says where and how it was measured."""
    said = report["settings"]
    ((package, version),) = report["engine"].items()
    label = next(name for name, known, *_ in ENGINES.values() if known == package)
    title = (
        f"{label} ({package} {version}) on the CPU · sampled "
        f"(T = {said['temperature']:g}), {', '.join(map(str, said['at_a_time']))} at a time · "
        f"alpha {said['alpha']:g}"
    )
    return Table.of(COLUMNS, report["cases"], title=title, words=(0, 1, -1))
